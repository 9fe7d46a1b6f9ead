"""One class in the majority at each client: the paper's 9:1, and what limits it."""

import numpy as np
import pytest

from fedvi.data import class_majority


def labels(*sizes, seed=0):
    """sizes[c] examples of class c, in random order."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(seed).permutation(y)


def counts(parts, y, classes):
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts])


TWO = labels(600, 400), labels(60, 100, seed=1)
SEVEN = labels(*range(140, 210, 10)), labels(*range(70, 140, 10), seed=1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("y", [TWO, SEVEN], ids=["two", "seven"])
def test_no_example_is_used_twice_and_the_seed_decides(y, seed):
    part, same, other = (
        class_majority(*y, clients=9, seed=s, majority=0.6)
        for s in (seed, seed, seed + 100)
    )
    for hands, again, split in zip(part[:2], same[:2], y):
        used = np.concatenate(hands)
        assert len(np.unique(used)) == len(used) <= len(split)
        np.testing.assert_array_equal(used, np.concatenate(again))
    assert any(set(a) != set(b) for a, b in zip(part.train, other.train))


def test_two_classes_are_mixed_nine_to_one_and_one_to_nine():
    part = class_majority(*TWO, clients=4, seed=0)
    # Class 1 limits train (2 (9 + 1) n / 10 <= 400), class 0 test.
    expected = np.array([[180, 20], [20, 180]] * 2)
    np.testing.assert_array_equal(counts(part.train, TWO[0], 2), expected)
    expected = np.array([[27, 3], [3, 27]] * 2)
    np.testing.assert_array_equal(counts(part.test, TWO[1], 2), expected)
    assert part.dropped_test == 160 - 4 * 30


def test_the_majority_class_is_the_client_number_modulo_the_classes():
    part = class_majority(*SEVEN, clients=9, seed=0, majority=0.5)
    held = counts(part.train, SEVEN[0], 7)
    assert held.argmax(axis=1).tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    others = np.sort(held, axis=1)[:, :-1]
    assert (others == others[0, 0]).all()
    assert len(set(held.sum(axis=1))) == 1


@pytest.mark.parametrize("clients", [1, 2, 5, 9])
@pytest.mark.parametrize("majority", [1 / 3, 0.5, 0.77, 0.9])
def test_the_size_is_the_largest_that_every_class_can_supply(clients, majority):
    """Against a search over all sizes and roundings."""
    sizes = (70, 55, 91)
    y = labels(*sizes)
    part = class_majority(y, y, clients=clients, seed=0, majority=majority)
    held = counts(part.train, y, 3)
    possible = []
    for least in range(1, 92):
        for most in range(least, 92):
            # The other classes' parts are the nearest whole numbers.
            size = most + 2 * least
            if not -0.5 <= (1 - majority) * size / 2 - least < 0.5:
                continue
            needed = np.full(3, clients * least)
            for client in range(clients):
                needed[client % 3] += most - least
            if (needed <= sizes).all():
                possible.append(size)
    assert held.sum(axis=1).tolist() == [max(possible)] * clients
    assert np.abs(held.max(axis=1) - majority * max(possible)).max() <= 1
    np.testing.assert_array_equal(held, counts(part.test, y, 3))


def test_labels_need_not_be_consecutive_and_unknown_test_labels_are_dropped():
    train_y, test_y = np.repeat([2, 7], 20), np.repeat([2, 5, 7], 10)
    part = class_majority(train_y, test_y, clients=2, seed=0, majority=0.75)
    shares = [np.mean(train_y[hand] == 2) for hand in part.train]
    assert shares == [0.75, 0.25]
    assert not np.isin(np.concatenate(part.test), np.flatnonzero(test_y == 5)).any()
    assert part.dropped_test == 30 - sum(map(len, part.test)) >= 10


def test_an_empty_test_split_stays_empty():
    part = class_majority(TWO[0], np.empty(0, int), clients=4, seed=0)
    assert [len(hand) for hand in part.test] == [0] * 4
    assert [len(hand) for hand in part.train] == [200] * 4
    assert part.dropped_test == 0


@pytest.mark.parametrize("majority", [0.49, 1.0, 1.5, -0.1, np.nan])
def test_a_majority_outside_its_range_is_named(majority):
    with pytest.raises(ValueError, match=rf"majority={majority} must be at least 1/2"):
        class_majority(*TWO, clients=4, seed=0, majority=majority)


def test_one_class_has_no_majority():
    with pytest.raises(ValueError, match="at least 2 classes, but .* has 1"):
        class_majority(np.zeros(9, int), np.zeros(9, int), clients=2, seed=0)


def test_clients_must_be_positive():
    with pytest.raises(ValueError, match="clients=0 must be at least 1"):
        class_majority(*TWO, clients=0, seed=0)


def test_too_many_clients_for_one_example_of_each_class_are_named():
    y = labels(40, 40)
    # Five examples, four and one, are the smallest part at 9:1 with rounding.
    fits = class_majority(y, y, clients=16, seed=0, majority=0.89)
    assert {len(hand) for hand in fits.train} == {5}
    with pytest.raises(ValueError, match=r"clients=17 with majority=0.89 .* training"):
        class_majority(y, y, clients=17, seed=0, majority=0.89)
    with pytest.raises(ValueError, match="the test split, whose 2 classes have 0 to 5"):
        class_majority(y, labels(0, 5), clients=2, seed=0)
