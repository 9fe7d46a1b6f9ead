"""Networks for federated learning: layers, the `Model` contract, and a registry."""

from fedvi.nn.dropped_inputs import masks_on_inputs
from fedvi.nn.layers import (
    BatchNorm,
    Conv,
    Dense,
    DepthwiseConv,
    avg_pool,
    global_avg_pool,
    max_pool,
)
from fedvi.nn.model import (
    Model,
    Params,
    from_flax,
    parameter_count,
    preprocessed,
    regroup,
    weight_paths,
)
from fedvi.nn.models import MODELS, build, options_of

__all__ = [
    "MODELS",
    "BatchNorm",
    "Conv",
    "Dense",
    "DepthwiseConv",
    "Model",
    "Params",
    "avg_pool",
    "build",
    "from_flax",
    "global_avg_pool",
    "masks_on_inputs",
    "max_pool",
    "options_of",
    "parameter_count",
    "preprocessed",
    "regroup",
    "weight_paths",
]
