"""sFedBayes against pFedBayes, and what its threshold and its metrics count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedvi.algorithm import Aggregate
from fedvi.algorithms import build as build_algorithm
from fedvi.algorithms import pfedbayes
from fedvi.algorithms.pfedbayes import Server
from fedvi.algorithms.sfedbayes import largest
from fedvi.flat import trees
from fedvi.local import LocalTraining
from fedvi.nn import build

KEY = jax.random.key(3)
THRESHOLD = 0.6


def assert_close(a, b, rtol=1e-4, atol=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b
    )


def flat(tree):
    return np.concatenate([*map(np.ravel, jax.tree.leaves(tree))])


def sfedbayes(task, inclusion_rate=10.0, **options):
    """At Adam's 0.02 the default rate, 101, would make the logits jump."""
    return build_algorithm("sfedbayes", task, inclusion_rate=inclusion_rate, **options)


def update(algorithm, server, data, key=KEY):
    """A newcomer's output."""

    @jax.jit
    def run(server, data):
        client = algorithm.init_client(KEY, server)
        return algorithm.client_update(key, 1, server, client, data)

    return run(server, data)


@pytest.fixture(scope="module")
def data(train):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), train)


@pytest.fixture(scope="module")
def linear(task):
    return task._replace(
        model=build("logistic", classes=3, input_shape=(6,)),
        training=LocalTraining(
            epochs=2, batch_size=8, learning_rate=0.02, optimizer="adam"
        ),
    )


def test_with_every_weight_included_it_is_pfedbayes(linear, data):
    """λ = 1 but for INCLUSION_FLOOR, and the same draws of the key handed on."""
    options = {"zeta": 0.5, "mc_samples": 2}
    dense = pfedbayes(linear, **options)
    sparse = sfedbayes(linear, inclusion=1 - 1e-9, **options)
    server, sparse_server = jax.jit(lambda: (dense.init(KEY), sparse.init(KEY)))()
    assert_close(sparse_server.posterior.slab, server.posterior)
    expected = update(dense, server, data, key=jax.random.split(KEY)[0])
    found = update(sparse, sparse_server, data)
    assert_close(found.upload.slab, expected.upload)
    personal = found.client.personal.posterior
    assert_close(personal.slab, expected.client.personal.posterior)
    assert_close(personal.logit, sparse_server.posterior.logit, rtol=0, atol=0)
    moved = flat(personal.slab.mu) - flat(server.posterior.mu)
    assert np.abs(moved).max() > 0.05
    metrics = found.metrics
    assert set(metrics) == {"loss", "kl", "inclusion", "kept"}  # no threshold
    assert metrics["inclusion"] > 0.9999 and metrics["kept"] == 1
    for name in ("loss", "kl"):
        np.testing.assert_allclose(metrics[name], expected.metrics[name], rtol=1e-3)


@pytest.fixture(scope="module")
def server(linear):
    """A broadcast whose inclusions lie on both sides of the threshold."""
    posterior = jax.jit(sfedbayes(linear).init)(KEY).posterior
    rng = np.random.default_rng(0)
    logit = jax.tree.map(
        lambda leaf: rng.normal(0.4, 1.5, leaf.shape).astype(np.float32),
        posterior.logit,
    )
    return Server(posterior._replace(logit=logit))


@pytest.fixture(scope="module")
def output(linear, server, data):
    """Of a client whose upload is its personal posterior, which is seen whole."""
    algorithm = sfedbayes(linear, zeta=0.5, threshold=THRESHOLD, upload="personal")
    return update(algorithm, server, data)


def test_inclusions_learn_and_are_reported(server, output):
    logit = flat(output.client.personal.posterior.logit)
    change = logit - flat(server.posterior.logit)
    assert (np.abs(change) > 1e-3).mean() > 0.9
    inclusion = 1 / (1 + np.exp(-logit.astype(np.float64)))
    np.testing.assert_allclose(output.metrics["inclusion"], inclusion.mean(), rtol=1e-5)
    # One draw of 21 gates, of which some are 0 and some 1.
    kept = output.metrics["kept"]
    count = kept * inclusion.size
    assert abs(count - round(float(count))) < 1e-4 and 0 < kept < 1
    deviation = np.sqrt((inclusion * (1 - inclusion)).sum())
    assert abs(count - inclusion.sum()) < 4 * deviation


def test_weights_below_the_threshold_are_the_servers(server, output):
    upload, old = output.client.personal.posterior, server.posterior
    sent = flat(upload.logit) >= np.log(THRESHOLD / (1 - THRESHOLD))
    share = sent.mean()
    assert 0.2 < share < 0.8
    found = optax.tree.add(old, output.upload)
    for arrived, own, servers in (
        (found.slab.mu, upload.slab.mu, old.slab.mu),
        (found.slab.rho, upload.slab.rho, old.slab.rho),
    ):
        expected = np.where(sent, flat(own), flat(servers))
        np.testing.assert_allclose(flat(arrived), expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(flat(arrived)[~sent], flat(servers)[~sent])
        assert (flat(own) != flat(servers))[~sent].any()  # so the choice shows
    # λ always arrives: it says which weights are left out, and may come back.
    np.testing.assert_allclose(flat(found.logit), flat(upload.logit), rtol=1e-6)
    np.testing.assert_allclose(output.metrics["sent"], share, rtol=1e-6)
    # μ and ρ of every weight held back.
    np.testing.assert_allclose(output.metrics["withheld"], 2 * (~sent).sum(), rtol=1e-5)


def test_the_weights_of_the_largest_inclusions_are_sent(linear, server, data):
    keep, count = 0.5, 10
    algorithm = sfedbayes(linear, zeta=0.5, keep=keep, upload="personal")
    output = update(algorithm, server, data)
    upload, old = output.client.personal.posterior, server.posterior
    logit = flat(upload.logit)
    sent = np.zeros(logit.size, bool)
    sent[np.argsort(-logit, kind="stable")[:count]] = True
    found = optax.tree.add(old, output.upload)
    for part in ("mu", "rho"):
        own, servers = (flat(getattr(q.slab, part)) for q in (upload, old))
        expected = np.where(sent, own, servers)
        arrived = flat(getattr(found.slab, part))
        np.testing.assert_allclose(arrived, expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(arrived[~sent], servers[~sent])
        assert (own != servers)[~sent].any()
    np.testing.assert_allclose(flat(found.logit), logit, rtol=1e-6)
    np.testing.assert_allclose(output.metrics["sent"], count / 21, rtol=1e-6)
    np.testing.assert_allclose(output.metrics["withheld"], 2 * (21 - count), rtol=1e-5)


def test_of_equal_inclusions_the_first_are_sent():
    """Exactly ⌊0.5 · 6⌋, and more of a tie never."""
    logit = {"a": jnp.array([3.0, 1.0, 1.0]), "b": jnp.array([[1.0, 1.0, 0.0]])}
    chosen = jax.jit(lambda tree: largest(tree, 0.5))(logit)
    np.testing.assert_array_equal(chosen["a"], [True, True, True])
    np.testing.assert_array_equal(chosen["b"], [[False, False, False]])
    equal = jax.tree.map(jnp.zeros_like, logit)
    chosen = jax.jit(lambda tree: largest(tree, 0.67))(equal)
    np.testing.assert_array_equal(flat(chosen), [True] * 4 + [False] * 2)
    assert flat(largest(equal, 0.01)).sum() == 1


def test_the_moments_of_what_was_not_sent_are_the_servers(linear, server, data):
    """With no slab to send, those of the server's slabs under the client's λ."""
    closed = server.posterior._replace(
        logit=jax.tree.map(lambda leaf: np.full_like(leaf, -4), server.posterior.logit)
    )
    algorithm = sfedbayes(
        linear,
        zeta=0.5,
        average="moments",
        threshold=THRESHOLD,
        upload="personal",
        inclusion_rate=1,
    )
    output = update(algorithm, Server(closed), data)
    assert output.metrics["sent"] == 0
    inclusion = 1 / (1 + np.exp(-flat(output.client.personal.posterior.logit)))
    found = algorithm.statistics(Server(closed), output.upload)
    mass = inclusion - 1 / (1 + np.exp(4))  # less that of the broadcast
    np.testing.assert_allclose(flat(found["mass"]), mass, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(flat(found["first"]), 0)
    np.testing.assert_array_equal(flat(found["second"]), 0)


def test_a_prediction_draws_gates(linear, server, data):
    algorithm = sfedbayes(linear, eps_scale=0.0, num_samples=6)
    draws = jax.jit(algorithm.global_predictive)(KEY, server, data.x, None)
    assert len(np.unique(draws[:, 0, 0])) > 1


@pytest.mark.parametrize("sampling", ["local", "weight"])
@pytest.mark.parametrize("average", ["parameters", "probabilities", "moments"])
def test_weights_that_no_input_reaches_stay_where_they_are(
    linear, data, sampling, average
):
    """Adam makes a step of what rounding leaves: 0.018 of a logit in a round."""
    dead = data._replace(x=data.x.at[:, 2:4].set(0))
    algorithm = sfedbayes(linear, zeta=0.5, sampling=sampling, average=average)

    @jax.jit
    def run(data):
        server = algorithm.init(KEY)
        client = algorithm.init_client(KEY, server)
        for round_index in range(2):
            output = algorithm.client_update(KEY, round_index, server, client, data)
            summed = algorithm.statistics(server, output.upload)
            aggregate = Aggregate(summed, jnp.float32(1), jnp.float32(1), 1)
            after = algorithm.server_update(KEY, round_index, server, aggregate)
            start, server, client = server, after, output.client
        return start, client.personal.posterior, server

    def of_inputs(q):
        """Each parameter of the weights `[inputs, classes]`, the head's kernel."""
        q = jax.tree.leaves(trees(q))
        return [leaf for leaf in q if leaf.shape == (6, 3)]

    before = of_inputs(jax.jit(algorithm.init)(KEY).posterior)
    _, personal, server = run(dead)
    assert len(before) == 3
    for start, *after in zip(before, of_inputs(personal), of_inputs(server.posterior)):
        for leaf in after:
            np.testing.assert_array_equal(leaf[2:4], start[2:4])
            assert (leaf[:2] != start[:2]).all()


def test_logits_that_would_jump_are_refused(linear):
    adam = LocalTraining(1, 8, 0.001, optimizer="adam")

    def at(**options):
        return sfedbayes(linear._replace(training=adam, finetuning=adam), **options)

    for inclusion, rate in ((0.99, None), (0.5, None), (0.9999, 300.0)):
        at(inclusion=inclusion, inclusion_rate=rate)
    with pytest.raises(ValueError, match=r"by 10 a step.* inclusion_rate=300 or less"):
        at(inclusion=0.9999, inclusion_rate=None)


def test_a_schedule_may_start_at_0(linear, data):
    warm = linear.training._replace(
        learning_rate=lambda round_index: 0.01 * jnp.maximum(round_index - 1, 0)
    )
    algorithm = sfedbayes(linear._replace(training=warm), zeta=0.01)
    server = jax.jit(algorithm.init)(KEY)
    assert not flat(update(algorithm, server, data).upload).any()


def test_logits_step_at_a_rate_of_their_own(linear, data):
    """Of one step, `inclusion_rate` times that at 1; the slabs' are the same."""
    training = linear.training._replace(steps=1)
    steps = {}
    for rate in (1.0, 7.0, None):
        algorithm = sfedbayes(
            linear._replace(training=training),
            inclusion_rate=rate,
            personal_steps=1,
            zeta=0.01,
            upload="personal",
            inclusion=0.9,
        )
        server = jax.jit(algorithm.init)(KEY)
        steps[rate] = update(algorithm, server, data).upload
    for rate, factor in ((7.0, 7), (None, 1 / (0.9 * 0.1))):
        assert_close(steps[rate].slab, steps[1.0].slab)
        logits = flat(steps[1.0].logit)
        assert (logits != 0).all()
        np.testing.assert_allclose(
            flat(steps[rate].logit), factor * logits, rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("inclusion", 1.0),
        ("inclusion_rate", 0.0),
        ("temperature", 0.0),
        ("threshold", 1.0),
        ("keep", 0.0),
        ("keep", 1.5),
        ("num_samples", 10**12),
    ],
)
def test_options_are_checked_by_name_at_construction(task, option, value):
    with pytest.raises(ValueError, match=f"{option}={value}"):
        sfedbayes(task, **{option: value})


def test_threshold_and_keep_exclude_each_other(task):
    with pytest.raises(ValueError, match=r"threshold=0\.5 and keep=0\.5 exclude"):
        sfedbayes(task, threshold=0.5, keep=0.5)
