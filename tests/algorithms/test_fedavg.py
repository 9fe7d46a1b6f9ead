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
    """Sum of what clients of sizes 3 and 1 moved by, and the mean of their models."""
    start, a, b = (task.model.init(jax.random.key(i)) for i in (0, 1, 2))
    mean = jax.tree.map(lambda x, y: (3 * x + y) / 4, a, b)
    total = jax.tree.map(lambda m, s: 4 * (m - s), mean, start)
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
    aggregate, _ = upload
    algorithm = fedavg(
        task,
        server_optimizer=name,
        server_learning_rate=0.5,
        server_momentum=momentum,
    )
    server = algorithm.init(KEY)
    params, moments = server.params, optimizer.init(server.params)
    for _ in range(2):
        server = algorithm.server_update(KEY, 0, server, aggregate)
        # Clients move by as much in the second round.
        gradient = jax.tree.map(lambda u: -u / 4, aggregate.statistics)
        updates, moments = optimizer.update(gradient, moments, params)
        params = optax.apply_updates(params, updates)
    assert_close(server.params, params)


@pytest.mark.parametrize(
    ("name", "rate"), [("sgd", 1.0), ("adam", 0.01), ("yogi", 0.01)]
)
def test_the_rate_that_is_not_given_suits_the_servers_optimiser(
    task, upload, name, rate
):
    def run(**options):
        algorithm = fedavg(task, server_optimizer=name, **options)
        return algorithm.server_update(KEY, 0, algorithm.init(KEY), upload[0])

    assert_close(run().params, run(server_learning_rate=rate).params)


def test_moments_are_not_sent(task):
    algorithm = fedavg(task, server_momentum=0.9)
    server = algorithm.init(KEY)
    assert jax.tree.leaves(server.moments)
    assert not jax.tree.leaves(algorithm.broadcast(server).moments)


def test_a_client_trains_at_the_rate_of_the_round(task, train):
    """A rate that falls to zero after round 3 leaves the client where it started."""
    falling = task._replace(
        training=task.training._replace(
            learning_rate=lambda round_index: jnp.where(round_index < 3, 0.1, 0.0)
        )
    )
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    algorithm = fedavg(falling)
    server = algorithm.init(KEY)
    update = jax.jit(algorithm.client_update)
    assert update(KEY, 3, server, (), data).weight == 20  # what it holds
    for leaf in jax.tree.leaves(update(KEY, 3, server, (), data).upload):
        assert not leaf.any()
    for leaf in jax.tree.leaves(update(KEY, 2, server, (), data).upload):
        assert leaf.all()
