"""BPFed against FedPer and its Eq. 10 and 11, and who learns what."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedvi.algorithm import Aggregate
from fedvi.algorithms import bpfed
from fedvi.algorithms.bpfed import half, join
from fedvi.algorithms.common import classification_loss
from fedvi.algorithms.partial_sharing import split
from fedvi.distributions import mean_field
from fedvi.federation import Federation
from fedvi.flat import trees
from fedvi.local import Batch, LocalTraining

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


def perturbed(tree, seed, size=0.1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (
            np.asarray(leaf) + size * rng.normal(size=leaf.shape).astype(np.float32)
        ),
        tree,
    )


def one_client(train, client):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[client]), train)


@pytest.fixture(scope="module")
def plain(task):
    return task._replace(training=PLAIN, finetuning=PLAIN)


@pytest.fixture(scope="module")
def fedper_step(task):
    """One full-batch step of all layers."""

    def step(params, data):
        batch = Batch(data.x, data.y, jnp.arange(data.y.shape[0]) < data.size)
        gradients = jax.grad(lambda p: classification_loss(task.model, p, batch))(
            params
        )
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients)

    return jax.jit(step)


def test_without_noise_it_is_fedper(plain, train, test, fedper_step):
    """Over rounds: all layers trained together, the bodies averaged, the heads kept."""
    algorithm = bpfed(
        plain,
        zeta=0.0,
        personal_steps=1,
        start="broadcast",
        upload="personal",
        sampling="weight",
        eps_scale=0.0,
    )
    federation = Federation(algorithm, train, test)
    state = federation.init(KEY)
    body = jax.tree.map(np.array, state.server.posterior.mu.tree())
    common = jax.tree.map(np.array, state.server.newcomer.mu.tree())
    heads = {i: common for i in np.flatnonzero(train.size)}
    for _ in range(3):
        uploads = []
        for i in heads:
            params = {"body": body, "head": heads[i]}
            for _ in range(PLAIN.epochs):
                params = fedper_step(params, one_client(train, i))
            uploads.append(params["body"])
            heads[i] = params["head"]
        body = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *uploads)
    state, _ = federation.rounds(state, 3)
    assert_close(state.server.posterior.mu.tree(), body)
    for i, head in heads.items():
        own = jax.tree.map(lambda leaf: leaf[i], state.clients)
        assert_close(own.personal.posterior.mu["personal"].tree(), head)
        change = head["classifier"]["kernel"] - common["classifier"]["kernel"]
        assert np.abs(change).max() > 0.01  # far more than what is compared


@pytest.fixture(scope="module")
def someone(plain):
    """(server state, client that took part and is away from its prior)."""
    algorithm = bpfed(plain, zeta=0.3)
    server = jax.jit(algorithm.init)(KEY)
    client = perturbed(jax.jit(algorithm.init_client)(KEY, server), 5)
    return server, client._replace(updates=jnp.int32(3))


def joined(server, client):
    """π of all weights, with the head as the personalised part."""
    return join(server.posterior, client.prior)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_one_minibatch_is_equations_10_and_11(plain, someone, train, direction):
    """And the public code's reverse of their KL; q starts where it stopped."""
    zeta, size = 0.3, 13
    server, client = someone
    algorithm = bpfed(
        plain._replace(training=PLAIN._replace(epochs=1)),
        zeta=zeta,
        kl_direction=direction,
        personal_steps=1,
        start="personal",
        sampling="weight",
        eps_scale=0.0,
    )
    data = one_client(train, 1)
    output = jax.jit(algorithm.client_update)(KEY, 0, server, client, data)
    batch = Batch(data.x, data.y, jnp.arange(20) < size)
    prior = joined(server, client)

    def kl(q, prior):
        pair = (q, prior) if direction == "forward" else (prior, q)
        return zeta / size * mean_field.kl(*pair)

    @jax.jit
    def expected(q, prior):
        loss = jax.grad(
            lambda q: classification_loss(plain.model, q.mu, batch) + kl(q, prior)
        )(q)
        q = jax.tree.map(lambda p, g: p - RATE * g, q, loss)
        pull = jax.grad(kl, argnums=1)(q, prior)
        return q, jax.tree.map(lambda p, g: p - RATE * g, prior, pull)

    q, prior = expected(client.personal.posterior, prior)
    assert_close(output.client.personal.posterior, q)
    # The shared half of π is sent, the other is the client's next prior.
    arrived = optax.tree.add(server.posterior, output.upload)
    assert_close(arrived, half(prior, "shared"))
    assert_close(output.client.prior, half(prior, "personal"))


def test_where_q_starts(plain, someone, train):
    """Without data nobody moves: what comes back is where they started."""
    server, client = someone
    nothing = one_client(train, 4)
    prior = joined(server, client)
    for start, own in (("personal", client.personal.posterior), ("prior", prior)):
        algorithm = bpfed(
            plain, zeta=0.3, start=start, upload="personal", sampling="weight"
        )
        update = jax.jit(algorithm.client_update)
        output = update(KEY, 0, server, client, nothing)
        assert_equal(output.client.personal.posterior, own)
        assert_equal(output.client.prior, client.prior)
        away = optax.tree.sub(half(own, "shared"), server.posterior)
        assert_equal(output.upload, away)
        newcomer = client._replace(updates=jnp.int32(0))
        output = update(KEY, 0, server, newcomer, nothing)
        assert_equal(output.client.personal.posterior, prior)


def test_a_newcomer_learns_personalised_factors_only(plain, someone, train):
    server, client = someone
    algorithm = bpfed(plain, zeta=0.3, sampling="weight", eps_scale=0.0)
    data, size = one_client(train, 1), 13
    personalise = jax.jit(algorithm.personalise)
    known, own = algorithm.kept(server, client)
    assert known
    assert_equal(own, client.personal.posterior)
    newcomer = client._replace(updates=jnp.int32(0))
    adapted = personalise(KEY, server, newcomer, data)
    assert_equal(half(adapted, "shared"), server.posterior)
    batch = Batch(data.x, data.y, jnp.arange(20) < size)

    def objective(head):
        params = {"body": server.posterior.mu, "head": head.mu}
        loss = classification_loss(plain.model, params, batch)
        return loss + 0.3 / size * mean_field.kl(head, client.prior)

    @jax.jit
    def step(head):
        return jax.tree.map(lambda p, g: p - RATE * g, head, jax.grad(objective)(head))

    head = client.prior  # one step a minibatch
    for _ in range(PLAIN.epochs):
        head = step(head)
    assert_close(half(adapted, "personal"), head)
    assert np.abs(head.mu.vector - client.prior.mu.vector).max() > 0.01


def test_the_server_averages_the_shared_factors(plain, someone):
    server, _ = someone
    a, b = (perturbed(server.posterior, seed) for seed in (0, 1))
    count = jnp.float32(2)
    moved = [optax.tree.sub(q, server.posterior) for q in (a, b)]
    total = optax.tree.add(*moved)
    new = bpfed(plain, zeta=0.3).server_update(
        KEY, 0, server, Aggregate(total, count, count, 6)
    )
    assert_close(new.posterior, jax.tree.map(lambda a, b: (a + b) / 2, a, b))
    assert_equal(new.newcomer, server.newcomer)

    @jax.jit
    def moments():
        algorithm = bpfed(plain, zeta=0.3, average="moments")
        statistics = [algorithm.statistics(server, each) for each in moved]
        total = jax.tree.map(jnp.add, *statistics)
        aggregate = Aggregate(total, count, count, 6)
        new = algorithm.server_update(KEY, 0, server, aggregate)

        def objective(w):
            return mean_field.kl(a, w) + mean_field.kl(b, w)

        return [
            jnp.concatenate(
                [g.ravel() for g in jax.tree.leaves(jax.grad(objective)(w))]
            )
            for w in (new.posterior, server.posterior)
        ]

    at_new, at_old = moments()
    assert np.abs(at_new).max() < 1e-4 * np.abs(at_old).max()


def test_any_split_of_the_weights(task, train):
    layers = jax.eval_shape(lambda: trees(split(task.model, "head").init(KEY)))
    assert list(layers["personal"]) == ["classifier"]
    assert list(layers["shared"]) == ["Dense_0"]
    # LG-FedAvg's opposite split: the body is personal. Then biases only.
    data = one_client(train, 1)
    for part, shared, personal in (("^body", 18, 35), ("bias$", 45, 8)):
        algorithm = bpfed(task, zeta=0.1, personal_part=part)

        def output(key, algorithm=algorithm):
            server = algorithm.init(key)
            client = algorithm.init_client(key, server)
            return algorithm.client_update(key, 0, server, client, data)

        shapes = jax.eval_shape(output, KEY)
        assert shapes.upload.mu.vector.shape == (shared,)
        assert shapes.client.prior.rho.vector.shape == (personal,)


def test_its_distribution_is_over_body_and_head(plain):
    """Whatever the split: what is drawn goes into the model that the user has."""
    algorithm = bpfed(plain, zeta=0.3, personal_part="bias$")
    x = jnp.ones((2, 6))

    @jax.jit
    def run():
        server = algorithm.init(KEY)
        q = join(server.posterior, server.newcomer)
        mean = algorithm.posterior(server).mean()
        draw = algorithm.personal_posterior(server, q).sample(seed=KEY)
        return plain.model.apply(mean, x), plain.model.apply(q.mu, x), draw

    found, expected, draw = run()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert jax.tree.structure(draw) == jax.tree.structure(trees(plain.model.init(KEY)))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "personal_part",
            "tail",
            "leaves no personalised weight of mlp, which has .*head",
        ),
        ("personal_part", "", "leaves no shared weight"),
        ("personal_part", "(", "is no regular expression"),
        ("zeta", 0, "upload='localised' sends what nothing moves"),
        ("start", "global", "prior"),
        ("mc_samples", 10**12, "memory: .* do"),
    ],
)
def test_options_are_checked_by_name_at_construction(task, option, value, message):
    with pytest.raises(ValueError) as error:
        bpfed(task, **{option: value})
    assert f"{option}={value!r}" in str(error.value)
    error.match(message)
