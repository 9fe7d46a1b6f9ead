"""The registered algorithms, by the name that a flag or a table gives them."""

from fedvi.algorithms.bpfed import bpfed
from fedvi.algorithms.cfedbayes import cfedbayes
from fedvi.algorithms.cfl import cfl
from fedvi.algorithms.common import plain_loss, point_estimate, train_from
from fedvi.algorithms.ditto import ditto
from fedvi.algorithms.dsvgd import dsvgd
from fedvi.algorithms.fedabml import fedabml
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.fedbabu import fedbabu
from fedvi.algorithms.fedbe import fedbe
from fedvi.algorithms.feddyn import feddyn
from fedvi.algorithms.fedem import fedem
from fedvi.algorithms.fedhb_mixture import fedhb_mixture
from fedvi.algorithms.fedhb_niw import fedhb_niw
from fedvi.algorithms.fedpa import fedpa
from fedvi.algorithms.fedpop import fedpop, fedsoul
from fedvi.algorithms.fedprox import fedprox
from fedvi.algorithms.fesem import fesem
from fedvi.algorithms.fola import fola
from fedvi.algorithms.heurfedamp import heurfedamp
from fedvi.algorithms.ifca import ensemble, ifca
from fedvi.algorithms.parallel_dsvgd import parallel_dsvgd
from fedvi.algorithms.partial_sharing import fedper, fedrep, lg_fedavg
from fedvi.algorithms.perfedavg import perfedavg
from fedvi.algorithms.pfedbayes import pfedbayes
from fedvi.algorithms.pfedgp import pfedgp
from fedvi.algorithms.pfedme import pfedme
from fedvi.algorithms.pfnm import pfnm
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
from fedvi.algorithms.scaffold import scaffold
from fedvi.algorithms.sfedbayes import sfedbayes
from fedvi.variational import posterior_estimate

__all__ = [
    "ALGORITHMS",
    "bpfed",
    "build",
    "builder",
    "centralised",
    "cfedbayes",
    "cfl",
    "ditto",
    "dsvgd",
    "ensemble",
    "fedabml",
    "fedavg",
    "fedbabu",
    "fedbe",
    "feddyn",
    "fedem",
    "fedhb_mixture",
    "fedhb_niw",
    "fedpa",
    "fedper",
    "fedpop",
    "fedprox",
    "fedrep",
    "fedsoul",
    "fesem",
    "find",
    "fola",
    "heurfedamp",
    "ifca",
    "is_registered",
    "lg_fedavg",
    "local_only",
    "options_of",
    "parallel_dsvgd",
    "perfedavg",
    "pfedbayes",
    "pfedgp",
    "pfedme",
    "pfnm",
    "plain_loss",
    "point_estimate",
    "posterior_estimate",
    "register",
    "scaffold",
    "sfedbayes",
    "train_from",
]

for _builder in (
    fedavg,
    fedprox,
    ditto,
    pfedme,
    perfedavg,
    heurfedamp,
    pfedgp,
    pfnm,
    scaffold,
    feddyn,
    fedpa,
    fedbe,
    fedbabu,
    fedper,
    fedrep,
    lg_fedavg,
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
    ifca,
    ensemble,
    fedem,
    fesem,
    cfl,
    local_only,
    centralised,
):
    register(_builder)
