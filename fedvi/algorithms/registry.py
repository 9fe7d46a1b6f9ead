"""Algorithms by the name that a flag or a table gives them, and their options."""

import dataclasses
import functools
import inspect
from collections.abc import Callable

from fedvi.algorithm import Algorithm, Task
from fedvi.options import Options, describe

__all__ = ["ALGORITHMS", "build", "builder", "options_of", "register"]

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {}


def builder(options: type[Options] = Options) -> Callable:
    """Decorator: makes a builder that users call with keywords.

    `make(task, options)` becomes `make(task, **options)`; the options are made, and by
    that checked, of the keywords, and their texts are appended to the docstring. The
    class is the attribute `options` of the result.

    Args:
      options: class of the algorithm's options.
    """

    def decorate(
        make: Callable[[Task, Options], Algorithm],
    ) -> Callable[..., Algorithm]:
        @functools.wraps(make)
        def build(task: Task, **given) -> Algorithm:
            known = [field.name for field in dataclasses.fields(options)]
            for name, value in given.items():
                if name not in known:
                    raise ValueError(
                        f"{name}={value!r} is no option of {make.__name__}, which "
                        f"takes {', '.join(known) or 'none'}"
                    )
            algorithm = make(task, options(**given))
            if not isinstance(algorithm, Algorithm):
                return algorithm  # which the federation refuses by name
            return algorithm._replace(population=(task.clients, task.samples))

        build.options = options
        keywords = inspect.signature(options).parameters.values()
        task = inspect.Parameter("task", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        build.__signature__ = inspect.Signature(
            [task.replace(annotation=Task), *keywords], return_annotation=Algorithm
        )
        if texts := describe(options):
            build.__doc__ = f"{inspect.getdoc(make)}\n\nOptions:\n{texts}"
        return build

    return decorate


def register(build: Callable[..., Algorithm], name: str | None = None) -> Callable:
    """Makes a builder known to `build`, the flags, the driver and the test battery.

    Args:
      build: what `builder` makes.
      name: default the builder's `__name__`.

    Raises:
      ValueError: not a builder.
    """
    if not hasattr(build, "options"):
        raise ValueError(
            f"{getattr(build, '__name__', build)!r} is no builder: decorate it with "
            "fedvi.algorithms.builder(Options)"
        )
    ALGORITHMS[name or build.__name__] = build
    return build


def options_of(name: str) -> type[Options]:
    """The class of an algorithm's options, a dataclass.

    Raises:
      ValueError: no algorithm of that name.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm={name!r} must be one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[name].options


def build(name: str, task: Task, **options) -> Algorithm:
    """Builds a registered algorithm.

    Raises:
      ValueError: unknown name, or an option that the algorithm does not take or that
        is outside its range.
    """
    options_of(name)
    return ALGORITHMS[name](task, **options)
