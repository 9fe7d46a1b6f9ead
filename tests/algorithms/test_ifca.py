"""IFCA and the ensemble against FedAvg, and the clusters that IFCA finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithm import Aggregate, Task
from fedvi.algorithms import ensemble, fedavg, ifca
from fedvi.evaluation import summarise
from fedvi.federation import Federation

KEY = jax.random.key(3)
PLANTED = np.array([0, 1, 1, 0, 1, 0])  # whose labels are permuted


def planted(data):
    """Clients of the fixture, some twice, whose labels follow one of two rules."""
    data = jax.tree.map(lambda leaf: leaf[np.array((0, 1, 2, 5, 0, 6))], data)
    return data._replace(y=(data.y + PLANTED[:, None]) % 3)


def test_it_recovers_planted_clusters(task, train, test):
    data = planted(train)
    task = Task.of(task.model, data, task.training, task.finetuning)
    federation = Federation(ifca(task), data, planted(test))
    state, metrics = federation.rounds(federation.init(jax.random.key(0)), 8)
    found = np.asarray(federation.clusters(state))
    assert (found == PLANTED).all() or (found == 1 - PLANTED).all()
    np.testing.assert_allclose(metrics.metrics["share_0"][-1], 0.5)
    assert summarise(federation.evaluate(state))["accuracy"] > 80


@pytest.mark.parametrize("build", [ifca, ensemble])
def test_one_cluster_is_fedavg(task, train, build):
    """With the keys that the clusters hand on."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), train)

    def run(algorithm, init_key, key, sent):
        server = algorithm.init(init_key)
        output = algorithm.client_update(key, 0, sent(server), (), data)
        weighted = jax.tree.map(
            lambda s: output.weight * s,
            algorithm.statistics(sent(server), output.upload),
        )
        one = jnp.float32(1)
        new = algorithm.server_update(
            KEY, 0, server, Aggregate(weighted, jnp.float32(output.weight), one, 6)
        )
        x, mask = data.x, jnp.ones(len(data.x), bool)
        personal = algorithm.personalise(KEY, sent(new), (), data)
        return new, algorithm.personal_predictive(KEY, sent(new), personal, x, mask)

    many = build(task, clusters=1, predict_with="ensemble")
    unicast = many.unicast or (lambda server, client_id: server)
    train_key = jax.random.split(KEY)[1]
    expected, predicted = jax.jit(
        lambda: run(fedavg(task), jax.random.split(KEY, 1)[0], train_key, lambda s: s)
    )()
    new, log_probs = jax.jit(lambda: run(many, KEY, KEY, lambda s: unicast(s, 5)))()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-6),
        new,
        expected,
    )
    np.testing.assert_allclose(log_probs, predicted, rtol=1e-4, atol=1e-5)


def test_an_ensembles_groups_are_equal_and_its_prediction_is_the_mean(task, train):
    algorithm = ensemble(task, clusters=2)
    server = algorithm.init(KEY)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    update = jax.jit(algorithm.client_update)
    groups = [
        int(update(KEY, 0, algorithm.unicast(server, i), (), data).upload["cluster"])
        for i in range(4)
    ]
    assert groups == [0, 1, 0, 1]
    x, mask = data.x, jnp.ones(len(data.x), bool)
    found = algorithm.global_predictive(KEY, algorithm.unicast(server, 0), x, mask)
    assert found.shape == (2, 20, 3)
    for k in (0, 1):
        own = jax.tree.map(lambda leaf: leaf[k], server)
        expected = fedavg(task).global_predictive(KEY, own, x, mask)[0]
        np.testing.assert_allclose(found[k], expected, rtol=1e-5, atol=1e-6)
