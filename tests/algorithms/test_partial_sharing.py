"""FedPer, FedRep and LG-FedAvg by what FedAvg and FedBABU do to the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms import fedavg, fedbabu, fedper, fedrep, lg_fedavg
from fedvi.federation import Federation
from fedvi.flat import trees

KEY = jax.random.key(0)


def assert_close(a, b, atol=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol),
        trees(a),
        trees(b),
    )


@pytest.fixture(scope="module")
def plain(task):
    """Full batches, so that no reference needs to know the order of the examples."""
    training = task.training._replace(batch_size=20)
    return task._replace(training=training, finetuning=training)


@pytest.fixture(scope="module")
def locally(plain):
    """Training of all layers together: `(params, data) -> params`."""
    avg = fedavg(plain)

    def train(params, data):
        server = avg.init(KEY)._replace(params=params)
        moved = avg.client_update(KEY, 0, server, (), data).upload
        return jax.tree.map(jnp.add, params, moved)

    return jax.jit(train)


def one_client(train, i):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[i]), train)


def test_fedper_averages_bodies_by_size_and_mixes_no_heads(plain, train, test, locally):
    federation = Federation(fedper(plain), train, test)
    state = federation.init(KEY)
    params = plain.model.init(KEY)
    like = jax.tree.structure(params)
    shared, newcomer = jax.device_get(state.server)  # a round donates its state
    body = jax.tree.structure(params["body"]).unflatten(jax.tree.leaves(shared))
    head = jax.tree.structure(params["head"]).unflatten(jax.tree.leaves(newcomer))
    heads = {i: head for i in np.flatnonzero(train.size)}
    for _ in range(2):
        bodies = []
        for i in heads:
            params = locally(
                like.unflatten(jax.tree.leaves({"body": body, "head": heads[i]})),
                one_client(train, i),
            )
            bodies.append(
                jax.tree.map(lambda v, n=train.size[i]: n * v, params["body"])
            )
            heads[i] = params["head"]
        total = train.size.sum()
        body = jax.tree.map(lambda *leaves: sum(leaves) / total, *bodies)
    state, _ = federation.rounds(state, 2)
    assert_close(state.server.shared, body, atol=1e-5)
    for i in range(7):  # one is empty
        own = jax.tree.map(lambda leaf, i=i: leaf[i], state.clients)
        assert_close(own, heads.get(i, head), atol=1e-5)


def test_lg_fedavg_is_fedpers_complement(plain, train):
    """One client: what one sends the other keeps."""
    data = one_client(train, 0)
    outputs, starts = [], []
    for algorithm in (fedper(plain), lg_fedavg(plain)):
        server = algorithm.init(KEY)
        run = jax.jit(algorithm.client_update)
        outputs.append(run(KEY, 0, server, server.newcomer, data))
        starts.append(server)
    per, lg = outputs
    assert_close(starts[0].shared, starts[1].newcomer)
    for one, other, start in ((per, lg, starts[1]), (lg, per, starts[0])):
        assert_close(one.client, jax.tree.map(jnp.add, start.shared, other.upload))
        assert one.weight == 20


def test_fedreps_body_steps_are_fedbabus_under_the_trained_head(plain, train):
    data = one_client(train, 0)

    def run(epochs):
        training = plain.training._replace(epochs=epochs)
        algorithm = fedrep(plain._replace(training=training), personal_epochs=3)
        server = algorithm.init(KEY)
        run = jax.jit(algorithm.client_update)
        return server, run(KEY, 0, server, server.newcomer, data)

    server, heads_only = run(0)
    assert not any(leaf.any() for leaf in jax.tree.leaves(heads_only.upload))
    assert np.abs(heads_only.client.vector - server.newcomer.vector).max() > 0.01
    _, whole = run(2)
    assert_close(whole.client, heads_only.client)
    start = {"body": server.shared, "head": heads_only.client}
    body = jax.jit(fedbabu(plain).client_update)(KEY, 0, start, (), data).upload["body"]
    assert_close(whole.upload, body)
    assert whole.weight == 1
    assert np.abs(whole.upload.vector).max() > 0.01


def test_nothing_is_adapted_but_a_clients_own_part(plain, train):
    algorithm = fedrep(plain, personal_epochs=10)
    server, data = algorithm.init(KEY), one_client(train, 0)
    own = jax.jit(algorithm.personalise)(KEY, server, server.newcomer, data)
    assert jax.tree.structure(own) == jax.tree.structure(server.newcomer)
    assert np.abs(own.vector - server.newcomer.vector).max() > 0.01
    assert not jax.tree.leaves(algorithm.broadcast(server).newcomer)


@pytest.mark.parametrize("pattern", ["nothing", "."])
def test_a_part_that_is_none_or_all_is_refused(task, pattern):
    with pytest.raises(ValueError, match="personal_part=.* leaves no"):
        fedper(task, personal_part=pattern)
