"""cFedBayes against pFedBayes, and the clusters that it finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithm import Aggregate, Task
from fedvi.algorithms import cfedbayes, pfedbayes
from fedvi.algorithms.pfedbayes import Server
from fedvi.distributions.mean_field import MeanField
from fedvi.evaluation import summarise
from fedvi.federation import Federation
from fedvi.local import LocalTraining
from fedvi.nn import build

KEY = jax.random.key(3)
PLANTED = np.array([0, 1, 1, 0, 1, 0])  # whose labels are permuted
CLASSES = 3


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b
    )


def component(tree, k):
    return jax.tree.map(lambda leaf: leaf[k], tree)


@pytest.fixture(scope="module")
def linear(task):
    training = LocalTraining(
        epochs=2, batch_size=8, learning_rate=0.02, optimizer="adam"
    )
    return task._replace(
        model=build("logistic", classes=CLASSES, input_shape=(6,)),
        training=training,
        finetuning=training,
        clients=len(PLANTED),
    )


def planted(data, clients=(0, 1, 2, 5, 0, 6)):
    """Clients of the fixture, some twice, whose labels follow one of two rules."""
    data = jax.tree.map(lambda leaf: leaf[np.array(clients)], data)
    return data._replace(y=(data.y + PLANTED[:, None]) % CLASSES)


@pytest.fixture(scope="module")
def run(linear, train, test):
    """(federation, first state's server, state after some rounds, metrics)."""
    data, (model, training, finetuning, *_) = planted(train), linear
    task = Task.of(model, data, training, finetuning)
    federation = Federation(cfedbayes(task, zeta=0.05), data, planted(test))
    state = federation.init(jax.random.key(0))
    start = jax.tree.map(np.array, state.server)
    state, metrics = federation.rounds(state, 6)
    return federation, start, state, metrics


def test_it_recovers_planted_clusters(run):
    federation, start, state, metrics = run
    found = np.asarray(federation.clusters(state))
    assert (found == PLANTED).all() or (found == 1 - PLANTED).all()
    # Different initialisations: equal posteriors would never separate.
    kernel = start.posterior.mu.vector
    assert np.abs(kernel[0] - kernel[1]).max() > 0.1
    shares = [metrics.metrics[f"share_{k}"] for k in (0, 1)]
    np.testing.assert_allclose(shares[0] + shares[1], 1, rtol=1e-6)
    np.testing.assert_allclose(shares[0][-1], 0.5)


def test_every_client_is_scored_on_its_own_clusters_model(run):
    federation, _, state, _ = run
    own = summarise(federation.evaluate(state))
    swapped = jax.tree.map(lambda leaf: leaf[::-1], state.server)
    assert own["accuracy"] > 80
    # Which of the clusters comes first makes no difference.
    other = summarise(federation.evaluate(state._replace(server=swapped)))
    assert other["accuracy"] == own["accuracy"]


def test_one_cluster_is_pfedbayes(linear, train):
    """With the keys that cFedBayes hands on."""
    options = {"zeta": 0.5, "upload": "personal", "average": "moments", "beta": 0.8}
    options["sampling"] = "weight"
    data = component(jax.tree.map(jnp.asarray, train), 1)

    def run(algorithm, init_key, key):
        server = algorithm.init(init_key)
        client = algorithm.init_client(KEY, server)
        output = algorithm.client_update(key, 0, server, client, data)
        one = jnp.float32(1)
        statistics = algorithm.statistics(server, output.upload)
        aggregate = Aggregate(statistics, one, one, 6)
        new = algorithm.server_update(KEY, 0, server, aggregate)
        personal = algorithm.personalise(key, server, client, data)
        return server, client, output, new, personal

    one, many = pfedbayes(linear, **options), cfedbayes(linear, clusters=1, **options)
    _, train_key = jax.random.split(KEY)
    server, client, output, new, personal = jax.jit(
        lambda: run(one, jax.random.split(KEY, 1)[0], train_key)
    )()
    found = jax.jit(lambda: run(many, KEY, KEY))()
    assert_equal(component(found[0], 0), server)
    assert_equal(found[1], client)
    assert_close(found[2].client, output.client)
    assert_close(found[2].upload["upload"], output.upload)
    assert found[2].upload["cluster"] == 0
    assert found[2].metrics["share_0"] == 1
    assert_close(component(found[3], 0), new)
    assert_close(found[4], personal)
    for moved in (new.posterior, personal):
        assert np.abs(moved.mu.vector - server.posterior.mu.vector).max() > 0.01


@pytest.fixture(scope="module")
def three(linear):
    algorithm = cfedbayes(linear, clusters=3, beta=0.8, sampling="weight")
    return algorithm, jax.jit(algorithm.init)(KEY)


@pytest.mark.parametrize("average", ["parameters", "moments"])
def test_a_cluster_is_the_average_of_its_members(linear, three, average):
    """Two chose cluster 0, one cluster 2 and nobody cluster 1: that one is kept."""
    _, server = three
    algorithm = cfedbayes(linear, clusters=3, beta=0.8, average=average)
    plain = pfedbayes(linear, beta=0.8, average=average)
    rng = np.random.default_rng(0)
    uploads = [
        jax.tree.map(
            lambda leaf: rng.uniform(0.5, 1, leaf.shape[1:]).astype(np.float32),
            _statistics(server, average),
        )
        for _ in range(3)
    ]
    members = np.eye(3, dtype=np.float32)[[0, 2, 0]]
    statistics = {
        "members": jnp.asarray(members.sum(0)),
        "placed": jax.tree.map(
            lambda *leaves: jnp.stack(
                [sum(members[i, k] * leaves[i] for i in range(3)) for k in range(3)]
            ),
            *uploads,
        ),
    }
    count = jnp.float32(3)
    new = jax.jit(algorithm.server_update)(
        KEY, 0, server, Aggregate(statistics, count, count, 6)
    )
    assert_equal(component(new, 1), component(server, 1))
    for k, who in ((0, (0, 2)), (2, (1,))):
        total = jax.tree.map(lambda *leaves: sum(leaves), *(uploads[i] for i in who))
        weight = jnp.float32(len(who))
        expected = jax.jit(plain.server_update)(
            KEY, 0, component(server, k), Aggregate(total, weight, weight, 6)
        )
        assert_close(component(new, k), expected)


def _statistics(server, average):
    """Something of the shape of the stacked uploads."""
    posterior = server.posterior
    if average == "parameters":
        return posterior
    return {"first": posterior.mu, "second": posterior.mu}


def test_clusters_are_compared_by_the_same_draws(three, run, train):
    """Equal posteriors tie exactly, whatever the key; then the first is taken."""
    algorithm, server = three
    _, _, state, _ = run
    data = component(jax.tree.map(jnp.asarray, planted(train)), 0)
    equal = jax.tree.map(lambda leaf: jnp.stack([leaf[2]] * 3), server)
    rho = jax.tree.map(jnp.zeros_like, equal.posterior.rho)
    noisy = Server(MeanField(equal.posterior.mu, rho))
    assign = jax.jit(jax.vmap(algorithm.assign, (0, None, None, None)))
    keys = jax.random.split(KEY, 20)
    cluster, own = assign(keys, noisy, (), data)
    np.testing.assert_array_equal(cluster, 0)
    # The better one wins, wherever it stands, and is handed out.
    good = component(state.server, int(run[0].clusters(state)[0]))
    placed = jax.tree.map(lambda a, b: a.at[1].set(b), server, good)
    cluster, own = assign(keys, placed, (), data)
    np.testing.assert_array_equal(cluster, 1)
    assert_equal(component(own, 0), good)
    # One that overflowed attracts nobody.
    broken = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), placed)
    np.testing.assert_array_equal(assign(keys, broken, (), data)[0], 1)


def test_an_upload_counts_for_its_cluster_only(three, train):
    algorithm, server = three
    data = component(jax.tree.map(jnp.asarray, train), 1)
    client = jax.jit(algorithm.init_client)(KEY, server)
    output = jax.jit(algorithm.client_update)(KEY, 0, server, client, data)
    # It sends its cluster's number and one posterior.
    k = int(output.upload["cluster"])
    assert sum(leaf.size for leaf in jax.tree.leaves(output.upload["upload"])) == 2 * 21
    shares = [float(output.metrics[f"share_{j}"]) for j in range(3)]
    assert shares == np.eye(3)[k].tolist()
    statistics = jax.jit(algorithm.statistics)(server, output.upload)
    np.testing.assert_array_equal(statistics["members"], shares)
    assert_equal(component(statistics["placed"], k), output.upload["upload"])
    for j in {0, 1, 2} - {k}:
        assert not any(
            x.any() for x in jax.tree.leaves(statistics["placed"].mu.vector[j])
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [("clusters", 0), ("clusters", 7), ("zeta", 0)],
)
def test_options_are_checked_by_name_at_construction(linear, option, value):
    with pytest.raises(ValueError, match=f"{option}={value}"):
        cfedbayes(linear, **{option: value})
