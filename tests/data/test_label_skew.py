"""Partitions by class: the papers' counts, and the cases that broke others' (C2-C4)."""

import re
import time

import numpy as np
import pytest

from fedvi.data import federate, partition
from fedvi.data.label_skew import (
    class_majority,
    class_shards,
    class_subsets,
    dirichlet,
    label_sorted_shards,
)
from fedvi.data.sources import Dataset

SEEDS = range(5)


def labels(*sizes, seed=0):
    """sizes[c] examples of class c, in random order."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(seed).permutation(y)


def counts(parts, y, classes=10):
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts])


MNIST = labels(*[600] * 10), labels(*[100] * 10, seed=1)  # a tenth of the real one

CALLS = {
    "class_shards": lambda seed: class_shards(*MNIST, clients=20, shards=5, seed=seed),
    "label_sorted_shards": lambda seed: label_sorted_shards(
        *MNIST, clients=33, shards=3, seed=seed
    ),
    "class_subsets": lambda seed: class_subsets(
        *MNIST, clients=10, train_per_class=50, test_per_class=20, seed=seed
    ),
    "dirichlet": lambda seed: dirichlet(*MNIST, clients=20, alpha=0.5, seed=seed),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CALLS)
def test_c4_no_index_is_used_twice_and_the_seed_decides(name, seed):
    part = CALLS[name](seed)
    for hands, y in zip((part.train, part.test), MNIST):
        used = np.concatenate(hands)
        assert len(np.unique(used)) == len(used) <= len(y)
        assert used.min() >= 0
        assert used.max() < len(y)
    same, other = CALLS[name](seed), CALLS[name](seed + 100)
    for a, b in zip(part.train + part.test, same.train + same.test):
        np.testing.assert_array_equal(a, b)
    assert any(not np.array_equal(a, b) for a, b in zip(part.train, other.train))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["class_shards", "label_sorted_shards", "dirichlet"])
def test_every_index_is_used(name, seed):
    part = CALLS[name](seed)
    assert sum(map(len, part.train)) == len(MNIST[0])
    assert sum(map(len, part.test)) == len(MNIST[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_class_shards_have_equal_sizes_and_the_same_classes_in_test(seed):
    """FedHB's s=5 with 100 clients on MNIST sizes: shards of 120 and 20 images."""
    train_y, test_y = labels(*[6000] * 10), labels(*[1000] * 10, seed=1)
    part = class_shards(train_y, test_y, clients=100, shards=5, seed=seed)
    train, test = counts(part.train, train_y), counts(part.test, test_y)
    assert (train % 120 == 0).all()
    assert (train.sum(axis=1) == 600).all()
    np.testing.assert_array_equal(train, 6 * test)
    held = (train > 0).sum(axis=1)
    assert held.max() <= 5
    assert held.min() < 5  # some client drew a class twice


def test_class_shards_of_cifar100():
    """100 clients, s=100: shards of 5 images, 500 / 100 images per client."""
    train_y, test_y = labels(*[500] * 100), labels(*[100] * 100, seed=1)
    part = class_shards(train_y, test_y, clients=100, shards=100, seed=0)
    train = counts(part.train, train_y, 100)
    assert (train % 5 == 0).all()
    assert {len(p) for p in part.train} == {500}
    assert {len(p) for p in part.test} == {100}


def test_left_over_images_go_one_each_to_shards():
    train_y, test_y = labels(23, 20), labels(4, 4)
    part = class_shards(train_y, test_y, clients=4, shards=2, seed=0)
    train, test = counts(part.train, train_y, 2), counts(part.test, test_y, 2)
    np.testing.assert_array_equal(train[:, 1], 5 * test[:, 1])
    extra = train[:, 0] - 5 * test[:, 0]
    assert extra.sum() == 3
    assert (extra <= test[:, 0]).all()  # at most one per shard, 1 test image each


def test_class_labels_need_not_be_consecutive():
    train_y = np.repeat([2, 7], 8)
    part = class_shards(train_y, train_y, clients=4, shards=1, seed=0)
    assert {len(np.unique(train_y[p])) for p in part.train} == {1}


def test_class_shards_that_cannot_be_equal():
    with pytest.raises(
        ValueError, match=r"clients=7 x shards=3 = 21 .* multiple of 10"
    ):
        class_shards(*MNIST, clients=7, shards=3, seed=0)


def test_more_shards_than_images_of_a_class():
    few = labels(*[600] * 9, 40), MNIST[1]
    with pytest.raises(ValueError, match=r"class 9 has 40 train .* 50 shards: use few"):
        class_shards(*few, clients=100, shards=5, seed=0)
    few = MNIST[0], labels(*[49] + [100] * 9)
    with pytest.raises(ValueError, match=r"class 0 has 49 test images.* 50 shards"):
        class_shards(*few, clients=100, shards=5, seed=0)


@pytest.mark.parametrize("call", [class_shards, label_sorted_shards])
@pytest.mark.parametrize("wrong", [{"clients": 0}, {"shards": -1}])
def test_counts_must_be_positive(call, wrong):
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))}=.* at least 1"):
        call(*MNIST, **{"clients": 10, "shards": 2, "seed": 0, **wrong})


@pytest.mark.parametrize("seed", SEEDS)
def test_label_sorted_shards_give_few_classes(seed):
    part = label_sorted_shards(*MNIST, clients=100, seed=seed)
    train, test = counts(part.train, MNIST[0]), counts(part.test, MNIST[1])
    assert (train.sum(axis=1) == 60).all()
    assert (train > 0).sum(axis=1).max() <= 2
    # Test images of the held classes only, in proportion up to rounding.
    assert (np.abs(test - train / 6) < 1).all()
    assert (test[train == 0] == 0).all()
    assert test.sum() == len(MNIST[1])


def test_test_images_of_unheld_classes_go_to_nobody():
    part = label_sorted_shards(
        labels(10, 10), labels(4, 4, 3), clients=2, shards=1, seed=0
    )
    assert sum(map(len, part.test)) == 8


def test_label_sorted_shards_need_enough_images():
    with pytest.raises(ValueError, match=r"12 shards are more than the 10 training"):
        label_sorted_shards(labels(10), labels(2), clients=6, shards=2, seed=0)


@pytest.mark.parametrize("pool", [False, True])
def test_class_subsets_alternate_two_label_sets(pool):
    part = class_subsets(
        *MNIST, clients=10, train_per_class=40, test_per_class=15, seed=0, pool=pool
    )
    assert part.pooled == pool
    y = np.concatenate(MNIST)
    train_y, test_y = (y, y) if pool else MNIST
    first = np.repeat([1, 0], 5)
    expected = np.array([first if u % 2 == 0 else 1 - first for u in range(10)])
    np.testing.assert_array_equal(counts(part.train, train_y), 40 * expected)
    np.testing.assert_array_equal(counts(part.test, test_y), 15 * expected)


def test_pooling_mixes_the_splits_but_not_train_and_test():
    """pFedBayes's small set has more test than official test images (scaled)."""
    part = class_subsets(
        *MNIST, clients=10, train_per_class=5, test_per_class=95, seed=0, pool=True
    )
    used = np.concatenate(part.train + part.test)
    assert len(np.unique(used)) == len(used) == 5000
    assert (np.concatenate(part.train) >= 6000).any()  # official test images
    with pytest.raises(ValueError, match=r"has 100 test images, but 5 clients need 95"):
        class_subsets(*MNIST, clients=10, train_per_class=5, test_per_class=95, seed=0)


def test_class_subsets_of_another_width_cover_all_classes():
    part = class_subsets(
        *MNIST,
        clients=5,
        classes_per_client=2,
        train_per_class=3,
        test_per_class=0,
        seed=0,
    )
    held = counts(part.train, MNIST[0])
    np.testing.assert_array_equal(held, 3 * np.kron(np.eye(5, dtype=int), [1, 1]))
    assert {len(p) for p in part.test} == {0}


def test_more_classes_per_client_than_classes():
    with pytest.raises(ValueError, match="classes_per_client=11 must be at most 10"):
        class_subsets(
            *MNIST,
            clients=2,
            classes_per_client=11,
            train_per_class=1,
            test_per_class=1,
            seed=0,
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_dirichlet_test_parts_follow_the_train_parts(seed):
    part = dirichlet(*MNIST, clients=20, alpha=0.3, seed=seed, min_size=10)
    train, test = counts(part.train, MNIST[0]), counts(part.test, MNIST[1])
    assert (np.abs(test - train / 6) < 1).all()
    assert train.sum(axis=1).min() >= 10


def test_alpha_sets_how_uneven_the_clients_are():
    """Shares of a class are Beta(alpha, (N-1) alpha), of known variance."""
    for alpha in (0.2, 1.0, 10.0):
        parts = [dirichlet(*MNIST, clients=10, alpha=alpha, seed=s) for s in range(40)]
        shares = np.stack([counts(p.train, MNIST[0]) / 600 for p in parts])
        expected = 0.1 * 0.9 / (10 * alpha + 1)
        assert np.var(shares) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("alpha", [1e-3, 100.0])
@pytest.mark.parametrize("rare", [0, 1])
def test_c2_classes_with_no_or_one_sample_left(seed, alpha, rare):
    train_y, test_y = labels(30, rare, 1), labels(5, 1, 0)
    part = dirichlet(train_y, test_y, clients=2, alpha=alpha, seed=seed, min_size=0)
    for hands, y in ((part.train, train_y), (part.test, test_y)):
        np.testing.assert_array_equal(np.sort(np.concatenate(hands)), np.arange(len(y)))


def test_c3_impossible_minimum_ends_quickly_and_names_the_numbers():
    y = labels(*[5000] * 10)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"alpha=0.1 .*clients=1000 .*min_size=40"):
        dirichlet(y, y[:10000], clients=1000, alpha=0.1, min_size=40, seed=0)
    with pytest.raises(ValueError, match=r"min_size=51"):
        dirichlet(y, y[:10000], clients=1000, alpha=0.1, min_size=51, seed=0)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("alpha", [0.0, -1.0, np.nan, np.inf])
def test_alpha_must_be_positive(alpha):
    with pytest.raises(ValueError, match=r"alpha=.* must be positive and finite"):
        dirichlet(*MNIST, clients=2, alpha=alpha, seed=0)


# class_majority: the paper's 9:1, and what limits it.

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


def test_an_empty_test_split_stays_empty():
    part = class_majority(TWO[0], np.empty(0, int), clients=4, seed=0)
    assert [len(hand) for hand in part.test] == [0] * 4
    assert [len(hand) for hand in part.train] == [200] * 4


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


def test_c35_test_classes_that_training_lacks_are_counted():
    """In every partition: what no client gets is in the line about the data."""
    train_y, test_y = labels(20, 20), labels(10, 10, 7)
    dataset = Dataset(
        np.zeros((40, 2)), train_y, np.zeros((27, 2)), test_y, 3, "mine", "made up"
    )
    for name, options, note in (
        ("class_shards", {"shards": 2}, "7 test examples fit no client"),
        ("label_sorted_shards", {}, "7 test examples fit no client"),
        (
            "class_subsets",
            {"classes_per_client": 1, "train_per_class": 8, "test_per_class": 4},
            "8 training examples fit no client; 11 test examples fit no client",
        ),
        (
            "class_subsets",
            {"classes_per_client": 1, "train_per_class": 8, "test_per_class": 4}
            | {"pool": True},
            "pooled; 19 pooled examples fit no client",
        ),
        (
            "class_majority",
            {"majority": 0.5},
            "made up; 11 test examples fit no client",
        ),
        ("dirichlet", {"alpha": 1.0}, "made up"),
        ("iid", {}, "made up"),
    ):
        part = partition(name, dataset, clients=4, seed=0, **options)
        federated = federate(dataset, part)
        assert federated.fidelity.endswith(note), name
        dealt = federated.train.size.sum() + federated.test.size.sum()
        left = sum(int(n) for n in re.findall(r"(\d+) \w+ examples", note))
        assert dealt + left == 67, name
