import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms.common import (
    Head,
    check_trained,
    classification_loss,
    finetune,
    gradient_only,
    log_probabilities,
)
from fedvi.local import Batch
from fedvi.nn import build


def test_a_penalty_for_descent_may_be_differentiated_twice():
    pull = gradient_only(lambda a, b: jnp.sum(a**3 * b))

    def inner(a, b):
        return jnp.sum(jax.grad(pull)(a, b) ** 2)

    a, b = jnp.array([1.0, 2.0]), jnp.array([0.5, -1.0])
    # Of Σ (3 a² b)²: by a, and by b.
    found = jax.grad(inner, argnums=(0, 1))(a, b)
    chex.assert_trees_all_close(found, (36 * a**3 * b**2, 18 * a**4 * b))
    assert pull(a, b) == 0


def test_loss_and_probabilities_agree(task, train):
    params = task.model.init(jax.random.key(0))
    x, y = jnp.asarray(train.x[0]), jnp.asarray(train.y[0])
    mask = jnp.arange(20) < 15
    log_probs = np.asarray(log_probabilities(task.model, params, x, mask))
    expected = -log_probs[np.arange(15), y[:15]].mean()
    loss = classification_loss(task.model, params, Batch(x, y, mask))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(np.exp(log_probs).sum(1), 1, rtol=1e-5)


def test_finetuning_trains_body_and_head_on_the_clients_data(task, train):
    patient = task._replace(
        finetuning=task.finetuning._replace(epochs=60, learning_rate=0.02)
    )
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    params = task.model.init(jax.random.key(0))
    tuned = finetune(patient, jax.random.key(1), params, data)
    batch = Batch(data.x, data.y, jnp.ones(20, bool))
    before, after = (classification_loss(task.model, p, batch) for p in (params, tuned))
    assert after < 0.2 * before
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(tuned), strict=True):
        assert not np.array_equal(old, new)


def test_a_model_without_a_body_needs_a_trained_head(task):
    model = build("logistic", classes=3, input_shape=(6,))
    logistic = task._replace(model=model)
    with pytest.raises(
        ValueError, match="model='logistic' has no body.*head='trained'"
    ):
        check_trained(logistic, Head(), "fedbabu")
    check_trained(task, Head(), "fedbabu")
    check_trained(logistic, Head(head="trained"), "fedbabu")
