"""FedPop's chain against a Gaussian posterior, and what clients keep and send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms import fedavg, fedpop, fedsoul
from fedvi.algorithms.fedpop import FedSOUL, potential_of, run_chain
from fedvi.data import ClientData
from fedvi.local import LocalTraining

KEY = jax.random.key(0)


def test_langevin_steps_draw_from_a_linear_heads_posterior():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 2)).astype(np.float32)
    y = rng.normal(size=12).astype(np.float32) + x[:, 0]
    data = ClientData(x, y, np.int32(12))
    # ℓ_j = (y_j - x_jᵀ z)² / 2, z ~ N(0, σ² I).
    precision = x.T @ x + np.eye(2) / 0.7**2
    mean, covariance = np.linalg.solve(precision, x.T @ y), np.linalg.inv(precision)

    def loss(z, batch):
        return jnp.mean((batch.y - batch.x @ z) ** 2) / 2

    options = FedSOUL(sampler_step_size=0.01, samples=1, sampler_steps=1)
    visit = LocalTraining(batch_size=12, steps=120)
    potential = potential_of(loss, 0.7, data)

    @jax.jit
    @jax.vmap
    def chain(key):
        start = jnp.zeros((1, 2))
        return run_chain(key, 0, data, visit, potential, start, options)[0]

    draws = np.asarray(chain(jax.random.split(KEY, 4000)))
    # A step's own bias is of the order of γ times the curvature: 6 % of the variance.
    np.testing.assert_allclose(draws.mean(0), mean, atol=0.02)
    np.testing.assert_allclose(np.cov(draws.T), covariance, atol=0.012)


@pytest.fixture(scope="module")
def one(train):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)


def test_a_visit_of_one_step_each_is_as_by_hand(task, one):
    plain = task._replace(
        training=LocalTraining(batch_size=20, learning_rate=0.1, momentum=0.0)
    )
    algorithm = fedpop(plain, sampler_steps=1, samples=1, body_steps=1, prior_std=0.5)
    server = algorithm.init(KEY)
    client = algorithm.init_client(KEY, server)
    update = jax.jit(algorithm.client_update)
    output = update(KEY, 0, algorithm.broadcast(server), client, one)

    def loss(params):
        logits = task.model.apply(params, one.x)
        return task.model.loss(logits, one.y, jnp.ones(20, bool))

    start = fedavg(task).init(KEY).params
    head, gradient = start["head"].vector, jax.grad(loss)(start)["head"].vector
    expected = head - 0.1 * (gradient + head / (20 * 0.25))
    z = output.client.chain.vector[-1]
    np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-6)
    moved = {
        "body": start["body"],
        "head": start["head"].__class__(z, start["head"].layout),
    }
    body = jax.grad(loss)(moved)["body"].vector
    np.testing.assert_allclose(output.upload.vector, -0.1 * body, rtol=1e-4, atol=1e-6)
    assert output.weight == one.size  # the shared objective is a sum over examples
    known, chain = algorithm.kept(server, output.client)
    assert known and chain is output.client.chain


def test_a_newcomer_leaves_no_copy_of_the_start(task, one):
    for finetuning in (
        LocalTraining(epochs=0, batch_size=20, learning_rate=0.1, steps=1),
        LocalTraining(epochs=1, batch_size=20, learning_rate=0.1),
    ):
        algorithm = fedpop(task._replace(finetuning=finetuning), samples=3)
        server = algorithm.init(KEY)
        client = algorithm.init_client(KEY, server)
        chain = jax.jit(algorithm.personalise)(KEY, server, client, one)
        moved = chain.vector - client.chain.vector
        assert (np.abs(moved).max(axis=-1) > 0).all()


def test_more_kept_states_than_steps_are_refused(task):
    with pytest.raises(ValueError, match="samples=5 states of z do not come from"):
        fedsoul(task, sampler_steps=4)


def test_a_newcomer_predicts_with_no_state_that_nobody_trained(task, one):
    short = task._replace(finetuning=LocalTraining(epochs=1, batch_size=20))
    algorithm = fedpop(short)
    server = algorithm.init(KEY)
    client = algorithm.init_client(KEY, server)
    chain = jax.jit(algorithm.personalise)(KEY, server, client, one).vector
    assert (np.abs(chain - client.chain.vector).max(axis=-1) > 1e-4).all()
