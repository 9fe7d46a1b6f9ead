"""Priors against SciPy's densities, and their draws against their moments."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedvi import priors
from fedvi.nn import Model
from fedvi.priors import WithPrecision


def toy_model(count):
    """A model of `count` weights; nothing but its parameters' shapes matters here."""

    def init(key):
        return {"body": jnp.zeros((count - 1,)), "head": jnp.zeros((1, 1))}

    return Model(init, None, None, "toy", 1)


MODEL = toy_model(5)


def ravelled(weights):
    leaves = jax.tree.leaves(weights)
    return np.concatenate([np.reshape(leaf, (len(leaf), -1)) for leaf in leaves], 1)


def draws(prior, count):
    keys = jax.random.split(jax.random.key(0), count)
    return jax.jit(jax.vmap(prior.sample))(keys)


def test_the_gaussian_is_scipys_normal():
    prior = priors.gaussian(MODEL, math.e)
    w = jax.tree.map(lambda z: z + 0.7, MODEL.init(None))
    expected = stats.norm(0, math.e**-0.5).logpdf(0.7) * 5
    np.testing.assert_allclose(prior.log_prob(w), expected, rtol=1e-6)
    # Its score is -λw.
    gradient = jax.grad(prior.log_prob)(w)
    np.testing.assert_allclose(gradient["body"], [-0.7 * math.e] * 4, rtol=1e-6)
    assert prior.weights(w) is w and prior.with_weights(w, 3) == 3


def test_gaussian_draws_have_the_precision():
    sample = ravelled(draws(priors.gaussian(MODEL, 4.0), 4000))
    errors = 5 / np.sqrt(4000)  # 5 standard errors
    assert np.abs(sample.mean(0)).max() < 0.5 * errors
    assert np.abs(np.cov(sample.T) - 0.25 * np.eye(5)).max() < 0.25 * 1.5 * errors


@pytest.mark.parametrize(("shape", "rate"), [(1.0, 0.01), (2.5, 3.0)])
def test_the_hierarchical_is_scipys_gamma_times_normal(shape, rate):
    prior = priors.hierarchical(MODEL, shape, rate)
    for log_precision in (-1.0, 0.3, 3.0):
        w = jax.tree.map(lambda z: z + 0.7, MODEL.init(None))
        particle = WithPrecision(w, jnp.float32(log_precision))
        xi = math.exp(log_precision)
        expected = (
            stats.norm(0, xi**-0.5).logpdf(0.7) * 5
            + stats.gamma(shape, scale=1 / rate).logpdf(xi)
            + log_precision
        )
        np.testing.assert_allclose(prior.log_prob(particle), expected, rtol=2e-6)
        assert prior.weights(particle) is w
        other = prior.with_weights(particle, 3)
        assert other == WithPrecision(3, particle.log_precision)


@pytest.mark.parametrize(("shape", "rate"), [(1.0, 0.01), (2.5, 3.0)])
def test_the_density_of_log_precision_integrates_to_one(shape, rate):
    """The Jacobian included; the one weight is integrated out on a grid as well."""
    model = toy_model(1)
    model = model._replace(init=lambda key: {"body": {}, "head": jnp.zeros(1)})
    prior = priors.hierarchical(model, shape, rate)
    log_xi = np.linspace(-14.0, 10.0, 1201)
    # In units of the weight's standard deviation, whose product cancels the density's.
    z = np.linspace(-8, 8, 81)
    w = (z[None] * np.exp(-0.5 * log_xi)[:, None])[..., None]

    def log_prob(w, log_xi):
        return prior.log_prob(WithPrecision({"body": {}, "head": w}, log_xi))

    grid = jax.jit(jax.vmap(jax.vmap(log_prob, (0, None))))(
        w.astype(np.float32), log_xi.astype(np.float32)
    )
    density = np.exp(np.float64(grid) - 0.5 * log_xi[:, None])
    total = density.sum() * (log_xi[1] - log_xi[0]) * (z[1] - z[0])
    np.testing.assert_allclose(total, 1, rtol=1e-3)


def test_hierarchical_draws_have_the_moments_of_log_precision():
    shape, rate, count = 2.5, 3.0, 4000
    particles = draws(priors.hierarchical(MODEL, shape, rate), count)
    log_xi = np.float64(particles.log_precision)
    law = stats.loggamma(shape, loc=-math.log(rate))
    error = 5 * law.std() / np.sqrt(count)
    assert abs(log_xi.mean() - law.mean()) < error
    assert abs(log_xi.std() - law.std()) < 1.5 * error
    # Given ξ the weights are N(0, 1/ξ), and independent of it.
    scaled = ravelled(particles.weights) * np.exp(0.5 * log_xi)[:, None]
    assert abs(scaled.std() - 1) < 5 / np.sqrt(2 * scaled.size)
    assert stats.kstest(scaled.ravel(), "norm").pvalue > 1e-3
    dependence = np.corrcoef(np.square(scaled).sum(1), log_xi)[0, 1]
    assert abs(dependence) < 5 / np.sqrt(count)


def test_a_small_shape_still_draws_finite_log_precisions():
    """Gamma(0.01) itself rounds to 0 in a large share of the draws."""
    particles = draws(priors.hierarchical(MODEL, 0.01, 1.0), 200)
    assert np.isfinite(particles.log_precision).all()
    assert particles.log_precision.min() < -100


def test_mistakes_are_named():
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"precision={value!r} must be"):
            priors.gaussian(MODEL, value)
        with pytest.raises(ValueError, match=f"gamma_shape={value!r} must be"):
            priors.hierarchical(MODEL, value, 1.0)
        with pytest.raises(ValueError, match=f"gamma_rate={value!r} must be"):
            priors.hierarchical(MODEL, 1.0, value)
