"""The average of Monte-Carlo predictive distributions."""

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["predictive_log_probs", "unnormalised"]

# Log-probabilities in bfloat16 are right to 2^-6 below 8, those of thousands of
# classes; probabilities or logits in their place are off by log 2 or more, or most are.
TOLERANCE = 0.1


def unnormalised(log_probs: Array) -> Array:
    """Whether what is said to be log-probabilities does not sum to 1, `[...]` bool.

    Args:
      log_probs: `[samples, ..., classes]`. A NaN, which a diverged model gives, is no
        sign of anything else than that.

    Returns:
      Where |log Σ_c p(c|x)| exceeds 0.1 in any sample.
    """
    totals = jax.nn.logsumexp(log_probs.astype(jnp.float32), axis=-1)
    return jnp.any(jnp.abs(totals) > TOLERANCE, axis=0)


def predictive_log_probs(log_probs: Array) -> Array:
    """Averages Monte-Carlo predictive distributions as probabilities, in log space.

    `log p(c|x) = logsumexp_s log p_s(c|x) - log S`.

    Args:
      log_probs: `[samples, ..., classes]`, normalised log-probabilities per sample.

    Returns:
      `[..., classes]` log-probabilities of the mixture of the S samples.
    """
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(float(log_probs.shape[0]))
