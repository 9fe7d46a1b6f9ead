"""Particle sets against their ravelled matrices in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.stein import particles as sets
from fedvi.stein import squared_distances, squared_norm

RNG = np.random.default_rng(0)


def tree(count):
    """Leaves of a scalar, a vector and a matrix for every particle."""
    shapes = {"scalar": (count,), "vector": (count, 3), "matrix": (count, 2, 2)}
    return {k: jnp.float32(RNG.normal(size=shape)) for k, shape in shapes.items()}


def ravelled(particles):
    leaves = jax.tree.leaves(particles)
    return np.concatenate([np.reshape(leaf, (len(leaf), -1)) for leaf in leaves], 1)


A, B = tree(4), tree(5)


def test_products_norms_and_distances_are_those_of_the_ravelled_matrix():
    a, b = (ravelled(t).astype(np.float64) for t in (A, B))
    assert sets.num_particles(A) == sets.check("A", A) == 4
    assert sets.dimension(A) == 8
    np.testing.assert_allclose(sets.inner(A, B), a @ b.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(squared_norm(A), np.square(a).sum(1), rtol=1e-5)
    distances = np.square(a[:, None] - b[None]).sum(-1)
    np.testing.assert_allclose(squared_distances(A, B), distances, rtol=1e-5)


def test_mixing_and_the_mean_keep_the_leaves_shapes():
    weights = RNG.normal(size=(2, 4)).astype(np.float32)
    mixed, mean = sets.mix(weights, A), sets.mean(A)
    for new, count in ((mixed, 2), (mean, 1)):
        for leaf, old in zip(jax.tree.leaves(new), jax.tree.leaves(A)):
            assert leaf.shape == (count, *old.shape[1:])
    np.testing.assert_allclose(ravelled(mixed), weights @ ravelled(A), rtol=1e-5)
    np.testing.assert_allclose(ravelled(mean)[0], ravelled(A).mean(0), rtol=1e-5)
    moved = ravelled(sets.shift(A, mean))
    np.testing.assert_allclose(moved, ravelled(A) - ravelled(mean), rtol=1e-6)


def test_distances_are_never_negative():
    far = jnp.float32(np.repeat(1000.1 + RNG.normal(size=(1, 50)), 3, axis=0))
    assert (squared_distances(far, far) >= 0).all()


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_identical_particles_are_centred_to_exactly_zero(offset):  # C15
    one = jnp.float32(RNG.normal(size=(1, 9)) + offset)
    assert (sets.centre(jnp.repeat(one, 7, axis=0)) == 0).all()
    different = jnp.float32(RNG.normal(size=(7, 9)) + offset)
    centred = sets.centre(different)
    np.testing.assert_allclose(centred.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(
        centred - centred[:1], different - different[:1], atol=1e-6
    )


def test_leaves_that_disagree_are_named():
    for wrong in ({}, jnp.ones(()), jnp.ones((0, 2)), [jnp.ones(2), jnp.ones((3, 1))]):
        with pytest.raises(ValueError, match="mine has leaves of shapes"):
            sets.check("mine", wrong)
    for wrong in (jnp.ones((3, 2)), [jnp.ones((2, 3))], jnp.ones((2, 3, 1))):
        with pytest.raises(ValueError, match="scores has shapes .* the particles"):
            sets.check_like("scores", wrong, jnp.ones((2, 3)))
