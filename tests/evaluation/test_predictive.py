"""The averaged prediction against SciPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from fedvi import evaluation
from fedvi.evaluation.predictive import unnormalised

predictive_log_probs = jax.jit(evaluation.predictive_log_probs)


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


def test_what_is_no_distribution_is_told_and_rounding_is_not():
    log_p = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (2, 50, 100)))
    thousands = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (1, 9, 4000)))
    for good in (
        log_p,
        log_p.astype(jnp.bfloat16),
        thousands.astype(jnp.bfloat16),
        log_p.at[..., 0].set(jnp.nan),
        jnp.full((1, 2, 3), -jnp.inf),
        jax.nn.log_softmax(1e4 * log_p),
        jnp.log(jax.nn.one_hot(jnp.arange(3), 3))[None],
    ):
        assert not unnormalised(good).any()
    for bad in (jnp.exp(log_p), log_p + 1, log_p - 1, 3 * log_p):
        assert unnormalised(bad).all()
    assert unnormalised(log_p.at[1, 7].add(0.5)).nonzero()[0].tolist() == [7]
