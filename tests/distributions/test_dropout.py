import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedvi.distributions import dropout
from fedvi.flat import flatten

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


def test_a_vector_has_the_columns_of_its_layout(draws):
    flat = flatten(PARAMS)
    keep = dropout.keep_probabilities(jax.eval_shape(lambda: flat), 0.9)
    expected = dropout.keep_probabilities(PARAMS, 0.9)
    jax.tree.map(np.testing.assert_allclose, keep.tree(), expected)
    key = jax.random.split(jax.random.key(1), 2000)[0]
    drawn = dropout.sample(key, flat, 0.8)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[0]), drawn, draws)


@pytest.mark.parametrize("shape", [(7,), (2, 3)])
def test_a_bare_array_is_refused(shape):
    """On a vector nothing would drop, silently."""
    for function in (
        lambda p: dropout.keep_probabilities(p, 0.9),
        lambda p: dropout.sample(jax.random.key(0), p, 0.9),
        lambda p: dropout.Spiky(p, 0.9, 0.1),
    ):
        with pytest.raises(ValueError, match="bare array.*give the Flat"):
            function(jnp.ones(shape))


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


def test_the_distribution_has_the_density_and_moments_of_the_spiky_mixture():
    params = {"bias": jnp.array([1.5]), "kernel": jnp.array([[3.0, -2.0], [1.0, 0.5]])}
    p, epsilon, count = 0.7, 0.5, 20_000
    q = dropout.Spiky(flatten(params), p, epsilon)
    draws = np.float64(q.sample(seed=jax.random.key(2), sample_shape=count))
    m = np.array([1.5, 3.0, -2.0, 1.0, 0.5])
    np.testing.assert_allclose(q.mean(), [1.5, *(p * m[1:])], rtol=1e-6)
    variance = epsilon**2 + p * (1 - p) * np.array([0, *m[1:]]) ** 2
    np.testing.assert_allclose(q.stddev(), np.sqrt(variance), rtol=1e-6)
    np.testing.assert_allclose(draws.mean(0), q.mean(), atol=0.06)
    np.testing.assert_allclose(draws.std(0), q.stddev(), rtol=0.03)
    # Columns are a kernel's input units: [3, -2] and [1, 0.5].
    x = draws[:3]
    expected = stats.norm.logpdf(x[:, 0], 1.5, epsilon)
    for column in (slice(1, 3), slice(3, 5)):
        kept = stats.norm.pdf(x[:, column], m[column], epsilon).prod(1)
        dropped = stats.norm.pdf(x[:, column], 0, epsilon).prod(1)
        expected = expected + np.log(p * kept + (1 - p) * dropped)
    np.testing.assert_allclose(q.log_prob(jnp.float32(x)), expected, rtol=1e-4)
    with pytest.raises(ValueError, match="epsilon=0"):
        dropout.Spiky(params, p, 0.0).log_prob(q.mean())


def random_primitives(p, epsilon):
    jaxpr = jax.make_jaxpr(lambda k: dropout.sample(k, PARAMS, p, epsilon))
    return str(jaxpr(jax.random.key(0))).count("random_bits")


def test_draws_only_what_is_asked_for():
    assert random_primitives(1.0, None) == 0
    assert random_primitives(0.9, None) == 1
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
