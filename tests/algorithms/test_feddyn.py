import jax
import jax.numpy as jnp
import numpy as np

from fedvi.algorithm import Task
from fedvi.algorithms import fedavg, feddyn
from fedvi.data import ClientData
from fedvi.federation import Federation
from fedvi.flat import trees
from fedvi.local import LocalTraining
from fedvi.nn import build
from fedvi.selection import uniform

KEY = jax.random.key(0)


def least_squares(scores, labels, mask):
    errors = ((scores - jax.nn.one_hot(labels, 3)) ** 2).sum(-1)
    return jnp.where(mask, errors, 0).sum() / jnp.maximum(mask.sum(), 1)


def test_its_fixed_point_is_the_pooled_minimiser_where_fedavgs_is_not():
    """Linear regressions of very different clients, with momentum, exact by lstsq."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 20, 2)).astype(np.float32)
    x *= np.array([[1, 0.3], [0.3, 1], [0.8, 0.8]], np.float32)[:, None]
    y = np.argmax(x @ rng.normal(size=(3, 2, 3)), -1).astype(np.int32)
    data = ClientData(x, y, np.full(3, 20, np.int32))
    model = build("logistic", classes=3, input_shape=(2,))._replace(loss=least_squares)
    training = LocalTraining(20, 20, 0.05, momentum=0.5)
    task = Task.of(model, data, training)

    inputs = np.concatenate([x.reshape(60, 2), np.ones((60, 1))], 1)
    best, *_ = np.linalg.lstsq(inputs, np.eye(3)[y.reshape(60)])
    distance = {}
    for algorithm in (fedavg(task), feddyn(task, alpha_coef=0.3)):
        federation = Federation(algorithm, data, data)
        state, _ = federation.rounds(federation.init(KEY), 150)
        (layer,) = trees(state.server.params)["head"].values()
        found = np.concatenate([layer["kernel"], layer["bias"][None]])
        distance[algorithm.name] = np.abs(found - best).max()
    assert distance["feddyn"] < 1e-4
    assert distance["fedavg"] > 0.02
    # h is the mean of the h_i, 0 at rest, where each is its client's gradient.
    slopes = state.clients["head"].vector
    assert np.abs(slopes).max() > 0.05
    np.testing.assert_allclose(slopes.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(state.server.drift["head"].vector, 0, atol=1e-4)


def test_absent_clients_keep_their_slopes_in_the_mean(task, train, test):
    federation = Federation(feddyn(task), train, test, selection=uniform(7, 3))
    state, _ = federation.rounds(federation.init(KEY), 3)
    means = jax.tree.map(lambda h: h.sum(0) / task.clients, state.clients)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        means,
        state.server.drift,
    )
