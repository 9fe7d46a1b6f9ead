"""Kernelised Stein discrepancy, and the inner product of two SVGD directions.

Liu, Lee and Jordan, "A kernelized Stein discrepancy for goodness-of-fit tests", ICML
2016; Yang, Liu and Kassab, "Client selection for federated Bayesian learning", Theorem
1. Both read `h_{p1,p2}` as an average over pairs of particles.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.stein.kernels import RBF, Kernel, check_kernel, gram, off_diagonal
from fedvi.stein.particles import check, check_like, product
from fedvi.stein.svgd import repulsion

__all__ = ["hip", "ksd"]


def hip(
    particles: jax.Array,
    scores1: jax.Array,
    scores2: jax.Array,
    *,
    kernel: Kernel = RBF,
    bandwidth: float | jax.Array | None = None,
) -> jax.Array:
    r"""Hilbert inner product ⟨φ1, φ2⟩ of the SVGD directions for p1 and p2 (Eq. 19).

    $\frac{1}{N^2} \sum_{ij} \left[ s_1(\theta_i)^\top k_{ij} s_2(\theta_j)
    + s_1(\theta_i)^\top \nabla_{\theta_j} k_{ij}
    + \nabla_{\theta_i} k_{ij}^\top s_2(\theta_j)
    + \mathrm{tr} \nabla_{\theta_i} \nabla_{\theta_j} k_{ij} \right]$

    Symmetric, and affine in each of the scores: a weighted mean of inner products is
    that with the weighted mean score (Lemma 3). It is negative where p1 and p2 pull the
    particles in opposite directions.

    Args:
      particles: `[N, d]`, drawn from q.
      scores1: `[N, d]` ∇ log p1 at every particle.
      scores2: `[N, d]` ∇ log p2, likewise.
      kernel: `RBF` (the paper) or `IMQ`.
      bandwidth: h > 0; default: `median_bandwidth`.

    Returns:
      `[]`.

    Raises:
      ValueError: as `svgd_direction`.
    """
    return _hip(particles, scores1, scores2, kernel, bandwidth, diagonal=True)


def ksd(
    particles: jax.Array,
    scores: jax.Array,
    *,
    kernel: Kernel = RBF,
    bandwidth: float | jax.Array | None = None,
    statistic: Literal["v", "u"] = "v",
) -> jax.Array:
    """Kernelised Stein discrepancy S(q, p) = ‖φ‖² = ⟨φ, φ⟩ (Eq. 10).

    Args:
      particles: `[N, d]`, drawn from q.
      scores: `[N, d]` ∇ log p at every particle; p need not be normalised.
      kernel: `RBF` (the paper) or `IMQ`.
      bandwidth: h > 0; default: `median_bandwidth`.
      statistic: "v", the mean over all N² pairs, which is never negative; "u", over
        the N(N-1) pairs of different particles, which is unbiased for independent
        particles and a fixed bandwidth.

    Returns:
      `[]`, the square, as the paper defines it.

    Raises:
      ValueError: as `svgd_direction`; an unknown statistic, or "u" of one particle.
    """
    checks.one_of("statistic", statistic, ("v", "u"))
    if statistic == "u" and check("particles", particles) < 2:
        raise ValueError("statistic='u' of one particle has no pairs: use 'v'")
    diagonal = statistic == "v"
    return _hip(particles, scores, scores, kernel, bandwidth, diagonal=diagonal)


def _hip(particles, scores1, scores2, kernel, bandwidth, *, diagonal: bool):
    check_kernel(kernel)
    count = check("particles", particles)
    check_like("scores1", scores1, particles)
    check_like("scores2", scores2, particles)
    pairs = gram(particles, bandwidth)
    kept = (lambda matrix: matrix) if diagonal else off_diagonal
    # Σ_j k_ij s2_j, and for both of the mixed terms Σ_j (2/h) g_ij (θ_i - θ_j).
    attraction = product(kept(kernel.value(pairs.ratio)), scores2)
    apart = repulsion(pairs, kernel)
    trace = (2.0 / pairs.bandwidth) * (
        particles.shape[1] * kernel.slope(pairs.ratio)
        - 2.0 * pairs.ratio * kernel.curvature(pairs.ratio)
    )
    number = count**2 if diagonal else count * (count - 1)
    along = jnp.sum(scores1 * (attraction + apart)) + jnp.sum(scores2 * apart)
    return (along + jnp.sum(kept(trace))) / number
