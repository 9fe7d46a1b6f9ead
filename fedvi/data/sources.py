"""Where data come from: npz files, idx files, tensorflow-datasets, scikit-learn."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedvi import checks
from fedvi.data import covertype, readers, tfds_reader

__all__ = ["KNOWN_CLASSES", "Dataset", "load", "validate"]

KNOWN_CLASSES = {
    "digits": 10,
    "mnist": 10,
    "fashion_mnist": 10,
    "emnist": 62,
    "cifar10": 10,
    "cifar100": 100,
    "covertype": covertype.CLASSES,
    "covertype_standin": covertype.CLASSES,
}

# Where Debian's package dataset-fashion-mnist puts the official idx files.
IDX_FOLDERS = {"fashion_mnist": "/usr/share/datasets/fashion-mnist"}


class Dataset(NamedTuple):
    """A data set with its official split, as host numpy arrays."""

    train_x: np.ndarray  # [n, h, w, c] uint8 (or float32), or [n, d] features
    train_y: np.ndarray  # [n] int32, in 0..classes-1
    test_x: np.ndarray  # [m, ...], as train_x
    test_y: np.ndarray  # [m] int32
    classes: int
    name: str
    fidelity: str  # one line on what the data really are
    train_group: np.ndarray | None = None  # [n] natural ids (writers), if known
    test_group: np.ndarray | None = None  # [m]


def load(
    name: str,
    *,
    data_file: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Loads a data set; the first source that has it wins.

    1. `data_file`, an `.npz` with `train_x, train_y, test_x, test_y` (or keras's
       `x_train, ...`): channels last, a missing channel axis is added; `train_group`
       and `test_group` (or `train_writer`, `test_writer`) are natural ids;
    2. `digits`: scikit-learn's 1,797 images of 8x8 pixels, scaled to 0..255, in a
       fixed stratified split of 1,437 / 360;
    3. `covertype`: scikit-learn's copy in `data_dir` (default: its own folder), in a
       fixed random split of 80 / 20; nothing is downloaded;
    4. `covertype_standin`: a synthetic Gaussian mixture of its shape, 10,000 / 2,500;
    5. idx files (plain or gz) in `data_dir`; for `fashion_mnist` without a
       `data_dir` also where Debian's `dataset-fashion-mnist` puts them;
    6. tensorflow-datasets' copy in `data_dir` (default: its own folder). Copies in
       array_record format need no TensorFlow. A set that is not prepared yet is
       downloaded only if TensorFlow (the extra `tf`) is installed.

    Args:
      name: `digits`, `fashion_mnist`, `mnist`, `emnist` (ByClass, upright),
        `cifar10`, `cifar100`, `covertype`, `covertype_standin`, or any other
        tensorflow-datasets name; with `data_file` any name. Known names fix the number
        of classes, else it is the largest label + 1.
      data_file: path of an `.npz` file.
      data_dir: folder with idx files, with prepared tensorflow-datasets copies or
        with scikit-learn's data.

    Raises:
      ValueError: nothing found (names the file or set, and the ways to supply it),
        or the data are invalid (see `validate`).
    """
    if data_file is not None:
        found = readers.read_npz(name, Path(data_file))
    elif name == "digits":
        found = readers.read_digits()
    elif name == "covertype":
        found = covertype.read_covertype(data_dir)
    elif name == "covertype_standin":
        found = covertype.read_covertype_standin()
    else:
        folder = data_dir if data_dir is not None else IDX_FOLDERS.get(name)
        found = readers.read_idx(name, Path(folder)) if folder is not None else None
        if found is None:
            found = tfds_reader.read_tfds(name, data_dir)
    return _build(name, found)


def _build(name: str, found: readers.Found) -> Dataset:
    arrays = found.arrays
    train_y = _labels("train_y", arrays["train_y"])
    test_y = _labels("test_y", arrays["test_y"])
    classes = KNOWN_CLASSES.get(name, found.classes)
    if classes is None:
        classes = int(max(train_y.max(initial=0), test_y.max(initial=0))) + 1
    dataset = Dataset(
        train_x=_inputs(arrays["train_x"]),
        train_y=train_y,
        test_x=_inputs(arrays["test_x"]),
        test_y=test_y,
        classes=classes,
        name=name,
        fidelity=found.fidelity,
        train_group=_group(arrays, "train"),
        test_group=_group(arrays, "test"),
    )
    validate(dataset)
    return dataset._replace(
        train_y=train_y.astype(np.int32), test_y=test_y.astype(np.int32)
    )


def _inputs(x: np.ndarray) -> np.ndarray:
    """uint8 where the values are pixels, float32 otherwise; adds a channel axis."""
    if x.ndim == 3:
        x = x[..., None]
    if x.dtype == np.uint8:
        return x
    is_image = x.ndim == 4 and np.issubdtype(x.dtype, np.integer)
    if is_image and x.size and x.min() >= 0 and x.max() <= 255:
        return x.astype(np.uint8)
    # What float32 cannot hold becomes inf, which `validate` reports with its index.
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def _labels(key: str, y: np.ndarray) -> np.ndarray:
    """Labels as int64 `[n]`: not yet int32, where a huge label would wrap around."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise ValueError(
            f"{key} has shape {y.shape}: give one integer label per example, shape [n]"
        )
    if not np.issubdtype(y.dtype, np.integer):
        whole = np.isfinite(y) & (np.floor(y) == y)
        if not whole.all():
            i = int(np.argmin(whole))
            raise ValueError(f"{key}[{i}] = {y[i]} is not an integer label")
    return y.astype(np.int64)


def _group(arrays: Mapping[str, np.ndarray], split: str) -> np.ndarray | None:
    return arrays.get(f"{split}_group", arrays.get(f"{split}_writer"))


def validate(dataset: Dataset) -> None:
    """Checks a data set, whoever built it.

    Raises:
      ValueError: an empty training split, inputs and labels (or group ids) of
        different lengths, train and test inputs of different shapes, channels not
        last, a label outside `0..classes-1`, or an input that is not finite; the
        last two name the split, the first bad index and its value.
    """
    if not len(dataset.train_x):
        raise ValueError(f"train_x of {dataset.name!r} is empty: give training data")
    if dataset.train_x.shape[1:] != dataset.test_x.shape[1:]:
        raise ValueError(
            f"train_x {dataset.train_x.shape} and test_x {dataset.test_x.shape} must "
            "agree in every axis but the first"
        )
    shape = dataset.train_x.shape
    if len(shape) == 4 and shape[1] in (1, 3) and shape[3] > 4:
        raise ValueError(
            f"train_x has shape {shape}, which looks channels-first: images are "
            "[n, height, width, channels]"
        )
    for split in ("train", "test"):
        x, y = getattr(dataset, f"{split}_x"), getattr(dataset, f"{split}_y")
        group = getattr(dataset, f"{split}_group")
        if len(x) != len(y):
            raise ValueError(
                f"{split}_x has {len(x)} examples but {split}_y has {len(y)} labels"
            )
        if group is not None and len(group) != len(x):
            raise ValueError(
                f"{split}_x has {len(x)} examples but {split}_group {len(group)} ids"
            )
        _check_labels(f"{split}_y", y, dataset)
        _check_finite(f"{split}_x", x)


def _check_labels(key: str, y: np.ndarray, dataset: Dataset) -> None:
    checks.labels(key, y, dataset.classes, repr(dataset.name))


def _check_finite(key: str, x: np.ndarray) -> None:
    if not np.issubdtype(x.dtype, np.floating):
        return
    bad = ~np.isfinite(x)
    if bad.any():
        index = tuple(int(i) for i in np.unravel_index(np.argmax(bad), x.shape))
        where = ", ".join(str(i) for i in index)
        raise ValueError(
            f"{key}[{where}] = {x[index]} is not finite: remove or repair that example"
        )
