"""Loading and validating data sets (C13: labels, C17: missing data)."""

import subprocess
import sys

import numpy as np
import pytest

from fedvi.data import sources
from fedvi.data.sources import Dataset, load, validate

SHAPE = (4, 4, 3)


def test_npz_round_trip(save_npz, arrays):
    dataset = load("mine", data_file=save_npz())
    for key, value in arrays().items():
        np.testing.assert_array_equal(getattr(dataset, key), value)
    assert dataset.train_x.dtype == np.uint8
    assert dataset.train_y.dtype == dataset.test_y.dtype == np.int32
    assert (dataset.classes, dataset.name) == (3, "mine")
    assert dataset.fidelity == "user's npz file set.npz"
    assert dataset.train_group is None


def test_known_name_fixes_the_number_of_classes(save_npz):
    dataset = load("cifar100", data_file=save_npz())
    assert dataset.classes == 100
    assert dataset.fidelity.endswith("; 97 of 100 classes have no example")


@pytest.mark.parametrize("prefix", ["group", "writer"])
def test_natural_ids_are_read(save_npz, prefix):
    ids = {f"train_{prefix}": np.arange(12), f"test_{prefix}": np.arange(6)}
    dataset = load("mine", data_file=save_npz(**ids))
    np.testing.assert_array_equal(dataset.train_group, np.arange(12))
    np.testing.assert_array_equal(dataset.test_group, np.arange(6))


def test_channel_axis_is_added_and_label_columns_are_flattened(save_npz, arrays):
    grey = arrays(shape=(4, 4))
    grey["train_y"] = grey["train_y"][:, None].astype(np.float64)
    dataset = load("mine", data_file=save_npz(**grey))
    assert dataset.train_x.shape == (12, 4, 4, 1)
    np.testing.assert_array_equal(dataset.train_y, grey["train_y"][:, 0])


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (np.int64, SHAPE, np.uint8),  # pixels stored wide
        (np.float64, SHAPE, np.float32),
        (np.int16, (5,), np.float32),  # integer features are no pixels
        (np.float32, (5,), np.float32),
    ],
)
def test_pixels_become_uint8_and_features_float32(
    save_npz, arrays, dtype, shape, expected
):
    wide = arrays(shape=shape)
    wide |= {key: wide[key].astype(dtype) for key in ("train_x", "test_x")}
    dataset = load("mine", data_file=save_npz(**wide))
    assert dataset.train_x.dtype == dataset.test_x.dtype == expected
    np.testing.assert_array_equal(dataset.train_x, wide["train_x"])


def test_digits_are_embedded_and_split_within_classes():
    dataset = load("digits")
    assert dataset.train_x.shape == (1437, 8, 8, 1)
    assert dataset.test_x.shape == (360, 8, 8, 1)
    assert dataset.train_x.dtype == np.uint8
    assert (dataset.train_x.min(), dataset.train_x.max()) == (0, 255)
    train, test = np.bincount(dataset.train_y), np.bincount(dataset.test_y)
    assert np.abs(test - (train + test) * 360 / 1797).max() < 1
    again = load("digits")
    np.testing.assert_array_equal(again.train_x, dataset.train_x)
    np.testing.assert_array_equal(again.test_y, dataset.test_y)


def test_digits_are_scikit_learns_images():
    from sklearn.datasets import load_digits

    official = load_digits()
    expected = np.sort((official.images.reshape(-1, 64) * 255 / 16).sum(axis=1))
    dataset = load("digits")
    x = np.concatenate([dataset.train_x, dataset.test_x]).reshape(-1, 64)
    # Rounding 64 pixels to whole numbers moves a sum by at most 32.
    np.testing.assert_allclose(np.sort(x.sum(axis=1)), expected, atol=32)


def test_digits_file_wins_over_the_embedded_one(save_npz):
    dataset = load("digits", data_file=save_npz())
    assert len(dataset.train_x) == 12


@pytest.mark.parametrize("bad", [-1, 10])
@pytest.mark.parametrize("split", ["train", "test"])
def test_c13_label_outside_the_classes(save_npz, arrays, bad, split):
    y = arrays()[f"{split}_y"]
    y[4:] = bad
    path = save_npz(**{f"{split}_y": y})
    with pytest.raises(ValueError, match=rf"{split}_y\[4\] = {bad} is outside 0\.\.9"):
        load("mnist", data_file=path)


def test_c13_huge_label_does_not_wrap_around(save_npz, arrays):
    y = arrays()["train_y"]
    y[3] = 2**32 + 1
    with pytest.raises(ValueError, match=r"train_y\[3\] = 4294967297"):
        load("mnist", data_file=save_npz(train_y=y))


@pytest.mark.parametrize("bad", [0.5, np.nan])
def test_label_that_is_no_integer(save_npz, arrays, bad):
    y = arrays()["test_y"].astype(float)
    y[2] = bad
    with pytest.raises(ValueError, match=rf"test_y\[2\] = {bad} is not an integer"):
        load("mine", data_file=save_npz(test_y=y))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("split", ["train", "test"])
def test_input_that_is_not_finite(save_npz, arrays, bad, split):
    x = {key: arrays()[key].astype(np.float64) for key in ("train_x", "test_x")}
    x[f"{split}_x"][5, 1, 2, 0] = bad
    x[f"{split}_x"][5, 3, 0, 0] = bad
    with pytest.raises(ValueError, match=rf"{split}_x\[5, 1, 2, 0\] = .*not finite"):
        load("mine", data_file=save_npz(**x))


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"train_y": np.zeros(11, int)}, "12 examples but train_y has 11 labels"),
        ({"test_y": np.zeros(7, int)}, "6 examples but test_y has 7 labels"),
        ({"train_group": np.zeros(3, int)}, "12 examples but train_group 3 ids"),
        ({"test_x": np.zeros((6, 5, 4, 3), np.uint8)}, "must agree in every axis"),
        (
            {"train_x": np.zeros((0, *SHAPE), np.uint8), "train_y": np.zeros(0, int)},
            "train_x of 'mine' is empty",
        ),
        (
            {k: np.zeros((n, 3, 8, 8), np.uint8) for k, n in
             (("train_x", 12), ("test_x", 6))},
            "channels-first",
        ),
    ],
)  # fmt: skip
def test_inconsistent_arrays(save_npz, replaced, message):
    with pytest.raises(ValueError, match=message):
        load("mine", data_file=save_npz(**replaced))


def test_validate_takes_a_data_set_built_by_hand(arrays):
    good = Dataset(**arrays(), classes=3, name="mine", fidelity="made up")
    validate(good)
    with pytest.raises(ValueError, match=r"train_y\[2\] = 2 is outside 0\.\.1"):
        validate(good._replace(classes=2))


def test_empty_test_split_is_allowed(save_npz):
    nothing = {"test_x": np.zeros((0, *SHAPE), np.uint8), "test_y": np.zeros(0, int)}
    assert len(load("mine", data_file=save_npz(**nothing)).test_x) == 0


def test_c17_missing_file_names_it_and_the_three_ways(tmp_path):
    with pytest.raises(ValueError) as caught:
        load("cifar100", data_file=tmp_path / "cifar100.npz")
    message = str(caught.value)
    assert str(tmp_path / "cifar100.npz") in message
    for way in ("--data_file", "--data_dir", "tensorflow-datasets", "fedvi[tf]"):
        assert way in message
    assert "\n" not in message


def test_idx_folder_of_debian_is_used_without_data_dir(
    tmp_path, monkeypatch, arrays, write_idx
):
    write_idx(tmp_path, arrays(shape=(4, 4)))
    monkeypatch.setitem(sources.IDX_FOLDERS, "fashion_mnist", str(tmp_path))
    dataset = load("fashion_mnist")
    assert dataset.train_x.shape == (12, 4, 4, 1)
    assert dataset.classes == 10


def test_without_debians_folder_the_copy_is_looked_for(tmp_path, monkeypatch):
    def none(name, data_dir):
        raise ValueError(f"no copy of {name}")

    monkeypatch.setitem(sources.IDX_FOLDERS, "fashion_mnist", str(tmp_path / "none"))
    monkeypatch.setattr(sources.tfds_reader, "read_tfds", none)
    for name in ("fashion_mnist", "mnist"):
        with pytest.raises(ValueError, match=f"^no copy of {name}$"):
            load(name)


def test_importing_data_imports_no_optional_library():
    code = (
        "import sys, fedvi.data; "
        "print([m for m in ('tensorflow', 'tensorflow_datasets', 'sklearn', "
        "'matplotlib', 'PIL') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_a_file_without_a_name_is_named_after_itself_and_nothing_else(save_npz):
    """Its classes are its labels', even where it is called like a known set."""
    path = save_npz()
    assert (load(data_file=path).name, load(data_file=path).classes) == ("set", 3)
    path = path.rename(path.with_name("cifar100.npz"))
    dataset = load(data_file=path)
    assert (dataset.name, dataset.classes) == ("cifar100_file", 3)
    with pytest.raises(ValueError, match="name=None needs a data_file"):
        load()


def scaled(arrays, train, test):
    """The same images, each split divided and stored as a function says."""
    x = arrays()
    return {"train_x": train(x["train_x"]), "test_x": test(x["test_x"])}


def as_type(dtype, factor=1.0):
    return lambda x: (x * factor).astype(dtype)


def test_c22_values_below_0_in_one_split_only_are_another_scale():
    x = np.random.default_rng(0).uniform(size=(40, 6)).astype(np.float32)
    y = np.arange(40) % 2
    dataset = Dataset(2 * x - 1, y, x, y, 2, "own", "")
    with pytest.raises(ValueError, match="different scales: .* negative in the one"):
        sources.validate(dataset)
    sources.validate(dataset._replace(test_x=2 * x - 1))


@pytest.mark.parametrize(
    ("train", "test", "dtype"),
    [
        # uint16 to 999 beside uint16 below 256, in either split.
        (as_type(np.uint16, 3.9), as_type(np.uint16), np.float32),
        (as_type(np.uint16), as_type(np.uint16, 3.9), np.float32),
        (as_type(np.uint8), as_type(np.uint16, 3.9), np.float32),
        (as_type(np.uint8), as_type(np.int64), np.uint8),
        (as_type(np.float64), as_type(np.float16), np.float32),
        (as_type(">f4", 1 / 255), as_type("<f8", 1 / 255), np.float32),
    ],
)
def test_c22_both_splits_are_on_one_scale(save_npz, arrays, train, test, dtype):
    given = scaled(arrays, train, test)
    dataset = load(data_file=save_npz(**given))
    for key, x in given.items():
        assert getattr(dataset, key).dtype == dtype
        np.testing.assert_allclose(getattr(dataset, key), x.astype(float), rtol=1e-6)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (as_type(np.uint8), as_type(np.float32), "train_x is uint8 and test_x float32"),
        (as_type(np.float32, 1 / 255), as_type(np.uint8), "float32 and test_x uint8"),
        (as_type(bool), as_type(np.uint8), "train_x is bool and test_x uint8"),
        (
            as_type(np.float32, 1 / 255),
            as_type(np.float32),
            "on different scales",
        ),
        (
            as_type(np.uint8),
            as_type(np.uint8, 1 / 99),
            "different scales: the mean",
        ),
    ],
)
def test_c22_what_cannot_be_on_one_scale_is_refused(
    save_npz, arrays, train, test, message
):
    with pytest.raises(ValueError, match=message) as caught:
        load(data_file=save_npz(**scaled(arrays, train, test)))
    assert "\n" not in str(caught.value)


def test_c22_blank_and_empty_splits_have_no_scale(save_npz):
    load(data_file=save_npz(test_x=np.zeros((6, *SHAPE), np.uint8)))
    nothing = {"test_x": np.zeros((0, *SHAPE)), "test_y": np.zeros(0)}
    assert load(data_file=save_npz(**nothing)).test_x.dtype == np.uint8


def test_c25_one_value_an_example_is_a_feature_and_a_lone_number_is_refused(save_npz):
    one = {"train_x": np.arange(12.0), "test_x": np.arange(6.0)}
    dataset = load(data_file=save_npz(**one))
    assert dataset.train_x.shape == (12, 1)
    assert dataset.fidelity.endswith("; one value an example")
    with pytest.raises(ValueError, match="train_x is a single number: give an array"):
        load(data_file=save_npz(train_x=5.0))
    with pytest.raises(ValueError, match="train_x is <U1: give numbers"):
        load(data_file=save_npz(train_x=np.full((12, 3), "a")))
    nothing = {"train_x": np.zeros((12, 0)), "test_x": np.zeros((6, 0))}
    with pytest.raises(ValueError, match=r"shape \(12, 0\): give at least one value"):
        load(data_file=save_npz(**nothing))


def test_hand_made_data_are_settled_once(arrays):
    """Lists, Fortran order, big-endian and wide numbers; what is right stays itself."""
    plain = load_like(arrays())
    rough = plain._replace(
        train_x=np.asfortranarray(plain.train_x.astype(">i8")),
        test_x=plain.test_x.tolist(),
        train_y=plain.train_y.astype(">f8"),
        test_y=plain.test_y.tolist(),
        classes=None,
    )
    settled = sources.settled(rough)
    for mine, theirs in zip(settled[:4], plain[:4]):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert settled.classes == 3
    again = sources.settled(settled)
    assert np.shares_memory(again.train_x, settled.train_x)
    assert again.fidelity == settled.fidelity


def load_like(arrays):
    return sources.settled(Dataset(**arrays, classes=3, name="mine", fidelity="made"))
