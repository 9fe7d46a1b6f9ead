"""Draws of activations instead of weights: local reparameterisation.

For weights W_ij ~ N(m_ij, s_ij²), independent, the output of a linear layer for one
input x is normal as well (Kingma, Salimans and Welling 2015, Eq. 6):

    y_j ~ N(Σ_i x_i m_ij, Σ_i x_i² s_ij²)

Drawing y takes batch × outputs random numbers instead of inputs × outputs. Every
example gets a draw of its own, so that the errors of a batch's gradients average out:
same expected gradient of a loss summed over examples, lower variance.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from fedvi.distributions.draws import standard_normal_like
from fedvi.nn.layers import Conv, DepthwiseConv

__all__ = ["apply_local"]

# Exactly these: a subclass may do more than its parent. Each output is a sum of
# products, every weight at most once, so that squared inputs and variances give its
# variance (a transposed convolution that wraps around uses a weight twice).
LINEAR = (nn.Dense, nn.DenseGeneral, nn.Conv, Conv, DepthwiseConv)

# Least variance of an activation, the square of mean_field.SCALE_FLOOR: an all-zero
# input has variance 0, where the root's derivative is infinite. At 1e-16 the first
# two derivatives (5e7, 3e23) are far inside float32's 3e38, and noise of 1e-8 is the
# spacing of float32 numbers at 0.1. A maximum and not a sum, because a fast
# convolution may round a variance to below zero.
VARIANCE_FLOOR = 1e-16


def apply_local(
    key: jax.Array,
    module: nn.Module,
    mean: dict[str, Any],
    scale: dict[str, Any],
    x: jax.Array,
    **options: Any,
) -> jax.Array:
    """One draw of a module's output, its linear layers drawn by activation.

    Layers of `LINEAR` are drawn so. All other weights (of normalisation, of a user's
    own layer, of a layer inside a lifted transformation such as `nn.scan` or
    `nn.remat`) are drawn as mean + scale · z, once for the batch.

    The draw of one example has exactly the distribution that drawing the weights gives
    it, if all weights are in dense layers, each applied once to that example. Examples
    then are independent, where a draw of the weights is common to all. The pixels of a
    convolution share weights, and so do two calls of one layer: their draws are
    independent all the same, so that every activation's distribution given the layer's
    input is right, but not the joint one. Batch normalisation mixes examples, which
    makes its network approximate too.

    Args:
        key: typed PRNG key.
        module: maps `[batch, ...]` to an output, with parameters only.
        mean: the module's parameters.
        scale: standard deviations, not negative, same structure and shapes; zero gives
            `module.apply` up to rounding.
        x: input `[batch, ...]`.
        **options: further arguments of the module, such as `mask`.

    Returns:
        The output, shaped as `module.apply({"params": mean}, x, **options)`.
    """
    outputs = _drawn_outputs(module, mean, x, **options)
    mean, scale = flatten_dict(mean), flatten_dict(scale)
    weights = {path: m for path, m in mean.items() if path[:-1] not in outputs}
    noise = standard_normal_like(key, {"outputs": outputs, "weights": weights})
    for path, z in noise["weights"].items():
        mean[path] = jax.tree.map(_draw, mean[path], scale[path], z)
    remaining = {path: iter(draws) for path, draws in noise["outputs"].items()}

    def draw(call, args, kwargs, context):
        y = call(*args, **kwargs)
        layer = context.module
        if not _is_plainly_linear(layer, mean):
            return y
        (inputs,) = (*args, *kwargs.values())
        squares = jnp.square(inputs.astype(y.dtype))
        names = layer.variables["params"]
        variances = {name: jnp.square(scale[*layer.path, name]) for name in names}
        variance = layer.clone(parent=None).apply({"params": variances}, squares)
        deviation = jnp.sqrt(jnp.maximum(variance, VARIANCE_FLOOR))
        return _draw(y, deviation, next(remaining[layer.path]))

    with nn.intercept_methods(draw):
        return module.apply({"params": unflatten_dict(mean)}, x, **options)


def _drawn_outputs(module, params, x, **options) -> dict[tuple[str, ...], list]:
    """Zeros shaped as the outputs to draw: one a call of each layer, by its path.

    A trace finds them, so that one generator call can serve all layers.
    """
    found = {}

    def trace(params, x):
        given = flatten_dict(params)

        def record(call, args, kwargs, context):
            y = call(*args, **kwargs)
            layer = context.module
            if _is_plainly_linear(layer, given):
                found.setdefault(layer.path, []).append((y.shape, y.dtype))
            return y

        with nn.intercept_methods(record):
            return module.apply({"params": params}, x, **options)

    jax.eval_shape(trace, params, x)
    return {path: [jnp.zeros(*y) for y in calls] for path, calls in found.items()}


def _draw(mean, deviation, noise):
    return mean + deviation * noise


def _is_plainly_linear(layer: nn.Module, given: dict[tuple[str, ...], Any]) -> bool:
    """Whether a layer of `LINEAR` uses parameters of `given` as they are.

    A lifted transformation hands its layers slices or copies of the parameters, or
    functions of them (`nn.WeightNorm`), whose variances are not ours to know.
    """
    if type(layer) not in LINEAR:
        return False
    own = layer.variables.get("params", {})
    return bool(own) and all(
        given.get((*layer.path, name)) is leaf for name, leaf in own.items()
    )
