"""Monte-Carlo predictive distributions: their average and how sure they are."""

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["predictive_log_probs", "predictive_uncertainty"]


def predictive_log_probs(log_probs: Array) -> Array:
    """Averages Monte-Carlo predictive distributions as probabilities, in log space.

    `log p(c|x) = logsumexp_s log p_s(c|x) - log S`.

    Args:
      log_probs: `[samples, ..., classes]`, normalised log-probabilities per sample.

    Returns:
      `[..., classes]` log-probabilities of the mixture of the S samples.
    """
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(float(log_probs.shape[0]))


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


def _entropy(log_p: Array) -> Array:
    """-Σ_c p_c log p_c with 0 log 0 = 0; `[..., classes]` -> `[...]`."""
    terms = jnp.where(log_p == -jnp.inf, 0.0, -jnp.exp(log_p) * log_p)
    # A certain average's probability can exceed 1 by a rounding error.
    return jnp.maximum(jnp.sum(terms, axis=-1), 0.0)
