"""Products, means and distances of particle sets against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.stein import particles as sets
from fedvi.stein import squared_distances

RNG = np.random.default_rng(0)
A, B = (RNG.normal(size=(count, 8)).astype(np.float32) for count in (4, 5))


def test_products_means_and_distances():
    a, b = np.float64(A), np.float64(B)
    np.testing.assert_allclose(sets.product(A, B.T), a @ b.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sets.mean(A), a.mean(0, keepdims=True), rtol=1e-5)
    distances = np.square(a[:, None] - b[None]).sum(-1)
    np.testing.assert_allclose(squared_distances(A, B), distances, rtol=1e-5)


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


def test_what_is_no_matrix_is_named():
    assert sets.check("mine", A) == 4
    for wrong in ({}, [[1.0]], jnp.ones(()), jnp.ones(3), jnp.ones((2, 3, 1))):
        with pytest.raises(ValueError, match="mine is .*, and must be a matrix"):
            sets.check("mine", wrong)
    with pytest.raises(ValueError, match="scores has shape .* the particles"):
        sets.check_like("scores", jnp.ones((3, 2)), jnp.ones((2, 3)))
