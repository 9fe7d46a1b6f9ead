import jax
import jax.numpy as jnp
import numpy as np

from fedvi.algorithms.common import (
    classification_loss,
    finetune,
    log_probabilities,
    quadratic_penalty,
)
from fedvi.local import Batch


def test_quadratic_penalty_against_numpy():
    rng = np.random.default_rng(0)
    trees = [{"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)} for _ in range(3)]
    theta, centre, weight = trees
    expected = sum(0.5 * (weight[k] * (theta[k] - centre[k]) ** 2).sum() for k in theta)
    args = jax.tree.map(jnp.float32, (theta, centre, weight))
    np.testing.assert_allclose(quadratic_penalty(*args), expected, rtol=1e-5)
    plain = sum(0.35 * ((theta[k] - centre[k]) ** 2).sum() for k in theta)
    np.testing.assert_allclose(quadratic_penalty(*args[:2], 0.7), plain, rtol=1e-5)
    assert quadratic_penalty({}, {}, 1.0) == 0


def test_loss_and_probabilities_agree(task, train):
    params = task.model.init(jax.random.key(0))
    x, y = jnp.asarray(train.x[0]), jnp.asarray(train.y[0])
    mask = jnp.arange(20) < 15
    log_probs = np.asarray(log_probabilities(task.model, params, x, mask))
    expected = -log_probs[np.arange(15), y[:15]].mean()
    loss = classification_loss(task.model, params, Batch(x, y, mask))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(np.exp(log_probs).sum(1), 1, rtol=1e-5)


def test_a_strong_penalty_keeps_finetuning_where_it_started(task, train):
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    params = task.model.init(jax.random.key(0))

    def penalty(tuned):
        return quadratic_penalty(tuned, params, 50.0)

    def moved(tuned):
        return max(
            float(jnp.abs(a - b).max())
            for a, b in zip(
                jax.tree.leaves(tuned), jax.tree.leaves(params), strict=True
            )
        )

    free = moved(finetune(task, jax.random.key(1), params, data))
    held = moved(finetune(task, jax.random.key(1), params, data, penalty))
    assert 0 < held < 0.5 * free
