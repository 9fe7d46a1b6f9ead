import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import gammaln

from fedvi.distributions.student_t import StudentT

LOC = np.array([1.0, 0.5, -1.0, 2.0, 0.0], np.float32)
SCALE = np.array([0.5, 0.3, 2.0, 1.0, 0.1], np.float32)
KEY = jax.random.key(0)


def student(df, joint):
    return StudentT(df, jnp.array(LOC), jnp.array(SCALE), joint=joint)


def standardised_draws(joint, df, count):
    draws = jax.jit(lambda: student(df, joint).sample(seed=KEY, sample_shape=count))()
    return np.float64((draws - LOC[None]) / SCALE[None])


@pytest.mark.parametrize("df", [3, 7.5, 50_003])
def test_densities_entropies_and_moments_equal_scipy(df):
    loc, scale = np.float64(LOC), np.float64(SCALE)
    x = np.stack([LOC + 1.5 * SCALE, LOC])
    one = stats.t(df, loc, scale)
    many = stats.multivariate_t(loc, np.diag(scale**2), df)
    for joint, density, entropy in (
        (True, many.logpdf(x), many.entropy()),
        (False, one.logpdf(x).sum(1), one.entropy().sum()),
    ):
        found = student(df, joint)
        np.testing.assert_allclose(found.log_prob(x), density, rtol=1e-5)
        np.testing.assert_allclose(found.entropy(), entropy, rtol=1e-5)
        np.testing.assert_allclose(found.mean(), loc)
        np.testing.assert_allclose(found.stddev(), one.std(), rtol=1e-5)


def test_log_prob_gradient_equals_the_analytic_one():
    df, x = 5, jnp.array(LOC + 1.5 * SCALE)
    z = (np.float64(x) - LOC) / SCALE
    expected = -(df + 5) / (df + (z**2).sum()) * z / SCALE
    found = jax.grad(student(df, True).log_prob)(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_sample_is_a_multivariate_t():
    df, count = 8, 50_000
    z = standardised_draws(True, df, count)
    np.testing.assert_allclose(z.mean(0), 0, atol=0.025)
    correlation = np.corrcoef(z.T)[np.triu_indices(5, 1)]
    np.testing.assert_allclose(correlation, 0, atol=0.03)
    # |z|²/d is F(d, df) only when all weights share one chi-square.
    squares = (z**2).mean(1)
    assert stats.kstest(squares, stats.f(5, df).cdf).pvalue > 0.01
    assert stats.kstest(z[:, 0], stats.t(df).cdf).pvalue > 0.01


def test_independent_sample_is_a_product_of_t():
    df, count = 8, 50_000
    z = standardised_draws(False, df, count)
    for column in z.T:
        assert stats.kstest(column, stats.t(df).cdf).pvalue > 0.001
    # Squares of a multivariate t are correlated; here they are not.
    uniform = stats.t(df).cdf(np.abs(z))
    correlation = np.corrcoef(uniform.T)[np.triu_indices(5, 1)]
    np.testing.assert_allclose(correlation, 0, atol=0.02)


def test_the_density_of_a_million_weights():
    df, size = 50_003, 1_000_000
    z = np.random.default_rng(0).normal(size=size).astype(np.float32)
    many = StudentT(df, jnp.zeros(size), jnp.full(size, 0.05), joint=True)
    expected = gammaln((df + size) / 2) - gammaln(df / 2)
    expected -= size / 2 * np.log(df * np.pi) + size * np.log(0.05)
    expected -= (df + size) / 2 * np.log1p((np.float64(z) ** 2).sum() / df)
    np.testing.assert_allclose(many.log_prob(0.05 * z), expected, rtol=2e-6)


def test_few_degrees_of_freedom_have_no_moments():
    assert np.isinf(student(2, True).stddev()).all()
    assert np.isnan(student(1, True).mean()).all()


@pytest.mark.parametrize("df", [0, -1, float("nan")])
def test_df_must_be_positive(df):
    with pytest.raises(ValueError, match="df="):
        student(df, joint=True)
