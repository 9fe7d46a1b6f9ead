"""Scores against scikit-learn and independent float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import entropy
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, log_loss

from fedvi.evaluation import (
    Scores,
    reliability,
    score,
    summarise,
)

SAMPLES, BATCH, CLASSES, BINS = 3, 64, 4, 15
jit_score = jax.jit(score, static_argnames="bins")


def make_client(seed, batch=BATCH, samples=SAMPLES, valid=None):
    """float32 log_probs `[samples, batch, classes]`, labels, mask."""
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.normal(size=(samples, batch, CLASSES))
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = rng.integers(CLASSES, size=batch).astype(np.int32)
    mask = np.arange(batch) < (batch if valid is None else valid)
    return jnp.asarray(log_probs, jnp.float32), jnp.asarray(labels), jnp.asarray(mask)


def mean_probs(log_probs):
    return np.exp(np.asarray(log_probs, np.float64)).mean(axis=0)


def loop_bins(confidence, correct, bins):
    """Bin index by scanning the intervals (l, r] one after the other."""
    count, hits, total = np.zeros(bins), np.zeros(bins), np.zeros(bins)
    for c, hit in zip(confidence, correct):
        for b in range(bins):
            if b / bins < c <= (b + 1) / bins:
                count[b] += 1
                hits[b] += hit
                total[b] += c
    return count, hits, total


def loop_ece_mce(confidence, correct, bins=BINS):
    count, hits, total = loop_bins(confidence, correct, bins)
    ece, mce = 0.0, 0.0
    for n, h, t in zip(count, hits, total):
        if n:
            gap = abs(h / n - t / n)
            ece += gap * n / len(confidence)
            mce = max(mce, gap)
    return ece, mce


def stack(*clients):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients)


def test_sums_equal_scikit_learn():
    log_probs, labels, mask = make_client(0)
    result = jit_score(log_probs, labels, mask)
    p = mean_probs(log_probs)
    onehot = np.eye(CLASSES)[np.asarray(labels)]
    count = float(result.count)
    assert count == BATCH
    np.testing.assert_allclose(
        result.correct / count, accuracy_score(labels, p.argmax(-1)), rtol=1e-6
    )
    np.testing.assert_allclose(
        result.nll / count, log_loss(labels, p, labels=range(CLASSES)), rtol=1e-5
    )
    np.testing.assert_allclose(
        result.brier / count, ((p - onehot) ** 2).sum(-1).mean(), rtol=1e-5
    )


def test_calibration_equals_loop():
    log_probs, labels, mask = make_client(1)
    p = mean_probs(log_probs)
    correct = p.argmax(-1) == np.asarray(labels)
    scores = jit_score(log_probs, labels, mask)
    for got, wanted in zip(scores[6:], loop_bins(p.max(-1), correct, BINS)):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    summary = summarise(stack(scores))
    wanted = loop_ece_mce(p.max(-1), correct)
    np.testing.assert_allclose((summary["ece"], summary["mce"]), wanted, rtol=1e-5)
    assert 0 < summary["ece"] < summary["mce"] <= 1


@pytest.mark.parametrize(
    ("confidence", "bins", "index"),
    [(0.5, 2, 0), (0.5, 10, 4), (0.75, 4, 2), (1.0, 15, 14), (0.5 + 1e-6, 10, 5)],
)
def test_bins_are_closed_on_the_right(confidence, bins, index):
    p = jnp.asarray([[[confidence, 1.0 - confidence]]], jnp.float32)
    scores = jit_score(
        jnp.log(p), jnp.zeros(1, jnp.int32), jnp.ones(1, bool), bins=bins
    )
    assert np.flatnonzero(scores.bin_count).tolist() == [index]
    np.testing.assert_allclose(scores.bin_confidence.sum(), confidence, rtol=1e-6)


def test_certain_and_right_is_perfect_certain_and_wrong_is_worst():
    log_probs = jnp.log(jnp.asarray([[[1.0, 0.0]]]))
    mask = jnp.ones(1, bool)
    right = summarise(stack(jit_score(log_probs, jnp.zeros(1, jnp.int32), mask)))
    wrong = summarise(stack(jit_score(log_probs, jnp.ones(1, jnp.int32), mask)))
    figures = ("accuracy", "nll", "brier", "ece", "mce")
    assert [right[k] for k in figures] == [100.0, 0.0, 0.0, 0.0, 0.0]
    assert [wrong[k] for k in figures] == [0.0, np.inf, 2.0, 1.0, 1.0]
    assert all(s["entropy"] == s["mutual_information"] == 0 for s in (right, wrong))


def test_masked_rows_contribute_nothing_even_nan():
    valid = 40
    log_probs, labels, mask = make_client(3, valid=valid)
    dirty = log_probs.at[:, valid:].set(jnp.nan), labels.at[valid:].set(99), mask
    clean = log_probs[:, :valid], labels[:valid], mask[:valid]
    for got, wanted in zip(jit_score(*dirty), jit_score(*clean)):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_wholly_masked_client_is_exactly_zero():
    log_probs, labels, _ = make_client(3)
    scores = jit_score(log_probs * jnp.nan, labels, jnp.zeros(BATCH, bool))
    assert all(not np.any(leaf) for leaf in scores)


def test_nan_in_a_valid_row_is_wrong_and_visible():
    log_probs = jnp.log(jnp.full((1, 2, 2), 0.5)).at[0, 1].set(jnp.nan)
    scores = jit_score(log_probs, jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    summary = summarise(stack(scores))
    assert summary["accuracy"] == 50.0
    undefined = ("nll", "ece", "mce", "entropy", "mutual_information")
    assert np.isnan([summary[key] for key in undefined]).all()


def test_sums_add_over_batches_and_vmap_over_clients():
    log_probs, labels, mask = make_client(4, valid=50)
    whole = jit_score(log_probs, labels, mask)
    halves = jax.jit(jax.vmap(score))(
        jnp.stack([log_probs[:, :32], log_probs[:, 32:]]),
        labels.reshape(2, 32),
        mask.reshape(2, 32),
    )
    for got, wanted in zip(halves, whole):
        np.testing.assert_allclose(got.sum(axis=0), wanted, rtol=1e-5)


def test_macro_and_micro_differ_for_clients_of_10_and_1000():
    """Case C5: both averages are reported under their own names."""
    log_probs, labels, _ = make_client(5, batch=1000)
    small = jit_score(log_probs, labels, jnp.arange(1000) < 10)
    # The large client is nearly always right, the small one rarely.
    sure = jnp.log(0.96 * jax.nn.one_hot(labels, CLASSES) + 0.01)[None]
    large = jit_score(jnp.repeat(sure, SAMPLES, axis=0), labels, jnp.ones(1000, bool))
    empty = jit_score(log_probs, labels, jnp.zeros(1000, bool))
    summary = summarise(stack(small, empty, large))

    p = mean_probs(log_probs)[:10]
    y = np.asarray(labels)[:10]
    accuracy = np.array([100 * np.mean(p.argmax(-1) == y), 100.0])
    nll = np.array([-np.log(p[np.arange(10), y]).mean(), -np.log(0.97)])
    each = entropy(np.exp(np.asarray(log_probs[:, :10])), axis=2).mean(axis=0)
    wanted = {
        "accuracy": accuracy.mean(),
        "accuracy_std": accuracy.std(),
        "accuracy_p10": accuracy.min() + 0.1 * np.ptp(accuracy),
        "accuracy_micro": (10 * accuracy[0] + 1000 * accuracy[1]) / 1010,
        "nll": nll.mean(),
        "nll_micro": (10 * nll[0] + 1000 * nll[1]) / 1010,
        "entropy": (entropy(p, axis=1).mean() + entropy([0.97, 0.01, 0.01, 0.01])) / 2,
        "mutual_information": (entropy(p, axis=1) - each).mean() / 2,
        "clients": 2,
        "examples": 1010,
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(summary[name], value, rtol=1e-4, err_msg=name)
    assert summary["accuracy_micro"] - summary["accuracy"] > 10
    assert summary["brier"] > 2 * summary["brier_micro"]


def test_ece_macro_is_the_mean_of_each_clients_ece():
    clients = [make_client(seed, valid=20 + 20 * seed) for seed in (0, 1, 2)]
    scores = [jit_score(*client) for client in clients]
    each = [summarise(stack(s))["ece"] for s in scores]
    summary = summarise(stack(*scores))
    np.testing.assert_allclose(summary["ece_macro"], np.mean(each), rtol=1e-9)
    # Gaps of opposite sign cancel in the pooled bins, never in the macro mean.
    assert summary["ece"] < summary["ece_macro"]


def test_reliability_pools_clients_and_marks_empty_bins():
    scores = [jit_score(*make_client(seed)) for seed in (6, 7)]
    figures = reliability(stack(*scores))
    p = np.concatenate([mean_probs(make_client(seed)[0]) for seed in (6, 7)])
    labels = np.concatenate([make_client(seed)[1] for seed in (6, 7)])
    count, hits, total = loop_bins(p.max(-1), p.argmax(-1) == labels, BINS)
    np.testing.assert_array_equal(figures["count"], count)
    np.testing.assert_array_equal(np.isnan(figures["accuracy"]), count == 0)
    full = count > 0
    np.testing.assert_allclose(figures["accuracy"][full], hits[full] / count[full])
    np.testing.assert_allclose(
        figures["confidence"][full], total[full] / count[full], rtol=1e-6
    )


def test_no_client_with_data_is_an_error():
    empty = Scores(*(jnp.zeros(2),) * 6, *(jnp.zeros((2, BINS)),) * 3, jnp.zeros(2))
    for function in (summarise, reliability):
        with pytest.raises(ValueError, match="none of the 2 clients"):
            function(empty)


def test_bad_shapes_name_the_argument():
    log_probs, labels, mask = make_client(0)
    with pytest.raises(ValueError, match="log_probs has shape"):
        jit_score(log_probs[0], labels, mask)
    with pytest.raises(ValueError, match=r"log_probs has shape \(0,"):
        jit_score(log_probs[:0], labels, mask)
    with pytest.raises(ValueError, match="labels has shape"):
        jit_score(log_probs, labels[:-1], mask)
    with pytest.raises(ValueError, match="mask has shape"):
        jit_score(log_probs, labels, mask[:-1])
    with pytest.raises(ValueError, match="bins=0"):
        jit_score(log_probs, labels, mask, bins=0)
    with pytest.raises(ValueError, match="stack the Scores"):
        summarise(jit_score(log_probs, labels, mask))


def test_calibration_against_scikit_learn():
    """ECE and MCE from scikit-learn's reliability curve of "the top class is right"."""
    rng = np.random.default_rng(11)
    logits = rng.normal(size=(400, 5)).astype(np.float32) * 2
    labels = rng.integers(0, 5, 400).astype(np.int32)
    log_probs = jax.nn.log_softmax(jnp.asarray(logits))
    scores = jit_score(log_probs[None], jnp.asarray(labels), jnp.ones(400, bool))
    found = summarise(jax.tree.map(lambda leaf: leaf[None], scores))

    confidence = np.exp(np.asarray(log_probs)).max(1)
    right = np.asarray(log_probs).argmax(1) == labels
    accuracy, mean = calibration_curve(right, confidence, n_bins=15)
    counts = np.histogram(confidence, np.linspace(0, 1, 16))[0]
    gaps = np.abs(accuracy - mean)
    expected = np.dot(counts[counts > 0], gaps) / 400
    np.testing.assert_allclose(found["ece"], expected, rtol=1e-4)
    np.testing.assert_allclose(found["mce"], gaps.max(), rtol=1e-4)
