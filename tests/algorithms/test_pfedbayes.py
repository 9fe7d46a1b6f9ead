"""pFedBayes against pFedMe, Lemma A.2 and what its Alg. 1 says is kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedvi.algorithm import Aggregate
from fedvi.algorithms import build, options_of, pfedbayes
from fedvi.algorithms.pfedbayes import Server
from fedvi.distributions import mean_field, spike_and_slab
from fedvi.federation import Federation
from fedvi.flat import trees
from fedvi.local import LocalTraining
from fedvi.nn import build as build_model
from fedvi.nn import parameter_count
from fedvi.selection import Selection, uniform

KEY = jax.random.key(3)
RATE = 0.05
# Full batches, so that no reference needs to know the order of the examples.
PLAIN = LocalTraining(epochs=2, batch_size=20, learning_rate=RATE, momentum=0.0)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b
    )


def one_client(train, client):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[client]), train)


def perturbed(tree, seed, size=0.1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (
            np.asarray(leaf) + size * rng.normal(size=leaf.shape).astype(np.float32)
        ),
        tree,
    )


@pytest.fixture(scope="module")
def linear(task):
    model = build_model("logistic", classes=3, input_shape=(6,))
    return task._replace(model=model, training=PLAIN)


@pytest.fixture(scope="module")
def adam(linear):
    training = LocalTraining(
        epochs=1, batch_size=8, learning_rate=0.02, optimizer="adam"
    )
    return linear._replace(training=training)


def flat(params):
    """Kernel and bias of the linear model as one float64 matrix."""
    (layer,) = trees(params)["head"].values()
    rows = [np.asarray(layer["kernel"]), np.asarray(layer["bias"])[None]]
    return np.concatenate(rows).astype(np.float64)


def nll_gradient(weights, x, y):
    x = np.concatenate([x, np.ones((len(x), 1))], 1).astype(np.float64)
    p = np.exp(x @ weights)
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y)


def pfedme_step(theta, w, x, y, strength, steps):
    """One minibatch of pFedMe's client, NumPy: θ then w."""
    for _ in range(steps):
        theta = theta - RATE * (nll_gradient(theta, x, y) + strength * (theta - w))
    return theta, w - RATE * strength * (w - theta)


def test_without_noise_the_first_minibatch_is_pfedmes(linear, train):
    """With λ = ζ/nσ²; and w's σ has learnt from how far q is away."""
    zeta, size = 0.4, 13
    once = linear._replace(training=PLAIN._replace(epochs=1))
    algorithm = pfedbayes(once, zeta=zeta, eps_scale=0.0, sampling="weight")
    server = jax.jit(algorithm.init)(KEY)
    client = jax.jit(algorithm.init_client)(KEY, server)
    data = one_client(train, 1)
    output = jax.jit(algorithm.client_update)(KEY, 0, server, client, data)
    sigma, start = np.log1p(np.exp(-2.5)), flat(server.posterior.mu)
    strength = zeta / (size * sigma**2)
    theta, w = pfedme_step(start, start, data.x[:size], data.y[:size], strength, 5)
    personal = output.client.personal.posterior
    np.testing.assert_allclose(flat(personal.mu), theta, rtol=1e-4, atol=1e-6)
    arrived = optax.tree.add(server.posterior, output.upload)
    np.testing.assert_allclose(flat(arrived.mu), w, rtol=1e-4, atol=1e-6)
    assert np.abs(w - start).max() > 0.01
    np.testing.assert_allclose(flat(personal.rho), -2.5, rtol=1e-5)
    slope = 1 / (1 + np.exp(2.5))
    rho = -2.5 + RATE * zeta / size * (theta - start) ** 2 / sigma**3 * slope
    np.testing.assert_allclose(flat(arrived.rho), rho, rtol=1e-4)


def test_without_noise_rounds_are_pfedmes(linear, train, test):
    """Where σ is large its own learning is beside the point, and λ = ζ/nσ²."""
    zeta, sigma, beta, steps = 1e5, 100.0, 0.7, 3
    algorithm = pfedbayes(
        linear, zeta=zeta, rho=sigma, beta=beta, personal_steps=steps, eps_scale=0.0
    )
    federation = Federation(algorithm, train, test)
    state = federation.init(KEY)
    server = flat(state.server.posterior.mu)
    thetas = {i: server for i in range(7) if train.size[i]}
    for _ in range(3):
        uploads = []
        for i in thetas:
            n, w = train.size[i], server
            for _ in range(PLAIN.epochs):
                thetas[i], w = pfedme_step(
                    thetas[i],
                    w,
                    train.x[i, :n],
                    train.y[i, :n],
                    zeta / (n * sigma**2),
                    steps,
                )
            uploads.append(w)
        server = (1 - beta) * server + beta * np.mean(uploads, axis=0)
    state, _ = federation.rounds(state, 3)
    np.testing.assert_allclose(
        flat(state.server.posterior.mu), server, rtol=2e-4, atol=2e-6
    )
    for i, theta in thetas.items():
        own = jax.tree.map(lambda leaf: leaf[i], state.clients.personal.posterior)
        np.testing.assert_allclose(flat(own.mu), theta, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["pfedbayes", "sfedbayes"])
def test_averaging_moments_finds_the_minimum_of_lemma_a2(linear, train, name):
    algorithm = build(name, linear, upload="personal", average="moments", zeta=0.1)
    server = Server(perturbed(jax.jit(algorithm.init)(KEY).posterior, 0))
    client = jax.jit(algorithm.init_client)(KEY, server)
    update = jax.jit(algorithm.client_update)
    outputs = [
        update(jax.random.key(i), 0, server, client, one_client(train, i))
        for i in (0, 1, 5)
    ]
    posteriors = [output.client.personal.posterior for output in outputs]
    sent = [algorithm.statistics(server, output.upload) for output in outputs]
    total = jax.tree.map(lambda *leaves: sum(leaves), *sent)
    count = jnp.float32(3)
    kl = {"pfedbayes": mean_field.kl, "sfedbayes": spike_and_slab.kl}[name]

    @jax.jit
    def gradients():
        aggregate = Aggregate(total, count, count, 6)
        new = algorithm.server_update(KEY, 0, server, aggregate)

        def objective(w):
            return sum(kl(q, w) for q in posteriors)

        return jax.grad(objective)(new.posterior), jax.grad(objective)(server.posterior)

    at_new, at_old = (
        np.concatenate([*map(np.ravel, jax.tree.leaves(g))]) for g in gradients()
    )
    assert np.abs(at_new).max() < 1e-5 * np.abs(at_old).max()


def test_averaging_parameters_extrapolates_their_mean(linear):
    algorithm = pfedbayes(linear, beta=1.5, zeta=1.0)
    server = jax.jit(algorithm.init)(KEY)
    zeros = optax.tree.zeros_like(server.posterior)
    a, b = perturbed(zeros, 0), perturbed(zeros, 1)
    total, count = jax.tree.map(jnp.add, a, b), jnp.float32(2)
    new = algorithm.server_update(KEY, 0, server, Aggregate(total, count, count, 6))
    expected = jax.tree.map(
        lambda v, a, b: v + 1.5 * (a + b) / 2, server.posterior, a, b
    )
    assert_close(new.posterior, expected)


@pytest.fixture(scope="module")
def histories(adam, train, test):
    """(initial state, states after rounds 1, 2 and 3, metrics) of a set cohort."""
    cohorts = jnp.array([[0, 1], [1, 2], [0, 1]], jnp.int32)
    selection = Selection(
        7, 2, lambda key, round_index, scores, counts: (cohorts[round_index], ())
    )
    federation = Federation(pfedbayes(adam), train, test, selection=selection)
    state = federation.init(KEY)
    states, metrics = [], []
    for _ in range(4):
        copied = jax.tree.map(np.array, (state.server, state.clients))
        states.append(copied)
        if len(states) < 4:
            state, info = federation.round(state)
            metrics.append(info)
    return states, metrics


def of(clients, i):
    return jax.tree.map(lambda leaf: leaf[i], clients)


def test_a_client_keeps_posterior_and_moments_while_away(histories):  # C7
    (_, start), (_, first), (_, second), (_, third) = histories[0]
    assert_equal(of(second, 0), of(first, 0))  # it took part in rounds 1 and 3
    for i in (3, 4, 5, 6):  # never
        assert_equal(of(third, i), of(start, i))
    assert_equal(of(first, 2), of(start, 2))
    before, after = (of(state, 0).personal.posterior for state in (first, third))
    assert np.abs(after.rho.vector - before.rho.vector).max() > 1e-4


def test_moments_of_both_posteriors_go_on_over_rounds(histories):
    (_, start), (_, first), (_, second), (_, third) = histories[0]
    minibatches = 3  # of client 0's 20 examples
    for state, rounds in ((start, 0), (first, 1), (second, 1), (third, 2)):
        client = of(state, 0)
        assert client.updates == rounds
        assert client.personal.moments[0].count == 5 * minibatches * rounds
        assert client.moments[0].count == minibatches * rounds


def test_it_reports_its_loss_and_how_far_q_is_away(histories):
    for info in histories[1]:
        assert set(info.metrics) == {"loss", "kl"}
        assert info.metrics["kl"] > 0 and np.isfinite(info.metrics["loss"])


@pytest.fixture(scope="module")
def someone(linear):
    """(server state, client that took part, with a posterior and moments of its own).

    The moments are told apart from fresh ones by their momentum.
    """
    heavy = linear._replace(training=PLAIN._replace(momentum=0.9))
    algorithm = pfedbayes(heavy, zeta=0.1)
    server = jax.jit(algorithm.init)(KEY)
    client = perturbed(jax.jit(algorithm.init_client)(KEY, server), 5)
    return heavy, server, client._replace(updates=jnp.int32(3))


@pytest.mark.parametrize("start", ["personal", "global"])
def test_where_q_starts(someone, train, start):
    """Without data nobody moves: what comes back is where they started."""
    task, server, client = someone
    algorithm = pfedbayes(task, start=start, zeta=1.0, global_steps=0)
    update = jax.jit(algorithm.client_update)
    nothing = one_client(train, 4)
    output = update(KEY, 0, server, client, nothing)
    own = client.personal.posterior if start == "personal" else server.posterior
    assert_equal(output.client.personal.posterior, own)
    assert_equal(output.client.personal.moments, client.personal.moments)
    assert_equal(output.client.moments, client.moments)
    newcomer = client._replace(updates=jnp.int32(0))
    output = update(KEY, 0, server, newcomer, nothing)
    assert_equal(output.client.personal.posterior, server.posterior)
    # With data q moves, but w has no steps here and comes back as it was sent.
    output = update(KEY, 0, server, newcomer, one_client(train, 1))
    assert output.metrics["kl"] > 0.1
    assert_equal(output.upload, optax.tree.zeros_like(server.posterior))


def test_who_took_part_predicts_with_q_and_a_newcomer_adapts_first(
    linear, someone, train
):
    _, server, client = someone
    plain = linear._replace(finetuning=PLAIN._replace(epochs=3))
    algorithm = pfedbayes(plain, zeta=0.5, eps_scale=0.0)
    personalise = jax.jit(algorithm.personalise)
    data, size = one_client(train, 1), 13
    assert algorithm.kept(server, client)[0]
    assert_equal(algorithm.kept(server, client)[1], client.personal.posterior)
    newcomer = client._replace(updates=jnp.int32(0))
    assert not algorithm.kept(server, newcomer)[0]
    adapted = personalise(KEY, server, newcomer, data)
    # From w, whatever its own state is, with w held where it is and fresh momentum,
    # one step a minibatch.
    theta = start = flat(server.posterior.mu)
    strength = 0.5 / (size * np.log1p(np.exp(-2.5)) ** 2)
    for _ in range(3):
        gradient = nll_gradient(theta, data.x[:size], data.y[:size])
        theta = theta - RATE * (gradient + strength * (theta - start))
    np.testing.assert_allclose(flat(adapted.mu), theta, rtol=1e-4, atol=1e-6)
    nothing = one_client(train, 4)
    assert_equal(personalise(KEY, server, newcomer, nothing), server.posterior)


def test_initial_means_and_scales(task):
    model = build_model("mlp", classes=3, input_shape=(40,), hidden=(200,))
    wide = task._replace(model=model)
    posterior = pfedbayes(wide, init_std=0.1, rho=-3.0, zeta=0.1).init(KEY).posterior
    means = np.concatenate([*map(np.ravel, jax.tree.leaves(posterior.mu))])
    assert means.std() == pytest.approx(0.1, rel=0.03)
    assert abs(means.mean()) < 0.004
    assert all((rho == -3).all() for rho in jax.tree.leaves(posterior.rho))
    plain = pfedbayes(wide, zeta=0.1).init(KEY).posterior.mu
    assert_equal(plain.tree(), trees(model.init(KEY)))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("zeta", -1.0),
        ("zeta", 0),  # nothing would move the w that is uploaded
        ("beta", 0.0),
        ("eps_scale", -1.0),
        ("start", "server"),
        ("mc_samples", 10**12),
    ],
)
def test_options_are_checked_by_name_at_construction(task, option, value):
    with pytest.raises(ValueError, match=f"{option}={value}|{option}='{value}'"):
        pfedbayes(task, **{option: value})


def test_the_posteriors_are_distributions_over_the_networks_layers(linear):
    algorithm = pfedbayes(linear, zeta=1.0)
    server = algorithm.init(KEY)
    posterior = algorithm.posterior(server)
    layers = trees(linear.model.init(KEY))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b), posterior.mean(), layers
    )
    own = algorithm.personal_posterior(server, perturbed(server.posterior, 0))
    expected = mean_field.kl(perturbed(server.posterior, 0), server.posterior)
    np.testing.assert_allclose(own.kl_divergence(posterior), expected, rtol=1e-6)


@pytest.fixture(scope="module")
def frozen(task, train, test):
    """(federation, first state, state after three rounds) with a frozen head."""
    training = LocalTraining(2, 8, learning_rate=0.02, optimizer="adam")
    task = task._replace(training=training, finetuning=training)
    algorithm = pfedbayes(task, zeta=0.1, head="frozen")
    cohort = uniform(7, 4)
    federation = Federation(algorithm, train, test, selection=cohort)
    first = jax.device_get(federation.init(KEY)._replace(key=()))
    state, _ = federation.rounds(federation.init(KEY), 3)
    return federation, first, state


def test_a_frozen_head_is_random_the_same_for_all_and_never_sent(frozen, task):
    federation, first, state = frozen
    head = first.server.newcomer
    assert np.std(head.vector) > 0.1
    assert_equal(state.server.newcomer, head)
    clients = state.clients
    for own in (clients.prior, clients.personal.posterior["head"]):
        for client in range(7):
            assert_equal(jax.tree.map(lambda leaf, c=client: leaf[c], own), head)
    assert state.server.posterior.mu.vector.shape == (6 * 5 + 5,)
    moved = state.server.posterior.mu.vector - first.server.posterior.mu.vector
    assert (moved != 0).all()
    down = federation.algorithm.broadcast(state.server)
    assert parameter_count(down) == parameter_count(state.server.posterior)
    data = one_client(federation.train, 1)
    client = jax.tree.map(lambda leaf: leaf[1], clients)
    output = jax.eval_shape(
        federation.algorithm.client_update, KEY, 0, down, client, data
    )
    assert parameter_count(output.upload) == 2 * (6 * 5 + 5)


def test_a_frozen_head_has_no_posterior(frozen):
    federation, first, state = frozen
    for who in (None, 0, 4):  # 4 is empty
        posterior = federation.posterior(state, client=who)
        deviation = posterior.stddev()
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(deviation["head"]))
        assert all((leaf > 0).all() for leaf in jax.tree.leaves(deviation["body"]))
        assert_equal(posterior.mean()["head"], first.server.newcomer.tree())


@pytest.mark.parametrize("sampling", ["local", "weight"])
def test_a_newcomer_with_a_frozen_head_adapts_its_body(task, train, sampling):
    task = task._replace(finetuning=PLAIN)
    algorithm = pfedbayes(task, zeta=0.1, head="frozen", sampling=sampling)
    data = one_client(train, 1)

    @jax.jit
    def run():
        server = algorithm.init(KEY)
        client = algorithm.init_client(KEY, server)
        return server, algorithm.personalise(KEY, server, client, data)

    server, own = run()
    assert_equal(own["head"], server.newcomer)
    assert (own["body"].mu.vector != server.posterior.mu.vector).any()


def test_weight_decay_does_not_reach_a_frozen_head(task, train):
    training = LocalTraining(2, 8, 0.02, optimizer=optax.adamw)
    task = task._replace(training=training, finetuning=training)
    algorithm = pfedbayes(task, zeta=0.1, head="frozen")
    data = one_client(train, 1)

    @jax.jit
    def run():
        server = algorithm.init(KEY)
        client = algorithm.init_client(KEY, server)
        newcomer = algorithm.personalise(KEY, server, client, data)
        output = algorithm.client_update(KEY, 0, server, client, data)
        return server, newcomer, output.client

    server, newcomer, client = run()
    for head in (newcomer["head"], client.personal.posterior["head"], client.prior):
        assert_equal(head, server.newcomer)


def test_a_frozen_head_needs_a_body(linear):
    with pytest.raises(ValueError, match="has no body.*head='trained'"):
        pfedbayes(linear, zeta=0.1, head="frozen")


METHODS = ("bpfed", "cfedbayes", "fedabml", "pfedbayes", "sfedbayes")


@pytest.mark.parametrize("name", METHODS)
def test_options_in_formulas_can_be_traced(linear, task, train, name):
    """A sweep over them compiles once; other options are static, and say so."""
    task = task if name == "bpfed" else linear
    fields = {f.name: f for f in dataclasses.fields(options_of(name))}
    traced = [f for f in fields.values() if f.metadata["traced"]]
    values = {f.name: 0.1 if f.default is None else f.default for f in traced}
    readings = ("alternate", "meta") if name == "fedabml" else (None,)
    for reading in readings:
        static = {"theta_update": reading} if reading else {}

        def update(values, static=static):
            algorithm = build(name, task, **values, **static)
            server = algorithm.init(KEY)
            client = algorithm.init_client(KEY, server)
            sent = algorithm.broadcast(server)
            data = one_client(train, 1)
            output = algorithm.client_update(KEY, 0, sent, client, data)
            one = jnp.ones(())
            statistics = algorithm.statistics(sent, output.upload)
            total = Aggregate(statistics, one, one, 6)
            return algorithm.server_update(KEY, 0, server, total)

        jax.eval_shape(update, jax.tree.map(jnp.float32, values))
