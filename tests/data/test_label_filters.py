"""Fewer classes, and one class against the rest."""

import numpy as np
import pytest

from fedvi.data import Dataset, keep_classes, one_against_rest, validate


@pytest.fixture
def dataset(arrays) -> Dataset:
    """Labels 0, 1, 2, 3, 0, ...; the natural id of example i is i."""
    return Dataset(
        **arrays(n=12, m=8, classes=4),
        classes=4,
        name="mine",
        fidelity="made up",
        train_group=np.arange(12),
        test_group=np.arange(8),
    )


def test_kept_classes_are_relabelled_in_the_order_given(dataset):
    kept = keep_classes(dataset, (3, 0))
    validate(kept)
    where = [0, 3, 4, 7, 8, 11]
    assert kept.train_y.tolist() == [1, 0, 1, 0, 1, 0]
    assert kept.train_y.dtype == kept.test_y.dtype == np.int32
    np.testing.assert_array_equal(kept.train_x, dataset.train_x[where])
    assert kept.train_group.tolist() == where
    np.testing.assert_array_equal(kept.test_x, dataset.test_x[where[:4]])
    assert kept.test_y.tolist() == [1, 0, 1, 0]
    assert kept.test_group.tolist() == where[:4]
    assert kept.classes == 2
    assert kept.fidelity == "made up; only classes 3, 0, as 0..1"


def test_a_data_set_without_natural_ids_keeps_none(dataset):
    kept = keep_classes(dataset._replace(train_group=None, test_group=None), (1, 2))
    assert kept.train_group is None and kept.test_group is None


def test_one_class_becomes_1_and_the_rest_0(dataset):
    binary = one_against_rest(dataset, 2)
    validate(binary)
    assert binary.train_y.tolist() == [0, 0, 1, 0] * 3
    assert binary.test_y.tolist() == [0, 0, 1, 0] * 2
    assert binary.train_y.dtype == binary.test_y.dtype == np.int32
    np.testing.assert_array_equal(binary.train_x, dataset.train_x)
    assert binary.train_group.tolist() == list(range(12))
    assert binary.classes == 2
    assert binary.fidelity == "made up; label 1 is class 2, 0 the rest"


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ((0, 4), r"keep_classes=\[0, 4\]: 4 is no class of 'mine'.* 0\.\.3"),
        ((-1, 0), r"-1 is no class of 'mine'"),
        ((0, 1, 0), r"keep_classes=\[0, 1, 0\] repeats a class"),
        ((2,), r"keep_classes=\[2\] must name at least 2"),
        ((), r"keep_classes=\[\] must name at least 2"),
    ],
)
def test_wrong_classes_are_named(dataset, classes, message):
    with pytest.raises(ValueError, match=message):
        keep_classes(dataset, classes)


def test_classes_without_training_examples_are_refused(dataset):
    dataset = dataset._replace(train_y=dataset.train_y % 2)
    with pytest.raises(ValueError, match=r"\[2, 3\] leaves 'mine' no training example"):
        keep_classes(dataset, (2, 3))


@pytest.mark.parametrize("positive", [-1, 4])
def test_a_positive_class_outside_the_labels_is_named(dataset, positive):
    message = rf"one_against_rest={positive} is no class of 'mine'.* 0\.\.3"
    with pytest.raises(ValueError, match=message):
        one_against_rest(dataset, positive)
