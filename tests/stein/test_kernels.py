"""Kernels against their derivatives, the bandwidth against NumPy's median."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.stein import IMQ, KERNELS, RBF, median_bandwidth
from fedvi.stein.kernels import gram

bandwidths = jax.jit(jax.vmap(median_bandwidth))


def numpy_bandwidth(particles):
    """med² / log(N + 1) in float64, the median over pairs of different particles."""
    particles = np.asarray(particles, np.float64)
    n = len(particles)
    distances = [
        np.linalg.norm(particles[i] - particles[j]) for i in range(n) for j in range(i)
    ]
    return np.median(distances) ** 2 / np.log(n + 1)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_slope_and_curvature_are_the_derivatives_of_the_value(kernel):
    ratio = jnp.linspace(0.0, 5.0, 9)
    first, second = jax.grad(kernel.value), jax.grad(jax.grad(kernel.value))
    assert kernel.value(jnp.float32(0)) == 1
    np.testing.assert_allclose(kernel.slope(ratio), -jax.vmap(first)(ratio), rtol=1e-5)
    np.testing.assert_allclose(
        kernel.curvature(ratio), jax.vmap(second)(ratio), rtol=1e-5
    )


def test_the_kernels_are_those_of_the_papers():
    ratio = np.array([0.0, 0.5, 3.0], np.float32)
    np.testing.assert_allclose(RBF.value(ratio), np.exp(-ratio), rtol=1e-6)
    np.testing.assert_allclose(IMQ.value(ratio), 1 / np.sqrt(1 + ratio), rtol=1e-6)


# 1, 3, 6, 55 and 780 pairs: odd and even numbers of them.
@pytest.mark.parametrize("count", [2, 3, 4, 11, 40])
def test_the_bandwidth_is_the_exact_median_over_different_pairs(count):
    """Normal draws, and points of a small lattice, whose distances have many ties."""
    rng = np.random.default_rng(count)
    draws = rng.normal(size=(12, count, 3))
    lattice = rng.integers(0, 4, (12, count, 3))
    lattice[:, 0], lattice[:, 1:] = -3, lattice[:, 1:] * 2  # not all in one place
    sets = np.concatenate([draws, lattice]).astype(np.float32)
    expected = np.array([numpy_bandwidth(one) for one in sets])
    usable = expected > 0  # else the heuristic falls back on the mean
    assert usable.sum() > 12
    np.testing.assert_allclose(
        np.asarray(bandwidths(sets))[usable], expected[usable], rtol=3e-6
    )


def test_the_bandwidth_far_from_the_origin():
    """Coordinates in 1/1024, which float32 holds at 10,000 exactly."""
    rng = np.random.default_rng(0)
    particles = np.round(rng.normal(size=(4, 11, 3)) * 1024) / 1024 + 1e4
    expected = [numpy_bandwidth(one) for one in particles]
    found = bandwidths(particles.astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("dimension", [3, 600])
def test_where_most_particles_coincide_the_mean_distance_takes_over(dimension, offset):
    """28 of the 45 distances are 0; their rounding errors are no bandwidth."""
    rng = np.random.default_rng(0)
    steps = np.round(rng.normal(size=(16, 3, dimension)) * 1024) / 1024
    particles = np.repeat(steps[:, :1], 10, axis=1) + offset
    particles[:, 8:] += steps[:, 1:]
    moved = particles[:, :, None] - particles[:, None]
    expected = np.square(moved).sum((1, 2, 3)) / 90 / np.log(11)
    found = bandwidths(particles.astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_one_or_identical_particles_have_bandwidth_one(offset):  # C15
    here = np.random.default_rng(0).normal(size=(1, 1, 5)).astype(np.float32) + offset
    assert bandwidths(here) == 1
    assert bandwidths(np.repeat(here, 7, axis=1)) == 1


def test_a_gram_matrix_has_an_exact_diagonal_and_centred_particles():
    particles = np.random.default_rng(2).normal(size=(6, 40)) * 100 + 1000
    pairs = gram(jnp.float32(particles), 2.0)
    assert (np.diagonal(pairs.ratio) == 0).all() and pairs.bandwidth == 2
    np.testing.assert_allclose(pairs.centred.mean(0), 0, atol=1e-4)
    squares = np.square(particles[:, None] - particles[None]).sum(-1)
    np.testing.assert_allclose(pairs.ratio, squares / 2, rtol=1e-5)


@pytest.mark.parametrize("bandwidth", [0, -1.0, float("nan"), float("inf")])
def test_a_bandwidth_that_is_not_positive_and_finite_is_refused(bandwidth):
    with pytest.raises(ValueError, match=f"bandwidth={bandwidth!r} must be"):
        gram(np.ones((2, 3), np.float32), bandwidth)


def test_no_particles_have_no_bandwidth():
    for particles in (jnp.zeros((0, 3)), jnp.ones(3), {"a": jnp.ones((2, 3))}):
        with pytest.raises(ValueError, match="particles is .* must be a matrix"):
            median_bandwidth(particles)
