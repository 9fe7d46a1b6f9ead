"""Selective risk and calibration errors against loops and brute force."""

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedvi.evaluation import adaptive_ece, risk_coverage, smooth_ece


def examples(n=300, seed=0, decimals=8, shift=0.0):
    """Confidences, and answers that are right that often, shifted."""
    rng = np.random.default_rng(seed)
    confidence = np.round(rng.beta(4, 2, n), decimals)
    return confidence, rng.random(n) < confidence - shift


def loop_aurc(confidence, correct):
    order = np.argsort(-confidence)
    errors = 1.0 - correct[order]
    return np.mean([errors[:k].mean() for k in range(1, len(errors) + 1)])


def test_aurc_equals_a_loop():
    confidence, correct = examples()
    found = risk_coverage(confidence, correct)
    assert found.aurc == pytest.approx(loop_aurc(confidence, correct))
    best = loop_aurc(correct.astype(float) + 0.001 * confidence, correct)
    assert found.excess == pytest.approx(found.aurc - best)
    assert found.risk.shape == (300,) and found.risk[-1] == np.mean(~correct)
    # Any scale will do.
    assert risk_coverage(np.log(confidence), correct).aurc == pytest.approx(found.aurc)


def test_ties_count_as_the_mean_over_their_orders():
    confidence, correct = examples(60, decimals=1)
    rng, orders = np.random.default_rng(0), []
    for _ in range(1000):
        shuffled = rng.permutation(60)
        orders.append(
            loop_aurc(confidence[shuffled] + 1e-9 * np.arange(60), correct[shuffled])
        )
    found = risk_coverage(confidence, correct).aurc
    assert found == pytest.approx(np.mean(orders), abs=4 * np.std(orders) / 1000**0.5)
    np.testing.assert_allclose(
        risk_coverage(confidence[::-1], correct[::-1]).aurc, found
    )


def test_a_perfect_order_has_no_excess():
    correct = np.arange(10) < 7
    assert risk_coverage(-np.arange(10.0), correct).excess == pytest.approx(0)
    assert risk_coverage(np.arange(10.0), correct).excess > 0.3
    assert risk_coverage([0.5, 0.9], [True, True]).aurc == 0


def test_equally_full_bins_equal_a_loop():
    confidence, correct = examples(shift=0.2)
    order = np.argsort(confidence)
    gaps = [
        abs(correct[part].mean() - confidence[part].mean()) * len(part)
        for part in np.split(order, 15)
    ]
    found = adaptive_ece(confidence, correct)
    assert found == pytest.approx(sum(gaps) / 300)
    assert adaptive_ece(confidence, correct, bins=1) == pytest.approx(
        abs(correct.mean() - confidence.mean())
    )
    # More bins than examples: one of each.
    assert adaptive_ece([0.5, 0.75], [True, False], bins=9) == pytest.approx(0.625)


def brute_smooth_ece(confidence, correct):
    """The definition, by quadrature: the kernel with its mirror images, the width at
    which the error equals it."""
    t = (np.arange(1000) + 0.5) / 1000
    residual = correct - confidence

    def at(width):
        images = [sign * confidence + 2 * k for k in range(-2, 3) for sign in (1, -1)]
        kernel = sum(norm.pdf(t[:, None] - image, scale=width) for image in images)
        return np.abs(kernel @ residual).mean() / len(residual)

    return at(brentq(lambda width: at(width) - width, 1e-3, 1.0, xtol=1e-5))


@pytest.mark.parametrize(
    ("seed", "shift", "n"), [(0, 0.0, 40), (1, 0.1, 60), (2, 0.5, 40)]
)
def test_smooth_ece_equals_its_definition(seed, shift, n):
    confidence, correct = examples(n, seed, shift=shift)
    found = smooth_ece(confidence, correct)
    assert found == pytest.approx(brute_smooth_ece(confidence, correct), abs=2e-4)


def test_smooth_ece_of_extreme_cases():
    assert smooth_ece(np.ones(9), np.ones(9)) == pytest.approx(0, abs=1e-3)
    # Everything in one place: the residual's mass, whatever the width.
    assert smooth_ece(np.full(9, 0.75), np.zeros(9)) == pytest.approx(0.75, abs=1e-3)
    assert np.isnan(smooth_ece([np.nan, 0.5], [True, True]))


def test_smooth_ece_does_not_jump_where_a_bin_does():
    """Half right at just above and just below a bin's edge."""
    correct = np.arange(100) % 2
    below, above = 0.6 - 1e-6 * (1 - correct), 0.6 + 1e-6 * (1 - correct)
    assert smooth_ece(below, correct) == pytest.approx(
        smooth_ece(above, correct), abs=1e-4
    )


@pytest.mark.parametrize("function", [risk_coverage, adaptive_ece, smooth_ece])
def test_shapes_are_checked(function):
    for confidence, correct in (([], []), ([0.5], [True, False]), ([[0.5]], [[True]])):
        with pytest.raises(ValueError, match=r"both must be \[n\], with at least one"):
            function(confidence, correct)
    with pytest.raises(ValueError, match="bins=0 must be"):
        adaptive_ece([0.5], [True], bins=0)
