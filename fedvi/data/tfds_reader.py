"""Reader of tensorflow-datasets copies, without TensorFlow where that is possible."""

import importlib.util
from pathlib import Path

import numpy as np

from fedvi.data.readers import THREE_WAYS, Found, upright

__all__ = ["read_tfds"]


def read_tfds(name: str, data_dir: str | Path | None) -> Found:
    """Reads the official splits `train` and `test` of a tensorflow-datasets set.

    array_record copies need no TensorFlow (encoded images need Pillow). Preparing a
    set and reading tfrecord copies need it; nothing is downloaded without it.

    Args:
      name: as in `tfds.builder`, e.g. `cifar100` or `emnist/balanced`.
      data_dir: folder of prepared copies; None is tensorflow-datasets' own default.

    Raises:
      ValueError: no copy can be found, prepared or read; names the set, and the
        ways to supply it.
    """
    where = "" if data_dir is None else f" in data_dir={str(data_dir)!r}"
    try:
        import tensorflow_datasets as tfds

        builder = tfds.builder(name, data_dir=data_dir)
    # ValueError covers tensorflow-datasets' own "dataset not found", whose message
    # lists hundreds of names.
    except (ImportError, ValueError) as error:
        raise ValueError(f"no data set {name!r}{where}: {THREE_WAYS}") from error
    if not builder.data_path.exists():
        if not _has_tensorflow():
            raise ValueError(f"no prepared data set {name!r}{where}: {THREE_WAYS}")
        builder = _prepare(tfds, name, data_dir)
    keys = builder.info.supervised_keys
    if keys is None or not {"train", "test"} <= set(builder.info.splits):
        raise ValueError(
            f"data set {name!r} is no classification set with splits train and test: "
            "convert it to an npz file for --data_file"
        )
    arrays = {}
    for split in ("train", "test"):
        arrays[f"{split}_x"], arrays[f"{split}_y"] = _read(tfds, builder, split, keys)
    if builder.name == "emnist":
        arrays = upright(arrays)
    classes = getattr(builder.info.features[keys[1]], "num_classes", None)
    return Found(arrays, classes, f"tensorflow-datasets {builder.info.full_name}")


def _has_tensorflow() -> bool:
    return importlib.util.find_spec("tensorflow") is not None


def _prepare(tfds, name, data_dir):
    try:
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        builder.download_and_prepare()
    # Downloads and parsers fail in any way; the report stays reachable as the cause.
    except Exception as error:
        raise ValueError(
            f"tensorflow-datasets could not prepare {name!r} "
            f"({type(error).__name__}): {THREE_WAYS}"
        ) from error
    return builder


def _read(tfds, builder, split, keys) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of one split, in the order of the prepared files."""
    try:
        source = builder.as_data_source(split=split)
        rows = source.__getitems__(range(len(source)))
        return tuple(np.stack([row[key] for row in rows]) for key in keys)
    except ImportError as error:
        raise ValueError(
            f"decoding the images of {str(builder.data_path)!r} needs Pillow: "
            "pip install pillow"
        ) from error
    except NotImplementedError as error:
        if not _has_tensorflow():
            raise ValueError(
                f"{str(builder.data_path)!r} is prepared in a format that only "
                "TensorFlow reads: pip install 'fedvi[tf]', or prepare it with "
                "file_format='array_record'"
            ) from error
    batch = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
    return batch[keys[0]], batch[keys[1]]
