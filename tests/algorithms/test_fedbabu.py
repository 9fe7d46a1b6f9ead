import jax
import jax.numpy as jnp
import numpy as np

from fedvi.algorithms import fedavg, fedbabu
from fedvi.federation import Federation

KEY = jax.random.key(0)


def test_only_the_body_is_sent_and_trained(task, train, test):
    algorithm = fedbabu(task)
    federation = Federation(algorithm, train, test)
    start = federation.init(KEY)
    head, body = jax.device_get((start.server["head"], start.server["body"]))
    state, _ = federation.rounds(start, 2)
    jax.tree.map(np.testing.assert_array_equal, state.server["head"], head)
    for old, new in zip(
        jax.tree.leaves(body), jax.tree.leaves(state.server["body"]), strict=True
    ):
        assert not np.allclose(old, new)


def test_with_a_head_that_cannot_move_a_client_is_fedavgs(task, train):
    """The body's gradient is FedAvg's: one full-batch step agrees on the body."""
    one_step = task._replace(
        training=task.training._replace(epochs=1, batch_size=20, momentum=0.0)
    )
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    babu, avg = fedbabu(one_step), fedavg(one_step)
    ours = babu.client_update(KEY, 0, babu.init(KEY), (), data)
    theirs = avg.client_update(KEY, 0, avg.init(KEY), (), data)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        ours.statistics,
        theirs.statistics["body"],
    )
    assert ours.weight == 1


def test_personalisation_trains_the_head_too(task, train):
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    algorithm = fedbabu(task)
    server = algorithm.init(KEY)
    personal = algorithm.personalise(KEY, server, (), data)
    for old, new in zip(
        jax.tree.leaves(server), jax.tree.leaves(personal), strict=True
    ):
        assert not np.array_equal(old, new)
