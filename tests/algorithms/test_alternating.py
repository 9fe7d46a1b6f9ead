"""The alternation of two posteriors, on quadratics whose steps are written out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithm import Task
from fedvi.algorithms import build
from fedvi.algorithms.alternating import alternate, learner
from fedvi.data import ClientData
from fedvi.federation import Federation
from fedvi.local import LocalTraining

KEY, WIDTH, SIZE = jax.random.key(3), 4, 6
PULL, SPREAD = 0.7, 1.3  # weights of the two objectives' quadratics
ROUND = 2

rng = np.random.default_rng(0)
X = rng.normal(size=(8, WIDTH)).astype(np.float32)
Q, W = rng.normal(size=(2, WIDTH)).astype(np.float32)
DATA = ClientData(jnp.asarray(X), jnp.zeros(8, jnp.int32), jnp.int32(SIZE))
FULL_BATCH = LocalTraining(
    epochs=2, batch_size=SIZE, learning_rate=lambda t: 0.05 * (1 + t), momentum=0.5
)
ADAM = FULL_BATCH._replace(optimizer="adam")


def objective(key, q, w, batch):
    """½|q - mean x|² + PULL/2 |q - w|², which depends on both."""
    count = batch.mask.sum()
    mean = jnp.where(batch.mask[:, None], batch.x, 0).sum(0) / count
    return 0.5 * jnp.sum((q - mean) ** 2) + 0.5 * PULL * jnp.sum((q - w) ** 2)


def divergence(q, w):
    return 0.5 * SPREAD * jnp.sum((q - w) ** 2)


def run(
    training=FULL_BATCH,
    *,
    data=DATA,
    learners=None,
    objective=objective,
    divergence=divergence,
    personal_steps=3,
    global_steps=2,
    rate=None,
):
    q, w = learners or (learner(jnp.asarray(a), training) for a in (Q, W))

    @jax.jit
    def call(q, w, data):
        return alternate(
            KEY,
            ROUND,
            data,
            training,
            q,
            w,
            (objective, divergence),
            (personal_steps, global_steps),
            rate,
        )

    return call(q, w, data)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_it_is_the_loop_of_algorithm_1():
    """Heavy-ball momentum, the round's rate, and a rate of its own for w."""
    q, w, loss = run(rate=0.03)
    mean, rate = X[:SIZE].mean(0, dtype=np.float64), 0.05 * (1 + ROUND)
    q64, w64 = Q.astype(np.float64), W.astype(np.float64)
    q_velocity, w_velocity = np.zeros(WIDTH), np.zeros(WIDTH)
    losses = []
    for _ in range(2):
        for _ in range(3):
            value = (
                0.5 * ((q64 - mean) ** 2).sum() + PULL / 2 * ((q64 - w64) ** 2).sum()
            )
            q_velocity = 0.5 * q_velocity + (q64 - mean) + PULL * (q64 - w64)
            q64 = q64 - rate * q_velocity
        losses.append(value)  # before q's last step
        for _ in range(2):
            w_velocity = 0.5 * w_velocity + SPREAD * (w64 - q64)
            w64 = w64 - 0.03 * w_velocity
    np.testing.assert_allclose(q.posterior, q64, rtol=1e-5)
    np.testing.assert_allclose(w.posterior, w64, rtol=1e-5)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_without_global_steps_only_q_moves():
    q, w, _ = run(ADAM, global_steps=0)
    assert_equal(w, learner(jnp.asarray(W), ADAM))
    assert not np.allclose(q.posterior, Q)


def test_each_objective_moves_its_own_posterior_only():
    """q's objective depends on w and w's divergence on q: both are constants there."""
    q, w, _ = run(divergence=lambda q, w: 5 * jnp.sum(q))
    assert_equal(w.posterior, W)
    assert not np.allclose(q.posterior, Q)
    q, w, _ = run(objective=lambda key, q, w, batch: 5 * jnp.sum(w))
    assert_equal(q.posterior, Q)
    assert not np.allclose(w.posterior, W)


def test_every_step_of_q_draws_afresh():
    """Two steps along N(0, 1) directions: variance 2 if they differ, else 4."""

    def noise(key, q, w, batch):
        return jnp.dot(q, jax.random.normal(key, q.shape))

    training = LocalTraining(epochs=1, batch_size=SIZE, learning_rate=1.0, momentum=0)
    zeros = learner(jnp.zeros(4000), training)
    q, _, _ = run(
        training,
        learners=(zeros, zeros),
        objective=noise,
        personal_steps=2,
        global_steps=0,
    )
    assert np.var(q.posterior) == pytest.approx(2, rel=0.15)


def test_moments_that_are_handed_back_continue_the_descent():
    once = ADAM._replace(epochs=1)
    q, w, _ = run(once)
    q, w, _ = run(once, learners=(q, w))
    longer = run(ADAM)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (q, w), longer[:2]
    )
    assert q.moments[0].count == 2 * 3 and w.moments[0].count == 2 * 2


def test_a_client_without_data_moves_nothing():
    q, w, loss = run(ADAM, data=DATA._replace(size=jnp.int32(0)))
    assert_equal((q, w), tuple(learner(jnp.asarray(a), ADAM) for a in (Q, W)))
    assert loss == 0


@pytest.mark.parametrize("name, weight", [("bpfed", "zeta"), ("fedabml", "kl_weight")])
def test_the_reported_loss_is_the_data_term(name, weight, task, train):
    # The KL of q from the prior it starts at is 0 and flat, whatever its weight: at the
    # second of two steps the data term is the same, the objective is not.
    once = LocalTraining(epochs=1, batch_size=20, learning_rate=0.1, momentum=0.0)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)

    @jax.jit
    def run(value):  # traced: one program for both
        options = {"personal_steps": 2, weight: value}
        algorithm = build(name, task._replace(training=once), **options)
        server = algorithm.init(KEY)
        client = algorithm.init_client(KEY, server)
        return algorithm.client_update(KEY, 0, server, client, data).metrics

    light, heavy = run(0.01), run(100.0)
    np.testing.assert_allclose(light["loss"], heavy["loss"], rtol=1e-6)
    assert abs(light["kl"] - heavy["kl"]) > 1e-3 * light["kl"] > 0


# C21: ten clients, one with a single example; the driver's SGD.
LONE = {"clients": 10, "samples": 500, "smallest": 1}
SGD = LocalTraining(learning_rate=0.1)


@pytest.mark.parametrize(
    ("name", "options", "curvature", "most"),
    [
        # Where both posteriors move, 2 (1 - momentum).
        ("pfedbayes", {}, 10 / np.log1p(np.exp(-2.5)) ** 2, 0.2),
        ("sfedbayes", {"zeta": 4.0}, 4 / np.log1p(np.exp(-2.5)) ** 2, 0.2),
        ("cfedbayes", {"rho": -1.0}, 10 / np.log1p(np.exp(-1)) ** 2, 0.2),
        ("bpfed", {"kl_direction": "reverse"}, 1 / np.log1p(np.exp(-3)) ** 2, 0.2),
        ("pfedbayes", {"global_steps": 0}, 10 / np.log1p(np.exp(-2.5)) ** 2, 3.8),
        ("fedabml", {"nu": -5.0}, 0.01 * np.exp(10), 3.8),
        ("fedabml", {"theta_update": "alternate"}, 0.01 * np.exp(8), 0.2),
        # φ's own steps, which are plain ones.
        ("fedabml", {"theta_update": "meta"}, 0.01 * np.exp(8), 2.0),
    ],
)
def test_steps_that_the_kl_term_throws_off_are_refused(
    name, options, curvature, most, task
):
    """C21: with the bound, which is a rate that would do."""

    def at(rate, optimizer="sgd", **more):
        training = SGD._replace(learning_rate=rate, optimizer=optimizer)
        both = {"training": training, "finetuning": training}
        return build(name, task._replace(**both, **LONE), **options, **more)

    most = most / curvature
    at(0.99 * most)
    text = rf"=[0-9.]+ for a client of 1 examples has .* learning_rate={most:.3g} on"
    with pytest.raises(ValueError, match=text):
        at(1.01 * most)
    if options.get("theta_update") != "meta":
        at(1.01 * most, "adam")
    if name == "fedabml" or "global_steps" in options:
        return
    with pytest.raises(ValueError, match="global_learning_rate"):
        at(0.99 * most, global_learning_rate=1.01 * most)
    # A traced weight is not known yet.
    options = {key: value for key, value in options.items() if key != "zeta"}
    jax.eval_shape(lambda zeta: at(1.0, zeta=zeta).init(KEY), 10.0)


@pytest.mark.parametrize(
    ("steps", "momentum", "unstable"),
    [
        # lr c from which on it diverges: the spectral radius of a minibatch's 4 x 4.
        ((1, 1), 0.0, 2.0),
        ((1, 1), 0.5, 1.0),
        ((1, 1), 0.9, 0.2),
        ((1, 1), 0.95, 0.1),
        ((5, 1), 0.0, 2.0),
        ((5, 1), 0.5, 2.72),
        ((5, 1), 0.9, 0.222),
        ((5, 1), 0.95, 0.1043),
        ((5, 5), 0.0, 2.0),
        ((5, 5), 0.5, 2.769),
        ((5, 5), 0.9, 1.45),
        ((5, 5), 0.95, 0.1638),
    ],
)
def test_two_posteriors_chase_each_other(steps, momentum, unstable):
    """C21: below the bound both come to rest; it is exact for a step of each."""
    bound = 2 * (1 - momentum)
    assert bound <= unstable * (1 + 1e-9)
    assert spectral_radius(0.98 * unstable, steps, momentum) < 1
    assert spectral_radius(1.02 * unstable, steps, momentum) > 1
    for lower in np.linspace(0.01, 0.99, 50):  # of clients with more examples
        assert spectral_radius(lower * bound, steps, momentum) < 1
        # The rates need not be the same.
        assert spectral_radius(lower * bound, steps, momentum, 0.1) < 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_bound_is_where_the_steps_in_turn_begin_to_diverge(momentum):
    """C21: on either side of it, data term 0."""
    training = FULL_BATCH._replace(epochs=3000, momentum=momentum)

    def kl(q, w):
        return 0.5 * jnp.sum((q - w) ** 2)

    @jax.jit
    def left(rate):
        at = training._replace(learning_rate=rate)
        q, w = (learner(jnp.asarray(a), at) for a in (Q, W))
        energy = (lambda key, q, w, batch: kl(q, w)), kl
        q, w, _ = alternate(KEY, 0, DATA, at, q, w, energy, (1, 1))
        return jnp.abs(q.posterior - w.posterior).max()

    most = 2 * (1 - momentum)
    assert left(0.95 * most) < 1e-3 and not left(1.05 * most) < 1e2


def spectral_radius(rate, steps, momentum, ratio=1.0):
    """Of a minibatch's linear map of (q, w, both velocities), translation left out."""
    q_step, w_step = np.eye(4), np.eye(4)
    q_step[2] = [rate, -rate, momentum, 0]
    q_step[0] -= q_step[2]
    w_step[3] = [-ratio * rate, ratio * rate, 0, momentum]
    w_step[1] -= w_step[3]
    power = np.linalg.matrix_power
    values = np.linalg.eigvals(power(w_step, steps[1]) @ power(q_step, steps[0]))
    return np.abs(np.delete(values, np.argmin(np.abs(values - 1)))).max()


def test_a_rate_below_the_bound_trains(task, train, test):
    """C21: equal clients, many minibatches a round, SGD with momentum."""
    train, test = (jax.tree.map(lambda leaf: leaf[[0, 5]], s) for s in (train, test))
    assert (train.size == 20).all()
    task = Task.of(task.model, train, SGD)
    with pytest.raises(ValueError, match="learning_rate=0.1 must be smaller") as error:
        build("pfedbayes", task)
    named = float(re.search(r"learning_rate=([0-9.e-]+) on", str(error.value))[1])
    training = SGD._replace(learning_rate=0.8 * named, epochs=2, batch_size=4)
    algorithm = build("pfedbayes", task._replace(training=training))
    federation = Federation(algorithm, train, test)
    state, metrics = federation.rounds(federation.init(KEY), 40)
    loss = metrics.metrics["loss"]
    assert loss[-1] < 0.5 * loss[0] and loss.max() < 1.1 * loss[0]
    for leaf in jax.tree.leaves((state.server, state.clients)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            # What is finite can be absurd: 2.5 here, 11 at 1.2 times the bound.
            assert jnp.abs(leaf).max() < 5


def test_without_the_smallest_client_the_mean_one_is_looked_at(task):
    training = SGD._replace(learning_rate=0.1)
    few = Task(task.model, training, training, clients=10, samples=200)
    with pytest.raises(ValueError, match=r"zeta=10\.0 for a client of 20 examples"):
        build("pfedbayes", few)
    build("pfedbayes", few._replace(samples=20000))
