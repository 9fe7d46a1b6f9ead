"""Stein variational gradient descent.

Liu and Wang, "Stein variational gradient descent: a general purpose Bayesian inference
algorithm", NIPS 2016.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedvi.stein import particles as sets
from fedvi.stein.kernels import RBF, Gram, Kernel, check_kernel, gram

__all__ = ["repulsion", "svgd_direction"]


def svgd_direction(
    particles: Any,
    scores: Any,
    *,
    kernel: Kernel = RBF,
    bandwidth: float | jax.Array | None = None,
) -> Any:
    r"""The direction in which KL(q ‖ p) falls fastest.

    $\phi(\theta_i) = \frac{1}{N} \sum_j \left[ k(\theta_j, \theta_i)
    \nabla \log p(\theta_j) + \nabla_{\theta_j} k(\theta_j, \theta_i) \right]$

    The first term draws particles to where p is large, the second apart. One particle
    follows its score. For RBF two matrix products, for other kernels three.

    Args:
      particles: leaves `[N, ...]`.
      scores: ∇ log p at every particle, like `particles`; p need not be normalised.
      kernel: `RBF` (the papers) or `IMQ`.
      bandwidth: h > 0; default: `median_bandwidth`, anew at every call.

    Returns:
      φ, like `particles`: to be added, times a step size.

    Raises:
      ValueError: no particles, leaves that do not agree, scores of other shapes, or a
        bandwidth that is not positive and finite.
    """
    check_kernel(kernel)
    count = sets.check("particles", particles)
    sets.check_like("scores", scores, particles)
    pairs = gram(particles, bandwidth)
    if kernel.slope is not kernel.value:
        attraction = sets.mix(kernel.value(pairs.ratio), scores)
        apart = repulsion(pairs, kernel)
        return jax.tree.map(lambda a, b: (a + b) / count, attraction, apart)
    # K S + (2/h)(rowsum(K) Θ - K Θ) as one product; K without its diagonal, whose part
    # is S exactly.
    factor = 2.0 / pairs.bandwidth
    weights = _without_diagonal(kernel.value(pairs.ratio))
    total = weights.sum(axis=1)
    mixed = sets.mix(
        weights, jax.tree.map(lambda s, x: s - factor * x, scores, pairs.centred)
    )
    return jax.tree.map(
        lambda m, s, x: (m + s + factor * _column(total, x) * x) / count,
        mixed,
        scores,
        pairs.centred,
    )


def repulsion(pairs: Gram, kernel: Kernel) -> Any:
    """Σ_j ∇_{θ_j} k(θ_j, θ_i) = (2/h) Σ_j g_ij (θ_i - θ_j) of every particle i."""
    factor = 2.0 / pairs.bandwidth
    weights = _without_diagonal(kernel.slope(pairs.ratio))
    total = weights.sum(axis=1)
    return jax.tree.map(
        lambda x, m: factor * (_column(total, x) * x - m),
        pairs.centred,
        sets.mix(weights, pairs.centred),
    )


def _without_diagonal(matrix: jax.Array) -> jax.Array:
    return jnp.where(jnp.eye(len(matrix), dtype=bool), 0.0, matrix)


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
    """`[N]` with as many trailing axes of length 1 as `like` needs."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))
