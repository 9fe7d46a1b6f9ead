"""Covertype from scikit-learn's copy, and its synthetic stand-in."""

import sys

import joblib
import numpy as np
import pytest

from fedvi.data import load, one_against_rest, pixel_statistics

FEATURES = 54


@pytest.fixture
def copy(tmp_path):
    """A folder as `fetch_covtype` leaves it, with 50 rows: row i is i + [0, .., 53]."""
    folder = tmp_path / "covertype"
    folder.mkdir()
    x = np.arange(50.0)[:, None] + np.arange(FEATURES)[None]
    y = np.arange(50, dtype=np.int32) % 7 + 1
    for name, values in (("samples", x), ("targets", y)):
        joblib.dump(values, folder / f"{name}_py3", compress=9)
    return tmp_path


def test_scikit_learns_copy_is_split_once_and_relabelled(copy):
    dataset = load("covertype", data_dir=copy)
    assert dataset.train_x.shape == (40, FEATURES)
    assert dataset.test_x.shape == (10, FEATURES)
    assert dataset.train_x.dtype == np.float32
    assert dataset.classes == 7
    rows = np.concatenate([dataset.train_x, dataset.test_x])[:, 0]
    np.testing.assert_array_equal(np.sort(rows), np.arange(50))
    labels = np.concatenate([dataset.train_y, dataset.test_y])
    np.testing.assert_array_equal(labels, rows % 7)
    expected = np.random.default_rng(42).permutation(50)[40:]
    np.testing.assert_array_equal(dataset.test_x[:, 0], expected)
    assert "split 80/20 at random by fedvi" in dataset.fidelity


def test_a_users_file_wins_over_scikit_learns_copy(copy, save_npz):
    dataset = load("covertype", data_file=save_npz(), data_dir=copy)
    assert (len(dataset.train_x), dataset.classes) == (12, 7)


def test_without_a_copy_the_ways_to_supply_it_are_named(tmp_path):
    with pytest.raises(ValueError) as caught:
        load("covertype", data_dir=tmp_path)
    message = str(caught.value)
    for way in ("--data_file", "fetch_covtype(data_home=", "=covertype_standin"):
        assert way in message
    assert str(tmp_path) in message and "\n" not in message


def test_a_missing_folder_is_not_created(tmp_path):
    with pytest.raises(ValueError, match="no data set 'covertype' in data_dir="):
        load("covertype", data_dir=tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


def test_a_truncated_copy_is_reported(copy):
    path = copy / "covertype" / "samples_py3"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="'covertype' in data_dir=.*UnpicklingError"):
        load("covertype", data_dir=copy)


def test_without_scikit_learn_the_extra_is_named(copy, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'fedvi\[digits\]'"):
        load("covertype", data_dir=copy)


@pytest.fixture(scope="module")
def standin():
    return load("covertype_standin")


def test_the_stand_in_has_covertypes_shape_and_class_shares(standin):
    assert standin.train_x.shape == (10_000, FEATURES)
    assert standin.test_x.shape == (2_500, FEATURES)
    assert standin.train_x.dtype == np.float32
    shares = np.array([0.365, 0.488, 0.062, 0.005, 0.016, 0.030, 0.034])
    counts = np.bincount(np.r_[standin.train_y, standin.test_y], minlength=7)
    # Four standard deviations of a binomial count.
    assert (np.abs(counts / 12_500 - shares) < 4 * np.sqrt(shares / 12_500)).all()
    assert "synthetic" in standin.fidelity
    assert "no substitute for Covertype" in standin.fidelity


def test_the_stand_in_is_the_same_every_time(standin):
    again = load("covertype_standin")
    np.testing.assert_array_equal(again.train_x, standin.train_x)
    np.testing.assert_array_equal(again.test_y, standin.test_y)


def test_the_stand_ins_classes_differ_in_their_means_only(standin):
    """Two samples of the two large classes have equal covariances up to noise."""
    first, second = (standin.train_x[standin.train_y == c] for c in (0, 1))
    gap = np.abs(first.mean(axis=0) - second.mean(axis=0)).mean()
    assert gap > 5 / np.sqrt(len(first))
    spread = np.abs(np.cov(first.T) - np.cov(second.T))
    assert spread.max() < 6 * 1.5 * np.sqrt(1 / len(first) + 1 / len(second))
    # The covariance is not diagonal.
    assert np.abs(np.corrcoef(first.T) - np.eye(FEATURES)).max() > 0.2


def test_lodgepole_pine_is_as_hard_to_tell_as_in_the_real_data(standin):
    from sklearn.linear_model import LogisticRegression

    binary = one_against_rest(standin, 1)
    mean, std = pixel_statistics(binary.train_x)
    train, test = ((x - mean) / std for x in (binary.train_x, binary.test_x))
    fitted = LogisticRegression(max_iter=1000).fit(train, binary.train_y)
    assert 0.72 < fitted.score(test, binary.test_y) < 0.80
