"""Bootstrap over clients against a loop of `summarise`."""

import numpy as np
import pytest

from fedvi.evaluation import Scores, bootstrap, bootstrap_intervals, summarise

RUNS, CLIENTS, BINS = 2, 12, 5


@pytest.fixture(scope="module")
def scores():
    """Made-up sums of two runs; one client has no test data."""
    rng = np.random.default_rng(0)
    count = rng.integers(5, 40, CLIENTS).astype(float)
    count[4] = 0
    shape = (RUNS, CLIENTS)
    zero = np.zeros(shape)
    in_bin = np.stack([rng.multinomial(int(n), np.full(BINS, 0.2)) for n in count])
    in_bin = np.broadcast_to(in_bin, (*shape, BINS)).astype(float)
    correct = rng.binomial(in_bin.astype(int), 0.7).astype(float)
    return Scores(
        count=np.broadcast_to(count, shape),
        correct=correct.sum(-1),
        nll=rng.gamma(2, 1, shape) * count,
        brier=zero,
        entropy=zero,
        mutual_information=zero,
        bin_count=in_bin,
        bin_correct=correct,
        bin_confidence=in_bin * rng.uniform(0.4, 0.9, (*shape, BINS)),
        unnormalised=zero,
    )


def test_it_equals_a_loop_over_resampled_clients(scores, monkeypatch):
    found = bootstrap_intervals(scores, draws=200, seed=3, level=0.9)
    monkeypatch.setattr(bootstrap, "_AT_ONCE", 30)  # in parts
    assert bootstrap_intervals(scores, draws=200, seed=3, level=0.9) == found
    held = np.flatnonzero(scores.count[0])
    rng, values = np.random.default_rng(3), []
    for _ in range(200):
        times = rng.multinomial(len(held), np.full(len(held), 1 / len(held)))
        drawn = np.repeat(held, times)
        runs = [
            summarise(Scores(*(leaf[run, drawn] for leaf in scores))) for run in (0, 1)
        ]
        values.append({k: np.mean([one[k] for one in runs]) for k in found})
    for name, ends in found.items():
        expected = np.percentile([one[name] for one in values], [5, 95])
        np.testing.assert_allclose(ends, expected, err_msg=name)


def test_one_run_needs_no_axis_and_the_figure_lies_inside(scores):
    one = Scores(*(leaf[0] for leaf in scores))
    found, figures = bootstrap_intervals(one), summarise(one)
    assert found == bootstrap_intervals(Scores(*(leaf[:1] for leaf in scores)))
    for name in ("accuracy", "nll"):
        low, high = found[name]
        assert low < figures[name] < high
    # For a mean the width is that of its standard error.
    each = 100 * (one.correct / np.maximum(one.count, 1))[one.count > 0]
    low, high = found["accuracy"]
    assert high - low == pytest.approx(2 * 1.96 * each.std() / np.sqrt(11), rel=0.15)


def test_it_covers_the_true_mean_as_often_as_it_says(scores):
    rng, hits = np.random.default_rng(1), 0
    one = Scores(*(leaf[0, :1] for leaf in scores))
    for repeat in range(200):
        right = rng.binomial(20, 0.7, 40).astype(float)
        many = Scores(*(np.repeat(leaf, 40, axis=0) for leaf in one))
        many = many._replace(count=np.full(40, 20.0), correct=right)
        low, high = bootstrap_intervals(many, draws=200, seed=repeat)["accuracy"]
        hits += low <= 70 <= high
    assert 200 * 0.95 - 4 * np.sqrt(200 * 0.05) < hits <= 200


def test_what_cannot_be_resampled_is_named(scores):
    empty = scores._replace(count=np.zeros((RUNS, CLIENTS)))
    with pytest.raises(ValueError, match="none of the 12 clients in scores has a test"):
        bootstrap_intervals(empty)
    with pytest.raises(ValueError, match="level=1.5 must lie strictly between"):
        bootstrap_intervals(scores, level=1.5)
    with pytest.raises(ValueError, match="draws=0 must be"):
        bootstrap_intervals(scores, draws=0)
