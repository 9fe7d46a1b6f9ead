"""The registered algorithms, by the name that a flag or a table gives them."""

from fedvi.algorithms.bpfed import bpfed
from fedvi.algorithms.cfedbayes import cfedbayes
from fedvi.algorithms.common import plain_loss, point_estimate, train_from
from fedvi.algorithms.dsvgd import dsvgd
from fedvi.algorithms.fedabml import fedabml
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.fedbabu import fedbabu
from fedvi.algorithms.fedbe import fedbe
from fedvi.algorithms.fedhb_mixture import fedhb_mixture
from fedvi.algorithms.fedhb_niw import fedhb_niw
from fedvi.algorithms.fedpa import fedpa
from fedvi.algorithms.fedpop import fedpop, fedsoul
from fedvi.algorithms.fedprox import fedprox
from fedvi.algorithms.fola import fola
from fedvi.algorithms.parallel_dsvgd import parallel_dsvgd
from fedvi.algorithms.pfedbayes import pfedbayes
from fedvi.algorithms.references import centralised, local_only
from fedvi.algorithms.registry import (
    ALGORITHMS,
    build,
    builder,
    find,
    is_registered,
    options_of,
    register,
)
from fedvi.algorithms.sfedbayes import sfedbayes
from fedvi.variational import posterior_estimate

__all__ = [
    "ALGORITHMS",
    "bpfed",
    "build",
    "builder",
    "centralised",
    "cfedbayes",
    "dsvgd",
    "fedabml",
    "fedavg",
    "fedbabu",
    "fedbe",
    "fedhb_mixture",
    "fedhb_niw",
    "fedpa",
    "fedpop",
    "fedprox",
    "fedsoul",
    "find",
    "fola",
    "is_registered",
    "local_only",
    "options_of",
    "parallel_dsvgd",
    "pfedbayes",
    "plain_loss",
    "point_estimate",
    "posterior_estimate",
    "register",
    "sfedbayes",
    "train_from",
]

for _builder in (
    fedavg,
    fedprox,
    fedpa,
    fedbe,
    fedbabu,
    pfedbayes,
    sfedbayes,
    cfedbayes,
    bpfed,
    fedpop,
    fedsoul,
    fedabml,
    fola,
    dsvgd,
    parallel_dsvgd,
    fedhb_niw,
    fedhb_mixture,
    local_only,
    centralised,
):
    register(_builder)
