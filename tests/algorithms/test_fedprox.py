import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedvi.algorithms import fedavg, fedprox

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def moved(task, train):
    """How far one client moves from the global model, by μ; None is FedAvg."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    start = fedavg(task).init(jax.random.key(1))

    @jax.jit
    def run(mu):
        return fedprox(task, mu=mu).client_update(KEY, 0, start, (), data)

    plain = jax.jit(fedavg(task).client_update)(KEY, 0, start, (), data)
    return {None: plain, **{mu: run(mu) for mu in (0.0, 0.5, 5.0)}}


def test_without_the_proximal_term_it_is_fedavg(moved):
    plain, none = moved[None].upload, moved[0.0].upload
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), none, plain)


def test_the_proximal_term_holds_a_client_near_the_server(moved):
    norms = [float(optax.tree.norm(moved[mu].upload)) for mu in (0.0, 0.5, 5.0)]
    assert norms[0] > 1.05 * norms[1] > 1.05**2 * norms[2]
    penalty = moved[0.5].metrics["penalty"]
    assert penalty == pytest.approx(0.25 * norms[1] ** 2, rel=1e-4)


def test_a_step_is_fedavgs_drawn_back_by_mu_lr_over_one_plus_mu_lr(task, train):
    # A first step from the global model has the factor 1 / (1 + μ lr) alone, by hand.
    small = task._replace(
        training=task.training._replace(
            epochs=1, batch_size=20, learning_rate=0.1, momentum=0.0
        )
    )
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    server = fedavg(small).init(KEY)

    def run(algorithm):
        return jax.jit(algorithm.client_update)(KEY, 0, server, (), data).upload

    plain, pulled = run(fedavg(small)), run(fedprox(small, mu=3.0))
    jax.tree.map(
        lambda p, q: np.testing.assert_allclose(q, p / 1.3, rtol=1e-4, atol=1e-6),
        plain,
        pulled,
    )


@pytest.mark.parametrize("mu", [1e3, 1e12])
def test_no_mu_is_too_strong(task, train, mu):
    """Issue 7: gradient steps diverge from μ lr = 2 (1 + β) on."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    algorithm = fedprox(task, mu=mu)
    server = algorithm.init(KEY)
    upload = jax.jit(algorithm.client_update)(KEY, 0, server, (), data).upload
    assert optax.tree.norm(upload) < 100 / mu + 1e-6  # rounding
