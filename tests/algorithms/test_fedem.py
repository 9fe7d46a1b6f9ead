"""FedEM: its responsibilities, and FedAvg where it has one component."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedvi.algorithm import Aggregate
from fedvi.algorithms import fedavg, fedem
from fedvi.algorithms.fedem import example_losses, expectation, responsibilities
from fedvi.local import LocalTraining

KEY = jax.random.key(3)


def one_client(train, i):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[i]), train)


def test_one_component_is_fedavg(task, train):
    data = one_client(train, 1)
    algorithm, plain = fedem(task, components=1), fedavg(task)
    server = algorithm.init(KEY)
    start = plain.init(jax.random.split(KEY, 1)[0])
    found = jax.jit(algorithm.client_update)(KEY, 0, server, jnp.ones(1), data)
    expected = jax.jit(plain.client_update)(KEY, 0, start, (), data)
    np.testing.assert_allclose(found.client, 1)
    np.testing.assert_allclose(found.metrics["loss"], expected.metrics["loss"], 1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-4, atol=1e-6),
        found.upload.components,
        expected.upload,
    )


def test_responsibilities_tell_two_rules_of_labels_apart(task, train):
    """Of models that each follow one rule, every example to its own; π their shares."""
    data = one_client(train, 1)  # 13 of 20 places are real
    rule = np.arange(20) % 3 == 0  # 5 of the 13
    data = data._replace(y=jnp.where(rule, (data.y + 1) % 3, data.y))
    algorithm = fedem(task, components=2)

    def apply(shift, x, mask=None):
        return 20.0 * jax.nn.one_hot((truth(x) + shift) % 3, 3)

    def truth(x):  # the place of the nearest known example
        distance = ((x[:, None] - data.x[None]) ** 2).sum(-1)
        return jnp.asarray(train.y[1])[distance.argmin(-1)]

    rules = fedem(task._replace(model=task.model._replace(apply=apply)), components=2)
    server = algorithm.init(KEY)._replace(components=jnp.arange(2))
    personal = jax.jit(rules.personalise)(KEY, server, jnp.full(2, 0.5), data)
    np.testing.assert_allclose(personal.weights, [8 / 13, 5 / 13], atol=1e-4)
    losses = jnp.stack(
        [
            example_losses(
                task._replace(model=task.model._replace(apply=apply)), KEY, k, data
            )
            for k in (0, 1)
        ],
        axis=-1,
    )
    q, _ = expectation(losses, personal.weights, data.size)
    np.testing.assert_allclose(q[:13, 1], rule[:13], atol=1e-4)
    # The mixture's probabilities.
    x, mask = data.x[:2], jnp.ones(2, bool)
    log_probs = rules.personal_predictive(KEY, server, personal, x, mask)
    own = np.arange(2), np.asarray(train.y[1][:2])
    np.testing.assert_allclose(np.exp(log_probs[0])[own], 8 / 13, atol=1e-4)


def test_rounding_takes_no_share_below_zero(task):
    algorithm = fedem(task)
    server = algorithm.init(KEY)
    shares = jnp.array([-1e-3, 0.4, 0.5])
    moved = server._replace(weights=shares - server.weights)
    aggregate = Aggregate(
        jax.tree.map(jnp.asarray, moved), jnp.ones(()), jnp.ones(()), 6
    )
    after = algorithm.server_update(KEY, 0, server, aggregate)
    np.testing.assert_allclose(after.weights, [0, 4 / 9, 5 / 9], atol=1e-6)
    x, mask = jnp.ones((2, 6)), jnp.ones(2, bool)
    assert np.isfinite(algorithm.global_predictive(KEY, after, x, mask)).all()


def test_an_em_step_by_hand(task, train):
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), train)
    size = int(data.size)
    training = LocalTraining(epochs=1, batch_size=20, learning_rate=0.1, momentum=0.0)
    algorithm = fedem(task._replace(training=training), components=2, em_steps=0)
    server, before = algorithm.init(KEY), jnp.array([0.9, 0.1])
    output = jax.jit(algorithm.client_update)(KEY, 0, server, before, data)

    def losses(params):
        logits = task.model.apply(params, data.x[:size])
        return optax.softmax_cross_entropy_with_integer_labels(logits, data.y[:size])

    models = [jax.tree.map(lambda leaf: leaf[m], server.components) for m in (0, 1)]
    q = np.exp(-np.float64([losses(m) for m in models]).T) * np.float64(before)
    q /= q.sum(1, keepdims=True)
    np.testing.assert_allclose(
        responsibilities(jnp.stack([losses(m) for m in models], 1), before), q, 1e-4
    )
    np.testing.assert_allclose(output.client, q.mean(0), rtol=1e-4)
    np.testing.assert_allclose(output.upload.weights, q.mean(0) - 0.5, atol=1e-5)
    assert output.weight == size
    for m, theta in enumerate(models):
        slope = jax.grad(lambda p: (jnp.float32(q[:, m]) * losses(p)).mean())(theta)
        jax.tree.map(
            lambda a, g: np.testing.assert_allclose(a[m], -0.1 * g, atol=1e-6),
            output.upload.components,
            slope,
        )
    # No step: what the client kept.
    personal = jax.jit(algorithm.personalise)(KEY, server, output.client, data)
    np.testing.assert_allclose(personal.weights, output.client)
