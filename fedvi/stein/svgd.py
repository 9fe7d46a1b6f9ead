"""Stein variational gradient descent.

Liu and Wang, "Stein variational gradient descent: a general purpose Bayesian inference
algorithm", NIPS 2016.
"""

import jax

from fedvi.stein.kernels import RBF, Gram, Kernel, check_kernel, gram, off_diagonal
from fedvi.stein.particles import check, check_like, product

__all__ = ["repulsion", "svgd_direction"]


def svgd_direction(
    particles: jax.Array,
    scores: jax.Array,
    *,
    kernel: Kernel = RBF,
    bandwidth: float | jax.Array | None = None,
) -> jax.Array:
    r"""The direction in which KL(q ‖ p) falls fastest.

    $\phi(\theta_i) = \frac{1}{N} \sum_j \left[ k(\theta_j, \theta_i)
    \nabla \log p(\theta_j) + \nabla_{\theta_j} k(\theta_j, \theta_i) \right]$

    The first term draws particles to where p is large, the second apart. One particle
    follows its score. For RBF two matrix products, for other kernels three.

    Args:
      particles: `[N, d]`.
      scores: `[N, d]` ∇ log p at every particle; p need not be normalised.
      kernel: `RBF` (the papers) or `IMQ`.
      bandwidth: h > 0; default: `median_bandwidth`, anew at every call.

    Returns:
      `[N, d]` φ: to be added, times a step size.

    Raises:
      ValueError: no matrix of particles, scores of another shape, or a bandwidth that
        is not positive and finite.
    """
    check_kernel(kernel)
    count = check("particles", particles)
    check_like("scores", scores, particles)
    pairs = gram(particles, bandwidth)
    if kernel.slope is not kernel.value:
        attraction = product(kernel.value(pairs.ratio), scores)
        return (attraction + repulsion(pairs, kernel)) / count
    # K S + (2/h)(rowsum(K) Θ - K Θ) as one product; K without its diagonal, whose part
    # is S exactly.
    factor = 2.0 / pairs.bandwidth
    weights = off_diagonal(kernel.value(pairs.ratio))
    total = weights.sum(axis=1, keepdims=True)
    mixed = product(weights, scores - factor * pairs.centred)
    return (mixed + scores + factor * total * pairs.centred) / count


def repulsion(pairs: Gram, kernel: Kernel) -> jax.Array:
    """Σ_j ∇_{θ_j} k(θ_j, θ_i) = (2/h) Σ_j g_ij (θ_i - θ_j) of every particle i."""
    weights = off_diagonal(kernel.slope(pairs.ratio))
    total = weights.sum(axis=1, keepdims=True)
    apart = total * pairs.centred - product(weights, pairs.centred)
    return 2.0 / pairs.bandwidth * apart
