"""Gaussian kernel density estimate of a particle set: its log-density and score."""

import math

import jax
import jax.numpy as jnp

from fedvi.stein.kernels import check_bandwidth
from fedvi.stein.particles import check, check_like, mean, product, squared_distances

__all__ = ["kde_log_density", "kde_score", "weakened_kde_score"]

Number = float | jax.Array


def kde_log_density(
    points: jax.Array, particles: jax.Array, *, bandwidth: Number
) -> jax.Array:
    r"""log q(θ) for $q(\theta) = \frac{1}{N} \sum_n N(\theta; \theta_n, b^2 I)$.

    By log-sum-exp: in d dimensions the density itself is of the order of b^(-d), which
    no float holds for a network.

    Args:
      points: θ, `[M, d]`.
      particles: θ_n, `[N, d]`.
      bandwidth: b > 0, the kernel's standard deviation in every coordinate.

    Returns:
      `[M]`.

    Raises:
      ValueError: no matrices of points and particles, d that differ, or b not positive
        and finite.
    """
    _check(points, particles, bandwidth)
    exponents, _, _ = _exponents(points, particles, bandwidth)
    count, dimension = particles.shape
    scale = dimension * (jnp.log(bandwidth) + 0.5 * math.log(2 * math.pi))
    return jax.nn.logsumexp(exponents, axis=1) - math.log(count) - scale


def kde_score(
    points: jax.Array, particles: jax.Array, *, bandwidth: Number
) -> jax.Array:
    r"""$\nabla_\theta \log q(\theta) = \sum_n w_n (\theta_n - \theta) / b^2$,
    $w = \mathrm{softmax}(-\lVert\theta - \theta_n\rVert^2 / 2 b^2)$.

    Where the particles are far apart, as they are in many dimensions, w is one-hot: the
    score points to the nearest particle.

    Args:
      points: θ, `[M, d]`.
      particles: θ_n, `[N, d]`.
      bandwidth: b > 0.

    Returns:
      `[M, d]`.

    Raises:
      ValueError: as `kde_log_density`.
    """
    _check(points, particles, bandwidth)
    exponents, points, particles = _exponents(points, particles, bandwidth)
    weights = jax.nn.softmax(exponents, axis=1)
    return (product(weights, particles) - points) / bandwidth**2


def weakened_kde_score(
    points: jax.Array, particles: jax.Array, *, bandwidth: Number
) -> jax.Array:
    r"""∇ log(q̃ + 1e-10), what DSVGD's public code takes for ∇ log q.

    $\tilde q = \sum_n \exp(-\lVert\theta - \theta_n\rVert^2 / 2 b^2)
    / (2 \pi b^2 N)^{d/2}$, with N inside the power. The result is `kde_score` times
    q̃ / (q̃ + 1e-10): 3e-19 of it for d = 54 and 6 particles, nothing for a network. To
    reproduce that code; args, result and errors are those of `kde_score`.
    """
    score = kde_score(points, particles, bandwidth=bandwidth)
    exponents, _, _ = _exponents(points, particles, bandwidth)
    count, dimension = particles.shape
    normaliser = dimension * (jnp.log(bandwidth) + 0.5 * math.log(2 * math.pi * count))
    log_q = jax.nn.logsumexp(exponents, axis=1, keepdims=True) - normaliser
    return score * jax.nn.sigmoid(log_q - math.log(1e-10))


def _check(points, particles, bandwidth) -> None:
    check("points", points)
    check("particles", particles)
    check_like("points", points[:1], particles[:1])
    check_bandwidth(bandwidth)


def _exponents(points, particles, bandwidth):
    """`[M, N]` -‖θ - θ_n‖²/2b², and both sets, moved towards the origin together."""
    middle = mean(particles)
    points, particles = points - middle, particles - middle
    squares = squared_distances(points, particles)
    return squares * (-0.5 / bandwidth**2), points, particles
