"""PFNM: which neurons are the same, and the network that they make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import nn
from fedvi.algorithms import pfnm
from fedvi.algorithms.pfnm import PFNM, Server, match

KEY = jax.random.key(0)
WIDTH, FEATURES = 5, 10


def networks(seed=0):
    return 4 * np.random.default_rng(seed).normal(size=(WIDTH, FEATURES))


def test_permuted_copies_of_one_network_are_matched_exactly():
    one, rng = networks(), np.random.default_rng(1)
    orders = [rng.permutation(WIDTH) for _ in range(4)]
    copies = np.stack([one[order] for order in orders])
    options = PFNM(prior_neuron_std=2.0)
    neurons, sizes, members = match(copies, np.ones(4, bool), options, 3 * WIDTH)
    assert list(sizes) == [4] * WIDTH + [0] * 2 * WIDTH
    shrunk = 4 / (4 + 1 / 4)  # m / (m + σ²/σ0²)
    for order, found in zip(orders, members):
        np.testing.assert_allclose(neurons[found], shrunk * one[order], rtol=1e-6)
    np.testing.assert_array_equal(neurons[WIDTH:], 0)


def test_networks_that_share_nothing_stay_side_by_side():
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(FEATURES,) * 2))[0]
    pair = 8 * directions.reshape(2, WIDTH, FEATURES)
    left_out = np.array([True, False, True])
    three = np.stack([pair[0], np.full_like(pair[0], np.nan), pair[1]])
    neurons, sizes, members = match(
        three, left_out, PFNM(prior_neuron_std=1.0), 3 * WIDTH
    )
    assert sizes.sum() == 2 * WIDTH and sizes.max() == 1
    np.testing.assert_allclose(neurons[members[2]], pair[1] / 2, rtol=1e-6)
    # No room: all must be shared.
    _, sizes, _ = match(pair, np.ones(2, bool), PFNM(), WIDTH)
    assert list(sizes) == [2] * WIDTH


def test_the_global_network_is_as_wide_as_its_neurons(task):
    algorithm = pfnm(task, widening=2)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6)).astype(np.float32)
    neurons = rng.normal(size=(2 * WIDTH, 6 + 1 + 3)).astype(np.float32)
    bias = np.array([0.5, -1.0, 2.0], np.float32)
    members = jnp.zeros((task.ids, WIDTH), jnp.int32)
    server = Server(jnp.asarray(neurons), jnp.asarray(bias), jnp.ones(10), members)
    seen = algorithm.unicast(server, 0)
    found = algorithm.global_predictive(KEY, seen, x, jnp.ones(4, bool))[0]
    hidden = np.maximum(x @ neurons[:, :6].T + neurons[:, 6], 0)
    expected = jax.nn.log_softmax(hidden @ neurons[:, 7:] + bias)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_client_is_sent_its_own_neurons_alone(task):
    algorithm = pfnm(task)
    server = algorithm.init(KEY)
    sent = algorithm.unicast(algorithm.broadcast(server), 1)
    assert sum(leaf.size for leaf in jax.tree.leaves(sent)) == WIDTH * FEATURES + 3


def test_other_networks_are_refused(task):
    deep = nn.build("mlp", classes=3, input_shape=(6,), hidden=(5, 4))
    with pytest.raises(ValueError, match="is no network of one hidden layer"):
        pfnm(task._replace(model=deep))
