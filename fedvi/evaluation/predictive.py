"""The average of Monte-Carlo predictive distributions."""

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["predictive_log_probs"]


def predictive_log_probs(log_probs: Array) -> Array:
    """Averages Monte-Carlo predictive distributions as probabilities, in log space.

    `log p(c|x) = logsumexp_s log p_s(c|x) - log S`.

    Args:
      log_probs: `[samples, ..., classes]`, normalised log-probabilities per sample.

    Returns:
      `[..., classes]` log-probabilities of the mixture of the S samples.
    """
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(float(log_probs.shape[0]))
