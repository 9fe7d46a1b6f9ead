"""Uncertainty of predictions against SciPy in float64, and the ROC curve's area."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import entropy
from sklearn.metrics import roc_auc_score

from fedvi import evaluation
from fedvi.evaluation import auroc

RNG = np.random.default_rng(0)
predictive_uncertainty = jax.jit(evaluation.predictive_uncertainty)


def draws(samples=3, batch=64, classes=4, spread=2.0):
    logits = spread * np.random.default_rng(2).normal(size=(samples, batch, classes))
    return log_softmax(logits, axis=-1)


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


@pytest.mark.parametrize("decimals", [0, 1, 8])  # with many, some and no ties
def test_auroc_equals_scikit_learn(decimals):
    inside = np.round(RNG.normal(size=50), decimals)
    outside = np.round(RNG.normal(size=80) + 0.7, decimals)
    expected = roc_auc_score(np.repeat([0, 1], [50, 80]), np.append(inside, outside))
    assert auroc(inside, outside) == pytest.approx(expected)
    assert auroc(outside, inside) == pytest.approx(1 - expected)
    assert 0.5 < expected < 1


def test_auroc_of_extreme_cases():
    assert auroc([0, 1], [2, 3]) == 1 and auroc([2, 3], [0, 1]) == 0
    assert auroc([0, 0, 0], [0, 0]) == 0.5
    assert np.isnan(auroc([0, np.nan], [1])) and np.isnan(auroc([0], [np.nan]))
    with pytest.raises(ValueError, match="out_values is empty"):
        auroc([1.0], [])
    with pytest.raises(ValueError, match="in_values is empty"):
        auroc([], [1.0])
