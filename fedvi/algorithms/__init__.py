"""The registered algorithms, by the name that a flag or a table gives them."""

from fedvi.algorithms.bpfed import bpfed
from fedvi.algorithms.cfedbayes import cfedbayes
from fedvi.algorithms.fedabml import fedabml
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.fedbabu import fedbabu
from fedvi.algorithms.fedprox import fedprox
from fedvi.algorithms.pfedbayes import pfedbayes
from fedvi.algorithms.references import centralised, local_only
from fedvi.algorithms.registry import (
    ALGORITHMS,
    build,
    builder,
    options_of,
    register,
)
from fedvi.algorithms.sfedbayes import sfedbayes

__all__ = [
    "ALGORITHMS",
    "bpfed",
    "build",
    "builder",
    "centralised",
    "cfedbayes",
    "fedabml",
    "fedavg",
    "fedbabu",
    "fedprox",
    "local_only",
    "options_of",
    "pfedbayes",
    "register",
    "sfedbayes",
]

for _builder in (
    fedavg,
    fedprox,
    fedbabu,
    pfedbayes,
    sfedbayes,
    cfedbayes,
    bpfed,
    fedabml,
    local_only,
    centralised,
):
    register(_builder)
