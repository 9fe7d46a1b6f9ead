"""Clients' data sets: padded, stacked, and summarised."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from fedvi.data.partitions import Partition
from fedvi.data.sources import Dataset, settled

__all__ = [
    "ClientData",
    "FederatedData",
    "calibration_split",
    "class_histogram",
    "empty_clients",
    "federate",
    "hold_out",
    "settled_clients",
    "some_examples",
]

HISTOGRAM_ROWS = 10  # clients shown one by one
HISTOGRAM_COLUMNS = 12  # more classes than this are shown in ten groups


class ClientData(NamedTuple):
    """ONE client's padded data set; stacked, every leaf gets a leading [clients]."""

    x: Array  # [capacity, ...] uint8 images or float features, raw
    y: Array  # [capacity] int32; padded slots hold 0
    size: Array  # [] int32: the first `size` slots are real


@dataclass(frozen=True, eq=False)
class FederatedData:
    """All clients' data as host numpy arrays, stacked along a leading client axis."""

    train: ClientData  # every leaf with a leading [clients]
    test: ClientData  # the same clients, with another capacity
    classes: int
    name: str
    fidelity: str  # one line on what the data really are
    clusters: np.ndarray | None = None  # [clients] int32, the true ones if known
    ids: np.ndarray | None = None  # [clients] natural ids, if they have any
    class_names: tuple[Any, ...] | None = None  # [classes] the file's own labels


def federate(dataset: Dataset, partition: Partition) -> FederatedData:
    """Gives each client its part, padded to the largest client's size.

    Pixels stay uint8. Padded slots are all zero and lie after the real ones. Examples
    that no client gets are counted in `fidelity`.

    Args:
      dataset: the data set that was partitioned (see `sources.settled`).
      partition: indices per client; with `pooled` into train followed by test.

    Raises:
      ValueError: an invalid data set, no clients, different numbers of train and test
        parts, an index outside the split, or one index in two parts.
    """
    dataset = settled(dataset)
    if not partition.train or len(partition.train) != len(partition.test):
        raise ValueError(
            f"partition has {len(partition.train)} train and {len(partition.test)} "
            "test parts: give one of each per client, for at least one client"
        )
    train_x, train_y = dataset.train_x, dataset.train_y
    test_x, test_y = dataset.test_x, dataset.test_y
    notes = [dataset.fidelity] if dataset.fidelity else []
    if partition.pooled:
        train_x = test_x = np.concatenate([train_x, test_x])
        train_y = test_y = np.concatenate([train_y, test_y])
        _check_parts("pooled", partition.train + partition.test, len(train_y))
        notes.append("official train and test splits pooled")
    else:
        _check_parts("train", partition.train, len(train_y))
        _check_parts("test", partition.test, len(test_y))
    notes += _left_out(dataset, partition)
    return FederatedData(
        train=_stack(train_x, train_y, partition.train),
        test=_stack(test_x, test_y, partition.test),
        classes=dataset.classes,
        name=dataset.name,
        fidelity="; ".join(notes),
        ids=partition.ids,
        class_names=dataset.class_names,
    )


def _left_out(dataset: Dataset, partition: Partition) -> list[str]:
    """How many examples no client gets, whatever the partition."""
    train, test = (sum(map(len, parts)) for parts in partition[:2])
    if partition.pooled:
        rest = len(dataset.train_y) + len(dataset.test_y) - train - test
        left = {"pooled": rest}
    else:
        left = {
            "training": len(dataset.train_y) - train,
            "test": len(dataset.test_y) - test,
        }
    return [f"{n:,} {split} examples fit no client" for split, n in left.items() if n]


def _check_parts(split: str, parts: Sequence[np.ndarray], examples: int) -> None:
    indices = np.concatenate(parts)
    if not indices.size:
        return
    if indices.min() < 0 or indices.max() >= examples:
        raise ValueError(
            f"partition has {split} indices {indices.min()}..{indices.max()}: the "
            f"split has indices 0..{examples - 1}"
        )
    uses = np.bincount(indices)
    if uses.max() > 1:
        raise ValueError(
            f"partition uses {split} index {int(np.argmax(uses))} {uses.max()} times: "
            "each index may be used once"
        )


def _stack(x: np.ndarray, y: np.ndarray, parts: Sequence[np.ndarray]) -> ClientData:
    size = np.array([len(part) for part in parts], np.int32)
    # A capacity of 0 would make shapes that no model can be applied to.
    capacity = max(1, int(size.max()))
    stacked_x = np.zeros((len(parts), capacity, *x.shape[1:]), x.dtype)
    stacked_y = np.zeros((len(parts), capacity), np.int32)
    for client, part in enumerate(parts):
        stacked_x[client, : len(part)] = x[part]
        stacked_y[client, : len(part)] = y[part]
    return ClientData(stacked_x, stacked_y, size)


def hold_out(federated: FederatedData, fraction: float, seed: int) -> FederatedData:
    """Replaces the test parts by a random fraction of every client's train part.

    For choosing hyper-parameters without touching test data. A client with two or
    more training examples keeps at least one in each part; one with a single example
    keeps it in its training part.

    Args:
      federated: the data; its test parts are not used.
      fraction: of the training examples to hold out, between 0 and 1.
      seed: a client's choice depends on the seed and its id only.

    Raises:
      ValueError: `fraction` is not strictly between 0 and 1.
    """
    train, test = _split(federated.train, fraction, seed)
    note = f"test part = {fraction:g} of the training part"
    return replace(
        federated, train=train, test=test, fidelity=f"{federated.fidelity}; {note}"
    )


def calibration_split(
    federated: FederatedData, fraction: float, seed: int
) -> tuple[FederatedData, ClientData]:
    """Splits a random fraction off every client's train part, as `hold_out` does.

    For what is fitted after training and must not have been trained on: temperatures,
    conformal thresholds. A client with a single training example keeps it, and has
    nothing to calibrate with.

    Args:
      federated: the data.
      fraction: of the training examples to split off, between 0 and 1.
      seed: a client's choice depends on the seed and its id only, and is another one
        than that of `hold_out`.

    Returns:
      (the data without them, what was split off, leaves `[clients, ...]`).

    Raises:
      ValueError: `fraction` is not strictly between 0 and 1, or no client has two
        training examples.
    """
    # A longer seed is a stream of its own, beside that of `hold_out`.
    train, calibration = _split(federated.train, fraction, seed, 1)
    if not calibration.size.any():
        raise ValueError(
            f"fraction={fraction}: no client has two training examples, one to train "
            "on and one to calibrate with: give the clients more data"
        )
    note = f"{calibration.size.sum():,} training examples kept for calibration"
    changed = replace(federated, train=train, fidelity=f"{federated.fidelity}; {note}")
    return changed, calibration


def _split(
    data: ClientData, fraction: float, seed: int, *stream: int
) -> tuple[ClientData, ClientData]:
    """(what is kept, a random `fraction` of it) of every client; two or more examples
    are at least one in each."""
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction} must lie strictly between 0 and 1")
    x, y, size = data
    clients, capacity = y.shape
    kept, held = [], []
    for client, n in enumerate(size.tolist()):
        count = min(max(1, round(fraction * n)), n - 1) if n > 1 else 0
        order = np.random.default_rng([seed, client, *stream]).permutation(n)
        slots = client * capacity + order
        kept.append(np.sort(slots[count:]))
        held.append(np.sort(slots[:count]))
    flat_x = x.reshape(clients * capacity, *x.shape[2:])
    flat_y = y.reshape(clients * capacity)
    return _stack(flat_x, flat_y, kept), _stack(flat_x, flat_y, held)


def settled_clients(data: ClientData) -> ClientData:
    """Stacked clients of anybody's in the types that JAX computes in.

    Lists become arrays, big-endian numbers native ones, float64 float32, labels and
    sizes int32, other 64-bit whole numbers too. A label that int32 does not hold stays,
    for a check to name it; what is no host array stays as well.
    """
    if not isinstance(data, ClientData):
        return data
    x, y, size = (
        np.asarray(leaf) if isinstance(leaf, (list, tuple)) else leaf for leaf in data
    )
    return ClientData(_settled(x), _settled(y, np.int32), _settled(size, np.int32))


def _settled(leaf: Any, whole: type | None = None) -> Any:
    """`whole`: the type of whole numbers; None: only those of 64 bits change."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    dtype = leaf.dtype.newbyteorder("=")
    if dtype == np.float64:
        dtype = np.dtype(np.float32)
    elif dtype.kind in "iu" and (whole or dtype.itemsize == 8):
        bounds = np.iinfo(np.int32)
        if leaf.min(initial=0) >= bounds.min and leaf.max(initial=0) <= bounds.max:
            dtype = np.dtype(np.int32)
    return leaf.astype(dtype, copy=False)


def some_examples(data: ClientData, most: int = 10) -> np.ndarray:
    """The first real inputs of every client, at most `most` each: `[n, ...]`."""
    x, size = np.asarray(data.x)[:, :most], np.asarray(data.size)
    return x[np.arange(x.shape[1])[None] < size[:, None]]


def empty_clients(federated: FederatedData) -> list[int]:
    """Ids of the clients that have no training example."""
    return np.flatnonzero(federated.train.size == 0).tolist()


def class_histogram(federated: FederatedData) -> str:
    """Who holds what, in at most 17 lines: sizes, classes per client, counts."""
    counts = _class_counts(federated)
    held = (counts > 0).sum(axis=1)
    empty = empty_clients(federated)
    lines = [
        f"{federated.name}: {len(counts)} clients, {federated.classes} classes "
        f"({federated.fidelity})",
        _spread("train examples per client", federated.train.size, total=True),
        _spread("test examples per client", federated.test.size, total=True),
        _spread("classes per client", held, total=False),
    ]
    if empty:
        shown = ", ".join(map(str, empty[:HISTOGRAM_ROWS]))
        more = ", ..." if len(empty) > HISTOGRAM_ROWS else ""
        lines.append(f"clients without training examples: {len(empty)} ({shown}{more})")
    return "\n".join(lines + _table(counts))


def _class_counts(federated: FederatedData) -> np.ndarray:
    """Training examples of each class: `[clients, classes]`."""
    _, y, size = federated.train
    return np.stack(
        [np.bincount(row[:n], minlength=federated.classes) for row, n in zip(y, size)]
    )


def _spread(title: str, values: np.ndarray, *, total: bool) -> str:
    line = (
        f"{title + ':':27}min {values.min():,}, median {np.median(values):,g}, "
        f"max {values.max():,}"
    )
    return f"{line}, total {values.sum(dtype=np.int64):,}" if total else line


def _table(counts: np.ndarray) -> list[str]:
    clients, classes = counts.shape
    width = 1 if classes <= HISTOGRAM_COLUMNS else -(-classes // 10)
    starts = np.arange(0, classes, width)
    grouped = np.add.reduceat(counts, starts, axis=1)
    last = np.minimum(starts + width, classes) - 1
    heads = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, last)]
    lines = ["class " + "".join(f"{head:>7}" for head in heads)]
    for client, row in enumerate(grouped[:HISTOGRAM_ROWS]):
        lines.append(f"{client:>5} " + "".join(f"{count:>7}" for count in row))
    if clients > HISTOGRAM_ROWS:
        lines.append(f"  ... {clients - HISTOGRAM_ROWS} more clients")
    return lines
