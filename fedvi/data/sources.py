"""Where data come from: npz files, idx files, tensorflow-datasets, scikit-learn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedvi import checks, names
from fedvi.data import covertype, readers, tfds_reader
from fedvi.data.labels import read_ids, read_labels

__all__ = [
    "KNOWN_CLASSES",
    "Dataset",
    "check_scale",
    "file_name",
    "load",
    "settled",
    "validate",
]

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

# Two splits of one scale are never so far apart: 0..255 is 255 times 0..1, and 40 to
# 90 times what is standardised.
SCALE_RATIO = 20
NEGATIVE_SHARE = 0.1  # of the values, where another set has none
SCALE_EXAMPLES = 1000  # looked at, of each split

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
    class_names: tuple[Any, ...] | None = None  # [classes] the file's own labels


def file_name(data_file: str | Path) -> str:
    """The name of a data set that has none but its file's.

    It is never one of `KNOWN_CLASSES`, whose facts would be taken for the file's.
    """
    stem = Path(data_file).stem
    return f"{stem}_file" if stem in KNOWN_CLASSES else stem


def load(
    name: str | None = None,
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
    5. idx files in `data_dir` (`readers.read_idx`); for `fashion_mnist` without a
       `data_dir` also where Debian's `dataset-fashion-mnist` puts them;
    6. tensorflow-datasets' copy in `data_dir` (default: its own folder). Copies in
       array_record format need no TensorFlow. A set that is not prepared yet is
       downloaded only if TensorFlow (the extra `tf`) is installed.

    Args:
      name: `digits`, `fashion_mnist`, `mnist`, `emnist` (ByClass, upright),
        `cifar10`, `cifar100`, `covertype`, `covertype_standin`, or any other
        tensorflow-datasets name; with `data_file` any name, or None: the file's
        (`file_name`). Known names fix the number of classes, else it is that of the
        different labels.
      data_file: path of an `.npz` file.
      data_dir: folder with idx files, with prepared tensorflow-datasets copies or
        with scikit-learn's data.

    Raises:
      ValueError: nothing found (names the file or set, and the ways to supply it),
        or the data are invalid (see `settled`).
    """
    if data_file is not None:
        name = name or file_name(data_file)
        found = readers.read_npz(name, Path(data_file))
    elif name is None:
        raise ValueError("name=None needs a data_file: name the data set")
    elif name == "digits":
        found = readers.read_digits()
    elif name == "covertype":
        found = covertype.read_covertype(data_dir)
    elif name == "covertype_standin":
        found = covertype.read_covertype_standin()
    else:
        found = _in_folder(name, data_dir)
    return _build(name, found, KNOWN_CLASSES.get(name))


def _in_folder(name: str, data_dir: str | Path | None) -> readers.Found:
    """idx files, else a tensorflow-datasets copy."""
    folder = data_dir
    if folder is None and name in IDX_FOLDERS and Path(IDX_FOLDERS[name]).is_dir():
        folder = IDX_FOLDERS[name]
    if folder is not None and (found := readers.read_idx(name, Path(folder))):
        return found
    try:
        return tfds_reader.read_tfds(name, data_dir)
    except ValueError as error:
        looked, cause = "", error.__cause__ or error
        if data_dir is not None:
            looked = f"; {readers.looked_for(name, Path(data_dir))}"
        # Another name of tensorflow-datasets' may be close to one of these.
        known = () if name in KNOWN_CLASSES else KNOWN_CLASSES
        raise ValueError(f"{error}{looked}{names.near(name, known)}") from cause


def _build(name: str, found: readers.Found, classes: int | None) -> Dataset:
    arrays = found.arrays
    dataset = settled(
        Dataset(
            **{key: arrays[key] for key in readers.KEYS},
            classes=found.classes if classes is None else classes,
            name=name,
            fidelity=found.fidelity,
            train_group=_group(arrays, "train"),
            test_group=_group(arrays, "test"),
        )
    )
    held = len(np.union1d(dataset.train_y, dataset.test_y))
    if held == dataset.classes:
        return dataset
    lacking = f"{dataset.classes - held} of {dataset.classes} classes have no example"
    return dataset._replace(fidelity=f"{dataset.fidelity}; {lacking}")


def _group(arrays: Mapping[str, np.ndarray], split: str) -> np.ndarray | None:
    return arrays.get(f"{split}_group", arrays.get(f"{split}_writer"))


def settled(dataset: Dataset) -> Dataset:
    """A data set of anybody's in the types that everything here takes, checked.

    Inputs of both splits become uint8 where all are pixels, else float32,
    with a channel axis; labels become int32 classes (`labels.read_labels`), natural
    ids int64 or text. What was changed in meaning is added to `fidelity`. A data set
    that is so already stays as it is.

    Args:
      dataset: its arrays may be lists or of any type; `classes` may be None.

    Raises:
      ValueError: labels that cannot be mapped, types that do not go together, or what
        `validate` finds.
    """
    train_x, test_x, input_note = _inputs(dataset.train_x, dataset.test_x)
    labels = read_labels(dataset.train_y, dataset.test_y, dataset.classes)
    notes = [dataset.fidelity, input_note, labels.note]
    changed = dataset._replace(
        train_x=train_x,
        train_y=labels.train,
        test_x=test_x,
        test_y=labels.test,
        classes=labels.classes,
        class_names=labels.names or dataset.class_names,
        fidelity="; ".join(filter(None, notes)),
        **_groups(dataset),
    )
    validate(changed)
    return changed._replace(
        train_y=labels.train.astype(np.int32), test_y=labels.test.astype(np.int32)
    )


def _inputs(train_x: Any, test_x: Any) -> tuple[np.ndarray, np.ndarray, str]:
    """Both splits on ONE scale, and a note: uint8 for pixels, else float32."""
    arrays = {"train_x": np.asarray(train_x), "test_x": np.asarray(test_x)}
    note = ""
    for key, x in arrays.items():
        if x.dtype.kind not in "biuf":
            raise ValueError(f"{key} is {x.dtype}: give numbers")
        if x.ndim == 0:
            raise ValueError(
                f"{key} is a single number: give an array [n, ...], an example a row"
            )
        if x.ndim == 1 and len(x):
            arrays[key], note = x[:, None], "one value an example"
        elif x.ndim == 3:
            arrays[key] = x[..., None]
    train, test = arrays.values()
    if not len(test):  # says nothing about its type
        test = test.astype(train.dtype)
    families = [{"u": "i"}.get(x.dtype.kind, x.dtype.kind) for x in (train, test)]
    if families[0] != families[1]:
        raise ValueError(
            f"train_x is {train.dtype} and test_x {test.dtype}, which may be different "
            "scales: give both in one type, pixels 0..255 as uint8"
        )
    pixels = train.dtype == test.dtype == np.uint8
    if families[0] == "i" and train.ndim == test.ndim == 4:
        low = min(train.min(initial=0), test.min(initial=0))
        high = max(train.max(initial=0), test.max(initial=0))
        pixels = pixels or (low >= 0 and high <= 255)
    dtype = np.uint8 if pixels else np.float32
    # What float32 cannot hold becomes inf, which `validate` reports with its index.
    with np.errstate(over="ignore"):
        train, test = (x.astype(dtype, copy=False) for x in (train, test))
    return train, test, note


def _groups(dataset: Dataset) -> dict[str, np.ndarray | None]:
    """Natural ids of both splits, as text in both if they are in one."""
    given = {key: getattr(dataset, key) for key in ("train_group", "test_group")}
    groups = {k: None if v is None else read_ids(k, v) for k, v in given.items()}
    if len({v.dtype.kind for v in groups.values() if v is not None}) > 1:
        groups = {key: ids.astype(str) for key, ids in groups.items()}
    return groups


def validate(dataset: Dataset) -> None:
    """Checks a data set of arrays, whoever built it.

    Raises:
      ValueError: an empty training split, inputs and labels (or group ids) of
        different lengths, train and test inputs of different shapes, types or scales,
        channels not last, a label outside `0..classes-1`, or an input that is not
        finite; the last two name the split, the first bad index and its value.
    """
    if not len(dataset.train_x):
        raise ValueError(f"train_x of {dataset.name!r} is empty: give training data")
    if dataset.train_x.shape[1:] != dataset.test_x.shape[1:]:
        raise ValueError(
            f"train_x {dataset.train_x.shape} and test_x {dataset.test_x.shape} must "
            "agree in every axis but the first"
        )
    shape = dataset.train_x.shape
    if 0 in shape:
        raise ValueError(
            f"train_x has shape {shape}: give at least one value an example"
        )
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
    if dataset.train_x.dtype != dataset.test_x.dtype:
        raise ValueError(
            f"train_x is {dataset.train_x.dtype} and test_x {dataset.test_x.dtype}: "
            "give both in one type"
        )
    check_scale("train_x", dataset.train_x, "test_x", dataset.test_x)


def check_scale(first: str, x: np.ndarray, second: str, other: np.ndarray) -> None:
    """Raises `ValueError` if two sets of inputs cannot be on one scale.

    Args:
      first, second: what they are called.
      x, other: inputs `[n, ...]`; nothing is said about empty ones or all zeros.
    """
    below = [float((_some(inputs) < 0).mean()) for inputs in (x, other) if len(inputs)]
    if len(below) == 2 and min(below) == 0 and max(below) > NEGATIVE_SHARE:
        raise ValueError(
            f"{first} and {second} are on different scales: {below[0]:.0%} of the "
            f"values are negative in the one and {below[1]:.0%} in the other; scale "
            "both alike"
        )
    sizes = [_typical(x), _typical(other)]
    if min(sizes) > 0 and max(sizes) > SCALE_RATIO * min(sizes):
        raise ValueError(
            f"{first} and {second} are on different scales: the mean of |x| is "
            f"{sizes[0]:.3g} in the one and {sizes[1]:.3g} in the other; scale both "
            "alike"
        )


def _typical(x: np.ndarray) -> float:
    """The mean of |x| over some of the examples; 0 if there are none."""
    some = _some(x)
    return float(np.abs(some.astype(np.float64)).mean()) if some.size else 0.0


def _some(x: np.ndarray) -> np.ndarray:
    return x[:: max(1, len(x) // SCALE_EXAMPLES)]


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
