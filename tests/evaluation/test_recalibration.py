"""Temperatures against SciPy's optimisers in float64, and against the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from fedvi.evaluation import recalibration
from fedvi.evaluation.recalibration import (
    LOG_TEMPERATURES,
    TemperatureSums,
    client_temperatures,
    global_temperature,
    temperature_variance,
)

CLIENTS, CAPACITY, CLASSES = 60, 120, 5
sums_of = jax.jit(jax.vmap(recalibration.temperature_sums))


def federation(temperatures, seed=0, capacity=CAPACITY, spread=3.0):
    """Predictions that are right at each client's own temperature."""
    rng = np.random.default_rng(seed)
    shape = (len(temperatures), capacity, CLASSES)
    log_p = log_softmax(spread * rng.normal(size=shape), axis=-1)
    truth = log_softmax(log_p / np.reshape(temperatures, (-1, 1, 1)), axis=-1)
    labels = (np.exp(truth).cumsum(-1) < rng.random(shape[:2])[..., None]).sum(-1)
    mask = np.arange(capacity) < rng.integers(1, capacity + 1, shape[0])[:, None]
    return log_p.astype(np.float32), labels.clip(max=CLASSES - 1), mask


def nll(log_p, labels, mask, temperature):
    scaled = log_softmax(log_p.astype(float) / temperature, axis=-1)
    own = np.take_along_axis(scaled, labels[..., None], -1)[..., 0]
    return -own[mask].sum()


@pytest.fixture(scope="module")
def mixed():
    temperatures = np.exp(np.random.default_rng(1).normal(0.5, 0.4, CLIENTS))
    data = federation(temperatures)
    return data, sums_of(*data)


def test_rescaling_is_a_power_and_keeps_the_order():
    log_p = federation([1.0])[0][0]
    p = np.exp(log_p.astype(float)) ** (1 / 1.7)
    found = recalibration.rescaled(jnp.asarray(log_p), 1.7)
    np.testing.assert_allclose(
        np.exp(found), p / p.sum(-1, keepdims=True), rtol=1e-4, atol=1e-7
    )
    each = recalibration.rescaled(jnp.asarray(log_p), jnp.full(CAPACITY, 1.7))
    np.testing.assert_allclose(each, found)


def test_the_slope_is_the_derivative_and_padding_is_nothing(mixed):
    (log_p, labels, mask), sums = mixed
    dirty = np.where(mask[..., None], log_p, np.nan)
    for spoilt, plain in zip(sums_of(dirty, labels, mask), sums):
        np.testing.assert_array_equal(spoilt, plain)
    for at in (12, 30, 40):
        theta, step = LOG_TEMPERATURES[at], 1e-4
        ends = [nll(log_p, labels, mask, np.exp(theta + s)) for s in (-step, step)]
        slope = (ends[1] - ends[0]) / (2 * step)
        np.testing.assert_allclose(sums.slope[:, at].sum(), slope, rtol=1e-3)


def test_the_information_is_the_slopes_variance_where_the_model_is_right():
    sums = sums_of(*federation(np.ones(2000), capacity=20))
    at = len(LOG_TEMPERATURES) // 2  # T = 1
    assert LOG_TEMPERATURES[at] == 0
    ratio = np.sum(sums.slope[:, at] ** 2) / np.sum(sums.information[:, at])
    assert ratio == pytest.approx(1, abs=4 * np.sqrt(2 / 2000) * 1.5)


@pytest.mark.parametrize("true", [0.3, 1.0, 4.0])
def test_the_global_temperature_is_scipys(true):
    data = federation(np.full(20, true), seed=3)
    found = global_temperature(sums_of(*data))
    best = minimize_scalar(
        lambda theta: nll(*data, np.exp(theta)), bounds=(-3, 3), method="bounded"
    )
    assert found == pytest.approx(np.exp(best.x), rel=4e-3)
    assert nll(*data, found) == pytest.approx(best.fun, rel=1e-5)
    assert found == pytest.approx(true, rel=0.2)


def test_only_the_sum_over_clients_counts(mixed):
    _, sums = mixed
    pooled = TemperatureSums(*(np.asarray(leaf).sum(0, keepdims=True) for leaf in sums))
    assert global_temperature(pooled) == pytest.approx(
        global_temperature(sums), rel=1e-4
    )


def test_the_spread_of_the_clients_is_found(mixed):
    _, sums = mixed
    found = temperature_variance(sums, global_temperature(sums))
    assert np.sqrt(found) == pytest.approx(0.4, rel=0.25)
    same = sums_of(*federation(np.full(CLIENTS, 1.6), seed=5))
    assert temperature_variance(same, global_temperature(same)) < 0.05 * found
    one = TemperatureSums(*(leaf[:1] for leaf in sums))
    assert temperature_variance(one, 1.0) == 0


def test_clients_are_drawn_to_the_global_temperature_as_far_as_they_are_unsure(mixed):
    """Each is where SciPy finds the posterior's mode; on new data of the same clients
    they beat both the global temperature and their own."""
    (log_p, labels, mask), sums = mixed
    shared = global_temperature(sums)
    variance = temperature_variance(sums, shared)
    found = client_temperatures(sums, shared, variance)
    own = []
    for i in range(CLIENTS):
        client = log_p[i], labels[i], mask[i]

        def penalised(theta, weight):
            prior = (theta - np.log(shared)) ** 2 / (2 * variance)
            return nll(*client, np.exp(theta)) + weight * prior

        modes = [
            minimize_scalar(penalised, bounds=(-3, 3), args=(w,), method="bounded").x
            for w in (1, 0)
        ]
        assert np.log(found[i]) == pytest.approx(modes[0], abs=0.02)
        own.append(np.exp(modes[1]))
    sure = mask.sum(1) > 80
    pull = np.abs(np.log(found / own))
    assert pull[sure].mean() < 0.5 * pull[~sure].mean()
    temperatures = np.exp(np.random.default_rng(1).normal(0.5, 0.4, CLIENTS))
    new = federation(temperatures, seed=9)
    totals = [
        sum(nll(*(a[i] for a in new), t[i]) for i in range(CLIENTS))
        for t in (found, np.full(CLIENTS, shared), own)
    ]
    assert totals[0] < min(totals[1:])


def test_what_cannot_be_fitted_is_1_or_an_end_or_the_global_temperature(mixed):
    (log_p, labels, mask), sums = mixed
    nothing = TemperatureSums(*(np.zeros_like(leaf) for leaf in sums))
    assert global_temperature(nothing) == 1
    top = np.where(mask, log_p.argmax(-1), 0)
    right = global_temperature(sums_of(log_p, top, mask))
    assert np.exp(-3) <= right < 0.2  # sure and never wrong
    wrong = global_temperature(sums_of(log_p, log_p.argmin(-1), mask))
    assert wrong == pytest.approx(np.exp(3))
    some = mask & (np.arange(CLIENTS) > 0)[:, None]
    sums = sums_of(log_p, labels, some)
    shared = global_temperature(sums)
    for variance in (0.0, 0.5):
        found = client_temperatures(sums, shared, variance)[0]
        assert found == pytest.approx(shared, rel=1e-6)


def test_impossible_and_undefined_predictions():
    log_p, labels, mask = federation([1.0, 1.0])
    certain = np.where(np.arange(CLASSES) == 0, 0.0, -np.inf)[None, None]
    sums = sums_of(np.broadcast_to(certain, log_p.shape), labels, mask)
    assert np.isfinite(sums.slope).all()
    undefined = global_temperature(sums_of(log_p * np.nan, labels, mask))
    assert np.isnan(undefined)
    sums = sums_of(log_p * np.nan, labels, mask)
    variance = temperature_variance(sums, undefined)
    assert np.isnan(client_temperatures(sums, undefined, variance)).all()


def test_clients_that_are_alike_do_not_vary_at_the_end_of_the_grid():
    """There the summed slope is not 0: it is no spread between clients."""
    log_probs = jax.nn.log_softmax(jnp.tile(jnp.array([5.0, 0.0, -5.0]), (50, 1)))
    labels = jnp.full(50, 2)  # always the least likely class: the flatter the better
    own = recalibration.temperature_sums(log_probs, labels, jnp.ones(50, bool))
    sums = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), own)
    temperature = recalibration.global_temperature(sums)
    assert temperature == pytest.approx(np.exp(3.0))
    assert recalibration.temperature_variance(sums, temperature) == 0.0
