"""The registered algorithms, by the name that a flag or a table gives them."""

import inspect
from collections.abc import Callable

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.bpfed import bpfed
from fedvi.algorithms.cfedbayes import cfedbayes
from fedvi.algorithms.dsvgd import dsvgd
from fedvi.algorithms.fedabml import fedabml
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.fedbabu import fedbabu
from fedvi.algorithms.fedhb_mixture import fedhb_mixture
from fedvi.algorithms.fedhb_niw import fedhb_niw
from fedvi.algorithms.fedprox import fedprox
from fedvi.algorithms.parallel_dsvgd import parallel_dsvgd
from fedvi.algorithms.pfedbayes import pfedbayes
from fedvi.algorithms.references import centralised, local_only
from fedvi.algorithms.sfedbayes import sfedbayes

__all__ = [
    "ALGORITHMS",
    "bpfed",
    "build",
    "centralised",
    "cfedbayes",
    "dsvgd",
    "fedabml",
    "fedavg",
    "fedbabu",
    "fedhb_mixture",
    "fedhb_niw",
    "fedprox",
    "local_only",
    "options_of",
    "parallel_dsvgd",
    "pfedbayes",
    "register",
    "sfedbayes",
]

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {}


def register(builder: Callable[..., Algorithm], name: str | None = None) -> Callable:
    """Makes a builder known to `build`, the flags, the driver and the test battery.

    Args:
      builder: `(task, *, option=default, ...) -> Algorithm`; every option keyword-only
        with a default and an annotation (int, float, bool, str or a `Literal`).
      name: default the builder's `__name__`.
    """
    ALGORITHMS[name or builder.__name__] = builder
    return builder


for _builder in (
    fedavg,
    fedprox,
    fedbabu,
    fedhb_niw,
    fedhb_mixture,
    pfedbayes,
    sfedbayes,
    cfedbayes,
    bpfed,
    fedabml,
    dsvgd,
    parallel_dsvgd,
    local_only,
    centralised,
):
    register(_builder)


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The keyword-only options of an algorithm's builder, by name.

    Raises:
      ValueError: no algorithm of that name.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm={name!r} must be one of {sorted(ALGORITHMS)}")
    signature = inspect.signature(ALGORITHMS[name], eval_str=True)
    return {
        key: parameter
        for key, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def build(name: str, task: Task, **options) -> Algorithm:
    """Builds a registered algorithm.

    Raises:
      ValueError: unknown name, or an option that the algorithm does not take.
    """
    known = options_of(name)
    for key, value in options.items():
        if key not in known:
            raise ValueError(
                f"{key}={value!r} is no option of {name}, which takes "
                f"{sorted(known) or 'none'}"
            )
    return ALGORITHMS[name](task, **options)
