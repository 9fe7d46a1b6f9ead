"""Scores of one client's padded test data, a batch at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedvi.evaluation.metrics import Scores, score

__all__ = ["score_in_batches"]


def score_in_batches(predict: Callable, data, batch_size: int) -> Scores:
    """Scores a client's examples in even batches.

    Batches are as few as `batch_size` allows and, by the client's true size, as even
    as can be: with batch statistics a small last batch would be predicted worse than
    the others, and nobody's figures should depend on another client's size.

    Args:
      predict: `(x [batch, ...], mask [batch]) -> log-probabilities
        [samples, batch, classes]`.
      data: one client's `ClientData`; padded slots count nothing.
      batch_size: most examples in one batch.

    Returns:
      Sums over the client's real examples.
    """
    capacity = data.x.shape[0]
    width = min(batch_size, capacity)
    batches = -(-data.size // width)
    even = -(-data.size // jnp.maximum(batches, 1))

    def one(b):
        first = b * even
        # The last slices are moved back to fit; the mask says what is the batch's own.
        start = jnp.minimum(first, capacity - width)
        slots = start + jnp.arange(width)
        x = jax.lax.dynamic_slice_in_dim(data.x, start, width)
        y = jax.lax.dynamic_slice_in_dim(data.y, start, width)
        mask = (slots >= first) & (slots < jnp.minimum(first + even, data.size))
        return score(predict(x, mask), y, mask)

    zero = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, jnp.int32(0))
    )
    return jax.lax.fori_loop(
        0, batches, lambda b, total: jax.tree.map(jnp.add, total, one(b)), zero
    )
