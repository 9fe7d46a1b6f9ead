"""Scores against loops; thresholds and coverage against counting and simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import comb, log_softmax

from fedvi.evaluation import conformal
from fedvi.evaluation.conformal import (
    SCORES,
    PredictionSets,
    client_thresholds,
    conformal_rank,
    histogram_threshold,
    of_labels,
    prediction_sets,
    quantile_of_quantiles,
    quantile_of_quantiles_orders,
    score_edges,
    score_histogram,
)

RNG = np.random.default_rng(0)
LOG_P = log_softmax(2 * RNG.normal(size=(40, 6)), axis=-1)


def loop_score(p, u=1.0, penalty=0.0, rank=5):
    """RAPS of one example's classes, as the paper writes it."""
    found = []
    for y in range(len(p)):
        above = [p[c] for c in range(len(p)) if p[c] > p[y]]
        place = len(above) + 1
        found.append(sum(above) + u * p[y] + penalty * max(0, place - rank))
    return found


def test_scores_equal_a_loop():
    p = np.exp(LOG_P)
    np.testing.assert_allclose(conformal.lac(LOG_P), 1 - p)
    np.testing.assert_allclose(conformal.aps(LOG_P), [loop_score(one) for one in p])
    u = RNG.random(40)
    np.testing.assert_allclose(
        conformal.aps(LOG_P, u), [loop_score(one, v) for one, v in zip(p, u)]
    )
    found = conformal.raps(LOG_P, u, penalty=0.2, rank=2)
    expected = [loop_score(one, v, 0.2, 2) for one, v in zip(p, u)]
    np.testing.assert_allclose(found, expected)


def test_equally_likely_classes_come_in_the_order_of_their_number():
    scores = conformal.aps(np.log([[0.25, 0.25, 0.25, 0.25]]))
    np.testing.assert_allclose(scores, [[0.25, 0.5, 0.75, 1.0]])
    # No rounding error beyond the largest score.
    scores = conformal.aps(np.float32(log_softmax(RNG.normal(size=(500, 100)), -1)))
    assert scores.max() == 1


def test_a_randomised_score_is_uniform_where_the_model_is_right():
    log_p = log_softmax(2 * RNG.normal(size=(20_000, 4)), axis=-1)
    labels = (np.exp(log_p).cumsum(-1) < RNG.random((20_000, 1))).sum(-1).clip(max=3)
    scores = of_labels(conformal.aps(log_p, RNG.random(20_000)), labels)
    counts = np.histogram(scores, 10, (0, 1))[0]
    assert np.abs(counts - 2000).max() < 4 * np.sqrt(2000)


@pytest.mark.parametrize("level", [0.1, 0.3, 0.05])
def test_the_rank_is_that_of_the_definition(level):
    """In whole numbers; too few examples have none."""
    for n in range(1, 60):
        hundredths = round(100 * level)
        expected = -(-(n + 1) * (100 - hundredths) // 100)
        assert conformal_rank(n, level) == expected
        assert (expected > n) == (n < round(1 / level - 1, 9))
    with pytest.raises(ValueError, match="level=1 must lie strictly between"):
        conformal_rank(5, 1)


def test_client_thresholds_are_order_statistics():
    scores, mask = RNG.random((4, 30)), np.ones((4, 30), bool)
    mask[1, 19:] = mask[2, 8:] = mask[3] = False
    found = client_thresholds(scores, mask, 0.1)
    assert found[0] == np.sort(scores[0])[28 - 1]
    assert found[1] == np.sort(scores[1, :19])[18 - 1]
    assert found[2:].tolist() == [math.inf, math.inf]  # eight examples, and none


@pytest.mark.parametrize("level", [0.1, 0.02])
def test_a_threshold_of_summed_histograms_is_just_above_the_exact_one(level):
    mask = RNG.random((5, 40)) < 0.8
    for scores in (RNG.random((5, 40)), 1 - RNG.random((5, 40)) ** 4):
        edges = score_edges(1.0)
        counts = score_histogram(scores, mask, edges)
        np.testing.assert_array_equal(counts.sum(1), mask.sum(1))
        found = histogram_threshold(counts.sum(0), edges, level)
        exact = client_thresholds(scores[mask][None], mask[mask][None], level)[0]
        assert exact <= found
        logits = [np.log(t / (1 - t)) for t in (exact, min(found, 1 - 1e-7))]
        assert logits[1] - logits[0] < 0.04
    # Of exchangeability among each client's own examples only: a larger one.
    assert histogram_threshold(counts.sum(0), edges, level, extra=5) >= found
    assert histogram_threshold(counts[0], edges, 0.001) == math.inf


def test_edges_hold_every_score():
    edges = score_edges(1.05, 10)
    scores = np.array([[-1e-9, 0.0, 1.05, np.inf, np.nan]])
    counts = score_histogram(scores, np.ones((1, 5), bool), edges)
    assert counts[0, [0, -2, -1]].tolist() == [2, 1, 2]
    assert histogram_threshold(counts[0], edges, 0.5) == 1.05
    assert histogram_threshold(counts[0], edges, 0.4) == math.inf


def exact_coverage(n, m, rank, order):
    """Theorem 3.2 of Humbert et al. (2023), as the paper writes it."""
    total = 0.0
    for j in range(order, m + 1):
        ranges = [range(rank, n + 1)] * j + [range(rank)] * (m - j)
        terms = (
            math.prod(comb(n, i, exact=True) for i in picked)
            / comb(m * n, sum(picked), exact=True)
            for picked in itertools.product(*ranges)
        )
        total += comb(m, j, exact=True) * sum(terms)
    return 1 - total / (m * n + 1)


def test_coverage_of_quantiles_of_quantiles_is_the_papers():
    n, m = 4, 3
    for rank in range(1, n + 1):
        found = conformal._coverage_of_orders(np.full(m, n), np.full(m, rank))
        expected = [exact_coverage(n, m, rank, k) for k in range(1, m + 1)]
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    # One client: the rank's own coverage, whatever its size.
    for n, rank in ((1, 1), (9, 9), (2000, 1801)):
        found = conformal._coverage_of_orders(np.array([n]), np.array([rank]))
        np.testing.assert_allclose(found, rank / (n + 1), rtol=1e-9)
    # The largest of all.
    found = conformal._coverage_of_orders(
        np.array([5, 40, 300]), np.array([5, 40, 300])
    )
    np.testing.assert_allclose(found[-1], 345 / 346, rtol=1e-9)


def test_orders_keep_the_coverage_and_little_more():
    sizes = (12, 30, 7, 30, 100, 55, 31, 18)
    ranks, order, coverage = quantile_of_quantiles_orders(sizes, 0.1)
    assert 0.9 <= coverage < 0.91
    rng, hits = np.random.default_rng(2), 0.0
    for _ in range(2000):
        sent = [np.sort(rng.random(n))[r - 1] for n, r in zip(sizes, ranks)]
        hits += np.sort(sent)[order - 1]  # the coverage, given the threshold
    assert hits / 2000 == pytest.approx(coverage, abs=0.003)
    assert quantile_of_quantiles_orders((2, 3), 0.1) is None
    assert quantile_of_quantiles_orders((), 0.1) is None


def test_the_quantile_of_quantiles_picks_what_was_sent():
    scores = RNG.random((300, 20))
    mask = np.arange(20) < RNG.integers(0, 21, 300)[:, None]
    few = scores[:9], mask[:9]
    ranks, order, _ = quantile_of_quantiles_orders(
        tuple(n for n in few[1].sum(1).tolist() if n), 0.2
    )
    held = [np.sort(s[m]) for s, m in zip(*few) if m.any()]
    sent = np.sort([s[r - 1] for s, r in zip(held, ranks)])
    assert quantile_of_quantiles(*few, 0.2) == sent[order - 1]
    assert quantile_of_quantiles(scores, mask & False, 0.2) == math.inf
    assert 0.8 < quantile_of_quantiles(scores, mask, 0.2) < 0.85  # 256 of them


def test_sets_are_counted():
    scores = np.array([[[0.1, 0.5, 0.9], [0.2, 0.3, 0.7]], [[0.0, 0.1, 0.2]] * 2])
    labels = np.array([[1, 2], [0, 1]])
    mask = np.array([[True, True], [True, False]])
    found = prediction_sets(scores, labels, mask, np.array([0.5, 0.1]))
    assert [leaf.tolist() for leaf in found] == [[2, 1], [1, 1], [4, 2]]
    assert found.summarise() == {
        "coverage": 0.75,
        "set_size": 2.0,
        "coverage_micro": pytest.approx(2 / 3),
        "worst_client": 0.5,
    }
    everything = prediction_sets(scores, labels, mask, math.inf)
    assert everything.summarise()["set_size"] == 3
    nothing = PredictionSets(*(np.zeros(2) for _ in range(3))).summarise()
    assert np.isnan(list(nothing.values())).all()


def test_undefined_predictions_are_never_held():
    scores = np.full((1, 1, 3), np.nan)
    labels, mask = np.zeros((1, 1), int), np.ones((1, 1), bool)
    assert of_labels(scores, labels).tolist() == [[math.inf]]
    found = prediction_sets(scores, labels, mask, math.inf)
    assert found.covered.tolist() == [0]


def test_clients_that_differ_are_covered_together():
    """Exchangeable among themselves only: with `extra` the clients' number the sets
    cover 1 - α, without it (1 - α)(N + 1)/(N + K), as the page says."""
    clients, n, level, repeats = 8, 10, 0.2, 400
    rng, covered = np.random.default_rng(5), {1: [], clients: []}
    edges = score_edges(1.0)
    for _ in range(repeats):
        # A shift of each client's, and its own spread.
        shift = np.linspace(0, 0.9, clients)[:, None]
        scores = shift + 0.1 * rng.random((clients, n + 1)) ** 2
        calibration, test = scores[:, :n], scores[:, n]
        mask = np.ones((clients, n), bool)
        counts = score_histogram(calibration, mask, edges).sum(0)
        for extra, found in covered.items():
            threshold = histogram_threshold(counts, edges, level, extra)
            found.append(np.mean(test <= threshold))
    least = {
        clients: 1 - level,
        1: (1 - level) * (clients * n + 1) / (clients * n + clients),
    }
    for extra, found in covered.items():
        error = 4 * np.std(found) / np.sqrt(repeats)
        assert np.mean(found) >= least[extra] - error, extra
        assert np.mean(found) <= least[extra] + 0.1, extra


@pytest.mark.parametrize("name", SCORES)
def test_every_threshold_keeps_the_coverage_for_any_model(name):
    """Many small federations, of a model that is too sure; the mean coverage."""
    clients, n, level, repeats = 6, 20, 0.2, 300
    rng = np.random.default_rng(4)
    totals = {"global": [], "client": [], "quantile_of_quantiles": []}
    mask = np.ones((clients, n), bool)
    for _ in range(repeats):
        truth = rng.normal(size=(2, clients, n, 4))
        labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
        seen = 3 * truth + rng.normal(size=truth.shape)
        scores = SCORES[name](log_softmax(seen, axis=-1))
        own = of_labels(scores[0], labels[0])
        edges = score_edges(1.0)
        counts = score_histogram(own, mask, edges).sum(0)
        thresholds = {
            "global": histogram_threshold(counts, edges, level),
            "client": client_thresholds(own, mask, level),
            "quantile_of_quantiles": quantile_of_quantiles(own, mask, level),
        }
        for rule, threshold in thresholds.items():
            sets = prediction_sets(scores[1], labels[1], mask, threshold)
            totals[rule].append(sets.summarise()["coverage"])
    for rule, values in totals.items():
        error = np.std(values) / np.sqrt(repeats)
        assert np.mean(values) > 1 - level - 4 * error, rule
        assert np.mean(values) < 1 - level + 0.05 + 4 * error, rule
