"""The Pólya-Gamma distribution PG(1, c), under which logistic likelihoods are normal.

Polson, Scott and Windle, "Bayesian inference for logistic models using Pólya-Gamma
latent variables", JASA 2013:

    σ(f)^y (1 - σ(f))^(1-y) = ½ exp((y - ½) f) E[exp(-ω f² / 2)],  ω ~ PG(1, 0),

and the conditional of ω given f is PG(1, f).
"""

import math

import jax
import jax.numpy as jnp

__all__ = ["mean", "sample"]


def mean(c: jax.Array) -> jax.Array:
    """tanh(c/2) / (2c), 1/4 at c = 0."""
    near = jnp.abs(c) < 1e-3
    safe = jnp.where(near, 1.0, c)
    return jnp.where(near, 0.25 - c**2 / 48, jnp.tanh(safe / 2) / (2 * safe))


def sample(key: jax.Array, c: jax.Array, terms: int = 32) -> jax.Array:
    """One draw for every c, by the sum that defines the distribution.

    ω = 1/(2π²) Σ_k g_k / ((k - ½)² + c²/(4π²)), g_k ~ Exp(1). What is behind the first
    `terms` has its mean: the draw's mean is exact, the variance short by less than
    1e-6 of itself at c = 0. A draw depends continuously on c.

    Args:
      key: typed PRNG key.
      c: `[...]`, the tilt.
      terms: of the sum that are drawn.
    """
    place = jnp.arange(terms) + 0.5
    shape = (1,) * c.ndim + (terms,)
    size = place.reshape(shape) ** 2 + (c[..., None] / (2 * math.pi)) ** 2
    scale = 1 / (2 * math.pi**2 * size)
    drawn = jax.random.exponential(key, (*c.shape, terms)) * scale
    # Rounding shall not make it negative.
    tail = jnp.maximum(mean(c) - scale.sum(axis=-1), 0.0)
    return drawn.sum(axis=-1) + tail
