from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp, softmax

from fedvi.distributions import mixture


def tree(a):
    """A vector `[..., 4]` as a pytree of a matrix and a bias."""
    matrix = jnp.float32(a[..., :2]).reshape(*a.shape[:-1], 2, 1)
    return {"kernel": matrix, "bias": jnp.float32(a[..., 2:])}


def vector(prototypes):
    kernel = np.asarray(prototypes["kernel"], np.float64)
    return np.concatenate([kernel[..., 0], prototypes["bias"]], axis=-1)


def squared_distances(m, r):
    return ((m[:, None] - r[None]) ** 2).sum(-1)


def objective(r, m, variance, population):
    """Eq. 23 in float64, the sum over clients estimated from those in `m`."""
    fit = logsumexp(-squared_distances(m, r) / (2 * variance), axis=1).sum()
    return 0.5 * (r**2).sum() - population / len(m) * fit


@partial(jax.jit, static_argnames="population")
def em_statistics(m, prototypes, variance, population):
    """One EM step as clients and server share it."""
    e_step = partial(mixture.responsibilities, variance=variance)
    c = jax.vmap(e_step, (0, None))(m, prototypes)

    def moved(m, r):  # Σ_i c_ij (m_i - r_j)
        return jnp.einsum("ij,ij...->j...", c, m[:, None] - r[None])

    new = mixture.m_step(
        jax.tree.map(moved, m, prototypes),
        c.sum(0),
        prototypes,
        variance=variance,
        participants=len(c),
        population=population,
    )
    return new, c.sum(0)


def em_step(m, r, variance, population):
    new, mass = em_statistics(tree(m), tree(r), variance, population)
    return vector(new), np.asarray(mass)


distances = jax.jit(mixture.squared_distances)
e_step = jax.jit(mixture.responsibilities)
prior_and_gradient = jax.jit(jax.value_and_grad(mixture.log_prior))


def test_e_step_and_prior_equal_numpy():
    rng = np.random.default_rng(0)
    m, r = rng.normal(size=4), rng.normal(size=(3, 4))
    logits = -squared_distances(m[None], r)[0] / (2 * 0.3)
    args = tree(m), tree(r)
    np.testing.assert_allclose(distances(*args), -0.6 * logits, rtol=1e-5)
    np.testing.assert_allclose(e_step(*args, 0.3), softmax(logits), rtol=1e-4)
    value, gradient = prior_and_gradient(*args, 0.3)
    np.testing.assert_allclose(value, logsumexp(logits), rtol=1e-5)
    expected = (softmax(logits) @ r - m) / 0.3
    np.testing.assert_allclose(vector(gradient), expected, rtol=1e-4)
    centre = vector(jax.jit(mixture.expected)(*args, 0.3))
    np.testing.assert_allclose(centre, softmax(logits) @ r, rtol=1e-4, atol=1e-6)
    # The quadratic around it lies above -log p everywhere, and touches it at m.
    at_m = ((m - centre) ** 2).sum() / 0.6
    for other in m + rng.normal(size=(50, 4)):
        fit = logsumexp(-squared_distances(other[None], r)[0] / 0.6)
        rise = ((other - centre) ** 2).sum() / 0.6 - at_m
        assert logsumexp(logits) - fit <= rise + 1e-5


def test_distances_of_many_weights_do_not_cancel():
    rng = np.random.default_rng(1)
    r = (10 + rng.normal(size=(2, 300_000))).astype(np.float32)
    m = (r[0] + 1e-3 * rng.normal(size=300_000)).astype(np.float32)
    expected = ((m.astype(np.float64) - r) ** 2).sum(-1)
    found = mixture.squared_distances({"w": jnp.array(m)}, {"w": jnp.array(r)})
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_prior_is_a_distribution_over_vectors():
    rng = np.random.default_rng(5)
    m, r, variance = rng.normal(size=(2, 4)), rng.normal(size=(3, 4)), 0.3
    found = mixture.distribution(tree(r), variance)
    # jax.tree.leaves has the bias first.
    turned = np.roll(m, 2, axis=1)
    components = stats.norm.logpdf(m[:, None], r[None], np.sqrt(variance)).sum(-1)
    expected = logsumexp(components, axis=1) - np.log(3)
    log_prob = jax.vmap(found.log_prob)(jnp.float32(turned))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-4)
    mean, std = np.roll(r.mean(0), 2), np.roll(np.sqrt(variance + r.var(0)), 2)
    np.testing.assert_allclose(found.mean(), mean, rtol=1e-4)
    np.testing.assert_allclose(found.stddev(), std, rtol=1e-4)
    draws = np.asarray(found.sample(seed=jax.random.key(0), sample_shape=4_000))
    np.testing.assert_allclose(draws.mean(0), mean, atol=5 * std.max() / 60)
    np.testing.assert_allclose(draws.std(0), std, rtol=0.1)
    with pytest.raises(NotImplementedError, match="MixtureSameFamily.*entropy"):
        found.entropy()


def test_far_prototypes_keep_prior_and_gradient_finite():
    m, r = tree(np.full(4, 1e4)), tree(np.array([[0.0], [1.0], [-9.0]]) + np.zeros(4))
    value, gradient = prior_and_gradient(m, r, 0.3)
    assert np.isfinite(value)
    np.testing.assert_allclose(vector(gradient), (1 - 1e4) / 0.3, rtol=1e-5)
    np.testing.assert_array_equal(e_step(m, r, 0.3), [0, 1, 0])


@pytest.mark.parametrize("participants", [9, 3])
def test_one_prototype_has_the_closed_form(participants):
    rng = np.random.default_rng(2)
    population, variance = 9, 0.7
    m, r = rng.normal(1, 1, (participants, 4)), rng.normal(size=(1, 4))
    new, _ = em_step(m, r, variance, population)
    total = population / participants * m.sum(0)
    np.testing.assert_allclose(new[0], total / (population + variance), rtol=1e-5)
    # Gradient of Eq. 23 by central differences.
    for step in 1e-4 * np.eye(4):
        above = objective(new + step, m, variance, population)
        below = objective(new - step, m, variance, population)
        assert abs(above - below) / 2e-4 < 1e-4


def test_em_step_never_raises_the_objective():
    rng = np.random.default_rng(3)
    emptied = 0
    for case in range(60):
        variance, population = [(0.02, 60), (0.5, 6), (8.0, 60)][case % 3]
        spread = 10 ** rng.uniform(-1, 1.5)
        m = spread * rng.normal(size=(6, 4)) + rng.normal(size=4)
        r = spread * rng.normal(size=(3, 4))
        for _ in range(3):
            new, mass = em_step(m, r, variance, population)
            before = objective(r, m, variance, population)
            after = objective(new, m, variance, population)
            assert after <= before + 1e-5 * abs(before)
            empty = mass < mixture.EMPTY_MASS
            emptied += empty.sum()
            np.testing.assert_allclose(new[empty], r[empty], rtol=1e-6)
            r = new
    assert emptied > 10  # the kept prototypes are part of what is tested


@pytest.mark.parametrize("prior_mean", ["zero", "previous"])
def test_what_never_rises_with_either_prior_mean(prior_mean):
    """K=1, N=2, m=3, σ²=0.5, r=2.4: with the prior at the last r Eq. 23 rises from 3.60
    to 4.18, and its sum over clients falls; with the paper's 2.4 is the optimum."""
    with jax.enable_x64(True):
        r, m = jnp.full((1, 1), 2.4), jnp.full((2, 1), 3.0)
        new = mixture.m_step(
            (m - r).sum(0, keepdims=True),
            jnp.full(1, 2.0),
            r,
            variance=0.5,
            prior_mean=r if prior_mean == "previous" else None,
            participants=2,
            population=2,
        )
        r, m, new = (np.asarray(a, np.float64) for a in (r, m, new))
    whole = [objective(at, m, 0.5, 2) for at in (r, new)]
    clients = [value - 0.5 * (at**2).sum() for value, at in zip(whole, (r, new))]
    if prior_mean == "zero":
        np.testing.assert_allclose(whole, 3.6, rtol=1e-12)
    else:
        np.testing.assert_allclose(whole, [3.6, 4.1760], rtol=1e-12)
        np.testing.assert_allclose(clients, [0.72, 0.0288], rtol=1e-12)


def test_em_converges_to_a_stationary_point():
    rng = np.random.default_rng(4)
    m = np.repeat([[2.0] * 4, [-1.0] * 4], 3, axis=0) + 0.3 * rng.normal(size=(6, 4))
    r = rng.normal(size=(3, 4))
    for _ in range(60):
        r, _ = em_step(m, r, 0.5, 6)
    for step in 1e-4 * np.eye(12).reshape(12, 3, 4):
        above, below = (objective(r + s, m, 0.5, 6) for s in (step, -step))
        assert abs(above - below) / 2e-4 < 1e-3


def test_empty_prototype_keeps_its_value_and_no_participant_is_finite():
    prototypes = tree(np.array([[1.0] * 4, [-5.0] * 4]))
    total = jax.tree.map(lambda leaf: jnp.zeros_like(leaf).at[0].set(2.0), prototypes)

    @jax.jit
    def step(mass, participants):
        return mixture.m_step(
            total,
            mass,
            prototypes,
            variance=0.1,
            participants=participants,
            population=10,
        )

    new = vector(step(jnp.array([4.0, 1e-30]), jnp.float32(4)))
    # r + (w (0 - r) + S) / (w + mass) with r = 1, S = 2, w = σ² N_f/N.
    np.testing.assert_allclose(new[0], 1 + (2 - 0.04) / 4.04, rtol=1e-6)
    np.testing.assert_array_equal(new[1], -5.0)
    none = step(jnp.zeros(2), jnp.float32(0))
    jax.tree.map(np.testing.assert_array_equal, none, prototypes)


@pytest.mark.parametrize("variance", [0.0, -1.0, float("nan")])
def test_variance_must_be_positive(variance):
    m, r = tree(np.ones(4)), tree(np.ones((2, 4)))
    for function in (mixture.responsibilities, mixture.log_prior):
        with pytest.raises(ValueError, match="variance="):
            function(m, r, variance)
    with pytest.raises(ValueError, match="variance="):
        mixture.m_step(
            r, jnp.ones(2), r, variance=variance, participants=2, population=2
        )
