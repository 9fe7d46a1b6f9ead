import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from fedvi.distributions import polya_gamma
from fedvi.gaussian_process import (
    Fit,
    Kernel,
    _solve,
    balanced_tree,
    fit,
    log_probabilities,
)

KEY = jax.random.key(0)
KERNEL = Kernel(8.0, 1.0)
GRID, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def gram(a, b):
    return 8 * np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))


@pytest.fixture(scope="module")
def points():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    return jnp.asarray(x), rng.integers(0, 4, 40)


@pytest.fixture(scope="module")
def four(points):
    """A classifier of four classes, fit to 30 of the points, the last 4 padding."""
    x, y = points
    tree, mask = balanced_tree(4), jnp.arange(30) < 26
    found = jax.jit(
        lambda key: fit(key, tree, KERNEL, x[:30], y[:30], mask, chains=7, steps=4)
    )(KEY)
    return tree, found


def test_polya_gamma_has_its_mean_and_variance():
    c = jnp.array([0.0, 0.5, 3.0, -9.0])
    draws = jax.jit(lambda key: polya_gamma.sample(key, jnp.tile(c, (40_000, 1))))(KEY)
    draws, c = np.float64(draws), np.float64(np.maximum(np.abs(c), 1e-3))
    variance = (np.sinh(c) - c) / (4 * c**3 * np.cosh(c / 2) ** 2)
    error = np.abs(draws.mean(0) - np.tanh(c / 2) / (2 * c))
    assert (error < 4 * np.sqrt(variance / len(draws))).all()
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.05)


def test_a_node_is_a_gaussian_process_given_its_draws(points):
    x, y = points
    y = jnp.asarray(y % 2)
    omega = polya_gamma.sample(KEY, jnp.zeros((1, 3, 30)))
    found = Fit(x[:30], y[:30], jnp.ones(30, bool), omega)
    ours = jax.jit(lambda f: log_probabilities(f, balanced_tree(2), KERNEL, x[30:]))
    a, new = np.float64(x[:30]), np.float64(x[30:])
    kappa, expected = np.float64(y[:30]) - 0.5, []
    for w in np.float64(omega[0]):
        whole = np.linalg.inv(gram(a, a) + 1e-3 * np.eye(30) + np.diag(1 / w))
        across = gram(new, a)
        mean = across @ whole @ (kappa / w)
        std = np.sqrt(8 - np.diag(across @ whole @ across.T))
        expected.append(expit(mean[:, None] + std[:, None] * GRID) @ WEIGHTS)
    np.testing.assert_allclose(
        np.exp(ours(found))[:, 1], np.mean(expected, 0), atol=2e-4
    )


def test_gibbs_chains_reach_the_posterior():
    x, y = np.array([[0.0], [0.7], [-0.4]]), np.array([1, 0])
    k = gram(x, x) + np.diag([1e-3, 1e-3, 0])
    # The two latent values by quadrature over the prior, the third given them.
    root = np.linalg.cholesky(k[:2, :2])
    whitened = np.stack(np.meshgrid(GRID, GRID), -1).reshape(-1, 2)
    f = whitened @ root.T
    weight = np.outer(WEIGHTS, WEIGHTS).ravel() * expit(f[:, 0]) * expit(-f[:, 1])
    across = np.linalg.solve(k[:2, :2], k[:2, 2])
    std = np.sqrt(8 - k[2, :2] @ across)
    new = expit((f @ across)[:, None] + std * GRID) @ WEIGHTS
    expected = (weight * new).sum() / weight.sum()
    omega = weight @ (np.tanh(f / 2) / (2 * f)) / weight.sum()

    tree = balanced_tree(2)

    @jax.jit
    def ours(key):
        given = jnp.float32(x[:2]), jnp.asarray(y), jnp.ones(2, bool)
        found = fit(key, tree, KERNEL, *given, chains=4000, steps=40)
        new = log_probabilities(found, tree, KERNEL, jnp.float32(x[2:]))
        return jnp.exp(new[0, 1]), found.omega.mean((0, 1))

    probability, drawn = ours(KEY)
    assert float(probability) == pytest.approx(expected, abs=0.01)
    # Four standard errors: PG(1, 0) has the largest variance, 1/24.
    np.testing.assert_allclose(drawn, omega, atol=4 * np.sqrt(1 / 24 / 4000))


def test_a_solution_has_its_gradient():
    rng = np.random.default_rng(1)
    root = rng.normal(size=(5, 5)).astype(np.float32)
    given = jnp.asarray(np.eye(5, dtype=np.float32) + root @ root.T), root[:, :3]

    def gradient(solve):
        return jax.jit(jax.grad(lambda *ab: jnp.sin(solve(*ab)).sum(), argnums=(0, 1)))(
            *given
        )

    for ours, theirs in zip(gradient(_solve), gradient(jnp.linalg.solve)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_nodes_of_a_level_know_nothing_of_each_other(points, four):
    x, (tree, found) = points[0], four
    probabilities = np.exp(log_probabilities(found, tree, KERNEL, x[30:]))
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    right = np.flatnonzero((found.y >= 2) & found.mask)
    alone = Fit(
        found.x[right],
        found.y[right] - 2,
        jnp.ones(len(right), bool),
        found.omega[1:, :, right],
    )
    expected = np.exp(log_probabilities(alone, balanced_tree(2), KERNEL, x[30:]))
    conditional = probabilities[:, 2:] / probabilities[:, 2:].sum(1, keepdims=True)
    np.testing.assert_allclose(conditional, expected, atol=1e-4)


def test_classes_without_examples_get_what_laplaces_rule_leaves(points):
    x, _ = points
    tree = balanced_tree(5)
    assert [sorted(set(level)) for level in tree.node.tolist()] == [
        [0],
        [0, 1],
        [-1, 0],
    ]
    given = x[:3], jnp.full(3, 4), jnp.array([True, True, False])
    found = fit(KEY, tree, KERNEL, *given, chains=2, steps=1)
    probabilities = np.exp(log_probabilities(found, tree, KERNEL, x[3:5]))
    np.testing.assert_allclose(
        probabilities, np.tile([1 / 7, 1 / 7, 1 / 7, 1 / 7, 3 / 7], (2, 1)), rtol=1e-5
    )


def test_too_many_examples_are_refused():
    x = jax.ShapeDtypeStruct((10**6, 2), jnp.float32)
    with pytest.raises(ValueError, match="1000000 examples"):
        jax.eval_shape(
            lambda x: fit(
                KEY,
                balanced_tree(2),
                KERNEL,
                x,
                jnp.zeros(10**6, int),
                jnp.ones(10**6, bool),
                chains=20,
                steps=5,
            ),
            x,
        )
