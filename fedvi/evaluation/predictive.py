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
      log_probs: `[samples, ..., classes]`. What is not finite, as of a diverged model,
        is no sign of anything else than that.

    Returns:
      Where |log Σ_c p(c|x)| exceeds 0.1, or what rounding large values makes of 0, in
      any sample.
    """
    log_probs = log_probs.astype(jnp.float32)
    totals = jnp.abs(jax.nn.logsumexp(log_probs, axis=-1))
    sizes = jnp.where(jnp.isfinite(log_probs), jnp.abs(log_probs), 0.0).max(axis=-1)
    off = totals > TOLERANCE + 1e-5 * sizes
    return jnp.any(off & jnp.isfinite(totals), axis=0)


def predictive_log_probs(log_probs: Array) -> Array:
    """Averages Monte-Carlo predictive distributions as probabilities, in log space.

    `log p(c|x) = logsumexp_s log p_s(c|x) - log S`.

    Args:
      log_probs: `[samples, ..., classes]`, normalised log-probabilities per sample.

    Returns:
      `[..., classes]` log-probabilities of the mixture of the S samples.
    """
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(float(log_probs.shape[0]))
