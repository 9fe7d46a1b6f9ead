"""SVGD's direction against a double loop in float64, and against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.flat import flatten
from fedvi.stein import IMQ, KERNELS, RBF, median_bandwidth, svgd_direction
from fedvi.stein.svgd import repulsion

N, D = 7, 5
RNG = np.random.default_rng(0)
PARTICLES = RNG.normal(size=(N, D)).astype(np.float32)
SCORES = RNG.normal(size=(N, D)).astype(np.float32)

direction = jax.jit(svgd_direction, static_argnames="kernel")


def numpy_kernel(name, difference, h):
    """k(θ, θ') and ∇_{θ'} k at θ - θ' = difference."""
    r = difference @ difference / h
    if name == "rbf":
        return np.exp(-r), 2 / h * np.exp(-r) * difference
    return (1 + r) ** -0.5, (1 + r) ** -1.5 / h * difference


def numpy_direction(name, particles, scores, h):
    particles, scores = np.float64(particles), np.float64(scores)
    phi = np.zeros_like(particles)
    for i in range(len(particles)):
        for j in range(len(particles)):
            value, slope = numpy_kernel(name, particles[i] - particles[j], h)
            phi[i] += (value * scores[j] + slope) / len(particles)
    return phi


def numpy_bandwidth(particles):
    """By the median heuristic."""
    particles = np.float64(particles)
    squares = np.square(particles[:, None] - particles[None]).sum(-1)
    pairs = np.sqrt(squares[np.triu_indices(len(particles), 1)])
    return np.median(pairs) ** 2 / np.log(len(particles) + 1)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_direction_is_that_of_a_double_loop(name, offset):
    moved = (PARTICLES + np.float32(offset)).astype(np.float32)
    found = direction(moved, SCORES, kernel=KERNELS[name])
    expected = numpy_direction(name, moved, SCORES, numpy_bandwidth(moved))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    found = direction(moved, SCORES, kernel=KERNELS[name], bandwidth=0.7)
    expected = numpy_direction(name, moved, SCORES, 0.7)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_direction_is_that_of_autodiff(kernel):
    def k(a, b):
        return kernel.value(jnp.sum(jnp.square(a - b)) / 1.3)

    @jax.jit
    def expected(particles, scores):
        def at(one):
            values = jax.vmap(k, (0, None))(particles, one)
            slopes = jax.vmap(jax.grad(k), (0, None))(particles, one)
            return (values[:, None] * scores + slopes).mean(0)

        return jax.vmap(at)(particles)

    np.testing.assert_allclose(
        direction(PARTICLES, SCORES, kernel=kernel, bandwidth=1.3),
        expected(PARTICLES, SCORES),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_one_particle_follows_its_score_exactly(kernel, offset):  # C15
    found = direction(PARTICLES[:1] + offset, SCORES[:1], kernel=kernel)
    np.testing.assert_array_equal(found, SCORES[:1])


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_identical_particles_follow_their_mean_score(kernel, offset):  # C15
    same = np.repeat(PARTICLES[:1] + np.float32(offset), N, axis=0)
    expected = np.broadcast_to(SCORES.mean(0), (N, D))
    for bandwidth in (None, 1e-3):
        found = direction(same, SCORES, kernel=kernel, bandwidth=bandwidth)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_second_call_does_not_see_the_bandwidth_of_the_first():  # C15
    far = 30 * PARTICLES
    first = np.asarray(direction(PARTICLES, SCORES, kernel=RBF))
    wide = direction(far, SCORES, kernel=RBF)
    expected = numpy_direction("rbf", far, SCORES, numpy_bandwidth(far))
    np.testing.assert_allclose(wide, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(direction(PARTICLES, SCORES, kernel=RBF), first)
    np.testing.assert_allclose(
        median_bandwidth(far), 900 * median_bandwidth(PARTICLES), rtol=1e-5
    )


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_without_scores_the_particles_fall_apart(kernel):
    """The forces add up to nothing, and every one points away from the others."""
    pair = np.array([[0.0, 0.0], [1.0, 0.0]], np.float32)
    force = np.asarray(direction(pair, np.zeros_like(pair), kernel=kernel))
    assert force[0, 0] < 0 < force[1, 0]
    np.testing.assert_allclose(force.sum(0), 0, atol=1e-7)
    from_pairs = repulsion_of(pair, kernel) / 2
    np.testing.assert_allclose(force, from_pairs, rtol=1e-5, atol=1e-7)


def repulsion_of(particles, kernel):
    from fedvi.stein.kernels import gram

    return np.asarray(repulsion(gram(particles, None), kernel))


@pytest.mark.parametrize("kernel", [RBF, IMQ], ids=KERNELS)
def test_no_array_of_pairs_times_dimension(kernel):
    """One such array would take 64 times what a particle set does."""
    count, dimension = 64, 20_000
    shape = jax.ShapeDtypeStruct((count, dimension), jnp.float32)
    compiled = direction.lower(shape, shape, kernel=kernel).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 6 * count * dimension * 4 + 100 * count**2


def test_mistakes_are_named():
    for bandwidth in (0, -0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"bandwidth={bandwidth!r} must be"):
            svgd_direction(PARTICLES, SCORES, bandwidth=bandwidth)
    for bandwidth in (jnp.zeros(()), "median"):
        with pytest.raises(ValueError, match="bandwidth=.* must be"):
            svgd_direction(PARTICLES, SCORES, bandwidth=bandwidth)
    with pytest.raises(ValueError, match="kernel='imq' must be a fedvi.stein.Kernel"):
        svgd_direction(PARTICLES, SCORES, kernel="imq")
    with pytest.raises(
        ValueError, match=r"particles is of shape \(0, 5\), and must be"
    ):
        svgd_direction(PARTICLES[:0], SCORES[:0])
    for scores in (SCORES[:, :4], SCORES[:3]):
        with pytest.raises(ValueError, match="scores has shape .* the particles"):
            svgd_direction(PARTICLES, scores)


def test_a_pytree_of_particles_is_told_how_it_becomes_a_matrix():
    tree = {"a": jnp.ones((3, 2)), "b": jnp.zeros((3, 1, 2))}
    with pytest.raises(ValueError, match="particles is a dict, .*flatten.p..vector"):
        svgd_direction(tree, tree)
    matrix = jax.vmap(lambda p: flatten(p).vector)(tree)
    np.testing.assert_array_equal(matrix, [[1, 1, 0, 0]] * 3)
