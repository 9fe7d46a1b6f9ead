"""IID and natural partitions, and the registry."""

import numpy as np
import pytest

from fedvi.data.partitions import PARTITIONS, by_group, iid, partition
from fedvi.data.sources import Dataset


@pytest.fixture
def dataset(arrays) -> Dataset:
    return Dataset(**arrays(n=60, m=30), classes=3, name="mine", fidelity="made up")


@pytest.mark.parametrize("seed", range(5))
def test_iid_uses_every_index_once_in_equal_parts(seed):
    part = iid(np.zeros(103), np.zeros(31), clients=10, seed=seed)
    for hands, n in ((part.train, 103), (part.test, 31)):
        np.testing.assert_array_equal(np.sort(np.concatenate(hands)), np.arange(n))
        sizes = [len(hand) for hand in hands]
        assert max(sizes) - min(sizes) <= 1


def test_iid_needs_an_image_per_client():
    with pytest.raises(ValueError, match="clients=11 must be at most 10"):
        iid(np.zeros(10), np.zeros(5), clients=11, seed=0)


def test_by_group_gives_each_writer_its_images():
    train = np.array([7, 3, 7, 9, 3, 7])
    part = by_group(train, np.array([3, 4, 9, 9, 5]))
    assert [hand.tolist() for hand in part.train] == [[1, 4], [0, 2, 5], [3]]
    assert [hand.tolist() for hand in part.test] == [[0], [], [2, 3]]
    assert part.ids.tolist() == [3, 7, 9]


def test_by_group_chooses_some_writers_by_seed():
    groups = np.repeat(np.arange(20), 3)
    part = by_group(groups, groups, clients=6, seed=1)
    chosen = [int(groups[hand[0]]) for hand in part.train]
    assert chosen == sorted(set(chosen))
    assert {len(hand) for hand in part.train} == {3}
    assert part.ids.tolist() == chosen
    again = by_group(groups, groups, clients=6, seed=2)
    assert chosen != [int(groups[hand[0]]) for hand in again.train]


def test_by_group_has_no_more_clients_than_writers():
    with pytest.raises(ValueError, match="clients=3 must be at most 2"):
        by_group(np.array([1, 2]), np.array([1]), clients=3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("class_shards", {"shards": 2}),
        ("label_sorted_shards", {}),
        ("class_subsets", {"classes_per_client": 2, "train_per_class": 2,
                           "test_per_class": 1}),
        ("class_majority", {"majority": 0.5}),
        ("dirichlet", {"alpha": 1.0}),
        ("iid", {}),
        ("by_group", {}),
    ],
)  # fmt: skip
def test_registry_calls_the_function_of_that_name(dataset, name, options):
    ids = np.arange(60) % 6, np.arange(30) % 6
    dataset = dataset._replace(train_group=ids[0], test_group=ids[1])
    arguments = ids if name == "by_group" else (dataset.train_y, dataset.test_y)
    got = partition(name, dataset, clients=6, seed=3, **options)
    expected = PARTITIONS[name](*arguments, clients=6, seed=3, **options)
    assert len(got.train) == len(got.test) == 6
    for a, b in zip(got.train + got.test, expected.train + expected.test):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dirichlets", {}, "partition='dirichlets' must be one of .*mean dirichlet?"),
        ("iid", {"alpha": 1}, "unknown alpha=1; it takes none"),
        ("class_shards", {}, "missing shards; it takes shards"),
        ("class_shards", {"shard": 5}, "unknown shard=5, missing shards"),
        ("dirichlet", {"alpha": 1, "minsize": 2}, "retries: did you mean min_size?"),
        ("dirichlet", {}, "missing alpha; it takes alpha, min_size, retries"),
        ("by_group", {}, "'mine' lacks: add train_group and test_group"),
    ],
)
def test_wrong_names_and_options(dataset, name, options, message):
    with pytest.raises(ValueError, match=message):
        partition(name, dataset, clients=6, seed=0, **options)


def test_only_groups_set_the_number_of_clients_themselves(dataset):
    dataset = dataset._replace(train_group=np.arange(60), test_group=np.arange(30))
    assert len(partition("by_group", dataset, clients=None, seed=0).train) == 60
    with pytest.raises(ValueError, match="clients=None: give partition='iid' a number"):
        partition("iid", dataset, clients=None, seed=0)
