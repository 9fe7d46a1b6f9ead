"""FeSEM and CFL: planted clusters are found, and equal clients are not split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithm import StackedAggregate, Task
from fedvi.algorithms import cfl, fedavg, fesem
from fedvi.algorithms.cfl import split
from fedvi.algorithms.fesem import means, spread
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


FOUR = np.array([[1, 0.1], [1, -0.1], [-1, 0.1], [-1, -0.1]])
SPLIT = {"eps1": 0.2, "eps2": 0.6, "norms": "relative", "min_rounds": 4}


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


def halves(moved=FOUR, n=None, eps1=0.2, eps2=0.5, late=True, most=4):
    n = np.ones(len(moved)) if n is None else np.array(n)
    cluster = np.where(n > 0, 0, -1)
    found, count = split(
        moved @ moved.T, n, cluster, 1, eps1, eps2, late, max_clusters=most
    )
    return found.tolist(), int(count)


def test_a_cluster_is_split_where_all_conditions_hold():
    assert halves() in (([0, 0, 1, 1], 2), ([1, 1, 0, 0], 2))
    kept = [0, 0, 0, 0], 1
    assert halves(n=[3, 3, 1, 1]) == kept  # the mean is long, of weights
    assert halves(eps2=2) == kept
    assert halves(late=False) == kept
    assert halves(most=1) == kept
    assert halves(n=[1, 0, 1, 0]) == ([0, -1, 0, -1], 1)  # two members
    # Ties are no reason to stay together, being equal is.
    assert halves(np.eye(4), eps1=9)[1] == 2
    assert halves(np.ones((4, 2)), eps1=9) == kept


def test_the_linkage_is_complete():
    angle = np.deg2rad([0, 29, 60, 90, 125])
    found, _ = halves(np.stack([np.cos(angle), np.sin(angle)], 1), eps1=9)
    assert found in ([0, 0, 1, 1, 1], [1, 1, 0, 0, 0])


def aggregate(server, cluster, moved, n):
    """Updates along two coordinates of the weights."""
    leaves, structure = jax.tree.flatten(server.models)
    rows = [jnp.zeros((len(n), *leaf.shape[1:])) for leaf in leaves]
    rows[0] = rows[0].at[:, :2].set(jnp.asarray(moved))
    uploads = {"cluster": jnp.asarray(cluster), "moved": structure.unflatten(rows)}
    n = jnp.asarray(n, jnp.float32)
    return StackedAggregate(uploads, n, jnp.arange(len(n)), (n > 0).sum(), 6)


def two(models):
    return np.asarray(jax.tree.leaves(models)[0])[:, :2]


def test_cfl_halves_begin_at_their_parents_model(task):
    algorithm = cfl(task, norms="relative", eps1=0.5, eps2=0.6, min_rounds=1)
    server = start = algorithm.init(jax.random.key(0))
    n = [1.0, 3.0, 2.0, 2.0, 0.0]  # the last one is there in the first round only
    for at, moved in enumerate((np.tile([[2.0, 1.0]], (5, 1)), 2 * FOUR)):
        moved = np.resize(moved, (5, 2))
        sent = aggregate(server, [0] * 5, moved, n if at else [1] * 5)
        server = jax.jit(algorithm.server_update)(None, at, server, sent)
    np.testing.assert_allclose(server.scale, 5**0.5, rtol=1e-6)  # of round 0
    assert server.count == 2
    assert server.cluster[4] == -1
    for k in (0, 1):
        own = np.asarray(server.cluster[:4]) == k
        mean = np.average(2 * FOUR[own], axis=0, weights=np.array(n)[:4][own])
        expected = two(start.models)[0] + [2, 1] + mean
        np.testing.assert_allclose(two(server.models)[k], expected, rtol=1e-5)


def test_fesem_centres():
    models = {"w": jnp.array([[0.0], [1.0], [10.0], [11.0], [1000.0]])}
    real = jnp.arange(5) < 4
    first = spread(models, real, {"w": jnp.zeros((2, 1))})
    np.testing.assert_allclose(first["w"][:, 0], [0, 11])
    cluster = jnp.array([0, 0, 1, 1, 0])
    moved = means(models, real, cluster, {"w": jnp.array([[5.0], [6.0], [7.0]])})
    np.testing.assert_allclose(moved["w"][:, 0], [0.5, 10.5, 7])  # 7 has no member


def test_fesem_means_are_unweighted_and_absent_clients_stay_unknown(task):
    algorithm = fesem(task, clusters=2)
    server = start = algorithm.init(jax.random.key(0))
    moved = np.array([[0.0, 0], [1, 0], [0, 10], [0, 12], [0, 0]])
    sent = aggregate(server, [0] * 5, moved, [1, 5, 1, 5, 0])
    server = jax.jit(algorithm.server_update)(None, 0, server, sent)
    np.testing.assert_array_equal(server.cluster, [0, 0, 1, 1] + [-1] * (task.ids - 4))
    expected = two(start.models) + np.array([[0.5, 0], [0, 11]])
    np.testing.assert_allclose(two(server.models), expected, rtol=1e-4)


def test_fesem_begins_with_as_many_uploads_as_centres(task):
    algorithm = fesem(task, clusters=2)
    server = algorithm.init(jax.random.key(0))
    moved = np.array([[0.0, 0], [0, 9], [0, 9], [0, 9], [0, 9]])
    update = jax.jit(algorithm.server_update)
    counts = []
    for n in ([1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]):
        server = update(None, 0, server, aggregate(server, [0] * 5, moved, n))
        counts.append(int(server.count))
    assert counts == [1, 2, 2]
