"""The density estimate against SciPy's mixture, its score against autodiff."""

import jax
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from fedvi.stein import kde_log_density, kde_score
from fedvi.stein.kde import weakened_kde_score

M, N, D, B = 5, 6, 3, 0.55
RNG = np.random.default_rng(0)
POINTS = RNG.normal(size=(M, D)).astype(np.float32)
PARTICLES = RNG.normal(size=(N, D)).astype(np.float32)

log_density = jax.jit(kde_log_density)
score = jax.jit(kde_score)
weakened = jax.jit(weakened_kde_score)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_density_is_scipys_mixture_of_normals(offset):
    points, particles = (np.float32(a + offset) for a in (POINTS, PARTICLES))
    components = [
        multivariate_normal(mean, B**2 * np.eye(D)).logpdf(points.astype(np.float64))
        for mean in particles.astype(np.float64)
    ]
    expected = logsumexp(components, axis=0) - np.log(N)
    found = log_density(points, particles, bandwidth=B)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_the_score_is_the_gradient_of_the_log_density():
    def one(point):
        return kde_log_density(point[None], PARTICLES, bandwidth=B)[0]

    expected = jax.jit(jax.vmap(jax.grad(one)))(POINTS)
    found = score(POINTS, PARTICLES, bandwidth=B)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_score_is_the_softmax_formula_in_float64(offset):
    points, particles = (np.float32(a + offset) for a in (POINTS, PARTICLES))
    apart = particles[None].astype(np.float64) - points[:, None]
    exponents = -np.square(apart).sum(-1) / (2 * B**2)
    weights = np.exp(exponents - logsumexp(exponents, axis=1, keepdims=True))
    expected = np.einsum("mn,mnd->md", weights, apart) / B**2
    found = score(points, particles, bandwidth=B)
    # Centred sets at 1e4 keep float32's half unit there, 5e-4, over b².
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def test_with_a_networks_weights_it_points_to_the_nearest_particle():
    """79,510 dimensions, where the density itself is 10^-30,000 or less."""
    dimension, count = 79_510, 20
    rng = np.random.default_rng(1)
    particles = rng.normal(size=(count, dimension)).astype(np.float32)
    nearest = np.arange(3) + 4
    points = particles[nearest] + rng.normal(size=(3, dimension)).astype(np.float32)
    found = score(points, particles, bandwidth=B)
    expected = (particles[nearest] - points) / B**2
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.isfinite(log_density(points, particles, bandwidth=B)).all()
    assert (weakened(points, particles, bandwidth=B) == 0).all()


def test_identical_particles_pull_like_one():  # C15
    same = np.repeat(PARTICLES[:1], N, axis=0)
    np.testing.assert_allclose(
        score(POINTS, same, bandwidth=B),
        (PARTICLES[:1] - POINTS) / B**2,
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_weakened_score_is_the_public_codes_formula():
    """∇ log(q̃ + 1e-10) in float64, near the particles and where q̃ is about 1e-10."""
    direction = POINTS / np.linalg.norm(POINTS, axis=1, keepdims=True)
    points = np.float32(np.linspace(0.5, 4.5, M)[:, None] * direction)
    apart = PARTICLES[None].astype(np.float64) - points[:, None]
    normaliser = (2 * np.pi * B**2 * N) ** (D / 2)
    kernel = np.exp(-np.square(apart).sum(-1) / (2 * B**2)) / normaliser
    slope = np.einsum("mn,mnd->md", kernel, apart) / B**2
    q = kernel.sum(1)
    share = q / (q + 1e-10)
    assert share.min() < 0.5 < share.max()
    found = weakened(points, PARTICLES, bandwidth=B)
    np.testing.assert_allclose(found, slope / (q[:, None] + 1e-10), rtol=2e-4)


def test_in_54_dimensions_the_weakened_score_is_all_but_nothing():
    """Next to one of six particles: q̃ is (2πb²·6)^-27 = 3e-29, its share 3e-19."""
    particles = np.random.default_rng(2).normal(size=(6, 54)).astype(np.float32)
    points = particles[:1] + np.float32(1e-3)
    share = weakened(points, particles, bandwidth=B) / score(
        points, particles, bandwidth=B
    )
    expected = (2 * np.pi * B**2 * 6) ** -27.0 / 1e-10
    assert 2e-19 < expected < 4e-19
    np.testing.assert_allclose(share, expected, rtol=1e-3)


@pytest.mark.parametrize("density", [kde_log_density, kde_score, weakened_kde_score])
def test_mistakes_are_named(density):
    for bandwidth in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"bandwidth={bandwidth!r} must be"):
            density(POINTS, PARTICLES, bandwidth=bandwidth)
    for points in (POINTS[:0], (POINTS,)):
        with pytest.raises(ValueError, match="points is .* must be a matrix"):
            density(points, PARTICLES, bandwidth=B)
    with pytest.raises(ValueError, match="particles is .* must be a matrix"):
        density(POINTS, PARTICLES[:0], bandwidth=B)
    with pytest.raises(ValueError, match="points has shape .* the particles"):
        density(POINTS[:, :2], PARTICLES, bandwidth=B)
