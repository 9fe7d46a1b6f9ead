"""The averaged prediction and its uncertainty against SciPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import entropy

from fedvi import evaluation

predictive_log_probs = jax.jit(evaluation.predictive_log_probs)
predictive_uncertainty = jax.jit(evaluation.predictive_uncertainty)


def draws(samples=3, batch=64, classes=4, spread=2.0):
    logits = spread * np.random.default_rng(2).normal(size=(samples, batch, classes))
    return log_softmax(logits, axis=-1)


def test_average_is_of_probabilities_not_of_logits():
    log_probs = draws()
    averaged = predictive_log_probs(jnp.asarray(log_probs, jnp.float32))
    np.testing.assert_allclose(
        np.exp(averaged), np.exp(log_probs).mean(axis=0), rtol=1e-5
    )
    assert not np.allclose(averaged, log_probs.mean(axis=0), atol=1e-2)
    one = jnp.asarray(log_probs[:1], jnp.float32)
    np.testing.assert_allclose(predictive_log_probs(one), one[0], rtol=1e-6)


def test_average_of_tiny_probabilities_stays_finite():
    log_probs = jnp.full((2, 1, 2), -500.0).at[:, :, 0].set(0.0)
    np.testing.assert_allclose(predictive_log_probs(log_probs), [[0.0, -500.0]])


def test_entropy_and_mutual_information_equal_scipy():
    log_probs = draws()
    found = predictive_uncertainty(jnp.asarray(log_probs, jnp.float32))
    p = np.exp(log_probs)
    total = entropy(p.mean(axis=0), axis=-1)
    information = total - entropy(p, axis=-1).mean(axis=0)
    np.testing.assert_allclose(found[0], total, rtol=1e-5)
    np.testing.assert_allclose(found[1], information, rtol=1e-4, atol=1e-6)
    assert information.min() > 0.01


def test_mutual_information_of_extreme_cases():
    certain = jnp.log(jnp.eye(3))  # three samples, each sure of another class
    total, information = predictive_uncertainty(certain[:, None])
    np.testing.assert_allclose([total, information], np.log(3) * np.ones((2, 1)))
    total, information = predictive_uncertainty(certain[:1, None])
    assert total.tolist() == information.tolist() == [0.0]


@pytest.mark.parametrize("samples", [1, 7])
def test_samples_that_agree_share_no_information(samples):
    one = jnp.asarray(draws(1, batch=500, classes=11), jnp.float32)
    total, information = predictive_uncertainty(jnp.repeat(one, samples, axis=0))
    assert total.min() > 0 and information.min() >= 0
    assert information.max() <= (0 if samples == 1 else 1e-6)
