"""Scores of one client's padded test data, a batch at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedvi.evaluation.metrics import Scores, score

__all__ = ["score_in_batches"]


def score_in_batches(predict: Callable, data, batch_size: int) -> Scores:
    """Scores a client's examples in even batches.

    Batches are as few as `batch_size` allows and as even as can be: with batch
    statistics a small last batch would be predicted worse than the others.

    Args:
      predict: `(x [batch, ...], mask [batch]) -> log-probabilities
        [samples, batch, classes]`.
      data: one client's `ClientData`; padded slots count nothing.
      batch_size: most examples in one batch.

    Returns:
      Sums over the client's real examples.
    """
    capacity = data.x.shape[0]
    batches = -(-capacity // batch_size)
    batch_size = -(-capacity // batches)

    def one(b):
        # The last batch is moved back to fit; what it sees twice counts once.
        start = jnp.minimum(b * batch_size, capacity - batch_size)
        slots = start + jnp.arange(batch_size)
        x = jax.lax.dynamic_slice_in_dim(data.x, start, batch_size)
        y = jax.lax.dynamic_slice_in_dim(data.y, start, batch_size)
        real = slots < data.size
        return score(predict(x, real), y, real & (slots >= b * batch_size))

    if batches == 1:
        return one(0)
    scores = jax.lax.map(one, jnp.arange(batches))
    return jax.tree.map(lambda s: s.sum(0), scores)
