import jax
import jax.numpy as jnp
import numpy as np

from fedvi.algorithm import Aggregate
from fedvi.algorithms import fedavg, fedbabu

KEY = jax.random.key(0)


def test_with_a_head_that_cannot_move_a_client_is_fedavgs(task, train):
    """The body's gradient is FedAvg's: one full-batch step agrees on the body."""
    one_step = task._replace(
        training=task.training._replace(epochs=1, batch_size=20, momentum=0.0)
    )
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    babu, avg = fedbabu(one_step), fedavg(one_step)
    ours = jax.jit(babu.client_update)(KEY, 0, babu.init(KEY), (), data)
    theirs = jax.jit(avg.client_update)(KEY, 0, avg.init(KEY), (), data)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        ours.upload,
        {"body": theirs.upload["body"]},
    )
    assert ours.weight == 1


def test_the_server_adds_the_mean_and_keeps_the_head(task):
    algorithm = fedbabu(task)
    server = algorithm.init(KEY)
    total = jax.tree.map(jnp.ones_like, {"body": server["body"]})
    aggregate = Aggregate(total, jnp.float32(4), jnp.float32(4), 6)
    new = algorithm.server_update(KEY, 0, server, aggregate)
    np.testing.assert_allclose(new["body"].vector, server["body"].vector + 0.25)
    assert new["head"] is server["head"]


def test_with_a_trained_head_it_is_fedavg_of_uniform_weights(task, train):
    babu, avg = fedbabu(task, head="trained"), fedavg(task)
    server, data = babu.init(KEY), jax.tree.map(lambda leaf: leaf[1], train)
    start = avg.init(KEY)

    @jax.jit
    def run(data):
        ours = babu.client_update(KEY, 0, server, (), data)
        theirs = avg.client_update(KEY, 0, start, (), data)
        tuned = [
            a.personalise(KEY, s, (), data) for a, s in ((babu, server), (avg, start))
        ]
        return (ours.upload, tuned[0]), (theirs.upload, tuned[1]), ours.weight

    ours, theirs, weight = run(jax.tree.map(jnp.asarray, data))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert weight == 1
    aggregate = Aggregate(ours[0], jnp.float32(1), jnp.float32(1), 6)
    new = babu.server_update(KEY, 0, server, aggregate)
    jax.tree.map(
        lambda n, s, m: np.testing.assert_array_equal(n, s + m), new, server, ours[0]
    )
