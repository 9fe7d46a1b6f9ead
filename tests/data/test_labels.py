"""C25: labels and ids of the types that files hold, mapped and reported or refused."""

import numpy as np
import pytest

from fedvi.data import federate, keep_classes, labels, load, one_against_rest, partition
from fedvi.data.sources import Dataset

# Twelve training and six test examples of classes 0, 1, 2, 0, ...
PLACE = {"train_y": np.arange(12) % 3, "test_y": np.arange(6) % 3}


def in_form(form):
    return {key: form(place) for key, place in PLACE.items()}


def names(*given, dtype=None):
    return lambda place: np.array(given, dtype)[place]


@pytest.mark.parametrize(
    ("form", "note"),
    [
        (lambda place: place.astype(np.int8), ""),
        (lambda place: place.astype(np.uint64), ""),
        (lambda place: place.astype(">i4"), ""),
        (lambda place: place.astype(np.float16), ""),
        (lambda place: place[:, None].astype(np.float64), ""),
        (names("0", "1", "2"), ""),
        (names(b"0", b"1", b"2"), ""),
        (lambda place: place + 1, "labels 1, 2, 3 are classes 0..2"),
        (lambda place: (place + 1).astype(np.int8), "labels 1, 2, 3 are classes 0..2"),
        (names(0, 5, 7), "labels 0, 5, 7 are classes 0..2"),
        (names(0, 1, 2**40), "labels 0, 1, 1099511627776 are classes 0..2"),
        (names("cat", "dog", "emu"), "labels 'cat', 'dog', 'emu' are classes 0..2"),
        (names(b"a", b"b", b"c"), "labels 'a', 'b', 'c' are classes 0..2"),
        (names("c2", "c3", "c10"), "labels 'c2', 'c3', 'c10' are classes 0..2"),
        (names("1", "2", "10"), "labels 1, 2, 10 are classes 0..2"),
        (lambda place: np.eye(3)[place], "labels given one-hot, 3 columns"),
        (lambda place: np.eye(3, dtype=bool)[place], "labels given one-hot, 3 columns"),
    ],
)
def test_c25_labels_become_classes_and_what_was_done_is_said(save_npz, form, note):
    dataset = load(data_file=save_npz(**in_form(form)))
    assert dataset.classes == 3
    for key, place in PLACE.items():
        assert getattr(dataset, key).dtype == np.int32
        np.testing.assert_array_equal(getattr(dataset, key), place)
    assert dataset.fidelity == "; ".join(
        filter(None, ["user's npz file set.npz", note])
    )
    mapped = note.startswith("labels ") and "one-hot" not in note
    assert (dataset.class_names is not None) == mapped


@pytest.mark.parametrize("values", [(False, True), (-1, 1), (0.0, 1.0), (1, 2)])
def test_two_classes_in_any_notation(values):
    y = np.array(values)[[0, 1, 1, 0]]
    found = labels.read_labels(y, y[:2])
    assert (found.classes, found.train.tolist()) == (2, [0, 1, 1, 0])


def test_the_classes_are_those_of_both_splits_in_order():
    found = labels.read_labels(np.array(["b", "d"]), np.array(["c", "b", "a"]))
    assert found.names == ("a", "b", "c", "d")
    assert (found.train.tolist(), found.test.tolist()) == ([1, 3], [2, 1, 0])
    many = labels.read_labels(np.arange(1, 41), [40])
    assert many.note == "labels 1, 2, 3, 4, 5, ..., 40 are classes 0..39"


def test_where_the_number_of_classes_is_known_1_to_C_lose_one(save_npz):
    """Covertype's own file counts from 1; a subset of 0..C-1 stays as it is."""
    y = np.arange(12) % 7 + 1
    dataset = load("covertype", data_file=save_npz(train_y=y, test_y=y[:6]))
    assert (dataset.classes, dataset.train_y.tolist()) == (7, (y - 1).tolist())
    assert "labels 1, 2, 3, 4, 5, ..., 7 are classes 0..6" in dataset.fidelity
    subset = load("covertype", data_file=save_npz(train_y=y % 3 + 1, test_y=y[:6] % 3))
    assert (subset.classes, subset.train_y.tolist()) == (7, (y % 3 + 1).tolist())
    with pytest.raises(ValueError, match="hold 3 different texts, .* of 10 classes"):
        load("mnist", data_file=save_npz(**in_form(names("a", "b", "c"))))


def test_python_objects_are_taken_for_what_they_hold():
    found = labels.read_labels(np.array(["b", "a"], object), [])
    assert found.train.tolist() == [1, 0]
    assert labels.read_labels([2, 1, 0], [0]).train.tolist() == [2, 1, 0]


@pytest.mark.parametrize("nothing", [np.zeros(0), np.zeros(0, str), np.zeros((0, 3))])
@pytest.mark.parametrize("train_y", [["a", "b"], [1, 2], np.eye(3)[:2]])
def test_an_empty_split_has_no_form_of_its_own(train_y, nothing):
    found = labels.read_labels(train_y, nothing)
    assert (found.train.tolist(), found.test.shape) == ([0, 1], (0,))


@pytest.mark.parametrize(
    ("train_y", "test_y", "message"),
    [
        ([0, 1, -1], [0], r"train_y\[2\] = -1 is negative: leave examples without"),
        ([0, 1], [0, -5], r"test_y\[1\] = -5 is negative"),
        ([0, 1e300], [0], r"train_y\[1\] = 1e\+300 is not an integer label"),
        (["a", "b"], [0], r"train_y is <U1\[2\] and test_y int64\[1\]: give the label"),
        (np.eye(2), [0], r"train_y is float64\[2, 2\] and test_y int64\[1\]: give"),
        (
            np.full((2, 3), 1 / 3),
            [0],
            r"train_y has shape \(2, 3\), but .* not one-hot",
        ),
        (np.zeros((2, 2, 2)), [0], r"train_y has shape \(2, 2, 2\): give one label"),
        (3, [0], "train_y is a single value: give one per example"),
        (np.array([1j]), [0], "train_y is complex128: give labels as whole numbers"),
        (np.array(["2020"], "M8[Y]"), [0], r"train_y is datetime64\[Y\]: give labels"),
    ],
)
def test_c25_what_cannot_be_mapped_is_refused_in_one_line(train_y, test_y, message):
    with pytest.raises(ValueError, match=message) as caught:
        labels.read_labels(train_y, test_y)
    assert "\n" not in str(caught.value)


def test_names_follow_the_chosen_classes(save_npz):
    dataset = load(data_file=save_npz(**in_form(names("cat", "dog", "emu"))))
    kept = keep_classes(dataset, (2, 0))
    assert kept.class_names == ("emu", "cat")
    assert one_against_rest(dataset, 1).class_names is None
    part = partition("iid", kept, clients=2, seed=0)
    assert federate(kept, part).class_names == ("emu", "cat")


@pytest.mark.parametrize("kind", ["U", "S", "O"])
def test_natural_ids_are_kept_in_natural_order(arrays, kind):
    """Client 2 is hospital_3, not hospital_10."""
    sites = [f"hospital_{site}" for site in (10, 2, 1, 3)]
    group = np.array(sites).astype(kind)
    dataset = Dataset(
        **arrays(),
        classes=3,
        name="mine",
        fidelity="",
        train_group=np.tile(group, 3),
        test_group=np.array(["hospital_2", "hospital_9"] * 3),
    )
    part = partition("by_group", dataset, clients=None, seed=0)
    federated = federate(dataset, part)
    assert federated.ids.tolist() == [f"hospital_{site}" for site in (1, 2, 3, 10)]
    assert part.train[3].tolist() == [0, 4, 8]
    assert federated.test.size.tolist() == [0, 3, 0, 0]
    assert federated.fidelity == "3 test examples fit no client"
    fewer = federate(dataset, partition("by_group", dataset, clients=2, seed=1))
    assert len(fewer.ids) == 2
    assert fewer.fidelity.startswith("6 training examples fit no client; ")


def test_ids_of_any_type_are_whole_numbers_or_text():
    assert labels.read_ids("g", np.array([3.0, 1.0])).tolist() == [3, 1]
    assert labels.read_ids("g", np.array([[4], [2]], np.uint8)).tolist() == [4, 2]
    for ids, message in (
        (np.array([1.0, np.nan]), r"g\[1\] = nan is not an id"),
        (np.zeros((2, 2)), r"g is float64\[2, 2\]: give one id for each example"),
        (np.array([1j]), r"g is complex128\[1\]: give one id"),
    ):
        with pytest.raises(ValueError, match=message):
            labels.read_ids("g", ids)


def test_ids_that_are_text_in_one_split_are_text_in_both(save_npz):
    ids = {"train_group": np.arange(12) // 6, "test_group": np.array(["0", "1"] * 3)}
    dataset = load(data_file=save_npz(**ids))
    part = partition("by_group", dataset, clients=None, seed=0)
    assert [len(test) for test in part.test] == [3, 3]
