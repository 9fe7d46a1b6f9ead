"""FedHB-Mixture against the algorithms and formulas that it generalises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from scipy import stats

from fedvi.algorithm import Aggregate
from fedvi.algorithms import fedhb_mixture
from fedvi.algorithms.common import classification_loss, finetune
from fedvi.algorithms.fedhb_mixture import (
    FedHBMixture,
    first_model,
    penalty,
    prototype,
    statistics,
    total_loss,
    train_gate,
)
from fedvi.algorithms.fedhb_mixture import train as descend
from fedvi.distributions import mixture
from fedvi.federation import Federation
from fedvi.flat import trees
from fedvi.local import Batch, LocalTraining, Quadratic, minimise

KEY = jax.random.key(3)


def assert_close(a, b, **kwargs):
    kwargs = {"rtol": 1e-5, "atol": 1e-6, **kwargs}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **kwargs), a, b)


def one_client(train, client=1):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[client]), train)


@pytest.fixture(scope="module")
def bodies(task):
    """m_i of four clients, `[4, d]`."""
    shape = jax.eval_shape(task.model.init, KEY)["body"].vector.shape
    return np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32)


def upload_of(server, body, mass):
    """What a client with this body and these responsibilities sends."""
    nearest = np.int32(np.argmax(mass))
    moved = jax.tree.map(lambda r: body - r[nearest], server.prototypes)
    gate = optax.tree.zeros_like({"body": server.gate["body"]})
    return {"nearest": nearest, "mass": jnp.float32(mass), "model": moved, "gate": gate}


def after(algorithm, server, bodies, masses, population):
    """The server's state after participants with these bodies."""
    summands = [
        algorithm.statistics(server, upload_of(server, body, mass))
        for body, mass in zip(bodies, masses, strict=True)
    ]
    total = jax.tree.map(lambda *leaves: sum(leaves), *summands)
    count = jnp.float32(len(bodies))
    aggregate = Aggregate(total, count, count, population)
    return algorithm.server_update(KEY, 0, server, aggregate)


@pytest.mark.parametrize("start", ["centre", "likelihood"])
def test_one_prototype_is_fedprox(task, train, start):
    variance, size = 0.02, 13
    algorithm = fedhb_mixture(task, components=1, variance=variance, start=start)
    server, data = algorithm.init(KEY), one_client(train)
    centre = prototype(server, 0)

    near = Quadratic(trees(centre), 1 / (variance * size))

    def loss(key, learned, batch):
        return classification_loss(task.model, {**server.frozen, **learned}, batch)

    @jax.jit
    def run():
        upload = algorithm.client_update(KEY, 0, server, (), data).upload
        body_key = jax.random.split(KEY, 3)[0]
        learned, _ = minimise(
            body_key, 0, centre, data, task.training, loss, lambda params: near
        )
        return upload, optax.tree.sub(learned, centre)

    upload, expected = run()
    assert_close(upload["model"], expected)
    assert upload["mass"] == 1 and upload["nearest"] == 0


def test_what_is_sent_gives_the_sums_of_the_em_step(task, bodies):
    server = fedhb_mixture(task, components=3).init(KEY)
    mass = np.array([0.2, 0.1, 0.7], np.float32)
    found = statistics(server, upload_of(server, bodies[0], mass))
    expected = mass[:, None] * (bodies[:1] - server.prototypes["body"].vector)
    np.testing.assert_allclose(
        found["moved"]["body"].vector, expected, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(found["mass"], mass)


def test_the_server_takes_the_em_step_of_the_paper(task, bodies):
    """Eq. 24, half of the population took part; the last prototype is empty."""
    variance, masses = 0.3, np.array([[1, 0, 0], [0.5, 0.5, 0]] * 2, np.float32)
    for prior_mean in ("zero", "previous"):
        algorithm = fedhb_mixture(
            task, components=3, variance=variance, prior_mean=prior_mean
        )
        server = algorithm.init(KEY)
        new = after(algorithm, server, bodies, masses, population=8)
        r = np.asarray(server.prototypes["body"].vector)
        prior = r if prior_mean == "previous" else 0.0
        total, weight = masses.T @ bodies, masses.sum(0)[:, None] + variance / 2
        expected = np.where(
            masses.sum(0)[:, None] > 0, (variance / 2 * prior + total) / weight, r
        )
        np.testing.assert_allclose(
            new.prototypes["body"].vector, expected, rtol=1e-4, atol=1e-6
        )
        assert_close(new.gate, server.gate)


def test_prototypes_start_apart_and_init_spread_says_how_far(task):
    distances = {}
    for spread in (1.0, 0.1, 0.0):
        r = fedhb_mixture(task, init_spread=spread).init(KEY).prototypes["body"].vector
        distances[spread] = float(jnp.linalg.norm(r[0] - r[1]))
    assert distances[1.0] > 0.5 and distances[0.0] == 0
    assert distances[0.1] == pytest.approx(0.1 * distances[1.0], rel=1e-4)


def test_likelihood_starts_from_the_prototype_that_fits_the_client(task, train):
    data = one_client(train)
    fitted = finetune(
        task._replace(finetuning=task.training._replace(epochs=20)),
        KEY,
        task.model.init(KEY),
        data,
    )
    server = fedhb_mixture(task, components=3).init(KEY)
    prototypes = jax.tree.map(
        lambda r, f: r.at[1].set(f), server.prototypes, {"body": fitted["body"]}
    )
    server = server._replace(prototypes=prototypes, frozen={"head": fitted["head"]})
    chosen = first_model(task, FedHBMixture(components=3), KEY, server, data)
    assert_close(chosen, {"body": fitted["body"]}, rtol=0, atol=0)
    mean = first_model(task, FedHBMixture(start="centre"), KEY, server, data)
    expected = prototypes["body"].vector.mean(0)
    np.testing.assert_allclose(mean["body"].vector, expected)


@pytest.mark.parametrize("steps", [None, 1, 5])
def test_the_loss_that_chooses_is_of_all_of_the_clients_data(task, train, steps):
    """Issue 6: `--local_steps` is for training, one pass is 2 minibatches here."""
    other = task._replace(training=task.training._replace(steps=steps, epochs=0))
    data, params = one_client(train), task.model.init(KEY)
    logits = task.model.apply(params, data.x[:13])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, data.y[:13])
    found = total_loss(other, KEY, params, data)
    np.testing.assert_allclose(found, losses.sum(), rtol=1e-5)


def test_global_prediction_is_the_gated_mixture(task, train):
    algorithm = fedhb_mixture(task, components=2)
    server = algorithm.init(KEY)
    x, mask = one_client(train).x, jnp.ones(20, bool)
    gate_model = task.model.with_classes(2)
    gate = jax.nn.softmax(gate_model.apply(server.gate, x, mask))
    expected = sum(
        gate[:, j : j + 1]
        * jax.nn.softmax(
            task.model.apply({**server.frozen, **prototype(server, j)}, x, mask)
        )
        for j in range(2)
    )
    predicted = algorithm.global_predictive(KEY, server, x, mask)
    np.testing.assert_allclose(np.exp(predicted[0]), expected, rtol=1e-5, atol=1e-6)


def test_a_gate_learns_the_label_of_the_nearest_prototype(task, train):
    gate_model, data = task.model.with_classes(2), one_client(train)
    gate = gate_model.init(KEY)
    moved, loss = train_gate(
        gate_model, task.training, FedHBMixture(), KEY, 0, gate, 1, data
    )
    assert set(moved) == {"body"}
    trained = {**gate, "body": optax.tree.add(gate["body"], moved["body"])}
    before, after = (
        gate_model.apply(params, data.x[:13]) for params in (gate, trained)
    )
    margin = [np.diff(logits, axis=1).mean() for logits in (before, after)]
    assert margin[1] > margin[0] + 0.5 and loss > 0


def test_the_gate_learns_which_prototype_explains_a_client(task, train, test):
    """Two groups of clients with shifted inputs: the gate tells them apart."""
    shift = np.where(np.arange(7) % 2, 6.0, -6.0)[:, None, None].astype(np.float32)
    split = train._replace(x=train.x + shift)
    federation = Federation(fedhb_mixture(task, start="likelihood"), split, split)
    state = federation.init(jax.random.key(2))
    head = jax.device_get(state.server.gate["head"])
    state, metrics = federation.rounds(state, 16)
    share = metrics.metrics["share_0"][-1]
    assert 0.05 < share < 0.95  # both prototypes are in use
    losses = metrics.metrics["gate_loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert_close(state.server.gate["head"], head, rtol=0, atol=0)


def test_personalisation_keeps_the_clients_penalty(task, train):  # Eq. 84
    data = one_client(train)

    @jax.jit
    def moved(penalty_scale):
        algorithm = fedhb_mixture(task, components=1, penalty_scale=penalty_scale)
        server = algorithm.init(KEY)
        personal = algorithm.personalise(KEY, server, (), data)
        start = prototype(server, 0)["body"].vector
        return jnp.abs(personal["body"].vector - start).max()

    assert moved(100.0) < 0.8 * moved(0.0)


def test_posteriors_are_mixtures_of_networks_and_normal_around_a_client(task):
    algorithm = fedhb_mixture(task, variance=0.04, epsilon=0.01)
    server = algorithm.init(KEY)
    r, params = np.asarray(server.prototypes["body"].vector), task.model.init(KEY)
    found = algorithm.posterior(server)
    np.testing.assert_allclose(
        ravel_pytree(found.mean()["body"])[0], r.mean(0), rtol=1e-4, atol=1e-6
    )
    std = ravel_pytree(found.stddev()["body"])[0]
    np.testing.assert_allclose(std, np.sqrt(0.04 + r.var(0)), rtol=1e-4)
    assert_close(found.mean()["head"], trees(server.frozen["head"]), rtol=0, atol=0)
    own = algorithm.personal_posterior(server, params)
    assert_close(own.mean(), trees(params))
    np.testing.assert_allclose(ravel_pytree(own.stddev()["body"])[0], 0.01)
    normal = stats.norm(0, 0.01).logpdf(np.zeros(r.shape[1])).sum()
    np.testing.assert_allclose(own.log_prob(params), normal, rtol=1e-5)


@pytest.mark.parametrize("strength", [1.0, 1e4, 1e12])
def test_the_penalty_is_stable_at_any_strength(task, train, strength):
    """Issue 7: gradient steps diverge from lr s / (σ² |D_i|) = 2 (1 + β) on. Here m
    ends near the prototype that it started at, the other one far away."""
    algorithm = fedhb_mixture(task, penalty_scale=strength)
    server = algorithm.init(KEY)
    output = jax.jit(algorithm.client_update)(KEY, 0, server, (), one_client(train))
    farthest = jnp.abs(output.upload["model"]["body"].vector).max()
    assert farthest < 10 / strength + 1e-6  # rounding
    assert output.metrics["penalty"] >= 0 and np.isfinite(output.metrics["penalty"])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_client_ends_where_loss_and_penalty_balance(task, train, optimizer):
    """The gradient of all of Eq. 22, by autodiff, between two near prototypes."""
    options = FedHBMixture(init_spread=0.03, variance=0.1, penalty_scale=20.0)
    server = fedhb_mixture(task, **dataclasses.asdict(options)).init(KEY)
    data = one_client(train)
    patient = LocalTraining(3000, 20, 0.01, momentum=0.5, optimizer=optimizer)
    start = jax.tree.map(lambda r: r.mean(0), server.prototypes)

    def whole(learned):
        batch = Batch(data.x, data.y, jnp.arange(20) < data.size)
        fit = classification_loss(task.model, {**server.frozen, **learned}, batch)
        return fit + penalty(options, server, learned, data.size)

    @jax.jit
    def run():
        found, _ = descend(task, patient, options, KEY, 0, server, start, data)
        shares = mixture.responsibilities(found, server.prototypes, 0.1)
        slopes = [jax.grad(whole)(at)["body"].vector for at in (start, found)]
        return shares, [jnp.abs(slope).max() for slope in slopes]

    shares, (before, left) = run()
    assert shares.min() > 0.05  # both prototypes pull
    assert left < 0.01 * before


def test_a_trained_head_is_part_of_the_prototypes(task, train):
    algorithm = fedhb_mixture(task, head="trained")
    server = algorithm.init(KEY)
    assert server.frozen == {} and set(server.prototypes) == {"body", "head"}
    assert jnp.ptp(server.prototypes["head"].vector, axis=0).max() > 0
    upload = algorithm.client_update(KEY, 0, server, (), one_client(train)).upload
    for sent in (upload["model"], upload["gate"]):
        assert set(sent) == {"body", "head"}
        assert jnp.abs(sent["head"].vector).max() > 0
    std = algorithm.posterior(server).stddev()["head"]
    assert jax.tree.all(jax.tree.map(lambda s: (s > 0).all(), std))
