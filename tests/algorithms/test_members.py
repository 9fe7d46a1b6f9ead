"""FeSEM and CFL: planted clusters are found, and equal clients are not split."""

import jax
import numpy as np
import pytest

from fedvi.algorithm import Task
from fedvi.algorithms import cfl, fedavg, fesem
from fedvi.federation import Federation
from fedvi.local import LocalTraining

PLANTED = np.array([0, 1, 1, 0, 1, 0])
TRAINING = LocalTraining(epochs=1, batch_size=20, learning_rate=0.2, momentum=0.0)


def clients(data, rules):
    """Six clients whose labels follow one of two rules."""
    data = jax.tree.map(lambda leaf: leaf[np.array((0, 1, 5, 0, 1, 5))], data)
    return data._replace(y=(data.y + np.asarray(rules)[:, None]) % 3)


def run(build, task, train, rules, rounds, **options):
    data = clients(train, rules)
    task = Task.of(task.model, data, TRAINING, task.finetuning)
    federation = Federation(build(task, **options), data, data)
    state, metrics = federation.rounds(federation.init(jax.random.key(0)), rounds)
    return federation, state, metrics


SPLIT = {"eps1": 0.2, "eps2": 0.6, "norms": "relative", "min_rounds": 3}


@pytest.mark.parametrize(("build", "options"), [(fesem, {}), (cfl, SPLIT)])
def test_planted_clusters_are_found(task, train, build, options):
    federation, state, metrics = run(build, task, train, PLANTED, 20, **options)
    np.testing.assert_array_equal(federation.clusters(state), state.server.cluster)
    found = np.asarray(state.server.cluster)
    assert (found == found[0])[PLANTED == 0].all()
    assert (found == found[1])[PLANTED == 1].all()
    assert found[0] != found[1]
    losses = metrics.metrics["loss"]
    assert losses[-1] < 0.7 * losses[0]


def test_clients_of_one_rule_stay_together_and_that_is_fedavg(task, train):
    _, state, metrics = run(cfl, task, train, PLANTED * 0, 12, **SPLIT)
    _, plain, _ = run(fedavg, task, train, PLANTED * 0, 12)
    assert metrics.metrics["clusters"][-1] == 1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-3, atol=1e-4),
        state.server.models,
        plain.server.params,
    )
