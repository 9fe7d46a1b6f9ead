import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms import fedbabu, scaffold
from fedvi.algorithms.scaffold import path_length
from fedvi.federation import Federation
from fedvi.local import LocalTraining
from fedvi.selection import uniform

KEY = jax.random.key(0)


def assert_close(a, b, atol=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol), a, b
    )


def test_controls_stay_mean_gradients_whose_mean_the_server_has(task, train, test):
    """And the first round, whose controls are 0, is FedAvg's of uniform weights."""
    algorithm = scaffold(task)
    federation = Federation(algorithm, train, test)
    plain = Federation(fedbabu(task, head="trained"), train, test)
    state, _ = federation.rounds(federation.init(KEY), 1)
    expected, _ = plain.rounds(plain.init(KEY), 1)
    assert_close(state.server.params, expected.server)
    for _ in range(2):
        state, _ = federation.rounds(state, 1)
        means = jax.tree.map(lambda c: c.sum(0) / task.clients, state.clients)
        assert np.abs(means["body"].vector).max() > 0.01
        assert_close(means, state.server.control)


def test_absent_clients_keep_their_controls_in_the_mean(task, train, test):
    federation = Federation(scaffold(task), train, test, selection=uniform(7, 3))
    state, _ = federation.rounds(federation.init(KEY), 3)
    means = jax.tree.map(lambda c: c.sum(0) / task.clients, state.clients)
    assert_close(means, state.server.control)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_control_is_the_gradient_where_it_hardly_changes(task, train, momentum):
    """Full batches at a small rate; whatever c and c_i are."""
    training = LocalTraining(4, 20, lambda r: jnp.where(r < 3, 9.0, 1e-3), momentum)
    algorithm = scaffold(task._replace(training=training))
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), train)
    server = algorithm.init(KEY)
    control, own = (task.model.init(jax.random.key(i)) for i in (1, 2))
    server = server._replace(control=control)
    out = jax.jit(algorithm.client_update)(KEY, 5, server, own, data)

    def loss(params):
        mask = jnp.arange(20) < data.size
        return task.model.loss(task.model.apply(params, data.x), data.y, mask)

    gradient = jax.jit(jax.grad(loss))(server.params)
    assert_close(out.client, gradient, atol=0.03)
    assert out.metrics["loss"] == pytest.approx(float(loss(server.params)), rel=0.02)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_the_length_of_a_path_is_that_of_its_steps(momentum):
    training = LocalTraining(2, 5, 0.3, momentum)
    velocity = way = 0.0
    for _ in range(6):
        velocity = 1 + momentum * velocity
        way += 0.3 * velocity
    assert path_length(0, 12, training) == pytest.approx(way, rel=1e-6)
    assert path_length(0, 0, training) == 0


def test_other_optimisers_are_refused(task):
    adam = task._replace(training=LocalTraining(optimizer="adam"))
    with pytest.raises(ValueError, match="optimizer='adam' does not fit scaffold"):
        scaffold(adam)
