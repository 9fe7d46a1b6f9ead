"""FedBE: what the student learns of teachers whose average is of no use."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedvi.algorithm import StackedAggregate
from fedvi.algorithms import fedbe, train_from
from fedvi.algorithms.common import log_probabilities
from fedvi.algorithms.fedbe import FedBE, teachers
from fedvi.flat import like_flats, trees
from fedvi.local import LocalTraining

KEY = jax.random.key(0)


def test_the_student_beats_the_average_of_permuted_networks(task, train, test):
    """Two networks of one function, their hidden units in other orders."""
    long = LocalTraining(60, 10, 0.05)
    x, y = test.x.reshape(-1, 6), test.y.reshape(-1)
    task = task._replace(training=long, unlabelled=x[:40])
    algorithm = fedbe(task, teacher_draws=0, distillation_learning_rate=0.05)
    server = algorithm.init(KEY)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    good = train_from(task, KEY, 0, server.params, data)[0]

    def permuted(path, leaf):
        hidden = leaf.shape.index(5) if 5 in leaf.shape else None
        return leaf if hidden is None else jnp.roll(leaf, 2, hidden)

    other = like_flats(jax.tree.map_with_path(permuted, trees(good)), good)
    moved = [optax.tree.sub(one, server.params) for one in (good, other)]
    # A third client sent nothing, and is no teacher.
    uploads = jax.tree.map(lambda a, b: jnp.stack([a, b, 0 * a]), *moved)
    weight = jnp.array([1.0, 1.0, 0.0])
    aggregate = StackedAggregate(uploads, weight, jnp.arange(3), jnp.float32(2), 3)
    found = jax.jit(algorithm.server_update)(KEY, 0, server, aggregate)

    def nll(params):
        logits = log_probabilities(task.model, params, x[40:])
        return -float(np.take_along_axis(logits, y[40:, None], 1).mean())

    average = optax.tree.add(
        server.params, optax.tree.scale(0.5, optax.tree.add(*moved))
    )
    assert nll(good) < 0.5 * nll(average)
    assert nll(found.params) < 0.6 * nll(average)


def test_teachers_are_the_average_the_clients_and_draws_around_them():
    rng = np.random.default_rng(0)
    moved = rng.normal(size=(3, 4)).astype(np.float32)
    weight = jnp.array([1.0, 3.0, 0.0])
    options = FedBE(teacher_draws=4000, draw_scale=0.5)
    found, counts = teachers(KEY, {"a": jnp.asarray(moved)}, weight, options)
    found = np.asarray(found["a"])
    share, norms = np.array([0.25, 0.75]), np.linalg.norm(moved[:2], axis=1)
    np.testing.assert_allclose(found[0], share @ moved[:2], rtol=1e-5)
    np.testing.assert_array_equal(found[1:4], moved)
    np.testing.assert_array_equal(counts[:5], [1, 1, 1, 0, 1])
    unit = moved[:2] / norms[:, None]
    centre, radius = share @ unit, share @ norms
    spread = np.sqrt(share @ (unit - centre) ** 2)
    draws = found[4:]
    np.testing.assert_allclose(draws.mean(0), radius * centre, atol=0.05)
    np.testing.assert_allclose(draws.std(0), radius * spread / 2, rtol=0.05)


def test_it_needs_unlabelled_inputs(task):
    with pytest.raises(ValueError, match="task.unlabelled=None: fedbe distils on"):
        fedbe(task._replace(unlabelled=None))
