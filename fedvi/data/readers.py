"""Readers of npz files, idx files and scikit-learn's digits, for `fedvi.data.load`."""

import gzip
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = [
    "KEYS",
    "THREE_WAYS",
    "Found",
    "looked_for",
    "read_digits",
    "read_idx",
    "read_npz",
    "upright",
]

THREE_WAYS = (
    "supply it with --data_file=FILE.npz (arrays train_x, train_y, test_x, test_y), "
    "with --data_dir=FOLDER of idx files, or as a prepared tensorflow-datasets copy "
    "(pip install 'fedvi[tf]' prepares one)"
)
KEYS = ("train_x", "train_y", "test_x", "test_y")
KERAS_KEYS = ("x_train", "y_train", "x_test", "y_test")
GROUP_KEYS = ("train_group", "test_group", "train_writer", "test_writer")


class Found(NamedTuple):
    """What a reader found."""

    arrays: Mapping[str, np.ndarray]  # `KEYS`, and perhaps some of `GROUP_KEYS`
    classes: int | None  # None: not known to the source
    fidelity: str


def read_npz(name: str, path: Path) -> Found:
    """Reads an `.npz` file with fedvi's or keras's keys, never unpickling.

    Raises:
      ValueError: the file is missing, unreadable, or lacks an array.
    """
    if not path.is_file():
        raise ValueError(
            f"data_file {str(path)!r} for {name!r} is missing: {THREE_WAYS}"
        )
    described = f"data_file {str(path)!r}"
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{described} is not an npz file: save it with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            held = set(archive.files)
            keys = KERAS_KEYS if held.issuperset(KERAS_KEYS) else KEYS
            lacking = [key for key in keys if key not in held]
            arrays = {new: archive[old] for new, old in zip(KEYS, keys) if old in held}
            arrays |= {key: archive[key] for key in GROUP_KEYS if key in held}
    # numpy raises ValueError for pickled objects, which are never loaded.
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{described} is damaged or holds pickled objects: save plain arrays with "
            "numpy.savez (text: array.astype(str))"
        ) from error
    if lacking:
        raise ValueError(
            f"{described} lacks {', '.join(lacking)}: it needs the arrays "
            f"{', '.join(KEYS)} (or {', '.join(KERAS_KEYS)})"
        )
    return Found(arrays, None, f"user's npz file {path.name}")


def read_digits() -> Found:
    """scikit-learn's digits as 8x8x1 uint8, split 1,437 / 360 within each class.

    Raises:
      ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ValueError(
            "the data set 'digits' needs scikit-learn: pip install 'fedvi[digits]'"
        ) from error
    digits = load_digits()
    x = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    split = train_test_split(
        x, digits.target, test_size=360, stratify=digits.target, random_state=0
    )
    train_x, test_x, train_y, test_y = split
    fidelity = "scikit-learn digits, 1,797 of UCI's images, split by fedvi"
    return Found(dict(zip(KEYS, (train_x, train_y, test_x, test_y))), 10, fidelity)


def read_idx(name: str, folder: Path) -> Found | None:
    """Reads the four idx files of `folder`, plain or gz; None if it holds none.

    They may lie where torchvision puts them (`MNIST/raw`), be written in capitals, or
    with a dot (`train-images.idx3-ubyte`). EMNIST's files are its ByClass ones, which
    store images transposed: they are turned upright.

    Raises:
      ValueError: the folder is missing, some but not all of the four files are there,
        or one is broken.
    """
    if not folder.is_dir():
        raise ValueError(f"data_dir {str(folder)!r} is no folder: {THREE_WAYS}")
    held = [_idx_files(name, place) for place in _places(name, folder)]
    paths = max(held, key=len)
    if not paths:
        return None
    if len(paths) < len(KEYS):
        raise ValueError(
            f"{str(folder)!r} holds idx files but lacks "
            f"{', '.join(stem for stem in _stems(name) if stem not in paths)}; "
            f"{looked_for(name, folder)}"
        )
    arrays = {k: read_idx_file(paths[stem]) for k, stem in zip(KEYS, _stems(name))}
    if name == "emnist":
        arrays = upright(arrays)
    return Found(arrays, None, f"idx files of {folder}")


def looked_for(name: str, folder: Path) -> str:
    """Which idx files `read_idx` looks for, and what the folder holds instead."""
    found = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
    return (
        f"looked for {', '.join(_stems(name))}, with or without .gz, and found "
        f"{shown or 'nothing'}"
    )


def _stems(name: str) -> list[str]:
    """The official names, in the order of `KEYS`."""
    prefixes = ("train", "t10k")
    if name == "emnist":
        prefixes = ("emnist-byclass-train", "emnist-byclass-test")
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return [f"{prefix}-{kind}" for prefix in prefixes for kind in kinds]


def _places(name: str, folder: Path) -> list[Path]:
    """The folder, and those in it that are named after the data set, raw or gzip."""

    def named(place: Path, names: tuple[str, ...]) -> list[Path]:
        found = sorted(path for path in place.iterdir() if path.is_dir())
        return [path for path in found if _squeezed(path.name) in names]

    tops = [folder, *named(folder, (_squeezed(name),))]
    return [place for top in tops for place in (top, *named(top, ("raw", "gzip")))]


def _squeezed(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _idx_files(name: str, folder: Path) -> dict[str, Path]:
    """Those of the four files that a folder holds, by their official names."""
    official = {
        path.name.lower().removesuffix(".gz").replace(".", "-"): path
        for path in sorted(folder.iterdir(), reverse=True)  # plain before gz
        if path.is_file()
    }
    return {stem: official[stem] for stem in _stems(name) if stem in official}


def upright(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Transposes rows and columns of all images: EMNIST is published transposed."""
    turned = {k: arrays[k].swapaxes(1, 2) for k in ("train_x", "test_x")}
    return {**arrays, **turned}


def read_idx_file(path: Path) -> np.ndarray:
    """One idx file of unsigned bytes (the MNIST format), plain or gzipped, as uint8.

    Raises:
      ValueError: not such a file, or truncated.
    """
    try:
        data = path.read_bytes()
        # Whatever its name says.
        if path.suffix.lower() == ".gz" or data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"idx file {str(path)!r} is unreadable: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError(f"{str(path)!r} is not an idx file of unsigned bytes")
    axes = data[3]
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", axes, offset=4))
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * axes)
    if body.size != np.prod(shape, dtype=np.int64):
        raise ValueError(
            f"idx file {str(path)!r} holds {body.size} bytes, not the {shape} it "
            "announces: fetch it again"
        )
    return body.reshape(shape)
