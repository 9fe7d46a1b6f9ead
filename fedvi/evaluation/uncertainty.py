"""Uncertainty of single predictions, and how well it tells two data sets apart."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedvi.evaluation.batches import fold_batches
from fedvi.evaluation.predictive import predictive_uncertainty

__all__ = ["Uncertainty", "auroc", "uncertainty_in_batches"]


class Uncertainty(NamedTuple):
    """One client's figures, one slot an example; stacked, with a leading [clients]."""

    entropy: Array  # [capacity] of the averaged prediction, nats; 0 where padded
    mutual_information: Array  # [capacity] of label and weights, nats
    mask: Array  # [capacity] bool, real examples


def uncertainty_in_batches(predict: Callable, data, batch_size: int) -> Uncertainty:
    """Uncertainty of every example of a client, in the batches of `fold_batches`.

    Args:
      predict: `(x [batch, ...], mask [batch]) -> log-probabilities
        [samples, batch, classes]`.
      data: one client's `ClientData`; its labels are not used.
      batch_size: most examples in one batch.
    """
    capacity = data.x.shape[0]

    def write(carry, start, x, y, mask):
        # Slots of another batch are written out of range, which drops them.
        slots = jnp.where(mask, start + jnp.arange(x.shape[0]), capacity)
        return tuple(
            whole.at[slots].set(part, mode="drop")
            for whole, part in zip(carry, predictive_uncertainty(predict(x, mask)))
        )

    start = (jnp.zeros(capacity), jnp.zeros(capacity))
    filled = fold_batches(write, data, batch_size, start)
    return Uncertainty(*filled, jnp.arange(capacity) < data.size)


def auroc(in_values: np.ndarray, out_values: np.ndarray) -> float:
    """Area under the ROC curve of telling "out" from "in" by a larger value.

    P(out > in) + ½ P(out = in) for one value drawn from each, the Mann-Whitney
    statistic: ½ tells nothing apart, 1 everything.

    Args:
      in_values: `[n]`, for instance entropies of test examples.
      out_values: `[m]`, those of out-of-distribution inputs.

    Returns:
      The area, NaN if a value is NaN.

    Raises:
      ValueError: one of them is empty.
    """
    first, second = (
        np.ravel(np.asarray(v, np.float64)) for v in (in_values, out_values)
    )
    for name, values in (("in_values", first), ("out_values", second)):
        if values.size == 0:
            raise ValueError(f"{name} is empty: nothing to tell apart")
    if np.isnan(first).any() or np.isnan(second).any():
        return float("nan")
    first = np.sort(first)
    below = np.searchsorted(first, second, side="left")
    not_above = np.searchsorted(first, second, side="right")
    return float((below + not_above).mean() / (2 * first.size))
