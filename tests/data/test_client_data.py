"""Padding, held-out parts and the printed histogram."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms import fedavg
from fedvi.data import (
    ClientArrays,
    ClientData,
    Dataset,
    Partition,
    calibration_split,
    class_histogram,
    class_subsets,
    empty_clients,
    federate,
    hold_out,
    settled_clients,
)
from fedvi.federation import Federation
from fedvi.streaming import StreamedFederation


def rows(*parts):
    return [np.array(part, int) for part in parts]


@pytest.fixture
def dataset(arrays) -> Dataset:
    return Dataset(**arrays(), classes=3, name="mine", fidelity="made up")


@pytest.fixture
def uneven(dataset):
    """12 training images over clients of 6, 0, 1, 2 and 3; 6 test images over two."""
    train = rows([3, 1, 4, 0, 5, 9], [], [2], [6, 10], [11, 8, 7])
    test = rows([0, 5], [], [1, 2, 4], [], [3])
    return federate(dataset, Partition(train, test))


def test_federate_pads_to_the_largest_client(dataset, uneven):
    train, test = uneven.train, uneven.test
    assert train.x.shape == (5, 6, 4, 4, 3)
    assert train.x.dtype == np.uint8
    assert train.y.shape == (5, 6)
    assert train.y.dtype == train.size.dtype == np.int32
    assert train.size.tolist() == [6, 0, 1, 2, 3]
    assert test.x.shape == (5, 3, 4, 4, 3)
    np.testing.assert_array_equal(train.x[4, :3], dataset.train_x[[11, 8, 7]])
    np.testing.assert_array_equal(train.y[4, :3], dataset.train_y[[11, 8, 7]])
    np.testing.assert_array_equal(test.x[2], dataset.test_x[[1, 2, 4]])
    for part in uneven.train, uneven.test:
        padded = np.arange(part.y.shape[1])[None] >= part.size[:, None]
        assert (part.y[padded] == 0).all()
        assert (part.x[padded] == 0).all()
    assert (uneven.classes, uneven.name, uneven.fidelity) == (3, "mine", "made up")


def test_no_test_data_at_all_still_has_a_shape(dataset):
    federated = federate(dataset, Partition(rows([0], [1]), rows([], [])))
    assert federated.test.x.shape == (2, 1, 4, 4, 3)
    assert federated.test.size.tolist() == [0, 0]
    assert federated.fidelity == (
        "made up; 10 training examples fit no client; 6 test examples fit no client"
    )


def test_pooled_partitions_index_train_then_test(dataset):
    part = class_subsets(
        dataset.train_y,
        dataset.test_y,
        clients=3,
        classes_per_client=2,
        train_per_class=2,
        test_per_class=1,
        seed=0,
        pool=True,
    )
    federated = federate(dataset, part)
    pooled = np.concatenate([dataset.train_x, dataset.test_x])
    np.testing.assert_array_equal(federated.train.x[1], pooled[part.train[1]])
    np.testing.assert_array_equal(federated.test.x[2], pooled[part.test[2]])
    assert federated.fidelity == "made up; official train and test splits pooled"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Partition([], []), "0 train and 0 test parts"),
        (Partition(rows([0], [1]), rows([0])), "2 train and 1 test parts"),
        (Partition(rows([0, 12]), rows([0])), r"train indices 0\.\.12.*0\.\.11"),
        (Partition(rows([0]), rows([-1])), r"test indices -1\.\.-1"),
        (Partition(rows([0, 3], [3]), rows([], [])), "train index 3 2 times"),
        (Partition(rows([0, 3]), rows([17, 3]), pooled=True), "pooled index 3 2 times"),
    ],
)
def test_c4_broken_partitions_are_refused(dataset, part, message):
    with pytest.raises(ValueError, match=message):
        federate(dataset, part)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
def test_hold_out_splits_the_training_part_of_every_client(uneven, fraction, seed):
    held = hold_out(uneven, fraction, seed)
    for client, n in enumerate(uneven.train.size):
        parts = [p.x[client, : p.size[client]] for p in (held.train, held.test)]
        sizes = [len(part) for part in parts]
        assert sum(sizes) == n
        if n >= 2:
            assert min(sizes) >= 1
            assert abs(sizes[1] - fraction * n) <= 1
        else:
            assert sizes == [n, 0]
        # The images are all different, so equal multisets mean disjoint parts.
        both = np.concatenate(parts).reshape(n, 48)
        original = uneven.train.x[client, :n].reshape(n, 48)
        assert sorted(both.tolist()) == sorted(original.tolist())


def test_hold_out_keeps_labels_with_images(uneven, dataset):
    held = hold_out(uneven, 0.5, 0)
    for part in held.train, held.test:
        for x, y, size in zip(*part):
            for image, label in zip(x[:size], y[:size]):
                match = (dataset.train_x == image[None]).all(axis=(1, 2, 3))
                assert dataset.train_y[match].tolist() == [label]
    assert held.fidelity == "made up; test part = 0.5 of the training part"


def test_hold_out_is_drawn_by_the_seed(uneven):
    choices = {hold_out(uneven, 0.5, seed).test.x.tobytes() for seed in range(6)}
    assert len(choices) > 1
    again = hold_out(uneven, 0.5, 0).test.x
    np.testing.assert_array_equal(again, hold_out(uneven, 0.5, 0).test.x)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, np.nan])
def test_hold_out_fraction_must_be_inside_0_and_1(uneven, fraction):
    for function in (hold_out, calibration_split):
        with pytest.raises(ValueError, match=r"fraction=.* strictly between 0 and 1"):
            function(uneven, fraction, 0)


def test_a_calibration_split_takes_training_data_only(uneven):
    kept, calibration = calibration_split(uneven, 0.3, 0)
    assert kept.test is uneven.test
    held = hold_out(uneven, 0.3, 0)
    assert kept.fidelity.endswith("training examples kept for calibration")
    others = []
    for client, n in enumerate(uneven.train.size):
        parts = [p.x[client, : p.size[client]] for p in (kept.train, calibration)]
        both = np.concatenate(parts).reshape(n, 48).tolist()
        original = uneven.train.x[client, :n].reshape(n, 48).tolist()
        assert sorted(both) == sorted(original)
        assert len(parts[1]) == held.test.size[client]  # the same machinery
        others.append(
            held.test.x[client, : len(parts[1])].tolist() == parts[1].tolist()
        )
    assert not all(others)  # and other examples


def test_clients_of_one_example_cannot_be_calibrated(dataset):
    part = Partition(rows([0], [1]), rows([0], [1]))
    with pytest.raises(ValueError, match="no client has two training examples, one to"):
        calibration_split(federate(dataset, part), 0.5, 0)


def test_empty_clients(uneven):
    assert empty_clients(uneven) == [1]


def test_histogram_counts_only_real_slots(uneven):
    lines = class_histogram(uneven).splitlines()
    assert lines[0] == "mine: 5 clients, 3 classes (made up)"
    assert lines[1].endswith("min 0, median 2, max 6, total 12")
    assert lines[2].endswith("min 0, median 1, max 3, total 6")
    assert lines[3].endswith("min 0, median 2, max 3")
    assert lines[4] == "clients without training examples: 1 (1)"
    table = [[int(number) for number in line.split()] for line in lines[6:]]
    # Client 0 holds examples 3, 1, 4, 0, 5 and 9, whose labels are i mod 3.
    assert table == [[0, 3, 2, 1], [1, 0, 0, 0], [2, 0, 0, 1], [3, 1, 1, 0],
                     [4, 0, 1, 2]]  # fmt: skip


@pytest.mark.parametrize("classes", [13, 62, 100])
def test_histogram_of_many_clients_and_classes_stays_short(classes):
    y = np.arange(2 * classes) % classes
    x = np.zeros((len(y), 2), np.float32)
    dataset = Dataset(x, y, x, y, classes, "wide", "made up")
    parts = np.array_split(np.arange(len(y)), 25) + rows(*[[]] * 25)
    text = class_histogram(federate(dataset, Partition(parts, parts)))
    lines = text.splitlines()
    assert len(lines) <= 18
    assert max(map(len, lines)) <= 88
    heads = lines[5].split()[1:]
    assert heads[0].startswith("0-")
    assert heads[-1].split("-")[-1] == str(classes - 1)
    assert sum(map(int, lines[6].split()[1:])) == len(parts[0])
    assert lines[-1] == "  ... 40 more clients"


@pytest.mark.parametrize(
    ("x", "y", "size"),
    [
        (np.float64, np.int64, np.int64),
        (">f4", ">i4", ">i8"),
        (">f8", np.int8, np.uint8),
        (np.float16, np.uint16, np.uint64),
        (np.int64, bool, np.int32),
        (np.uint8, np.float64, np.int16),
    ],
)
def test_hand_made_clients_are_settled_for_jax(x, y, size):
    """Issue 13.15b: jax 0.12 warns of int64, and takes no big-endian numbers."""
    given = ClientData(
        np.asfortranarray(np.arange(24).reshape(2, 3, 4)).astype(x),
        np.array([[0, 1, 1], [1, 0, 0]]).astype(y),
        np.array([3, 2]).astype(size),
    )
    settled = settled_clients(given)
    for old, new in zip(given, settled):
        np.testing.assert_array_equal(old, new)
        assert new.dtype.isnative and new.dtype == jax.dtypes.canonicalize_dtype(
            new.dtype
        )
    assert settled.size.dtype == np.int32
    assert settled.y.dtype == {bool: bool, np.float64: np.float32}.get(y, np.int32)
    # What is right already, or no host array, stays itself.
    again = settled_clients(settled)
    assert all(a is b or np.shares_memory(a, b) for a, b in zip(again, settled))
    on_device = settled._replace(x=jnp.zeros((2, 3, 4)))
    assert settled_clients(on_device).x is on_device.x


def test_lists_become_arrays_and_a_huge_label_does_not_wrap_around():
    data = ClientData([[[0.5], [1.5]]], [[0, 2**32 + 1]], [2])
    settled = settled_clients(data)
    assert settled.x.dtype == np.float32 and settled.size.dtype == np.int32
    assert settled.y.tolist() == [[0, 2**32 + 1]]
    assert settled_clients(None) is None


def test_c22_pooled_splits_are_on_one_scale(dataset):
    """Wide pixels in one split only make features of both."""
    wide = dataset._replace(
        train_x=dataset.train_x.astype(np.uint16) * 3,
        test_x=dataset.test_x.astype(np.uint16),
    )
    everything = [np.arange(12)], [12 + np.arange(6)]
    pooled = federate(wide, Partition(*everything, pooled=True))
    assert pooled.train.x.dtype == pooled.test.x.dtype == np.float32
    np.testing.assert_array_equal(pooled.train.x[0], wide.train_x)
    np.testing.assert_array_equal(pooled.test.x[0], wide.test_x)


def test_a_federation_takes_hand_made_data_without_a_warning(task, train, test):
    """Issue 13.15b; warnings are errors here."""
    rough = ClientData(
        np.asfortranarray(train.x.astype(">f8")),
        train.y.astype(np.int64),
        train.size.tolist(),
    )
    plain = test._replace(y=test.y.tolist(), size=test.size.astype(np.uint8))
    federation = Federation(fedavg(task), rough, plain)
    for given, settled in ((train, federation.train), (test, federation.test)):
        for leaf, like in zip(settled, given, strict=True):
            assert leaf.dtype == like.dtype
            np.testing.assert_array_equal(leaf, like)


def test_c22_a_federation_refuses_inputs_of_two_types(task, train, test):
    pixels = test._replace(x=test.x.astype(np.uint8))
    message = "train.x is float32 and test.x uint8, which a model scales differently"
    with pytest.raises(ValueError, match=message):
        Federation(fedavg(task), train, pixels)
    sources = [ClientArrays(data) for data in (train, pixels)]
    with pytest.raises(ValueError, match=message):
        StreamedFederation(fedavg(task), *sources)
