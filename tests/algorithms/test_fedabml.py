"""FedABML against Per-FedAvg, its Alg. 1, and the exact posterior of its toy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fedvi.algorithm import Aggregate, Task
from fedvi.algorithms import fedabml, fedavg
from fedvi.algorithms.common import classification_loss
from fedvi.algorithms.fedabml import Server
from fedvi.data import ClientData
from fedvi.distributions import mean_field
from fedvi.federation import Federation
from fedvi.flat import trees
from fedvi.local import Batch, LocalTraining, Quadratic, fold_minibatches
from fedvi.nn import from_flax

KEY = jax.random.key(3)
RATE, SIZE, CLIENT, NU = 0.05, 13, 1, -1.0
# Full batches, so that no reference needs to know the order of the examples.
PLAIN = LocalTraining(epochs=3, batch_size=20, learning_rate=RATE, momentum=0.0)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b
    )


def flat(tree):
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves).astype(np.float64)


def arrived(server, output):
    return optax.tree.add(server.prior, output.upload)


def sgd(params, gradients, rate):
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients)


@pytest.fixture(scope="module")
def plain(task):
    return task._replace(training=PLAIN, finetuning=PLAIN)


@pytest.fixture(scope="module")
def data(train):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[CLIENT]), train)


@pytest.fixture(scope="module")
def server(task):
    return jax.jit(fedabml(task).init)(KEY)


@pytest.fixture(scope="module")
def wide(server):
    """A prior under whose scale the KL term is not stiff."""
    rho = jax.tree.map(lambda leaf: np.full_like(leaf, NU), server.prior.rho)
    return Server(mean_field.MeanField(server.prior.mu, rho, "exp"))


@pytest.fixture(scope="module")
def step(task):
    """One full-batch step of SGD."""

    def step(params, data):
        batch = Batch(data.x, data.y, jnp.arange(data.y.shape[0]) < data.size)
        loss = partial(classification_loss, task.model, batch=batch)
        return sgd(params, jax.grad(loss)(params), RATE)

    return jax.jit(step)


def test_without_noise_personalisation_is_per_fedavgs(plain, server, data, step):
    """Steps of plain SGD from θ (3.6); with 'average' that is what a client sends.

    Two steps a minibatch in one, one in the other, on as many minibatches.
    """
    algorithm = fedabml(
        plain,
        kl_weight=0.0,
        personal_steps=2,
        finetune_steps=1,
        sampling="weight",
        mc_samples=1,
        eps_scale=0.0,
    )

    @jax.jit
    def run():
        personal = algorithm.personalise(KEY, server, (), data)
        return personal, algorithm.client_update(KEY, 0, server, (), data)

    path = [server.prior.mu]
    for _ in range(2 * PLAIN.epochs):
        path.append(step(path[-1], data))
    personal, output = run()
    assert np.abs(flat(path[-1]) - flat(path[PLAIN.epochs])).max() > 0.02
    for found, steps in ((personal, 1), (arrived(server, output), 2)):
        assert_close(found.mu, path[steps * PLAIN.epochs])
        np.testing.assert_array_equal(flat(found.rho), -4.0)
    assert output.client == () and output.weight == 1


@pytest.mark.parametrize(
    ("inner_rate", "steps", "kl_weight"), [(None, 1, 0.0), (0.2, 2, 0.5)]
)
def test_meta_is_per_fedavgs_exact_gradient(
    plain, wide, data, train, inner_rate, steps, kl_weight
):
    """θ - β ∇_θ f_query(θ - α ∇f_support(θ)); α is the round's rate by default.

    With a KL term f has λ/n |φ - θ|²/2σ² in it: σ is the same until θ's first step.
    """
    training = PLAIN._replace(epochs=1, learning_rate=lambda t: 0.05 * (1 + t))
    algorithm = fedabml(
        plain._replace(training=training),
        theta_update="meta",
        nu=NU,
        kl_weight=kl_weight,
        personal_steps=steps,
        global_learning_rate=0.2,
        inner_learning_rate=inner_rate,
        sampling="weight",
        mc_samples=1,
        eps_scale=0.0,
    )
    round_index, alpha = 1, inner_rate or 0.1
    update = jax.jit(algorithm.client_update)
    output = update(KEY, round_index, wide, (), data)
    precision = kl_weight / SIZE * np.exp(-2 * NU)

    @jax.jit
    def expected(params):
        nothing = Batch(data.x, data.y, jnp.zeros(20, bool))
        batch = fold_minibatches(  # the minibatch that the client sees
            KEY, data, training, lambda key, seen, batch: batch, nothing
        )
        even = jnp.arange(20) % 2 == 0

        def loss(phi, theta, mask):
            chosen = batch._replace(mask=batch.mask & mask)
            penalty = Quadratic(*trees((theta, precision))).value(phi)
            return classification_loss(plain.model, phi, chosen) + penalty

        def adapt(theta):
            phi = theta
            for _ in range(steps):
                phi = sgd(phi, jax.grad(loss)(phi, theta, even), alpha)
            return phi

        gradient = jax.grad(lambda theta: loss(adapt(theta), theta, ~even))(params)
        # The first-order shortcut, which the test must tell apart.
        shortcut = jax.grad(loss)(adapt(params), params, ~even)
        return sgd(params, gradient, 0.2), sgd(params, shortcut, 0.2)

    exact, first_order = expected(wide.prior.mu)
    assert_close(arrived(wide, output).mu, exact)
    assert np.abs(flat(exact) - flat(first_order)).max() > 1e-3
    if kl_weight == 0:
        np.testing.assert_array_equal(flat(arrived(wide, output).rho), NU)
    # Of a single example none is left to ask about, and θ stays.
    single = jax.tree.map(lambda leaf: jnp.asarray(leaf[3]), train)
    still = update(KEY, round_index, wide, (), single).upload
    assert not flat(still).any()


def test_alternate_is_line_9_of_algorithm_1(plain, wide, data, step):
    """θ's gradient is that of the KL alone, in closed form; φ has moved before."""
    kl_weight, eta = 0.7, 2.0
    once = plain._replace(training=PLAIN._replace(epochs=1))
    algorithm = fedabml(
        once,
        theta_update="alternate",
        nu=NU,
        kl_weight=kl_weight,
        personal_steps=1,
        global_learning_rate=eta,
        sampling="weight",
        mc_samples=1,
        eps_scale=0.0,
    )
    output = jax.jit(algorithm.client_update)(KEY, 0, wide, (), data)

    # φ starts at θ, where the KL has no gradient.
    shift = flat(step(wide.prior.mu, data)) - flat(wide.prior.mu)
    weight, variance = kl_weight / SIZE, np.exp(2 * NU)
    mu = flat(wide.prior.mu) + eta * weight * shift / variance
    rho = NU + eta * weight * shift**2 / variance
    np.testing.assert_allclose(flat(arrived(wide, output).mu), mu, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(arrived(wide, output).rho), rho, rtol=1e-6)
    assert np.abs(rho - NU).max() > 1e-4
    moved = ((mu - flat(wide.prior.mu)) ** 2).sum() / (2 * variance)
    np.testing.assert_allclose(output.metrics["kl"], moved, rtol=2e-3)


def test_the_server_fits_the_prior_to_the_posteriors(plain, server):
    """Mean of (m, ν), or the minimiser of Σ_i KL(φ_i ‖ θ) in Eq. 3.5."""
    rng = np.random.default_rng(0)
    posteriors = [
        jax.tree.map(
            lambda leaf: np.asarray(leaf) + 0.1 * rng.normal(size=leaf.shape), tree
        )
        for tree in [server.prior] * 3
    ]
    posteriors = [jax.tree.map(np.float32, q) for q in posteriors]
    count = jnp.float32(3)

    @jax.jit
    def run():
        found = {}
        for average in ("parameters", "moments"):
            algorithm = fedabml(plain, average=average)
            statistics = [
                algorithm.statistics(server, optax.tree.sub(q, server.prior))
                for q in posteriors
            ]
            total = jax.tree.map(lambda *leaves: sum(leaves), *statistics)
            found[average] = algorithm.server_update(
                KEY, 0, server, Aggregate(total, count, count, 6)
            ).prior

        def objective(theta):
            return sum(mean_field.kl(q, theta) for q in posteriors)

        gradients = jax.tree.map(
            jax.grad(objective),
            (found["moments"], server.prior),
            is_leaf=lambda x: isinstance(x, mean_field.MeanField),
        )
        return found, gradients

    found, (at_new, at_old) = run()
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *posteriors)
    assert_close(found["parameters"], mean)
    assert found["moments"].link == "exp"
    assert np.abs(flat(at_new)).max() < 1e-4 * np.abs(flat(at_old)).max()


class Linear(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, use_bias=False)(x)


def squared_error(outputs, y, mask):
    """-log N(y | xw, 1), up to a constant."""
    error = jnp.where(mask, (outputs[:, 0] - y) ** 2, 0)
    return 0.5 * error.sum() / jnp.maximum(mask.sum(), 1)


def test_the_toy_comes_closer_to_the_exact_posterior_than_fedavg():
    """§5.1: two quadratic clients, the same local steps and rate for both methods."""
    rng, samples = np.random.default_rng(0), 20
    scales = np.array([[[1.5, 0.3]], [[0.3, 1.5]]])
    rotation = np.array([[np.cos(0.6), -np.sin(0.6)], [np.sin(0.6), np.cos(0.6)]])
    x = rng.normal(size=(2, samples, 2)) * scales @ rotation
    truth = np.array([[2.0, -1.0], [-1.0, 2.0]])
    y = np.einsum("cnd,cd->cn", x, truth) + 0.3 * rng.normal(size=(2, samples))
    # Uniform prior: precisions add up, float64.
    exact = np.linalg.solve(
        np.einsum("cnd,cne->de", x, x), np.einsum("cnd,cn->d", x, y)
    )
    size = np.full(2, samples, np.int32)
    data = ClientData(x.astype(np.float32), y.astype(np.float32), size)
    model = from_flax(Linear(), (2,), head="Dense_0")._replace(loss=squared_error)
    training = LocalTraining(10, samples, learning_rate=0.1, momentum=0.0)
    task = Task(model, training, training, 2, 2 * samples)

    def distances(algorithm, weights):
        federation = Federation(algorithm, data, data)
        state, found = federation.init(KEY), []
        for _ in range(6):
            state, _ = federation.rounds(state, 25)
            found.append(np.linalg.norm(flat(weights(state.server)) - exact))
        return found

    algorithm = fedabml(
        task, theta_update="alternate", kl_weight=1.0, nu=-2.0, personal_steps=1
    )
    ours = distances(algorithm, lambda s: s.prior.mu)
    fedavgs = distances(fedavg(task), lambda s: s.params)
    assert ours[0] > 1.5 * ours[1] > 2 * ours[2]  # it falls
    # FedAvg has stopped where its clients' drifts balance.
    assert fedavgs[-1] == pytest.approx(fedavgs[0], rel=1e-2)
    assert ours[-1] < 0.75 * fedavgs[-1]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("theta_update", "reptile"),
        ("kl_weight", -1.0),
        ("nu", float("nan")),
        ("finetune_steps", 0),
        ("inner_learning_rate", 0.0),
        ("mc_samples", 10**12),
    ],
)
def test_options_are_checked_by_name_at_construction(task, option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        fedabml(task, **{option: value})


def test_options_that_leave_nothing_to_learn_from_are_refused(task):
    single = task._replace(training=task.training._replace(batch_size=1))
    with pytest.raises(ValueError, match="batch_size=1 with theta_update='meta'"):
        fedabml(single, theta_update="meta")
    with pytest.raises(ValueError, match="kl_weight=0 with theta_update='alternate'"):
        fedabml(task, theta_update="alternate", kl_weight=0)
