import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedvi.algorithm import Aggregate
from fedvi.algorithms import fedavg

KEY = jax.random.key(0)


def assert_close(a, b):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b
    )


@pytest.fixture(scope="module")
def upload(task):
    """Weighted sum of two clients of sizes 3 and 1, and their weighted mean."""
    a, b = (task.model.init(jax.random.key(i)) for i in (1, 2))
    total = jax.tree.map(lambda x, y: 3 * x + y, a, b)
    mean = jax.tree.map(lambda x: x / 4, total)
    return Aggregate(total, jnp.float32(4), jnp.float32(2), 2), mean


def test_the_server_takes_the_size_weighted_mean(task, upload):
    algorithm, (aggregate, mean) = fedavg(task), upload
    server = algorithm.server_update(KEY, 0, algorithm.init(KEY), aggregate)
    assert_close(server.params, mean)


@pytest.mark.parametrize(
    ("name", "momentum", "optimizer"),
    [
        ("sgd", 0.9, optax.sgd(0.5, 0.9)),
        ("adam", 0.9, optax.adam(0.5, 0.9, 0.99, 1e-3)),
        ("yogi", 0.8, optax.yogi(0.5, 0.8, 0.99, 1e-3)),
    ],
)
def test_server_optimisers_see_minus_the_mean_change(
    task, upload, name, momentum, optimizer
):
    algorithm, (aggregate, mean) = (
        fedavg(
            task,
            server_optimizer=name,
            server_learning_rate=0.5,
            server_momentum=momentum,
        ),
        upload,
    )
    server = algorithm.init(KEY)
    params, moments = server.params, optimizer.init(server.params)
    for _ in range(2):
        server = algorithm.server_update(KEY, 0, server, aggregate)
        gradient = jax.tree.map(jnp.subtract, params, mean)
        updates, moments = optimizer.update(gradient, moments, params)
        params = optax.apply_updates(params, updates)
    assert_close(server.params, params)


def test_moments_are_not_sent(task):
    algorithm = fedavg(task, server_momentum=0.9)
    server = algorithm.init(KEY)
    assert jax.tree.leaves(server.moments)
    assert not jax.tree.leaves(algorithm.broadcast(server).moments)


def test_a_client_weighs_what_it_holds(task, train):
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[2]), train)
    algorithm = fedavg(task)
    output = algorithm.client_update(KEY, 0, algorithm.init(KEY), (), data)
    assert output.weight == 8


def test_a_client_trains_at_the_rate_of_the_round(task, train):
    """A rate that falls to zero after round 3 leaves the client where it started."""
    falling = task._replace(
        training=task.training._replace(
            learning_rate=lambda round: jnp.where(round < 3, 0.1, 0.0)
        )
    )
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    algorithm = fedavg(falling)
    server = algorithm.init(KEY)
    update = jax.jit(algorithm.client_update)
    late = update(KEY, 3, server, (), data).statistics
    jax.tree.map(np.testing.assert_array_equal, late, server.params)
    early = update(KEY, 2, server, (), data).statistics
    assert not np.allclose(jax.tree.leaves(early)[0], jax.tree.leaves(late)[0])
