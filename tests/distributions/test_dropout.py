import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.distributions import dropout

PARAMS = {
    "dense": {"kernel": jnp.full((40, 3), 2.0), "bias": jnp.full(3, 5.0)},
    "conv": jnp.full((3, 3, 30, 4), -1.0),
    "depthwise": jnp.full((3, 3, 1, 50), 0.5),
    "norm": jnp.full(30, 1.0),
}


@pytest.fixture(scope="module")
def draws():
    """2,000 draws with p = 0.8, leaves `[2000, ...]`."""
    keys = jax.random.split(jax.random.key(1), 2000)
    return jax.jit(jax.vmap(lambda k: dropout.sample(k, PARAMS, 0.8)))(keys)


def test_keep_probabilities_of_matrices_only():
    shapes = jax.eval_shape(lambda: PARAMS)
    expected = {
        "dense": {"kernel": 0.9, "bias": 1.0},
        "conv": 0.9,
        "depthwise": 0.9,
        "norm": 1.0,
    }
    assert dropout.keep_probabilities(PARAMS, 0.9) == expected
    assert dropout.keep_probabilities(shapes, 0.9) == expected


def test_whole_columns_are_kept_unscaled_or_zero(draws):
    draw = jax.tree.map(lambda leaf: np.asarray(leaf)[0], draws)
    units_last = {
        "dense": (draw["dense"]["kernel"], 0, 2.0),
        "conv": (draw["conv"], 2, -1.0),
        "depthwise": (draw["depthwise"], 3, 0.5),
    }
    for leaf, axis, value in units_last.values():
        columns = np.moveaxis(leaf, axis, 0).reshape(leaf.shape[axis], -1)
        assert (columns == columns[:, :1]).all()
        assert set(np.unique(columns)) == {0.0, value}
    np.testing.assert_array_equal(draw["dense"]["bias"], PARAMS["dense"]["bias"])
    np.testing.assert_array_equal(draw["norm"], PARAMS["norm"])


def test_columns_are_dropped_independently_with_probability_one_minus_p(draws):
    draw = jax.tree.map(np.asarray, draws)
    kept = np.concatenate(
        [
            draw["dense"]["kernel"][:, :, 0] != 0,
            draw["conv"][:, 0, 0, :, 0] != 0,
            draw["depthwise"][:, 0, 0, 0, :] != 0,
        ],
        axis=1,
    )
    # 5 standard errors of a frequency of 2,000 draws.
    np.testing.assert_allclose(kept.mean(0), 0.8, atol=0.045)
    correlation = np.corrcoef(kept.T)[np.triu_indices(kept.shape[1], 1)]
    assert np.abs(correlation).max() < 0.12


def test_moments_are_those_of_the_spiky_mixture():
    params = {"kernel": jnp.array([[3.0, -2.0]]), "bias": jnp.array([1.5])}
    p, epsilon, count = 0.7, 0.5, 40_000
    keys = jax.random.split(jax.random.key(2), count)
    sample = jax.jit(jax.vmap(lambda k: dropout.sample(k, params, p, epsilon)))
    draw = jax.tree.map(np.asarray, sample(keys))
    m = np.asarray(params["kernel"])
    second = p * m**2 + epsilon**2
    np.testing.assert_allclose(draw["kernel"].mean(0), p * m, atol=0.04)
    np.testing.assert_allclose((draw["kernel"] ** 2).mean(0), second, rtol=0.03)
    np.testing.assert_allclose(draw["bias"].mean(0), 1.5, atol=0.02)
    np.testing.assert_allclose(draw["bias"].std(0), epsilon, rtol=0.03)


def random_primitives(p, epsilon):
    jaxpr = jax.make_jaxpr(lambda k: dropout.sample(k, PARAMS, p, epsilon))
    return str(jaxpr(jax.random.key(0))).count("random_bits")


def test_draws_only_what_is_asked_for():
    assert dropout.sample(jax.random.key(0), PARAMS, 1.0) is PARAMS
    assert random_primitives(1.0, 0.0) == 0
    assert random_primitives(0.9, 0.0) == 1
    assert random_primitives(1.0, 0.1) == 1
    assert random_primitives(0.9, 0.1) == 2


def test_gradient_passes_through_kept_columns_only():
    def total(params):
        draw = dropout.sample(jax.random.key(3), params, 0.5)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(draw)), draw

    gradient, draw = jax.jit(jax.grad(total, has_aux=True))(PARAMS)
    kept = jax.tree.map(lambda leaf: np.asarray(leaf) != 0, draw)
    jax.tree.map(np.testing.assert_array_equal, gradient, kept)


@pytest.mark.parametrize("p", [0.0, -0.1, 1.1, float("nan")])
def test_p_must_be_a_probability(p):
    with pytest.raises(ValueError, match="p="):
        dropout.sample(jax.random.key(0), PARAMS, p)
    with pytest.raises(ValueError, match="p="):
        dropout.keep_probabilities(PARAMS, p)


@pytest.mark.parametrize("epsilon", [-1e-4, float("nan")])
def test_epsilon_must_not_be_negative(epsilon):
    with pytest.raises(ValueError, match="epsilon="):
        dropout.sample(jax.random.key(0), PARAMS, 0.9, epsilon)
