"""npz and idx files, whole and broken."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from fedvi.data.readers import KERAS_KEYS, KEYS, read_idx, read_idx_file, read_npz
from fedvi.data.sources import IDX_FOLDERS, load

GREY = (4, 5)
DEBIAN = Path(IDX_FOLDERS["fashion_mnist"])


def test_npz_with_keras_keys(tmp_path, arrays):
    path = tmp_path / "keras.npz"
    plain = arrays()
    np.savez(path, **{new: plain[old] for new, old in zip(KERAS_KEYS, KEYS)})
    found = read_npz("mine", path)
    for key in KEYS:
        np.testing.assert_array_equal(found.arrays[key], plain[key])


def test_npz_that_lacks_an_array_is_named(tmp_path, arrays):
    path = tmp_path / "half.npz"
    np.savez(path, **{key: arrays()[key] for key in ("train_x", "test_y")})
    with pytest.raises(ValueError, match=r"half.npz' lacks train_y, test_x"):
        read_npz("mine", path)


def test_pickled_objects_are_never_loaded(save_npz):
    path = save_npz(train_y=np.array([{"a": 1}] * 12, dtype=object))
    with pytest.raises(ValueError, match="pickled objects"):
        read_npz("mine", path)


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"\x80\x04."])
def test_file_that_is_no_npz(tmp_path, content):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x.npz' is not an npz file"):
        read_npz("mine", path)


def test_damaged_npz(save_npz):
    path = save_npz()
    content = bytearray(path.read_bytes())
    middle = content.index(b"train_x.npy") + 200
    content[middle : middle + 50] = bytes(50)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        read_npz("mine", path)


@pytest.mark.parametrize("compress", [False, True])
def test_idx_round_trip(tmp_path, arrays, write_idx, compress):
    written = arrays(shape=GREY)
    write_idx(tmp_path, written, compress=compress)
    dataset = load("mnist", data_dir=tmp_path)
    np.testing.assert_array_equal(dataset.train_x, written["train_x"][..., None])
    np.testing.assert_array_equal(dataset.test_x, written["test_x"][..., None])
    np.testing.assert_array_equal(dataset.train_y, written["train_y"])
    np.testing.assert_array_equal(dataset.test_y, written["test_y"])
    assert dataset.train_y.dtype == np.int32


def test_emnist_is_turned_upright(tmp_path, arrays, write_idx):
    written = arrays(shape=GREY)
    splits = (("train", "emnist-byclass-train"), ("test", "emnist-byclass-test"))
    write_idx(tmp_path, written, splits=splits)
    dataset = load("emnist", data_dir=tmp_path)
    upright = written["train_x"].swapaxes(1, 2)[..., None]
    np.testing.assert_array_equal(dataset.train_x, upright)
    assert dataset.classes == 62


def test_folder_without_idx_files(tmp_path):
    assert read_idx("mnist", tmp_path) is None


def test_missing_one_of_four_idx_files_is_named(tmp_path, arrays, write_idx):
    write_idx(tmp_path, arrays(shape=GREY))
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match="lacks t10k-labels-idx1-ubyte"):
        read_idx("mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x08", "not an idx file"),
        (b"\0\0\x0d\x01\0\0\0\x01....", "not an idx file"),  # floats
        (b"\0\0\x08\x02\0\0\0\x02", "not an idx file"),  # header cut off
        (b"\0\0\x08\x01\0\0\0\x03ab", r"holds 2 bytes, not the \(3,\)"),
    ],
)
def test_broken_idx_file(tmp_path, content, message):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx_file(path)


@pytest.mark.parametrize("keep", [5, 40])
def test_broken_gz_file(tmp_path, keep):
    path = tmp_path / "labels.gz"
    labels = np.random.default_rng(0).integers(0, 9, 200, dtype=np.uint8).tobytes()
    path.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\xc8" + labels)[:keep])
    with pytest.raises(ValueError, match=r"labels.gz' is unreadable"):
        read_idx_file(path)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="dataset-fashion-mnist not installed")
def test_debians_fashion_mnist():
    dataset = load("fashion_mnist")
    assert dataset.train_x.shape == (60000, 28, 28, 1)
    assert dataset.test_x.shape == (10000, 28, 28, 1)
    assert np.bincount(dataset.train_y).tolist() == [6000] * 10
    assert np.bincount(dataset.test_y).tolist() == [1000] * 10


def moved(folder, rename):
    """Renames the files of a folder; `rename` may name folders, made where needed."""
    for path in list(folder.iterdir()):
        target = folder / rename(path.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("-idx", ".idx"),
        str.upper,
        lambda name: f"MNIST/raw/{name}",
        lambda name: f"raw/{name}",
        lambda name: f"mnist/{name}",
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_c26_idx_files_by_their_other_names(
    tmp_path, arrays, write_idx, rename, compress
):
    written = arrays(shape=GREY)
    write_idx(tmp_path, written, compress=compress)
    moved(tmp_path, rename)
    np.testing.assert_array_equal(
        load("mnist", data_dir=tmp_path).test_x, written["test_x"][..., None]
    )


def test_c26_gzip_without_gz(tmp_path, arrays, write_idx):
    write_idx(tmp_path, arrays(shape=GREY), compress=True)
    moved(tmp_path, lambda name: name.removesuffix(".gz"))
    assert len(load("mnist", data_dir=tmp_path).train_x) == 12


def test_c26_of_several_sets_the_one_asked_for_is_read(tmp_path, arrays, write_idx):
    """torchvision's root holds MNIST/raw and FashionMNIST/raw."""
    for name, n in (("MNIST", 12), ("FashionMNIST", 9)):
        (tmp_path / name / "raw").mkdir(parents=True)
        write_idx(tmp_path / name / "raw", arrays(n=n, shape=GREY))
    assert len(load("fashion_mnist", data_dir=tmp_path).train_x) == 9
    assert len(load("mnist", data_dir=tmp_path).train_x) == 12


def test_c26_what_was_looked_for_and_what_was_found_are_named(
    tmp_path, arrays, write_idx
):
    with pytest.raises(ValueError, match="no/such' is no folder: supply it with"):
        load("mnist", data_dir=tmp_path / "no" / "such")
    with pytest.raises(ValueError, match=r"t10k-labels.*\.gz, and found nothing$"):
        load("mnist", data_dir=tmp_path)
    write_idx(tmp_path, arrays(shape=GREY))
    moved(tmp_path, lambda name: f"my-{name}")
    with pytest.raises(ValueError) as caught:
        load("mnist", data_dir=tmp_path)
    message = str(caught.value)
    for name in ("train-images-idx3-ubyte", "my-t10k-labels-idx1-ubyte"):
        assert name in message
    assert "\n" not in message
