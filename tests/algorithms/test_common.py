from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms.common import (
    classification_loss,
    finetune,
    gradient_only,
    log_probabilities,
    quadratic_penalty,
    quadratic_pull,
    require_body,
)
from fedvi.flat import flatten
from fedvi.local import Batch
from fedvi.nn import build


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
    flats = [flatten(arg) for arg in args]
    np.testing.assert_allclose(quadratic_penalty(*flats), expected, rtol=1e-5)
    np.testing.assert_allclose(quadratic_penalty(*flats[:2], 0.7), plain, rtol=1e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["tree", "one number"])
def test_the_pull_is_the_penaltys_gradient(shared):
    rng = np.random.default_rng(0)
    theta, centre, weight = (
        {"a": jnp.float32(rng.normal(size=(5, 2, 3))), "b": [jnp.zeros((5, 0))]}
        for _ in range(3)
    )

    def gradient(penalty, theta, centre, weight):
        weight = 0.7 if shared else weight
        return jax.grad(lambda t: 3 * penalty(t, centre, weight))(theta)

    pull, wanted = (
        jax.vmap(partial(gradient, penalty))(theta, centre, weight)
        for penalty in (quadratic_pull, quadratic_penalty)
    )
    chex.assert_trees_all_close(pull, wanted, rtol=1e-6)
    assert quadratic_pull(theta, centre, 0.7) == 0


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


def test_a_model_without_a_body_is_refused_by_body_methods(task):
    model = build("logistic", classes=3, input_shape=(6,))
    with pytest.raises(ValueError, match="model='logistic' has no body and fedbabu"):
        require_body(task._replace(model=model), "fedbabu")
    require_body(task, "fedbabu")
