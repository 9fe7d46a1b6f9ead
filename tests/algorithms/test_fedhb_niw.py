"""FedHB-NIW against the algorithms and formulas that it generalises."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from fedvi.algorithm import Aggregate
from fedvi.algorithms import fedbabu, fedhb_niw
from fedvi.algorithms.common import classification_loss, log_probabilities
from fedvi.algorithms.fedhb_niw import FedHBNIW, mode, spiky_loss
from fedvi.distributions import dropout
from fedvi.federation import Federation
from fedvi.flat import trees
from fedvi.local import Batch, LocalTraining, Quadratic, minimise

KEY = jax.random.key(3)


def assert_close(a, b, **kwargs):
    kwargs = {"rtol": 1e-5, "atol": 1e-6, **kwargs}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **kwargs), a, b)


def one_client(train):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), train)


def proximal_sgd(task, server, data, mu):
    """FedProx's client on the body: CE + μ/2 ‖m - m_0‖²."""
    centre = server.posterior.mean

    def loss(key, learned, batch):
        return classification_loss(task.model, {**server.frozen, **learned}, batch)

    near = Quadratic(trees(centre), mu)
    return minimise(KEY, 0, centre, data, task.training, loss, lambda params: near)[0]


def test_without_dropout_and_constant_scale_a_client_is_fedprox(task, train):
    penalty_scale = 50.0
    algorithm = fedhb_niw(task, p_drop=0.0, penalty_scale=penalty_scale)
    data, server = one_client(train), algorithm.init(jax.random.key(0))
    constant = jax.tree.map(lambda v: jnp.full_like(v, 7.0), server.posterior.scale)
    server = server._replace(posterior=server.posterior._replace(scale=constant))
    # Eq. 17 with d = 1: p (n_0 + d + 1) / (V |D_i|), n_0 = |D| + 3, |D_i| = 13.
    mu = penalty_scale * (task.samples + 5) / (7.0 * 13)

    @jax.jit
    def run():
        output = algorithm.client_update(KEY, 0, server, (), data)
        bodies = [proximal_sgd(task, server, data, weight) for weight in (mu, 0.0)]
        return output, [optax.tree.sub(body, server.posterior.mean) for body in bodies]

    output, (expected, free) = run()
    assert_close(output.upload, expected)
    # Its own metric; the loss is the data term alone.
    far = np.square(expected["body"].vector).sum()
    np.testing.assert_allclose(output.metrics["penalty"], mu / 2 * far, rtol=1e-4)
    assert not np.allclose(free["body"].vector, expected["body"].vector)


@pytest.fixture(scope="module")
def bodies(task):
    """m_i of three participants out of the population, `[3, d]`."""
    shape = jax.eval_shape(task.model.init, KEY)["body"].vector.shape
    return np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)


def after(algorithm, server, bodies, population):
    """The server's state after participants with these bodies."""
    uploads = [
        jax.tree.map(lambda m0, b=b: b - m0, server.posterior.mean) for b in bodies
    ]
    summands = [algorithm.statistics(server, upload) for upload in uploads]
    total = jax.tree.map(lambda *leaves: sum(leaves), *summands)
    aggregate = Aggregate(total, jnp.float32(3), jnp.float32(3), population)
    return algorithm.server_update(KEY, 0, server, aggregate)


@pytest.mark.parametrize("prior_mean", ["zero", "previous"])
def test_without_dropout_the_mean_is_fedavgs_with_the_prior(task, bodies, prior_mean):
    """Shrunk by μ_0 = 0, or a moving average."""
    algorithm, n = fedhb_niw(task, p_drop=0.0, prior_mean=prior_mean), task.clients
    start = algorithm.init(KEY)
    server = after(algorithm, start, bodies, n)
    prior = start.posterior.mean["body"].vector if prior_mean == "previous" else 0.0
    expected = (prior + n * bodies.mean(0)) / (n + 1)
    np.testing.assert_allclose(
        server.posterior.mean["body"].vector, expected, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("covariance", ["per_weight", "joint"])
def test_the_server_minimises_the_papers_objective(task, bodies, covariance):
    """Eq. 37 + N/N_f Σ Eq. 38, straight from the paper, by autodiff."""
    p_drop, epsilon = 0.2, 0.03
    algorithm = fedhb_niw(
        task, covariance=covariance, prior_mean="zero", p_drop=p_drop, epsilon=epsilon
    )
    server = after(algorithm, algorithm.init(KEY), bodies, task.clients)
    d = bodies.shape[1] if covariance == "joint" else 1
    n0, nu0, share = task.samples + d + 2, d + 2, task.clients / 3
    # Weights of the kernel drop, biases do not.
    keep = {"Dense_0": {"bias": np.ones(5), "kernel": np.full((6, 5), 1 - p_drop)}}
    p = ravel_pytree(keep)[0]

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def slopes(m0, v0):
        kl = 0.5 * jnp.sum(n0 / v0 + nu0 * jnp.log(v0) + n0 * m0**2 / v0)
        fit = 0.0
        for m in bodies:
            quadratic = p * m**2 - 2 * p * m0 * m + m0**2 + epsilon**2
            fit += 0.5 * jnp.sum(n0 * quadratic / v0 + jnp.log(v0))
        return kl + share * fit

    m0, v0 = (part["body"].vector for part in server.posterior)
    # Sizes of the terms that cancel, for a tolerance in float32.
    sizes = (n0 * share * sum(map(abs, bodies)) / v0, (nu0 + 9) / v0)
    for gradient, moved, size in zip(slopes(m0, v0), slopes(m0 + 0.1, v0 * 1.1), sizes):
        assert np.all(np.abs(gradient) < 1e-5 * (1 + np.max(size)))
        assert np.any(np.abs(moved) > 1e-3 * (1 + np.max(size)))


def test_what_is_sent_bounds_what_is_summed(task, bodies):
    algorithm = fedhb_niw(task)
    server = algorithm.init(KEY)
    upload = jax.tree.map(lambda m0: bodies[0] - m0, server.posterior.mean)
    summands = algorithm.statistics(server, upload)
    assert_close(summands["delta"], upload, rtol=0, atol=0)
    assert_close(summands["delta2"], jax.tree.map(jnp.square, upload), rtol=0, atol=0)


@pytest.mark.parametrize("covariance", ["per_weight", "joint"])
@pytest.mark.parametrize("penalty_scale", [1.0, 1e4, 1e12])
def test_the_penalty_is_stable_at_any_strength(task, train, covariance, penalty_scale):
    """Issue 7: its coefficient would blow a gradient step up; the exact step cannot."""
    fast = task._replace(training=task.training._replace(learning_rate=0.5))
    algorithm = fedhb_niw(fast, covariance=covariance, penalty_scale=penalty_scale)
    server = algorithm.init(KEY)
    output = jax.jit(algorithm.client_update)(KEY, 0, server, (), one_client(train))
    assert np.isfinite(output.metrics["loss"])
    # The stiffer the penalty, the nearer the client stays to the mean.
    most = {1.0: 2.0, 1e4: 0.02, 1e12: 1e-6}[penalty_scale]
    assert 0 <= np.abs(output.upload["body"].vector).max() < most


def test_many_clients_of_few_examples_stay_nearer_than_without_a_penalty(task, train):
    """N=10,000, 20 examples, five epochs: by gradient steps 7e13, FedBABU 1.0."""
    many = task._replace(
        clients=10_000,
        samples=200_000,
        training=LocalTraining(epochs=5, batch_size=10, learning_rate=0.1),
    )
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    assert data.size == 20

    def farthest(algorithm):
        server = algorithm.init(KEY)
        upload = jax.jit(algorithm.client_update)(KEY, 0, server, (), data).upload
        return jnp.abs(upload["body"].vector).max()

    penalised = farthest(fedhb_niw(many, p_drop=0.0, penalty_scale=1.0))
    assert 0 < penalised < 0.2 * farthest(fedbabu(many))


@pytest.mark.parametrize(
    ("covariance", "held"), [("per_weight", 100.0), ("joint", 1e6)]
)
def test_personalisation_keeps_the_clients_penalty(task, train, covariance, held):
    """Eq. 46: the stronger, the nearer the body stays to m_0; the head is free."""
    data = one_client(train)

    @jax.jit
    def moved(penalty_scale):
        algorithm = fedhb_niw(
            task, covariance=covariance, p_drop=0.0, penalty_scale=penalty_scale
        )
        server = algorithm.init(KEY)
        personal = algorithm.personalise(KEY, server, (), data)
        change = optax.tree.sub(personal, mode(server))
        return {name: jnp.abs(part.vector).max() for name, part in change.items()}

    free, near = moved(0.0), moved(held)
    assert near["body"] < 0.8 * free["body"]
    assert near["head"] > 0.5 * free["head"] > 0


def test_the_spikes_noise_is_drawn_only_if_asked_for(task, train):
    params = task.model.init(KEY)
    batch = Batch(*one_client(train)[:2], jnp.ones(20, bool))
    spiky = {"body": params["body"]}
    losses = {
        (noise, drop): float(
            spiky_loss(
                task.model,
                FedHBNIW(p_drop=drop, epsilon=0.3, spike_noise=noise),
                (dropout.kept_columns(KEY, spiky, 1 - drop), KEY),
                params,
                spiky,
                batch,
            )
        )
        for noise in (False, True)
        for drop in (0.0, 0.5)
    }
    assert losses[False, 0.0] == pytest.approx(
        float(classification_loss(task.model, params, batch)), rel=1e-6
    )
    assert len(set(losses.values())) == 4


def test_no_penalty_no_dropout_and_many_clients_is_nearly_fedbabu(task, train, test):
    many = task._replace(clients=10**6)
    options = {"p_drop": 0.0, "penalty_scale": 0.0, "prior_mean": "zero"}
    servers = []
    for algorithm in (fedhb_niw(many, **options), fedbabu(many)):
        # A number of clients that the data do not have.
        federation = Federation(algorithm._replace(population=None), train, test)
        start = federation.init(jax.random.key(0))
        head = jax.device_get(
            start.server["head"] if servers else start.server.frozen["head"]
        )
        servers.append(federation.rounds(start, 2)[0].server)
    assert_close(mode(servers[0]), servers[1], rtol=1e-4, atol=1e-5)
    # The head stays frozen in both.
    heads = [server["head"] for server in (mode(servers[0]), servers[1])]
    assert_close(heads, [head, head], rtol=0, atol=0)


def test_a_clients_own_optimiser(task, train):
    """AdamW's weight decay shows: the same update, less rate · decay · θ a step."""
    data = one_client(train)

    def client(optimizer):
        training = LocalTraining(1, 20, learning_rate=0.1, optimizer=optimizer)
        algorithm = fedhb_niw(task._replace(training=training), p_drop=0.0)
        server = algorithm.init(KEY)
        return server, algorithm.client_update(KEY, 0, server, (), data).upload

    server, plain = client(optax.adam)
    _, decayed = client(partial(optax.adamw, weight_decay=0.5))
    mean = server.posterior.mean
    expected = jax.tree.map(lambda p, m: p - 0.1 * 0.5 * m, plain, mean)
    assert_close(decayed, expected, rtol=1e-4)


@pytest.mark.parametrize("covariance", ["per_weight", "joint"])
def test_sampled_prediction_and_posterior_spread_around_the_mode(
    task, train, covariance
):
    options = {"covariance": covariance, "num_samples": 300}
    sampled = fedhb_niw(task, prediction="sample", **options)
    server = sampled.init(KEY)
    # A small V_0, so that the network is nearly linear over the samples.
    small = jax.tree.map(lambda v: 1e-5 * v, server.posterior.scale)
    server = server._replace(posterior=server.posterior._replace(scale=small))
    x, mask = one_client(train).x, jnp.ones(20, bool)
    draws = sampled.global_predictive(KEY, server, x, mask)
    centre = fedhb_niw(task, covariance=covariance).global_predictive(
        KEY, server, x, mask
    )
    assert draws.shape == (300, 20, 3) and centre.shape == (1, 20, 3)
    spread = draws.std(0)
    assert spread.min() > 0
    error = np.abs(draws.mean(0) - centre[0])
    assert (error < 5 * spread / np.sqrt(300) + 1e-3).all()
    # What is drawn is the posterior that a user gets.
    found = sampled.posterior(server)
    draw = found.sample(seed=KEY, sample_shape=300)
    predict = jax.vmap(lambda p: log_probabilities(task.model, p, x, mask))
    np.testing.assert_allclose(predict(draw), draws, rtol=1e-4, atol=1e-5)
    d = task.samples + 3
    variance = (
        (task.samples + 2)
        / ((task.samples + 1) * d)
        * small["body"].vector
        * d
        / (d - 2)
    )
    std = ravel_pytree(found.stddev()["body"])[0]
    np.testing.assert_allclose(std, np.sqrt(variance), rtol=1e-5)
    assert_close(found.mean(), trees(mode(server)))


def test_a_personal_posterior_drops_columns_and_keeps_the_head(task):
    algorithm = fedhb_niw(task, p_drop=0.3, epsilon=0.01)
    params = task.model.init(KEY)
    found = algorithm.personal_posterior(algorithm.init(KEY), params)
    mean, layers = found.mean(), trees(params)
    kernel = layers["body"]["Dense_0"]["kernel"]
    np.testing.assert_allclose(mean["body"]["Dense_0"]["kernel"], 0.7 * kernel)
    assert_close(mean["head"], layers["head"], rtol=0, atol=0)
    variance = 0.01**2 + 0.7 * 0.3 * kernel**2
    std = found.stddev()["body"]["Dense_0"]["kernel"]
    np.testing.assert_allclose(std, np.sqrt(variance), rtol=1e-5)
    assert np.isfinite(found.log_prob(params))


def test_a_trained_head_is_part_of_the_posterior(task, train):
    """In d, m_0 and V_0, sent, dropped and held near m_0 like the body."""
    frozen, trained = (
        fedhb_niw(task, head=head, covariance="joint", penalty_scale=1e5, p_drop=0.3)
        for head in ("frozen", "trained")
    )
    server, data = trained.init(KEY), one_client(train)
    params = task.model.init(KEY)
    assert_close(mode(server), params, rtol=0, atol=0)
    assert server.frozen == {} and set(frozen.init(KEY).frozen) == {"head"}
    body, head = params["body"].vector.size, params["head"].vector.size
    d = body + head
    # V_0 of Eq. 18 without scatter, biases: n_0 / (N + d + 2) (1 + N ε²).
    n, bias = task.clients, trees(server.posterior.scale["head"])["classifier"]["bias"]
    expected = (task.samples + d + 2) / (n + d + 2) * (1 + n * 1e-8)
    np.testing.assert_allclose(bias, expected, rtol=1e-6)

    @jax.jit
    def moved():
        upload = trained.client_update(KEY, 0, server, (), data).upload
        own = [a.personalise(KEY, a.init(KEY), (), data) for a in (frozen, trained)]
        return upload, [optax.tree.sub(tuned, params)["head"].vector for tuned in own]

    upload, (free, held) = moved()
    assert set(upload) == {"body", "head"}
    assert 0 < np.abs(upload["head"].vector).max() < 1e-4
    assert np.abs(held).max() < 1e-4 < np.abs(free).max()
    personal = trained.personal_posterior(server, params)
    kernel = trees(params)["head"]["classifier"]["kernel"]
    mean = personal.mean()["head"]["classifier"]["kernel"]
    np.testing.assert_allclose(mean, 0.7 * kernel, rtol=1e-6)
    assert personal.event_shape == trained.posterior(server).event_shape
