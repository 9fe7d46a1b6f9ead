"""Uncertainty of single predictions, and how well it tells two data sets apart."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedvi.evaluation.predictive import predictive_log_probs

__all__ = ["Predictions", "Uncertainty", "auroc", "predictive_uncertainty"]


class Uncertainty(NamedTuple):
    """One client's figures, one slot an example; stacked, with a leading [clients]."""

    entropy: Array  # [capacity] of the averaged prediction, nats; 0 where padded
    mutual_information: Array  # [capacity] of label and weights, nats
    mask: Array  # [capacity] bool, real examples


class Predictions(NamedTuple):
    """What one client's model says of every example; stacked, with leading [clients].

    A padded slot holds zeros.
    """

    log_probs: Array  # [capacity, classes] float32, of the averaged prediction
    mutual_information: Array  # [capacity] of label and weights, nats
    mask: Array  # [capacity] bool, real examples
    unnormalised: Array  # [capacity] float32, 1 where log-probabilities are none

    @property
    def entropy(self) -> Array:
        """`[capacity]` entropy of the averaged prediction, nats; 0 where padded."""
        return _entropy(self.log_probs)

    @property
    def uncertainty(self) -> Uncertainty:
        """The two figures that need no label."""
        return Uncertainty(self.entropy, self.mutual_information, self.mask)


def predictive_uncertainty(log_probs: Array) -> tuple[Array, Array]:
    """Entropy of the averaged prediction, and its part that the weights cause.

    With p = (1/S) Σ_s p_s the entropy H(p) is the total uncertainty; the mutual
    information of label and weights, I = H(p) - (1/S) Σ_s H(p_s), is what the samples
    disagree about. I is 0 for one sample, and at most log S.

    Args:
      log_probs: `[samples, ..., classes]`, normalised log-probabilities per sample.

    Returns:
      `(entropy [...], mutual_information [...])` in nats, neither below 0.
    """
    total = _entropy(predictive_log_probs(log_probs))
    expected = jnp.mean(_entropy(log_probs), axis=0)
    return total, jnp.maximum(total - expected, 0.0)


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


def _entropy(log_p: Array) -> Array:
    """-Σ_c p_c log p_c with 0 log 0 = 0; `[..., classes]` -> `[...]`."""
    terms = jnp.where(log_p == -jnp.inf, 0.0, -jnp.exp(log_p) * log_p)
    # A certain average's probability can exceed 1 by a rounding error.
    return jnp.maximum(jnp.sum(terms, axis=-1), 0.0)
