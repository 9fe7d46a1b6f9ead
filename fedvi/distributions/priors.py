"""Gaussian priors over a network's weights: distributions over vectors."""

import math

import distrax
import jax
import jax.numpy as jnp

__all__ = ["Hierarchical", "gaussian"]


def gaussian(size: int, precision: float | jax.Array) -> distrax.Distribution:
    """w ~ N(0, I / precision), over vectors `[size]`.

    Args:
      size: number of weights, biases included.
      precision: λ > 0 (DSVGD's network: e).
    """
    std = jnp.exp(-0.5 * jnp.log(precision))
    return distrax.Independent(distrax.Normal(jnp.zeros(size), std), 1)


class Hierarchical(distrax.Distribution):
    r"""w | ξ ~ N(0, I / ξ), ξ ~ Gamma(shape, rate), over vectors (w, log ξ).

    $\log p_0(w, \log\xi) = \log N(w; 0, I/\xi) + \log \mathrm{Gamma}(\xi) + \log\xi$:
    the last is the Jacobian of ξ with respect to log ξ.

    Args:
      size: number of weights; a vector has one more coordinate, log ξ, its last.
      shape: a > 0 (1).
      rate: b > 0, so that E[ξ] = a / b. The papers say Gamma(1, 0.01) and Liu and
        Wang's code means a rate of 0.01; DSVGD's code has a rate of 100.
    """

    def __init__(self, size: int, shape: float | jax.Array, rate: float | jax.Array):
        super().__init__()
        self.size, self.shape, self.rate = size, shape, rate

    def _sample_n(self, key: jax.Array, n: int) -> jax.Array:
        precision_key, key = jax.random.split(key)
        # The log of the draw itself: a small shape's draws round to 0.
        log_gamma = jax.random.loggamma(precision_key, self.shape, (n, 1))
        log_precision = log_gamma - jnp.log(self.rate)
        noise = jax.random.normal(key, (n, self.size))
        weights = jnp.exp(-0.5 * log_precision) * noise
        return jnp.concatenate([weights, log_precision], axis=1)

    def log_prob(self, value: jax.Array) -> jax.Array:
        """`[*sample_shape]`, at (w, log ξ)."""
        weights, log_precision = value[..., :-1], value[..., -1]
        precision = jnp.exp(log_precision)
        squares = jnp.sum(jnp.square(weights), axis=-1)
        log_normal = self.size * (log_precision - math.log(2 * math.pi))
        log_gamma = self.shape * (log_precision + jnp.log(self.rate))
        log_gamma -= self.rate * precision + jax.lax.lgamma(jnp.float32(self.shape))
        return 0.5 * (log_normal - precision * squares) + log_gamma

    @property
    def event_shape(self) -> tuple[int, ...]:
        """`(size + 1,)`."""
        return (self.size + 1,)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Always ()."""
        return ()
