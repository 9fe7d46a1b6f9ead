"""Figures of one client's padded test data, a batch at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedvi.evaluation.metrics import BINS, Scores, score
from fedvi.evaluation.predictive import predictive_log_probs, unnormalised
from fedvi.evaluation.uncertainty import Predictions, predictive_uncertainty

__all__ = ["fold_batches", "predictions_in_batches", "score_in_batches"]


def score_in_batches(
    predict: Callable, data, batch_size: int, bins: int = BINS
) -> Scores:
    """Scores a client's examples in the batches of `fold_batches`.

    Args:
      predict: `(number [] int32 of the batch, x [batch, ...], mask [batch]) ->
        log-probabilities [samples, batch, classes]`.
      data: one client's `ClientData`; padded slots count nothing.
      batch_size: most examples in one batch.
      bins: of confidence, as of `score`.

    Returns:
      Sums over the client's real examples.
    """

    width = min(batch_size, data.x.shape[0])

    def scores(number, x, y, mask):
        return score(predict(number, x, mask), y, mask, bins)

    def add(total, number, start, *batch):
        return jax.tree.map(jnp.add, total, scores(number, *batch))

    shapes = jax.eval_shape(
        scores, jnp.int32(0), data.x[:width], data.y[:width], jnp.ones(width, bool)
    )
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return fold_batches(add, data, batch_size, zero)


def fold_batches(step: Callable, data, batch_size: int, carry: Any) -> Any:
    """Folds `step` over a client's examples in even batches.

    Batches are as few as `batch_size` allows and, by the client's true size, as even
    as can be: with batch statistics a small last batch would be predicted worse than
    the others, and nobody's figures should depend on another client's size.

    Args:
      step: `(carry, number, start, x [batch, ...], y [batch], mask [batch]) -> carry`;
        the batch of this number is a slice of the client's slots from `start`, its
        own examples those that the mask marks. Every real example is marked once.
      data: one client's `ClientData`.
      batch_size: most examples in one batch.
      carry: pytree.

    Returns:
      The carry after the last batch.
    """
    capacity = data.x.shape[0]
    width = min(batch_size, capacity)
    batches = -(-data.size // width)
    even = -(-data.size // jnp.maximum(batches, 1))

    def one(b, carry):
        first = b * even
        # The last slices are moved back to fit; the mask says what is the batch's own.
        start = jnp.minimum(first, capacity - width)
        slots = start + jnp.arange(width)
        x = jax.lax.dynamic_slice_in_dim(data.x, start, width)
        y = jax.lax.dynamic_slice_in_dim(data.y, start, width)
        mask = (slots >= first) & (slots < jnp.minimum(first + even, data.size))
        return step(carry, b, start, x, y, mask)

    return jax.lax.fori_loop(0, batches, one, carry)


def predictions_in_batches(predict: Callable, data, batch_size: int) -> Predictions:
    """The averaged prediction of every example, in the batches of `fold_batches`.

    Args:
      predict: `(number [] int32 of the batch, x [batch, ...], mask [batch]) ->
        log-probabilities [samples, batch, classes]`.
      data: one client's `ClientData`; its labels are not used.
      batch_size: most examples in one batch.
    """
    capacity = data.x.shape[0]

    def figures(number, x, mask):
        log_probs = predict(number, x, mask).astype(jnp.float32)
        _, information = predictive_uncertainty(log_probs)
        return predictive_log_probs(log_probs), information, unnormalised(log_probs)

    def write(carry, number, start, x, y, mask):
        # Slots of another batch are written out of range, which drops them.
        slots = jnp.where(mask, start + jnp.arange(x.shape[0]), capacity)
        return jax.tree.map(
            lambda whole, part: whole.at[slots].set(part, mode="drop"),
            carry,
            figures(number, x, mask),
        )

    x = data.x[: min(batch_size, capacity)]
    shapes = jax.eval_shape(figures, jnp.int32(0), x, jnp.ones(len(x), bool))
    empty = jax.tree.map(
        lambda s: jnp.zeros((capacity, *s.shape[1:]), jnp.float32), shapes
    )
    log_probs, information, off = fold_batches(write, data, batch_size, empty)
    return Predictions(log_probs, information, jnp.arange(capacity) < data.size, off)
