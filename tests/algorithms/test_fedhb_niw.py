"""FedHB-NIW against the algorithms and formulas that it generalises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithm import Aggregate
from fedvi.algorithms import fedbabu, fedhb_niw
from fedvi.algorithms.common import classification_loss, quadratic_penalty
from fedvi.federation import Federation
from fedvi.local import minimise

KEY = jax.random.key(3)


def assert_close(a, b, **kwargs):
    kwargs = {"rtol": 1e-5, "atol": 1e-6, **kwargs}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **kwargs), a, b)


def one_client(train):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), train)


def proximal_sgd(task, server, data, mu):
    """FedProx's client on the body: gradient steps on CE + μ/2 ‖m - m_0‖²."""
    centre = server.posterior.mean

    def loss(key, body, batch):
        params = {"body": body, "head": server.head}
        penalty = quadratic_penalty(body, centre, mu)
        return classification_loss(task.model, params, batch) + penalty

    return minimise(KEY, 0, centre, data, task.training, loss)[0]


@pytest.mark.parametrize("penalty_scale", [1.0, 50.0])
def test_without_dropout_and_constant_scale_a_client_is_fedprox(
    task, train, penalty_scale
):
    algorithm = fedhb_niw(task, p_drop=0.0, penalty_scale=penalty_scale)
    data, server = one_client(train), algorithm.init(jax.random.key(0))
    constant = jax.tree.map(lambda v: jnp.full_like(v, 7.0), server.posterior.scale)
    server = server._replace(posterior=server.posterior._replace(scale=constant))
    output = jax.jit(algorithm.client_update)(KEY, 0, server, (), data)
    # Eq. 17 with d = 1: p (n_0 + d + 1) / (V |D_i|), n_0 = |D| + 3, |D_i| = 13.
    mu = penalty_scale * (task.samples + 5) / (7.0 * 13)
    expected = jax.jit(lambda: proximal_sgd(task, server, data, mu))()
    assert_close(output.statistics["sum_m"], expected)
    free = jax.jit(lambda: proximal_sgd(task, server, data, 0.0))()
    assert not np.allclose(free["Dense_0"]["kernel"], expected["Dense_0"]["kernel"])


@pytest.fixture(scope="module")
def uploads(task):
    """Bodies of three participants out of the population."""
    shapes = jax.eval_shape(task.model.init, KEY)["body"]
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes)
        for _ in range(3)
    ]


def aggregate_of(uploads, population):
    total = jax.tree.map(lambda *leaves: sum(leaves), *uploads)
    squares = [jax.tree.map(jnp.square, upload) for upload in uploads]
    statistics = {
        "sum_m": total,
        "sum_m2": jax.tree.map(lambda *leaves: sum(leaves), *squares),
    }
    return Aggregate(statistics, jnp.float32(3), jnp.float32(3), population)


def test_without_dropout_the_mean_is_fedavgs_shrunk_by_the_prior(task, uploads):
    algorithm = fedhb_niw(task, p_drop=0.0, prior_mean="zero")
    aggregate = aggregate_of(uploads, task.clients)
    server = algorithm.server_update(KEY, 0, algorithm.init(KEY), aggregate)
    n = task.clients
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 3 * n / (n + 1), *uploads)
    assert_close(server.posterior.mean, expected)


def test_the_previous_mean_as_prior_is_a_moving_average(task, uploads):
    algorithm = fedhb_niw(task, p_drop=0.0, prior_mean="previous")
    start = algorithm.init(KEY)
    aggregate = aggregate_of(uploads, task.clients)
    server = algorithm.server_update(KEY, 0, start, aggregate)
    n = task.clients
    expected = jax.tree.map(
        lambda m0, *leaves: (m0 + n * sum(leaves) / 3) / (n + 1),
        start.posterior.mean,
        *uploads,
    )
    assert_close(server.posterior.mean, expected)


@pytest.mark.parametrize("covariance", ["per_weight", "joint"])
def test_the_server_minimises_the_papers_objective(task, uploads, covariance):
    """Eq. 37 + N/N_f Σ Eq. 38, straight from the paper, by autodiff."""
    p_drop, epsilon = 0.2, 0.03
    algorithm = fedhb_niw(
        task, covariance=covariance, prior_mean="zero", p_drop=p_drop, epsilon=epsilon
    )
    server = algorithm.init(KEY)
    server = algorithm.server_update(
        KEY, 0, server, aggregate_of(uploads, task.clients)
    )
    dims = sum(leaf.size for leaf in jax.tree.leaves(uploads[0]))
    d = dims if covariance == "joint" else 1
    n0, nu0, share = task.samples + d + 2, d + 2, task.clients / 3

    def objective(m0, v0, p, ms):
        kl = 0.5 * jnp.sum(n0 / v0 + nu0 * jnp.log(v0) + n0 * m0**2 / v0)
        fit = 0.0
        for m in ms:
            quadratic = p * m**2 - 2 * p * m0 * m + m0**2 + epsilon**2
            fit += 0.5 * jnp.sum(n0 * quadratic / v0 + jnp.log(v0))
        return kl + share * fit

    for path in (("Dense_0", "kernel"), ("Dense_0", "bias")):
        m0, v0 = (
            tree[path[0]][path[1]]
            for tree in (server.posterior.mean, server.posterior.scale)
        )
        ms = [upload[path[0]][path[1]] for upload in uploads]
        p = 1 - p_drop if path[1] == "kernel" else 1.0
        gradients = jax.grad(objective, argnums=(0, 1))(m0, v0, p, ms)
        # Sizes of the terms that cancel, for a tolerance in float32.
        sizes = (n0 * share * sum(abs(m) for m in ms) / v0, (nu0 + 9) / v0)
        for gradient, size in zip(gradients, sizes, strict=True):
            assert np.all(np.abs(gradient) < 1e-5 * (1 + np.max(size)))
        moved = jax.grad(objective, argnums=(0, 1))(m0 + 0.1, v0 * 1.1, p, ms)
        for gradient, size in zip(moved, sizes, strict=True):
            assert np.any(np.abs(gradient) > 1e-3 * (1 + np.max(size)))


@pytest.mark.parametrize(("penalty_scale", "most"), [(1.0, 1.0), (1e4, 0.02)])
def test_the_literal_joint_penalty_runs_stably(task, train, test, penalty_scale, most):
    """Its coefficient would blow a gradient step up; the exact step cannot."""
    fast = task._replace(training=task.training._replace(learning_rate=0.5))
    algorithm = fedhb_niw(fast, covariance="joint", penalty_scale=penalty_scale)
    federation = Federation(algorithm, train, test)
    start = federation.init(jax.random.key(0))
    before = jax.device_get(start.server.posterior.mean)
    state, metrics = federation.rounds(start, 3)
    assert np.isfinite(metrics.metrics["loss"]).all() and not metrics.failed.any()
    # The stiffer the penalty, the nearer the mean stays to where it was.
    for old, new in zip(
        jax.tree.leaves(before),
        jax.tree.leaves(state.server.posterior.mean),
        strict=True,
    ):
        assert np.abs(old - new).max() < most


@pytest.mark.parametrize("covariance", ["per_weight", "joint"])
def test_personalisation_keeps_the_clients_penalty(task, train, covariance):  # Eq. 46
    """The stronger it is, the nearer the body stays to m_0; the head is free."""
    data, moved = one_client(train), []
    for penalty_scale in (0.0, 1e6):
        algorithm = fedhb_niw(
            task, covariance=covariance, p_drop=0.0, penalty_scale=penalty_scale
        )
        if covariance == "per_weight" and penalty_scale:
            # Gradient steps: as strong as is stable, w lr < 2 (1 + momentum).
            algorithm = fedhb_niw(task, p_drop=0.0, penalty_scale=100.0)
        server = algorithm.init(KEY)
        personal = algorithm.personalise(KEY, server, (), data)
        moved.append(
            [
                max(float(jnp.abs(a - b).max()) for a, b in zip(*leaves, strict=True))
                for leaves in (
                    map(jax.tree.leaves, (personal["body"], server.posterior.mean)),
                    map(jax.tree.leaves, (personal["head"], server.head)),
                )
            ]
        )
    (free_body, free_head), (held_body, held_head) = moved
    assert held_body < 0.8 * free_body
    assert held_head > 0.5 * free_head > 0


def test_the_spikes_noise_is_drawn_only_if_asked_for(task, train):
    data = one_client(train)
    bodies = []
    for spike_noise in (False, True):
        algorithm = fedhb_niw(task, p_drop=0.0, epsilon=0.3, spike_noise=spike_noise)
        server = algorithm.init(KEY)
        output = algorithm.client_update(KEY, 0, server, (), data)
        bodies.append(output.statistics["sum_m"]["Dense_0"]["kernel"])
    assert np.abs(bodies[0] - bodies[1]).max() > 1e-3


def test_no_penalty_no_dropout_and_many_clients_is_nearly_fedbabu(task, train, test):
    many = task._replace(clients=10**6)
    options = {"p_drop": 0.0, "penalty_scale": 0.0, "prior_mean": "zero"}
    servers = []
    for algorithm in (fedhb_niw(many, **options), fedbabu(many)):
        federation = Federation(algorithm, train, test)
        state, _ = federation.rounds(federation.init(jax.random.key(0)), 2)
        servers.append(state.server)
    assert_close(servers[0].posterior.mean, servers[1]["body"], rtol=1e-4, atol=1e-5)
    assert_close(servers[0].head, servers[1]["head"])


def test_the_head_stays_frozen_until_personalisation(task, train, test):
    algorithm = fedhb_niw(task)
    federation = Federation(algorithm, train, test)
    state = federation.init(jax.random.key(0))
    head = jax.device_get(state.server.head)
    state, _ = federation.rounds(state, 2)
    assert_close(state.server.head, head, rtol=0, atol=0)
    assert set(state.server.posterior.mean) == {"Dense_0"}
    personal = algorithm.personalise(KEY, state.server, (), one_client(train))
    for old, new in zip(
        jax.tree.leaves(head), jax.tree.leaves(personal["head"]), strict=True
    ):
        assert not np.allclose(old, new, rtol=1e-6)


@pytest.mark.parametrize("covariance", ["per_weight", "joint"])
def test_sampled_prediction_spreads_around_the_mode(task, train, covariance):
    options = {"covariance": covariance, "num_samples": 300}
    sampled = fedhb_niw(task, prediction="sample", **options)
    mode = fedhb_niw(task, prediction="mode", covariance=covariance)
    server = sampled.init(KEY)
    # A small V_0, so that the network is nearly linear over the samples.
    small = jax.tree.map(lambda v: 1e-5 * v, server.posterior.scale)
    server = server._replace(posterior=server.posterior._replace(scale=small))
    x, mask = one_client(train).x, jnp.ones(20, bool)
    draws = sampled.global_predictive(KEY, server, x, mask)
    centre = mode.global_predictive(KEY, server, x, mask)
    assert draws.shape == (300, 20, 3) and centre.shape == (1, 20, 3)
    spread = draws.std(0)
    assert spread.min() > 0
    error = np.abs(draws.mean(0) - centre[0])
    assert (error < 5 * spread / np.sqrt(300) + 1e-3).all()
