import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedvi.algorithms import fedavg
from fedvi.data import ClientData
from fedvi.distributions import mixture
from fedvi.flat import Flat, flatten, trees
from fedvi.local import (
    Batch,
    LocalTraining,
    Quadratic,
    check_stable,
    cross_entropy,
    fold_minibatches,
    layerwise,
    minimise,
    squared_gradients,
)

CAPACITY, FEATURES = 500, 4
X = np.random.default_rng(0).normal(size=(CAPACITY, FEATURES)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, CAPACITY).astype(np.int32)


def test_cross_entropy_ignores_masked_examples_even_if_infinite():
    logits = jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf], [0.0, 0.0]])
    labels, mask = jnp.array([1, 0, 0]), jnp.array([True, False, True])
    expected = (np.log1p(np.exp(-1.0)) + np.log(2.0)) / 2
    np.testing.assert_allclose(cross_entropy(logits, labels, mask), expected, rtol=1e-6)
    assert cross_entropy(logits, labels, jnp.zeros(3, bool)) == 0


def test_padding_never_reaches_a_batch():
    """Slots beyond the size hold NaN; a batch is filled up with a real example."""
    x = jnp.where(jnp.arange(8) < 5, jnp.arange(8.0), jnp.nan)[:, None]
    data = ClientData(x, jnp.arange(8, dtype=jnp.int32), jnp.int32(5))
    training = LocalTraining(epochs=1, batch_size=4)

    def step(key, carry, batch):
        worst, count = carry
        return jnp.maximum(worst, batch.x.max()), count + batch.mask.sum()

    worst, count = fold_minibatches(
        jax.random.key(0), data, training, step, (jnp.float32(-1), 0)
    )
    assert worst == 4 and count == 5


@pytest.fixture(scope="module")
def visits():
    """(how often each slot was visited in two epochs, steps) by size, one program."""
    training = LocalTraining(epochs=2, batch_size=64)

    def step(key, carry, batch):
        counts, steps = carry
        slot = batch.x[:, 0].astype(jnp.int32)
        return counts.at[slot].add(batch.mask.astype(jnp.int32)), steps + 1

    slots = jnp.arange(CAPACITY, dtype=jnp.float32)[:, None]
    traces = []

    @jax.jit
    def run(size):
        traces.append(size)
        data = ClientData(slots, jnp.zeros(CAPACITY, jnp.int32), size)
        start = (jnp.zeros(CAPACITY, jnp.int32), 0)
        return fold_minibatches(jax.random.key(0), data, training, step, start)

    sizes = [0, 1, 7, 64, 65, 500]
    results = {size: jax.device_get(run(jnp.int32(size))) for size in sizes}
    assert len(traces) == 1  # C12: one compilation for all sizes
    return results


@pytest.mark.parametrize("size", [0, 1, 7, 64, 65, 500])
def test_every_real_example_is_seen_once_an_epoch(visits, size):  # C12
    counts, steps = visits[size]
    np.testing.assert_array_equal(counts, 2 * (np.arange(CAPACITY) < size))
    assert steps == 2 * -(-size // 64)


def test_what_is_drawn_for_an_epoch_at_once_is_what_each_step_would_draw():
    training = LocalTraining(epochs=2, batch_size=3)
    data = ClientData(jnp.asarray(X[:8]), jnp.asarray(Y[:8]), jnp.int32(7))
    start = jnp.zeros((6, 2)), 0

    def note(value, carry):
        rows, step = carry
        return rows.at[step].set(value), step + 1

    def draw(key):
        return {"two": jax.random.normal(key, (2,))}

    fold = partial(fold_minibatches, jax.random.key(0), data, training)
    at_once = fold(lambda drawn, c, _: note(drawn["two"], c), start, draw)
    by_step = fold(lambda key, c, _: note(draw(key)["two"], c), start)
    np.testing.assert_array_equal(at_once[0], by_step[0])
    assert at_once[1] == 6 and len(np.unique(at_once[0])) == 12


def reference_sgd(weights, x, y, order_of_epochs, batch_size, rate, momentum):
    """Softmax regression by heavy-ball SGD, float64 NumPy, no padding anywhere."""
    velocity = np.zeros_like(weights)
    for order in order_of_epochs:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            logits = x[rows] @ weights
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(rows)), y[rows]] -= 1
            velocity = momentum * velocity + x[rows].T @ p / len(rows)
            weights = weights - rate * velocity
    return weights


@pytest.mark.parametrize("size", [1, 7, 64, 65])
def test_padded_sgd_equals_unpadded_numpy(size):  # C12
    training = LocalTraining(epochs=2, batch_size=64, learning_rate=0.3, momentum=0.9)
    data = ClientData(jnp.asarray(X), jnp.asarray(Y), jnp.int32(size))
    key = jax.random.key(size)

    def loss(key, weights, batch):
        return cross_entropy(batch.x @ weights, batch.y, batch.mask)

    weights = jnp.zeros((FEATURES, 3))
    trained, _ = minimise(key, 0, weights, data, training, loss)

    orders = []
    for epoch in range(2):
        shuffle_key, _ = jax.random.split(jax.random.fold_in(key, epoch))
        rank = np.array(jax.random.uniform(shuffle_key, (CAPACITY,)))
        orders.append(np.argsort(rank[:size]))
    expected = reference_sgd(
        np.zeros((FEATURES, 3)), X.astype(np.float64), Y, orders, 64, 0.3, 0.9
    )
    np.testing.assert_allclose(trained, expected, rtol=2e-5, atol=1e-6)


def test_learning_rate_may_depend_on_the_round():
    training = LocalTraining(learning_rate=lambda round_index: 0.1 / (1 + round_index))
    assert training.learning_rate_at(4) == pytest.approx(0.02)


RNG = np.random.default_rng(4)
QUADRATIC = {
    part: jax.tree.map(
        jnp.float32, {"a": RNG.uniform(1, 3, (2, 3)), "b": [RNG.uniform(1, 3, 4)]}
    )
    for part in ("theta", "centre", "weight")
}


@pytest.mark.parametrize("shared", ["no", "all", "part"])
@pytest.mark.parametrize("flat", [False, True])
def test_a_quadratic_is_what_it_says(shared, flat):
    """Its value by NumPy, its gradient and its proximal step by autodiff."""
    theta, centre, weight = QUADRATIC.values()
    weight = {"no": weight, "all": 0.7, "part": {"a": 0.7, "b": weight["b"]}}[shared]
    each = {
        "a": 0.7 if shared != "no" else weight["a"],
        "b": [0.7] if shared == "all" else weight["b"],
    }

    def by_hand(theta):
        terms = jax.tree.map(
            lambda t, c, w: 0.5 * jnp.sum(w * (t - c) ** 2), theta, centre, each
        )
        return sum(jax.tree.leaves(terms))

    whole = flat and shared != "part"
    penalty = Quadratic(
        flatten(centre) if whole else centre,
        flatten(weight) if whole and shared == "no" else weight,
    )
    given = flatten(theta) if whole else theta
    np.testing.assert_allclose(penalty.value(given), by_hand(theta), rtol=1e-5)
    penalty = trees(penalty)
    chex.assert_trees_all_close(
        penalty.gradient(theta), jax.grad(by_hand)(theta), rtol=1e-5
    )

    def beside(found):
        near = jax.tree.map(lambda f, t: jnp.sum((f - t) ** 2), found, theta)
        return by_hand(found) + sum(jax.tree.leaves(near)) / (2 * 0.6)

    found = penalty.proximal(theta, 0.6)
    zeros = jax.tree.map(jnp.zeros_like, theta)
    chex.assert_trees_all_close(jax.grad(beside)(found), zeros, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_descent_ends_at_the_minimum_of_loss_and_penalty(momentum, optimizer):
    """½ Σ a (θ-1)² + ½ Σ w (θ-c)² is least at (a + w c) / (a + w), w up to 1e5."""
    training = LocalTraining(
        1500, 1, learning_rate=0.05, momentum=momentum, optimizer=optimizer
    )
    data = ClientData(jnp.zeros((1, 1)), jnp.zeros(1, jnp.int32), jnp.int32(1))
    a, c = jnp.array([1.0, 4.0, 0.5]), jnp.array([0.0, -2.0, 3.0])
    w = jnp.array([3.0, 0.0, 1e5 if optimizer == "sgd" else 20.0])

    def fit(key, theta, batch):
        return 0.5 * jnp.sum(a * (theta - 1) ** 2)

    found, _ = minimise(
        jax.random.key(0),
        0,
        jnp.zeros(3),
        data,
        training,
        fit,
        lambda p: Quadratic(c, w),
    )
    np.testing.assert_allclose(found, (a + w * c) / (a + w), rtol=2e-3)


@pytest.mark.parametrize("size", [1, 5, 13])
def test_a_penalty_that_moves_is_at_rest_where_loss_and_penalty_balance(size):
    """FedHB's Eq. 22 in one dimension, two prototypes that share the client: EM's
    quadratic has the gradient of the penalty only where it was taken."""
    variance, prototypes = 0.1, jnp.array([-0.3, 0.3])
    training = LocalTraining(3000, 1, learning_rate=0.1, momentum=0.9)
    data = ClientData(jnp.zeros((1, 1)), jnp.zeros(1, jnp.int32), jnp.int32(1))

    def fit(key, m, batch):
        return 0.05 * jnp.square(m - 0.9)

    def near(m):
        centre = mixture.expected(m, prototypes, variance)
        return Quadratic(centre, 1 / (size * variance))

    def objective(m):
        penalty = -mixture.log_prior(m, prototypes, variance) / size
        return fit(None, m, None) + penalty

    start = jnp.float32(0.9)
    found, _ = minimise(jax.random.key(0), 0, start, data, training, fit, near)
    assert abs(jax.grad(objective)(found)) < 1e-5 and found < 0.5


def test_the_penalty_never_narrows_the_stable_learning_rates():
    """Eigenvalues of momentum step and proximal step on ½ a θ² + ½ w θ², lr a up to
    its own bound 2 (1 + β): all within the unit circle for every w."""
    for beta in (0.0, 0.5, 0.9):
        for rate_curvature in np.linspace(1e-3, 1.999 * (1 + beta), 30):
            for pull in np.logspace(-4, 8, 13):  # lr w / (1 - β)
                kept = 1 / (1 + pull)
                step = [
                    [kept * (1 - rate_curvature), -kept * beta],
                    [rate_curvature, beta],
                ]
                assert np.abs(np.linalg.eigvals(step)).max() < 1


def test_augmentation_sees_raw_batches_and_its_own_keys():
    seen = []

    def augment(key, x):
        seen.append((x.dtype, x.shape))
        return x + jax.random.bits(key, x.shape, jnp.uint8)

    training = LocalTraining(epochs=2, batch_size=2, augment=augment)
    data = ClientData(
        jnp.zeros((4, 3), jnp.uint8), jnp.zeros(4, jnp.int32), jnp.int32(4)
    )

    def step(key, carry, batch: Batch):
        return jnp.roll(carry, 1, axis=0).at[0].set(batch.x[0])

    batches = fold_minibatches(
        jax.random.key(0), data, training, step, jnp.zeros((4, 3), jnp.uint8)
    )
    assert seen[0] == (jnp.uint8, (2, 3))
    assert len(np.unique(batches, axis=0)) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", -1),
        ("batch_size", 0),
        ("momentum", 1.0),
        ("learning_rate", -1.0),
    ],
)
def test_hyper_parameters_outside_their_range_are_named(field, value):
    training = LocalTraining()._replace(**{field: value})
    data = ClientData(jnp.zeros((2, 1)), jnp.zeros(2, jnp.int32), jnp.int32(2))
    with pytest.raises(ValueError, match=f"{field}={value!r} must"):
        fold_minibatches(jax.random.key(0), data, training, None, 0)


@pytest.mark.parametrize("size, steps", [(0, 5), (1, 5), (7, 3), (130, 5)])
def test_steps_replace_epochs(size, steps):
    training = LocalTraining(epochs=9, batch_size=64, steps=steps)
    slots = jnp.arange(CAPACITY, dtype=jnp.float32)[:, None]
    data = ClientData(slots, jnp.zeros(CAPACITY, jnp.int32), jnp.int32(size))

    def step(key, carry, batch):
        counts, steps = carry
        slot = batch.x[:, 0].astype(jnp.int32)
        return counts.at[slot].add(batch.mask.astype(jnp.int32)), steps + 1

    start = (jnp.zeros(CAPACITY, jnp.int32), 0)
    counts, done = jax.jit(
        lambda: fold_minibatches(jax.random.key(0), data, training, step, start)
    )()
    assert done == (steps if size else 0)
    assert counts.max() - counts[:size].min(initial=counts.max()) <= 1
    assert counts[size:].sum() == 0


def whole_batch(optimizer, params, loss, epochs=3):
    """Steps on all of the data at once: their order does not matter."""
    training = LocalTraining(epochs, 64, learning_rate=0.01, optimizer=optimizer)
    data = ClientData(jnp.asarray(X[:64]), jnp.asarray(Y[:64]), jnp.int32(64))
    return minimise(jax.random.key(0), 0, params, data, training, loss)[0]


def reference_steps(transform, params, loss, steps=3):
    """The same by optax alone."""
    batch = Batch(jnp.asarray(X[:64]), jnp.asarray(Y[:64]), jnp.ones(64, bool))
    state = transform.init(params)
    for _ in range(steps):
        gradient = jax.grad(lambda p: loss(None, p, batch))(params)
        updates, state = transform.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def two_layers(key, params, batch):
    w = trees(params)
    hidden = jnp.tanh(batch.x @ w["first"])
    return cross_entropy(hidden @ w["second"], batch.y, batch.mask)


LAYERS = {
    "first": jnp.asarray(X[:FEATURES]),
    "second": 0.1 * jnp.asarray(X[FEATURES : 2 * FEATURES, :3]),
}


@pytest.mark.parametrize(
    ("given", "transform"),
    [
        ("adam", optax.adam(0.01)),
        (optax.adamw, optax.adamw(0.01)),
        (partial(optax.sgd, nesterov=True, momentum=0.5), optax.sgd(0.01, 0.5, True)),
    ],
)
def test_optimisers_by_name_and_of_your_own_are_optaxs(given, transform):
    found = whole_batch(given, flatten(LAYERS), two_layers)
    expected = reference_steps(transform, LAYERS, two_layers)
    assert isinstance(found, Flat)
    chex.assert_trees_all_close(found.tree(), expected, rtol=1e-4, atol=1e-6)


def test_lamb_sees_layers_if_asked_to():
    """Its step depends on a layer's norm: on one vector it is another method."""
    flat = flatten(LAYERS)
    whole, by_layer = (
        optimizer(0.01) for optimizer in (optax.lamb, layerwise(optax.lamb))
    )
    on_tree = reference_steps(whole, LAYERS, two_layers)
    layered = reference_steps(by_layer, flat, two_layers)
    chex.assert_trees_all_close(layered.tree(), on_tree, rtol=1e-4, atol=1e-6)
    vector = reference_steps(whole, flat, two_layers)
    assert np.abs(vector.vector - layered.vector).max() > 1e-3
    found = whole_batch(layerwise(optax.lamb), flat, two_layers)
    chex.assert_trees_all_close(found.tree(), on_tree, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adagrad", "rmsprop"])
def test_adagrad_and_rmsprop_start_at_the_first_squared_gradient(optimizer):
    """Both take a first step of the rate; then G sums up, or fades by 0.9."""
    training = LocalTraining(
        epochs=4, batch_size=64, learning_rate=0.1, optimizer=optimizer
    )
    data = ClientData(jnp.asarray(X[:64]), jnp.asarray(Y[:64]), jnp.int32(64))
    curvature, start = np.array([1.0, 1e-3, 40.0]), np.array([1.0, 1.0, 0.0])

    def loss(key, weights, batch):
        return 0.5 * jnp.sum(jnp.float32(curvature) * jnp.square(weights))

    trained, _ = minimise(
        jax.random.key(0), 0, jnp.float32(start), data, training, loss
    )
    weights, square = start.copy(), None
    for t in range(4):
        gradient = curvature * weights
        if square is None:
            square = gradient**2
        elif optimizer == "adagrad":
            square = square + gradient**2
        else:
            square = 0.9 * square + 0.1 * gradient**2
        step = 0.1 * gradient / np.maximum(np.sqrt(square), 1e-30)
        if t == 0:
            np.testing.assert_allclose(step, [0.1, 0.1, 0])
        weights = weights - step
    # A coordinate without a gradient stays where it is.
    np.testing.assert_allclose(trained, weights, rtol=1e-5)


def test_the_moments_do_not_depend_on_the_rate():
    """A schedule's rate belongs to the step: moments may be kept over rounds."""
    for optimizer in ("adagrad", "rmsprop"):
        training = LocalTraining(
            learning_rate=lambda round_index: 0.1 * 0.5**round_index,
            optimizer=optimizer,
        )
        steps, moments = [], []
        for round_index in (0, 2):
            transform = training.optimizer_at(round_index)
            state = transform.init(jnp.zeros(1))
            step, state = transform.update(jnp.full(1, 3.0), state)
            steps.append(float(step[0]))
            moments.append(jax.tree.leaves(state))
        np.testing.assert_allclose(steps, [-0.1, -0.025], rtol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, *moments)


@pytest.mark.parametrize("field, value", [("optimizer", "lion"), ("steps", 0)])
def test_a_bad_optimizer_or_number_of_steps_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        LocalTraining(**{field: value}).check()


@pytest.mark.parametrize(
    "field, value",
    [
        ("epochs", 1.5),
        ("epochs", True),
        ("epochs", -1),
        ("batch_size", "a"),
        ("batch_size", 2.0),
        ("steps", True),
        ("steps", 1.5),
        ("learning_rate", "a"),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("learning_rate", None),
        ("momentum", "a"),
        ("momentum", np.array([0.1, 0.2])),
    ],
)
def test_values_of_another_kind_are_refused_in_one_line(field, value):
    with pytest.raises(ValueError, match=f"^{field}=.* must ") as found:
        LocalTraining(**{field: value}).check()
    assert "\n" not in str(found.value)
    assert (
        jax.eval_shape(
            lambda v: LocalTraining(learning_rate=v, momentum=v).check(), 0.5
        )
        is None
    )


def test_numbers_of_numpy_and_jax_are_numbers():
    LocalTraining(np.int64(2), jnp.int32(8), np.float32(0.1), jnp.float32(0.5)).check()


def test_a_client_may_be_trained_by_hand(task, train):
    """NumPy's arrays, as `federate` makes them, outside of any `jit`."""
    data = jax.tree.map(lambda leaf: leaf[2], train)
    algorithm = fedavg(task)
    server = algorithm.init(jax.random.key(0))
    output = algorithm.client_update(jax.random.key(1), 0, server, (), data)
    assert output.weight == 8 and 0 < output.metrics["loss"] < 9


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_bound_of_gradient_steps_is_where_they_begin_to_diverge(momentum):
    """lr c < 2 (1 + β), by running them on either side of it."""
    curvature = 40.0
    most = 2 * (1 + momentum) / curvature
    data = ClientData(jnp.zeros((1, 1)), jnp.zeros(1, jnp.int32), jnp.int32(1))

    def loss(key, theta, batch):
        return 0.5 * curvature * jnp.square(theta)

    @jax.jit
    def left(rate):
        training = LocalTraining(2000, 1, rate, momentum)
        return minimise(jax.random.key(0), 0, jnp.float32(1.0), data, training, loss)[0]

    assert abs(left(0.99 * most)) < 1e-3 and not abs(left(1.01 * most)) < 1e3
    below = LocalTraining(learning_rate=0.99 * most, momentum=momentum)
    above = below._replace(learning_rate=1.01 * most)
    check_stable(below, curvature, "zeta=3.0")
    check_stable(above._replace(optimizer="adam"), curvature, "zeta=3.0")
    jax.eval_shape(lambda c: check_stable(above, c, "zeta=3.0"), 1.0)
    with pytest.raises(ValueError, match=f"zeta=3.0 .*learning_rate={most:.3g} on"):
        check_stable(above, curvature, "zeta=3.0")
    check_stable(above, 0.0, "zeta=0.0")


def test_squared_gradients_are_those_of_single_examples():
    """Of softmax regression, (p - e_y)² x² by hand; padding is not looked at."""
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(FEATURES, 3)).astype(np.float32)
    x = np.where(np.arange(9)[:, None] < 7, X[:9], np.nan)
    data = ClientData(x, Y[:9], np.int32(7))

    def loss(key, params, batch):
        return cross_entropy(batch.x @ params["w"], batch.y, batch.mask)

    params = {"w": jnp.array(weights)}
    training = LocalTraining(epochs=5, batch_size=3, steps=1)
    found = squared_gradients(jax.random.key(0), params, data, training, loss)
    logits = X[:7].astype(np.float64) @ weights
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    error = p - np.eye(3)[Y[:7]]
    expected = np.einsum("nf,nc->fc", X[:7].astype(np.float64) ** 2, error**2)
    np.testing.assert_allclose(found["w"], expected, rtol=1e-5)
    empty = data._replace(size=np.int32(0))
    nothing = squared_gradients(jax.random.key(0), params, empty, training, loss)
    assert not nothing["w"].any()
