"""FedHB-Mixture against the algorithms and formulas that it generalises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithm import Aggregate
from fedvi.algorithms import fedhb_mixture
from fedvi.algorithms.common import classification_loss, quadratic_penalty
from fedvi.federation import Federation
from fedvi.local import minimise

KEY = jax.random.key(3)


def assert_close(a, b, **kwargs):
    kwargs = {"rtol": 1e-5, "atol": 1e-6, **kwargs}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **kwargs), a, b)


def one_client(train, client=1):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[client]), train)


def component(tree, j):
    return jax.tree.map(lambda leaf: leaf[j], tree)


@pytest.mark.parametrize("start", ["centre", "likelihood"])
def test_one_prototype_is_fedprox(task, train, start):
    variance, size = 0.02, 13
    algorithm = fedhb_mixture(task, components=1, variance=variance, start=start)
    server, data = algorithm.init(KEY), one_client(train)
    output = jax.jit(algorithm.client_update)(KEY, 0, server, (), data)
    centre = component(server.prototypes, 0)

    def loss(key, body, batch):
        params = {"body": body, "head": server.head}
        penalty = quadratic_penalty(body, centre, 1 / (variance * size))
        return classification_loss(task.model, params, batch) + penalty

    body_key = jax.random.split(KEY, 3)[0]
    expected = jax.jit(
        lambda: minimise(body_key, 0, centre, data, task.training, loss)[0]
    )()
    assert_close(component(output.statistics["weighted"], 0), expected)
    assert output.statistics["mass"] == 1


def statistics_of(bodies, masses, gate):
    """The weighted sum over clients of what they upload."""
    weighted = [
        jax.tree.map(lambda m: c.reshape(-1, *[1] * m.ndim) * m[None], body)
        for body, c in zip(bodies, masses, strict=True)
    ]
    return {
        "mass": sum(masses),
        "weighted": jax.tree.map(lambda *leaves: sum(leaves), *weighted),
        "gate": jax.tree.map(lambda leaf: leaf * len(bodies), gate),
    }


def random_bodies(task, count, seed=0):
    shapes = jax.eval_shape(task.model.init, KEY)["body"]
    rng = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes)
        for _ in range(count)
    ]


def test_one_prototype_is_the_shrunk_mean(task):
    variance = 0.3
    algorithm = fedhb_mixture(task, components=1, variance=variance, prior_mean="zero")
    server, bodies = algorithm.init(KEY), random_bodies(task, 4)
    statistics = statistics_of(bodies, [jnp.ones(1)] * 4, server.gate["body"])
    count = jnp.float32(4)
    new = algorithm.server_update(
        KEY, 0, server, Aggregate(statistics, count, count, 4)
    )
    expected = jax.tree.map(lambda *leaves: sum(leaves) / (4 + variance), *bodies)
    assert_close(component(new.prototypes, 0), expected)
    assert_close(new.gate, server.gate)


def test_the_previous_prototype_as_prior_is_a_moving_average(task):
    variance = 0.3
    algorithm = fedhb_mixture(
        task, components=1, variance=variance, prior_mean="previous"
    )
    server, bodies = algorithm.init(KEY), random_bodies(task, 4)
    statistics = statistics_of(bodies, [jnp.ones(1)] * 4, server.gate["body"])
    count = jnp.float32(4)
    # Half of the population took part: the prior weighs σ² N_f/N.
    new = algorithm.server_update(
        KEY, 0, server, Aggregate(statistics, count, count, 8)
    )
    expected = jax.tree.map(
        lambda r, *leaves: (variance / 2 * r[0] + sum(leaves)) / (4 + variance / 2),
        server.prototypes,
        *bodies,
    )
    assert_close(component(new.prototypes, 0), expected)


def test_an_empty_prototype_is_kept(task):
    algorithm = fedhb_mixture(task, components=2)
    server, bodies = algorithm.init(KEY), random_bodies(task, 3)
    masses = [jnp.array([1.0, 0.0])] * 3
    statistics = statistics_of(bodies, masses, server.gate["body"])
    count = jnp.float32(3)
    new = algorithm.server_update(
        KEY, 0, server, Aggregate(statistics, count, count, 3)
    )
    assert_close(component(new.prototypes, 1), component(server.prototypes, 1))
    moved = component(new.prototypes, 0)["Dense_0"]["kernel"]
    assert not np.allclose(moved, component(server.prototypes, 0)["Dense_0"]["kernel"])


def test_prototypes_start_apart_and_init_spread_says_how_far(task):
    distances = {}
    for spread in (1.0, 0.1, 0.0):
        server = fedhb_mixture(task, init_spread=spread).init(KEY)
        kernel = server.prototypes["Dense_0"]["kernel"]
        distances[spread] = float(jnp.linalg.norm(kernel[0] - kernel[1]))
    assert distances[1.0] > 0.5 and distances[0.0] == 0
    assert distances[0.1] == pytest.approx(0.1 * distances[1.0], rel=1e-4)


def test_likelihood_starts_from_the_prototype_that_fits_the_client(task, train):
    algorithm = fedhb_mixture(task, components=3, start="likelihood")
    data = one_client(train)
    good = fedhb_mixture(task, components=1)
    federation = Federation(good, train, train)
    state, _ = federation.rounds(federation.init(jax.random.key(0)), 8)
    fitted = component(state.server.prototypes, 0)
    server = algorithm.init(KEY)._replace(head=state.server.head)
    prototypes = jax.tree.map(lambda r, f: r.at[0].set(f), server.prototypes, fitted)
    server = server._replace(prototypes=prototypes)
    output = algorithm.client_update(KEY, 0, server, (), data)
    assert int(jnp.argmax(output.statistics["mass"])) == 0


def test_global_prediction_is_the_gated_mixture(task, train):
    algorithm = fedhb_mixture(task, components=2)
    server = algorithm.init(KEY)
    x, mask = one_client(train).x, jnp.ones(20, bool)
    gate_model = task.model.with_classes(2)
    gate = jax.nn.softmax(gate_model.apply(server.gate, x, mask))
    expected = sum(
        gate[:, j : j + 1]
        * jax.nn.softmax(
            task.model.apply(
                {"body": component(server.prototypes, j), "head": server.head}, x, mask
            )
        )
        for j in range(2)
    )
    predicted = algorithm.global_predictive(KEY, server, x, mask)
    np.testing.assert_allclose(np.exp(predicted[0]), expected, rtol=1e-5, atol=1e-6)


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
    data, moved = one_client(train), []
    for penalty_scale in (0.0, 100.0):
        algorithm = fedhb_mixture(task, components=1, penalty_scale=penalty_scale)
        server = algorithm.init(KEY)
        personal = algorithm.personalise(KEY, server, (), data)
        prototype = component(server.prototypes, 0)
        moved.append(
            max(
                float(jnp.abs(a - b).max())
                for a, b in zip(
                    *map(jax.tree.leaves, (personal["body"], prototype)), strict=True
                )
            )
        )
    assert moved[1] < 0.8 * moved[0]
