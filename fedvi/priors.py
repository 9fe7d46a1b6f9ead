"""Gaussian priors over a network's weights, and what is a particle under each."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.distributions.draws import standard_normal_like
from fedvi.nn import Model, parameter_count

__all__ = ["Prior", "WithPrecision", "gaussian", "hierarchical"]


class Prior(NamedTuple):
    """A prior density p_0 over particles.

    Attributes:
      sample: `(key) -> particle`, from p_0.
      log_prob: `(particle) -> []`, normalised.
      weights: `(particle) -> params`, the network's weights.
      with_weights: `(particle, params) -> particle`, with other weights.
    """

    sample: Callable[[jax.Array], Any]
    log_prob: Callable[[Any], jax.Array]
    weights: Callable[[Any], Any]
    with_weights: Callable[[Any, Any], Any]


class WithPrecision(NamedTuple):
    """A particle under the hierarchical prior.

    Attributes:
      weights: the network's parameters.
      log_precision: `[]` log ξ.
    """

    weights: Any
    log_precision: jax.Array


def gaussian(model: Model, precision: float) -> Prior:
    """w ~ N(0, I / precision); a particle is the weights.

    Args:
      model: whose parameters w are, biases included.
      precision: λ > 0 (DSVGD's network: e).

    Raises:
      ValueError: the precision is not positive and finite.
    """
    checks.positive("precision", precision)
    checks.finite("precision", precision)
    log_precision = math.log(precision)

    def sample(key):
        return _draw(model, key, -0.5 * log_precision)

    return Prior(
        sample=sample,
        log_prob=lambda weights: _log_normal(weights, log_precision),
        weights=lambda particle: particle,
        with_weights=lambda particle, weights: weights,
    )


def hierarchical(model: Model, shape: float, rate: float) -> Prior:
    r"""w | ξ ~ N(0, I / ξ), ξ ~ Gamma(shape, rate); a particle is (w, log ξ).

    $\log p_0(w, \log\xi) = \log N(w; 0, I/\xi) + \log \mathrm{Gamma}(\xi) + \log\xi$:
    the last is the Jacobian of ξ with respect to log ξ.

    Args:
      model: whose parameters w are.
      shape: a > 0 (1).
      rate: b > 0, so that E[ξ] = a / b. The papers say Gamma(1, 0.01) and Liu and
        Wang's code means a rate of 0.01; DSVGD's code has a rate of 100.

    Raises:
      ValueError: shape or rate is not positive and finite.
    """
    for name, value in (("gamma_shape", shape), ("gamma_rate", rate)):
        checks.positive(name, value)
        checks.finite(name, value)
    normaliser = shape * math.log(rate) - math.lgamma(shape)

    def sample(key):
        precision_key, key = jax.random.split(key)
        # The log of the draw itself: a small shape's draws round to 0.
        log_precision = jax.random.loggamma(precision_key, shape) - math.log(rate)
        return WithPrecision(_draw(model, key, -0.5 * log_precision), log_precision)

    def log_prob(particle):
        weights, log_precision = particle
        log_gamma = normaliser + shape * log_precision - rate * jnp.exp(log_precision)
        return _log_normal(weights, log_precision) + log_gamma

    return Prior(
        sample=sample,
        log_prob=log_prob,
        weights=lambda particle: particle.weights,
        with_weights=lambda particle, weights: particle._replace(weights=weights),
    )


def _draw(model: Model, key: jax.Array, log_std):
    shapes = jax.eval_shape(model.init, key)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    noise = standard_normal_like(key, zeros)
    return jax.tree.map(lambda z: jnp.exp(log_std) * z, noise)


def _log_normal(weights, log_precision):
    """log N(w; 0, I exp(-log_precision))."""
    squares = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(weights))
    count = parameter_count(weights)
    return 0.5 * (
        count * (log_precision - math.log(2 * math.pi))
        - jnp.exp(log_precision) * squares
    )
