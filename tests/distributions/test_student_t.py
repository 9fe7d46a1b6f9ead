import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import gammaln

from fedvi.distributions import student_t

LOC = {"kernel": jnp.array([[0.5, -1.0], [2.0, 0.0]]), "bias": jnp.array([1.0])}
SCALE = {"kernel": jnp.array([[0.3, 2.0], [1.0, 0.1]]), "bias": jnp.array([0.5])}


def flat(tree):
    return np.concatenate([tree["bias"], tree["kernel"].ravel()]).astype(np.float64)


def standardised_draws(sampler, df, count):
    keys = jax.random.split(jax.random.key(0), count)
    tree = jax.jit(jax.vmap(lambda k: sampler(k, df, LOC, SCALE)))(keys)
    x = np.concatenate([tree["bias"], tree["kernel"].reshape(count, 4)], axis=1)
    return (x - flat(LOC)) / flat(SCALE)


@pytest.mark.parametrize("df", [3, 7.5, 50_003])
def test_log_prob_equals_scipy(df):
    x = jax.tree.map(lambda a, s: a + 1.5 * s, LOC, SCALE)
    reference = stats.multivariate_t(flat(LOC), np.diag(flat(SCALE) ** 2), df)
    found = student_t.log_prob(x, df, LOC, SCALE)
    np.testing.assert_allclose(found, reference.logpdf(flat(x)), rtol=2e-6)


def test_log_prob_gradient_equals_the_analytic_one():
    df, x = 5, jax.tree.map(lambda a, s: a + 1.5 * s, LOC, SCALE)
    found = flat(jax.grad(student_t.log_prob)(x, df, LOC, SCALE))
    z = (flat(x) - flat(LOC)) / flat(SCALE)
    expected = -(df + 5) / (df + (z**2).sum()) * z / flat(SCALE)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_sample_is_a_multivariate_t():
    df, count = 8, 50_000
    z = standardised_draws(student_t.sample, df, count)
    np.testing.assert_allclose(z.mean(0), 0, atol=0.025)
    np.testing.assert_allclose(z.var(0), df / (df - 2), rtol=0.04)
    correlation = np.corrcoef(z.T)[np.triu_indices(5, 1)]
    np.testing.assert_allclose(correlation, 0, atol=0.03)
    # |z|²/d is F(d, df) only when all weights share one chi-square.
    squares = (z**2).mean(1)
    assert stats.kstest(squares, stats.f(5, df).cdf).pvalue > 0.01
    assert stats.kstest(z[:, 0], stats.t(df).cdf).pvalue > 0.01


def test_independent_sample_is_a_product_of_t():
    df, count = 8, 50_000
    z = standardised_draws(student_t.sample_independent, df, count)
    for column in z.T:
        assert stats.kstest(column, stats.t(df).cdf).pvalue > 0.001
    # Squares of a multivariate t are correlated; here they are not.
    uniform = stats.t(df).cdf(np.abs(z))
    correlation = np.corrcoef(uniform.T)[np.triu_indices(5, 1)]
    np.testing.assert_allclose(correlation, 0, atol=0.02)


def test_a_million_weights():
    loc = {"w": jnp.zeros((1000, 1000)), "b": jnp.zeros(10)}
    scale = jax.tree.map(lambda a: jnp.full_like(a, 0.05), loc)

    @jax.jit
    def draw_and_score(key):
        x = student_t.sample(key, 50_003, loc, scale)
        return x, student_t.log_prob(x, 50_003, loc, scale)

    x, value = draw_and_score(jax.random.key(1))
    z = np.concatenate([np.ravel(x["b"]), np.ravel(x["w"])]).astype(np.float64) / 0.05
    size, df = z.size, 50_003
    expected = gammaln((df + size) / 2) - gammaln(df / 2)
    expected -= size / 2 * np.log(df * np.pi) + size * np.log(0.05)
    expected -= (df + size) / 2 * np.log1p((z**2).sum() / df)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(z.std(), 1, atol=0.02)


@pytest.mark.parametrize("df", [0, -1, float("nan")])
def test_df_must_be_positive(df):
    with pytest.raises(ValueError, match="df="):
        student_t.sample(jax.random.key(0), df, LOC, SCALE)
    with pytest.raises(ValueError, match="df="):
        student_t.log_prob(LOC, df, LOC, SCALE)
