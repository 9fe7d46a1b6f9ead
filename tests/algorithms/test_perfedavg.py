"""Per-FedAvg's gradients against one by hand and against differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms import perfedavg, plain_loss
from fedvi.algorithms.perfedavg import PerFedAvg, meta_loss
from fedvi.federation import take
from fedvi.flat import trees
from fedvi.local import Batch

KEY = jax.random.key(0)


def squares(key, params, batch):
    """Mean of ½ (w·x - y)² over the real examples."""
    residuals = batch.x @ params - batch.y
    total = jnp.sum(jnp.where(batch.mask, residuals**2, 0))
    return 0.5 * total / jnp.maximum(batch.mask.sum(), 1)


def batch_of(examples, mask=None):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(examples, 3)), rng.normal(size=examples)
    mask = np.ones(examples, bool) if mask is None else np.array(mask)
    return Batch(jnp.float32(x), jnp.float32(y), jnp.asarray(mask))


def gradient_by_hand(batch, w, rate, second_order):
    x, y = (np.asarray(a, float)[np.asarray(batch.mask)] for a in (batch.x, batch.y))
    (x1, y1), (x2, y2) = (x[::2], y[::2]), (x[1::2], y[1::2])
    adapted = w - rate * x1.T @ (x1 @ w - y1) / len(y1)
    gradient = x2.T @ (x2 @ adapted - y2) / len(y2)
    hessian = x1.T @ x1 / len(y1)
    return gradient - rate * hessian @ gradient * second_order


def gradient_of(kind, difference):
    given = {"difference": difference} if kind == "hessian_free" else {}
    return PerFedAvg(gradient=kind, **given)


@pytest.mark.parametrize("kind", ["first_order", "hessian_free", "exact"])
def test_gradients_on_a_quadratic_are_those_by_hand(kind):
    batch = batch_of(7, [True] * 5 + [False] * 2)
    options = gradient_of(kind, 0.1)
    w = jnp.array([1.0, -2.0, 0.5])
    value, found = jax.value_and_grad(meta_loss(squares, options, 0.3), 1)(
        KEY, w, batch
    )
    expected = gradient_by_hand(batch, np.asarray(w, float), 0.3, kind != "first_order")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(value) and value > 0


def test_the_central_difference_is_the_exact_gradient_of_a_network(task, train):
    params = trees(task.model.init(KEY))
    x, y = (jnp.asarray(leaf[0, :8]) for leaf in (train.x, train.y))
    batch = Batch(x, y, jnp.ones(8, bool))

    def gradient(kind):
        loss = meta_loss(plain_loss(task.model), gradient_of(kind, 1e-2), 0.5)
        return jax.flatten_util.ravel_pytree(jax.grad(loss, 1)(KEY, params, batch))[0]

    exact, free, first = map(gradient, ("exact", "hessian_free", "first_order"))
    scale = jnp.abs(exact).max()
    assert jnp.abs(exact - first).max() > 0.02 * scale
    np.testing.assert_allclose(free, exact, atol=2e-3 * scale)


@pytest.mark.parametrize("slots", [1, 4])
def test_an_example_alone_asks_nothing(task, train, slots):
    batch = batch_of(slots, [True, False, False, False][:slots])
    for kind in ("first_order", "hessian_free", "exact"):
        loss = meta_loss(squares, PerFedAvg(gradient=kind), 0.01)
        gradient = jax.grad(loss, 1)(KEY, jnp.ones(3), batch)
        np.testing.assert_array_equal(gradient, 0)
    alone = take(jax.tree.map(jnp.asarray, train), 3)  # of one example
    algorithm = perfedavg(task)
    assert algorithm.client_update(KEY, 0, algorithm.init(KEY), (), alone).weight == 0
    training = task.training._replace(batch_size=1)
    with pytest.raises(ValueError, match="batch_size=1 leaves no example"):
        perfedavg(task._replace(training=training))
