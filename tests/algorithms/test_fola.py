"""FOLA on linear regression, where its round is Bayes' rule."""

import jax
import jax.numpy as jnp
import numpy as np

from fedvi.algorithm import Aggregate, Task
from fedvi.algorithms import fola
from fedvi.data import ClientData
from fedvi.local import LocalTraining
from fedvi.nn import Model

KEY = jax.random.key(0)


def squares(outputs, y, mask):
    errors = jnp.where(mask, (y - outputs[:, 0]) ** 2, 0.0)
    return errors.sum() / jnp.maximum(mask.sum(), 1) / 2


MODEL = Model(
    init=lambda key: {"body": {}, "head": jnp.array([0.3, -0.2])},
    apply=lambda params, x, mask=None: (x @ params["head"])[:, None],
    with_classes=lambda classes: MODEL,
    name="linear",
    classes=1,
    loss=squares,
)


def client(optimum, scale, reps, pull):
    """Inputs along the axes whose residuals at `optimum` pull with `pull`.

    They have a mean square of 1, the noise's: there the empirical Fisher information is
    the curvature Σ x².
    """
    bias = pull / (2 * reps * scale)
    spread = np.sqrt(1 - bias**2)
    x = np.concatenate([np.diag(scale)] * 2 * reps)
    residuals = np.tile([bias + spread, bias - spread], (reps, 1)).ravel()
    padded, labels = np.zeros((16, 2), np.float32), np.zeros(16, np.float32)
    padded[: len(x)], labels[: len(x)] = x, x @ optimum + residuals
    return ClientData(padded, labels, np.int32(len(x)))


def test_a_round_ends_at_the_posterior_of_the_pooled_data():
    start, precision, samples = np.array([0.3, -0.2]), 3.0, 24
    clients = []
    for optimum, scale, reps in (
        ([1.0, -1.0], [1.0, 0.5], 2),
        ([0.4, 0.7], [0.8, 1.5], 4),
    ):
        stands_for = samples / (4 * reps)
        pull = precision * (optimum - start) / stands_for
        clients.append(client(np.array(optimum), np.array(scale), reps, pull))
    exact = LocalTraining(300, 16, 0.5, momentum=0.0)
    task = Task(MODEL, exact, exact, len(clients), samples)
    algorithm = fola(task, precision=precision)
    server = algorithm.init(KEY)

    @jax.jit
    def send(data):
        output = algorithm.client_update(KEY, 0, server, (), data)
        summands = algorithm.statistics(server, output.upload)
        return jax.tree.map(lambda s: output.weight * s, summands)

    total = jax.tree.map(lambda *s: sum(s), *map(send, clients))
    aggregate = Aggregate(total, jnp.float32(samples), jnp.float32(2), 2)
    found = algorithm.server_update(KEY, 0, server, aggregate)

    x, y = (np.concatenate([d[i][: d.size] for d in clients]) for i in range(2))
    pooled = x.T @ x + precision * np.eye(2)
    mean = np.linalg.solve(pooled, x.T @ y + precision * start)
    np.testing.assert_allclose(found.precision["head"], np.diag(pooled), rtol=1e-3)
    np.testing.assert_allclose(found.mean["head"], mean, atol=1e-3)
