"""Small data sets in memory and on disk."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

SPLITS = (("train", "train"), ("test", "t10k"))
EMNIST_SPLITS = (("train", "emnist-byclass-train"), ("test", "emnist-byclass-test"))


def make_arrays(n=12, m=6, classes=3, shape=(4, 4, 3)) -> dict[str, np.ndarray]:
    """Random pixels; labels 0, 1, 2, 0, 1, ..."""
    rng = np.random.default_rng(0)
    return {
        "train_x": rng.integers(0, 256, (n, *shape), dtype=np.uint8),
        "train_y": np.arange(n) % classes,
        "test_x": rng.integers(0, 256, (m, *shape), dtype=np.uint8),
        "test_y": np.arange(m) % classes,
    }


def idx_bytes(array: np.ndarray) -> bytes:
    """The MNIST file format, written from its specification."""
    header = bytes([0, 0, 8, array.ndim])
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + sizes + array.astype(np.uint8).tobytes()


def write_idx_files(folder, arrays, *, compress=False, splits=SPLITS) -> None:
    for split, prefix in splits:
        for key, kind in (("x", "images-idx3-ubyte"), ("y", "labels-idx1-ubyte")):
            data = idx_bytes(arrays[f"{split}_{key}"])
            path = folder / f"{prefix}-{kind}{'.gz' if compress else ''}"
            path.write_bytes(gzip.compress(data) if compress else data)


@pytest.fixture
def arrays() -> Callable[..., dict[str, np.ndarray]]:
    return make_arrays


@pytest.fixture
def write_idx() -> Callable[..., None]:
    return write_idx_files


@pytest.fixture
def save_npz(tmp_path) -> Callable[..., Path]:
    """Saves the default arrays, some of them replaced."""

    def save(**replaced) -> Path:
        path = tmp_path / "set.npz"
        np.savez(path, **{**make_arrays(), **replaced})
        return path

    return save
