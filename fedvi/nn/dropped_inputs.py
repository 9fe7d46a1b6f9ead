"""Dropped input units by a mask of the inputs instead of the weights."""

from collections.abc import Iterable

import jax
from flax import linen as nn

from fedvi.nn.layers import Conv

__all__ = ["masks_on_inputs"]

# Exactly these, whose inputs' last axis is their kernel's next to last.
MASKED = (nn.Dense, Conv)


def masks_on_inputs(
    kernels: Iterable[tuple[jax.Array, jax.Array, jax.Array | None]],
):
    """A context in which layers take x·z and W where they are given diag(z) W.

    The product is the same, x (diag(z) W) = (x·z) W, and so is its gradient. What has
    fewer values is masked: for 50 examples of a dense layer 784-256 the inputs, 39,200
    instead of 200,704 weights, which are written and read once more in every step.
    A layer that does not hold a kernel of `kernels` itself (its weights were rounded
    or made of others) stays as it is.

    Args:
      kernels: for each array of weights (diag(z) W, W, z), z `[in]` or None: it has no
        mask.
    """
    # With the arrays themselves: the id of one that is gone may be another's.
    known = {id(kernel[0]): kernel for kernel in kernels}

    def call_with_mask(call, args, kwargs, context):
        layer = context.module
        if type(layer) not in MASKED:
            return call(*args, **kwargs)
        own = layer.variables.get("params", {})
        _, whole, kept = known.get(id(own.get("kernel")), (None, None, None))
        (x,) = (*args, *kwargs.values())
        if kept is None or kept.shape != x.shape[-1:] or x.size >= whole.size:
            return call(*args, **kwargs)
        x = x * kept.astype(x.dtype).reshape(*[1] * (x.ndim - 1), -1)
        own = {**own, "kernel": whole}
        return layer.clone(parent=None).apply({"params": own}, x)

    return nn.intercept_methods(call_with_mask)
