import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms import fedavg, fedprox

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def distances(task, train):
    """How far one client moves from the global model, by μ; None is FedAvg."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    start = fedavg(task).init(jax.random.key(1))

    def moved(algorithm):
        output = algorithm.client_update(KEY, 0, start, (), data)
        return jax.tree.map(jnp.subtract, output.statistics, start.params)

    algorithms = {mu: fedprox(task, mu=mu) for mu in (0.0, 0.5, 5.0)}
    return {mu: moved(one) for mu, one in {None: fedavg(task), **algorithms}.items()}


def test_without_the_proximal_term_it_is_fedavg(distances):
    jax.tree.map(np.testing.assert_array_equal, distances[0.0], distances[None])


def test_the_proximal_term_holds_a_client_near_the_server(distances):
    norms = [
        np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(distances[mu])))
        for mu in (0.0, 0.5, 5.0)
    ]
    assert norms[0] > 1.05 * norms[1] > 1.05**2 * norms[2]


def test_one_step_is_gradient_plus_mu_times_distance(task, train):
    # A first step from the global model itself has no proximal gradient, a second has
    # μ times the first step.
    small = task._replace(
        training=task.training._replace(
            epochs=2, batch_size=20, learning_rate=0.1, momentum=0.0
        )
    )
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    server = fedavg(small).init(KEY)

    def run(algorithm):
        return algorithm.client_update(KEY, 0, server, (), data).statistics

    once = small._replace(training=small.training._replace(epochs=1))
    first = run(fedavg(once))
    plain, pulled = run(fedavg(small)), run(fedprox(small, mu=0.3))
    jax.tree.map(
        lambda p, q, f, s: np.testing.assert_allclose(
            q, p - 0.1 * 0.3 * (f - s), rtol=1e-4, atol=1e-6
        ),
        plain,
        pulled,
        first,
        server.params,
    )
