"""Priors against SciPy's densities, and their draws against their moments."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedvi.distributions import priors

SIZE, DRAWS = 5, 4000


def draws(prior, count=DRAWS):
    return np.float64(prior.sample(seed=jax.random.key(0), sample_shape=count))


def test_the_gaussian_is_scipys_normal():
    prior = priors.gaussian(SIZE, math.e)
    w = jnp.full(SIZE, 0.7)
    expected = stats.norm(0, math.e**-0.5).logpdf(0.7) * SIZE
    np.testing.assert_allclose(prior.log_prob(w), expected, rtol=1e-6)
    assert prior.event_shape == (SIZE,) and prior.batch_shape == ()
    # Its score is -λw.
    gradient = jax.grad(prior.log_prob)(w)
    np.testing.assert_allclose(gradient, [-0.7 * math.e] * SIZE, rtol=1e-6)


def test_gaussian_draws_have_the_precision():
    sample = draws(priors.gaussian(SIZE, 4.0))
    errors = 5 / np.sqrt(DRAWS)  # 5 standard errors
    assert np.abs(sample.mean(0)).max() < 0.5 * errors
    assert np.abs(np.cov(sample.T) - 0.25 * np.eye(SIZE)).max() < 0.25 * 1.5 * errors


@pytest.mark.parametrize(("shape", "rate"), [(1.0, 0.01), (2.5, 3.0)])
def test_the_hierarchical_is_scipys_gamma_times_normal(shape, rate):
    prior = priors.Hierarchical(SIZE, shape, rate)
    log_xi = np.array([-1.0, 0.3, 3.0])
    xi = np.exp(log_xi)
    particles = np.column_stack([np.full((3, SIZE), 0.7), log_xi])
    expected = (
        stats.norm(0, xi**-0.5).logpdf(0.7) * SIZE
        + stats.gamma(shape, scale=1 / rate).logpdf(xi)
        + log_xi  # the Jacobian
    )
    found = prior.log_prob(jnp.float32(particles))
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    one = prior.log_prob(jnp.float32(particles[1]))
    np.testing.assert_allclose(one, expected[1], rtol=2e-6)
    assert prior.event_shape == (SIZE + 1,) and prior.batch_shape == ()


def test_hierarchical_draws_have_the_moments_of_log_precision():
    shape, rate = 2.5, 3.0
    particles = draws(priors.Hierarchical(SIZE, shape, rate))
    weights, log_xi = particles[:, :-1], particles[:, -1]
    law = stats.loggamma(shape, loc=-math.log(rate))
    error = 5 * law.std() / np.sqrt(DRAWS)
    assert abs(log_xi.mean() - law.mean()) < error
    assert abs(log_xi.std() - law.std()) < 1.5 * error
    # Given ξ the weights are N(0, 1/ξ), and independent of it.
    scaled = weights * np.exp(0.5 * log_xi)[:, None]
    assert abs(scaled.std() - 1) < 5 / np.sqrt(2 * scaled.size)
    assert stats.kstest(scaled.ravel(), "norm").pvalue > 1e-3
    dependence = np.corrcoef(np.square(scaled).sum(1), log_xi)[0, 1]
    assert abs(dependence) < 5 / np.sqrt(DRAWS)


def test_a_small_shape_still_draws_finite_log_precisions():
    """Gamma(0.01) itself rounds to 0 in a large share of the draws."""
    log_xi = draws(priors.Hierarchical(SIZE, 0.01, 1.0))[:, -1]
    assert np.isfinite(log_xi).all() and log_xi.min() < -100
