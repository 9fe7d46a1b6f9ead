import jax
import jax.numpy as jnp
import numpy as np

from fedvi.algorithms import centralised, fedavg, local_only
from fedvi.algorithms.references import pool
from fedvi.data import ClientData
from fedvi.federation import Federation
from fedvi.selection import Selection

KEY = jax.random.key(0)


def assert_close(a, b):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b
    )


def always(ids):
    """The same cohort in every round."""
    ids = jnp.array(ids, jnp.int32)
    return Selection(7, len(ids), lambda key, round_index, scores, counts: (ids, ()))


def test_pooling_puts_every_real_example_first(train):
    pooled = pool(jax.tree.map(jnp.asarray, train))
    sizes = np.asarray(train.size)
    expected = np.concatenate([train.x[i, :n] for i, n in enumerate(sizes)])
    assert pooled.size == sizes.sum()
    np.testing.assert_array_equal(pooled.x[: sizes.sum()], expected)
    np.testing.assert_array_equal(
        pooled.y[: sizes.sum()],
        np.concatenate([train.y[i, :n] for i, n in enumerate(sizes)]),
    )


def test_centralised_on_one_client_is_that_clients_training(task, train, test):
    """One full-batch step, so that the order of the batches plays no part."""
    one_step = task._replace(
        training=task.training._replace(epochs=1, batch_size=20, momentum=0.0)
    )
    only = always([0])
    params = []
    for builder in (centralised, fedavg):
        federation = Federation(builder(one_step), train, test, selection=only)
        state, _ = federation.round(federation.init(KEY))
        params.append(state.server.params)
    assert_close(*params)


def test_local_clients_keep_their_own_models(task, train, test):
    cohort = always([0, 3])
    federation = Federation(local_only(task), train, test, selection=cohort)
    start = federation.init(KEY)
    common = jax.device_get(start.server.params)
    state, _ = federation.rounds(start, 2)
    assert_close(state.server.params, common)
    kernels, initial = state.clients["body"].vector, common["body"].vector
    moved = [not np.allclose(kernel, initial) for kernel in kernels]
    assert moved == [True, False, False, True, False, False, False]
    assert not np.allclose(kernels[0], kernels[3])


def test_local_clients_send_nothing(task, train):
    data: ClientData = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    algorithm = local_only(task)
    server = algorithm.init(KEY)
    client = algorithm.init_client(KEY, server)
    output = algorithm.client_update(KEY, 0, (), client, data)
    assert not jax.tree.leaves(output.upload)
    assert not jax.tree.leaves(algorithm.broadcast(server))
