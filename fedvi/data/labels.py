"""Labels and natural ids of the types that files hold: as numbers from 0."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Labels", "natural_order", "places", "read_ids", "read_labels"]

_SHOWN = 6  # names of classes in a note
_WHOLE = 2**53  # above it a float64 skips whole numbers


class Labels(NamedTuple):
    """Labels of both splits as classes 0..classes-1.

    Attributes:
      train: `[n]` int64. Not yet int32, where a huge label would wrap around.
      test: `[m]` int64.
      classes: their number; those of both splits together, unless it was known.
      names: the file's own labels in the order of the classes; None if they are 0, 1,
        ... themselves.
      note: how they were mapped; empty: not at all.
    """

    train: np.ndarray
    test: np.ndarray
    classes: int
    names: tuple[Any, ...] | None = None
    note: str = ""


def read_labels(train_y: Any, test_y: Any, classes: int | None = None) -> Labels:
    """Reads whole numbers (of any type, 1-based too), text, bytes or one-hot rows.

    Labels that are not 0..classes-1 already become so in natural order: 1..C, -1 and 1,
    whole numbers with gaps, and text. Where the number of classes is known, numbers
    below it stay as they are, and 1..C, which then need all be meant, lose 1.

    Args:
      train_y, test_y: `[n]` and `[m]`, or `[n, 1]`, or one-hot `[n, classes]`.
      classes: if known; None: as many as there are different labels.

    Raises:
      ValueError: names the split, and the first bad index if it is one label's fault.
        A label that is no class of a known number is left to `sources.validate`.
    """
    (train, wide), (test, test_wide) = (
        _plain("train_y", train_y),
        _plain("test_y", test_y),
    )
    if not len(test):  # says nothing about its form
        test, test_wide = test.astype(train.dtype), wide
    if _is_text(train) != _is_text(test) or wide != test_wide:
        raise ValueError(
            f"train_y is {_described(train_y)} and test_y {_described(test_y)}: give "
            "the labels of both splits in one form"
        )
    note = f"labels given one-hot, {wide} columns" if wide else ""
    if _is_text(train):
        names = natural_order(np.concatenate([train, test]))
        if classes not in (None, len(names)):
            raise ValueError(
                f"train_y and test_y hold {len(names)} different texts, which cannot "
                f"be told to be which of {classes} classes: give the numbers "
                f"0..{classes - 1}"
            )
        return _mapped(train, test, names)
    if wide and classes is None:
        classes = wide
    values = np.unique(np.concatenate([train, test]))
    if not len(values):
        return Labels(train, test, classes or 0, note=note)
    if classes is not None:
        if values[0] == 1 and values[-1] == classes:
            return _mapped(train, test, np.arange(1, classes + 1))
        return Labels(train, test, classes, note=note)
    if values[0] < 0 and values.tolist() != [-1, 1]:
        key, y = ("train_y", train) if train.min(initial=0) < 0 else ("test_y", test)
        i = int(np.argmax(y < 0))
        raise ValueError(
            f"{key}[{i}] = {y[i]} is negative: leave examples without a label out, and "
            "number the classes from 0"
        )
    if values[0] == 0 and values[-1] == len(values) - 1:
        return Labels(train, test, len(values))
    return _mapped(train, test, values)


def read_ids(key: str, ids: Any) -> np.ndarray:
    """Natural ids `[n]` as int64 or text.

    Raises:
      ValueError: neither whole numbers nor text, or not one for each example.
    """
    array = _column(key, ids)
    if array.ndim == 1 and array.dtype.kind in "US":
        return _text(array)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise ValueError(
            f"{key} is {_described(array)}: give one id for each example, a whole "
            "number or text"
        )
    return _integers(key, array, "id")


def natural_order(values: np.ndarray) -> np.ndarray:
    """The different values, sorted; in text numbers count as numbers: a2 before a10."""
    values = np.unique(values)
    if not _is_text(values):
        return values
    return np.array(sorted(values.tolist(), key=_natural_key), values.dtype)


def places(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The place of each value among the different `ids`; -1: it is not there."""
    order = np.argsort(ids)
    found = np.minimum(np.searchsorted(ids, values, sorter=order), len(ids) - 1)
    return np.where(ids[order[found]] == values, order[found], -1)


def _natural_key(text: str) -> list:
    # Text and digits take turns, so that like is compared with like.
    return [int(t) if i % 2 else t for i, t in enumerate(re.split(r"(\d+)", text))]


def _mapped(train: np.ndarray, test: np.ndarray, names: np.ndarray) -> Labels:
    listed = [repr(name) for name in names.tolist()]
    if len(listed) > _SHOWN:
        listed = [*listed[: _SHOWN - 1], "...", listed[-1]]
    note = f"labels {', '.join(listed)} are classes 0..{len(names) - 1}"
    return Labels(
        places(train, names),
        places(test, names),
        len(names),
        tuple(names.tolist()),
        note,
    )


def _plain(key: str, y: Any) -> tuple[np.ndarray, int]:
    """Labels `[n]` as int64 or text, and the columns of one-hot ones, else 0."""
    y, wide = _column(key, y), 0
    if y.ndim == 2 and y.dtype.kind in "biuf" and y.shape[1]:
        if not (((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all()):
            raise ValueError(
                f"{key} has shape {y.shape}, but its rows are not one-hot (a single 1 "
                "among zeros): give one label per example, shape [n]"
            )
        return y.argmax(axis=1), y.shape[1]
    if y.ndim != 1:
        raise ValueError(
            f"{key} has shape {y.shape}: give one label per example, shape [n]"
        )
    if y.dtype.kind in "US":
        y = _text(y)
        # Digits that were saved as text are numbers.
        if len(y) and all(re.fullmatch(r"[+-]?\d{1,15}", text) for text in y.tolist()):
            y = y.astype(np.int64)
        return y, wide
    if y.dtype.kind not in "biuf":
        raise ValueError(
            f"{key} is {y.dtype}: give labels as whole numbers, text or one-hot rows"
        )
    return _integers(key, y, "integer label"), wide


def _column(key: str, values: Any) -> np.ndarray:
    """As an array, of text or numbers where Python objects are so."""
    array = np.asarray(values)
    if array.dtype.kind == "O":
        array = np.asarray(array.tolist())
    if array.ndim == 0:
        raise ValueError(f"{key} is a single value: give one per example, shape [n]")
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _integers(key: str, y: np.ndarray, what: str) -> np.ndarray:
    if y.dtype.kind == "f":
        wide = y.astype(np.float64)  # float16 does not hold the bound
        whole = np.isfinite(wide) & (np.floor(wide) == wide) & (np.abs(wide) < _WHOLE)
        if not whole.all():
            i = int(np.argmin(whole))
            raise ValueError(f"{key}[{i}] = {y[i]} is not an {what}")
    return y.astype(np.int64)


def _text(y: np.ndarray) -> np.ndarray:
    if y.dtype.kind == "S":
        y = np.char.decode(y, "utf-8", "backslashreplace")
    return y.astype(y.dtype.newbyteorder("="))


def _is_text(y: np.ndarray) -> bool:
    return y.dtype.kind == "U"


def _described(y: Any) -> str:
    y = np.asarray(y)
    shape: Sequence[int] = y.shape
    return f"{y.dtype}{list(shape)}"
