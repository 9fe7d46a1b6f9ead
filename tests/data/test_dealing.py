"""Dealing examples in given proportions."""

import numpy as np
import pytest

from fedvi.data.dealing import count_labels, deal_in_proportion


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_exact_up_to_rounding_and_nobody_is_favoured(seed):
    rng = np.random.default_rng(seed)
    values = np.array([3, 5, 8])
    y = rng.permutation(np.repeat(values, [40, 7, 0]))
    weights = rng.random((6, 3))
    hands = deal_in_proportion(y, values, weights, rng)
    np.testing.assert_array_equal(np.sort(np.concatenate(hands)), np.arange(47))
    exact = weights / weights.sum(axis=0)[None] * np.array([[40, 7, 0]])
    assert (np.abs(count_labels(hands, y, values) - exact) < 1).all()


def test_rounding_favours_no_client():
    """Ten clients, one image: each gets it a tenth of the time."""
    rng = np.random.default_rng(0)
    wins = np.zeros(10)
    for _ in range(500):
        hands = deal_in_proportion(np.zeros(1), np.zeros(1), np.ones((10, 1)), rng)
        wins += [len(hand) for hand in hands]
    assert wins.sum() == 500
    assert (np.abs(wins - 50) < 5 * np.sqrt(45)).all()


def test_label_without_weight_is_not_dealt():
    y = np.array([0, 1, 0, 1])
    weights = np.array([[1.0, 0.0], [1.0, 0.0]])
    hands = deal_in_proportion(y, np.arange(2), weights, np.random.default_rng(0))
    assert sorted(np.concatenate(hands)) == [0, 2]
    assert all(hand.dtype == int for hand in hands)
