"""Clients' data on disk: more clients than fit in memory, read a few at a time."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedvi import checks
from fedvi.data.client_data import ClientData, settled_clients
from fedvi.folder_lock import FolderLock

__all__ = ["ClientArrays", "ClientFiles", "ClientSource", "write_client_files"]

HEADER = "clients.json"
FORMAT = 1


class ClientSource(Protocol):
    """Where a stream of clients comes from.

    Attributes:
      size: `[clients]` int32 in memory, every client's number of examples.
      shapes: `ClientData` of `np.ndarray`s `[0, capacity, ...]`: shapes and types.
    """

    size: np.ndarray
    shapes: ClientData

    def read(self, ids: np.ndarray) -> ClientData:
        """The data of some clients as numpy arrays, leaves `[len(ids), ...]`."""


class ClientArrays:
    """A `ClientSource` of arrays that are in memory anyway.

    Args:
      data: stacked `ClientData`, leaves `[clients, ...]`.
    """

    def __init__(self, data: ClientData):
        self._data = ClientData(*map(np.asarray, settled_clients(data)))
        self.size = self._data.size
        self.shapes = ClientData(*(leaf[:0] for leaf in self._data))

    def read(self, ids: np.ndarray) -> ClientData:
        """The data of some clients, leaves `[len(ids), ...]`."""
        return ClientData(*(leaf[ids] for leaf in self._data))


def write_client_files(folder: str | Path, blocks: Iterable[ClientData]) -> None:
    """Writes clients to a folder that `ClientFiles` opens.

    Each block becomes one shard of three `.npy` files, so that one block at a time is
    in memory. The header `clients.json`, with the SHA-256 of every file, comes last:
    without it the folder is not taken for complete.

    Args:
      folder: made if absent.
      blocks: stacked `ClientData`, leaves `[clients, capacity, ...]`, all of one
        capacity; the clients are numbered in this order.

    Raises:
      ValueError: the folder holds clients already, another process is writing to it,
        there are no blocks, a block's shapes or types differ from the first one's, a
        size exceeds the capacity, or the disk is full.
    """
    folder = Path(folder).expanduser()
    with FolderLock(folder):
        if (folder / HEADER).exists():
            raise ValueError(
                f"folder={folder} holds clients already: delete it or give another one"
            )
        shards = _write_shards(folder, blocks)
        text = json.dumps({"format": FORMAT, "shards": shards}, indent=1)
        temporary = folder / f"{HEADER}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / HEADER)


def _write_shards(folder: Path, blocks: Iterable[ClientData]) -> list[dict[str, Any]]:
    """Writes the shards; returns what the header says of them."""
    shards, first = [], None
    for number, block in enumerate(blocks):
        arrays = ClientData(*map(np.asarray, block))
        first = first or arrays
        _check_block(number, arrays, first)
        shards.append(
            {
                "clients": len(arrays.size),
                "files": {
                    field: _write(folder / f"{field}_{number:05d}.npy", array)
                    for field, array in arrays._asdict().items()
                },
            }
        )
    if first is None:
        raise ValueError("blocks is empty: give at least one block of clients")
    return shards


class ClientFiles:
    """Clients in a folder of `write_client_files`, mapped into memory.

    Only the sizes are read; examples come from the disk, or the system's cache of it,
    when they are asked for.

    Args:
      folder: with the header `clients.json`.
      verify: compares every file with its SHA-256 first, which reads all of them once;
        without it only their lengths are looked at.

    Attributes:
      size: `[clients]` int32.
      shapes: as of `ClientSource`.
      sha256: of all files together (hex), which names the data.

    Raises:
      ValueError: no header, or a file that is missing, cut short or changed (named).
    """

    def __init__(self, folder: str | Path, verify: bool = True):
        self._folder = Path(folder).expanduser()
        header = self._header()
        self._shards = [
            ClientData(
                *(self._open(shard, field, verify) for field in ("x", "y")), None
            )
            for shard in header["shards"]
        ]
        sizes = [self._open(shard, "size", verify) for shard in header["shards"]]
        self.size = np.concatenate(sizes)
        self._starts = np.cumsum([0] + [len(size) for size in sizes])
        first = self._shards[0]
        self.shapes = ClientData(
            np.empty((0, *first.x.shape[1:]), first.x.dtype),
            np.empty((0, *first.y.shape[1:]), first.y.dtype),
            self.size[:0],
        )
        digests = [
            file["sha256"]
            for shard in header["shards"]
            for file in shard["files"].values()
        ]
        self.sha256 = hashlib.sha256("".join(digests).encode()).hexdigest()

    def read(self, ids: np.ndarray) -> ClientData:
        """The data of some clients, copied: leaves `[len(ids), ...]`."""
        ids = np.asarray(ids)
        x = np.empty((len(ids), *self.shapes.x.shape[1:]), self.shapes.x.dtype)
        y = np.empty((len(ids), *self.shapes.y.shape[1:]), self.shapes.y.dtype)
        shard_of = np.searchsorted(self._starts, ids, side="right") - 1
        by_shard = np.argsort(shard_of, kind="stable")
        shards, firsts = np.unique(shard_of[by_shard], return_index=True)
        for shard, places in zip(shards, np.split(by_shard, firsts[1:])):
            rows = ids[places] - self._starts[shard]
            x[places] = self._shards[shard].x[rows]
            y[places] = self._shards[shard].y[rows]
        return ClientData(x, y, self.size[ids])

    def _header(self) -> dict[str, Any]:
        path = self._folder / HEADER
        if not path.exists():
            raise ValueError(
                f"folder={self._folder} has no {HEADER}: it is no folder of clients, "
                "or writing it was not finished; write it with "
                "fedvi.data.write_client_files"
            )
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
            if header["format"] != FORMAT or not header["shards"]:
                raise ValueError(f"format {header['format']!r}, not {FORMAT}")
            for shard in header["shards"]:
                for field in ClientData._fields:
                    file = shard["files"][field]
                    _ = Path(file["name"]), int(file["bytes"]), file["sha256"][:1]
            return header
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"cannot read {path} ({error}): write the folder again"
            ) from error

    def _open(self, shard: dict[str, Any], field: str, verify: bool) -> np.ndarray:
        """One file of a shard, as large as the header says and, if asked, the same."""
        file = shard["files"][field]
        path = self._folder / file["name"]
        length = path.stat().st_size if path.exists() else None
        problem = None
        if length is None:
            problem = "is missing"
        elif length != file["bytes"]:
            problem = f"has {length:,} bytes, not {file['bytes']:,}"
        elif verify and (found := _sha256(path)) != file["sha256"]:
            problem = f"has the SHA-256 {found[:12]}..., not {file['sha256'][:12]}..."
        if problem:
            raise ValueError(
                f"data shard {path} {problem}: copy it again from where it was made, "
                "or write the folder again"
            )
        # Plain arrays over the mapped pages: a memmap takes twice as long to index.
        return np.asarray(np.load(path, mmap_mode=None if field == "size" else "r"))


def _check_block(number: int, block: ClientData, first: ClientData) -> None:
    for field, array, like in zip(block._fields, block, first):
        if array.shape[1:] != like.shape[1:] or array.dtype != like.dtype:
            raise ValueError(
                f"blocks[{number}].{field} is {array.dtype}{list(array.shape[1:])} a "
                f"client, that of the first block {like.dtype}{list(like.shape[1:])}: "
                "pad all clients to one capacity"
            )
    checks.client_data(f"blocks[{number}]", block)
    if not len(block.size):
        raise ValueError(f"blocks[{number}] holds no client: give at least one")
    if (block.y.dtype, block.size.dtype) != (np.int32, np.int32):
        raise ValueError(
            f"blocks[{number}].y is {block.y.dtype} and size {block.size.dtype}: make "
            "both int32"
        )


def _write(path: Path, array: np.ndarray) -> dict[str, Any]:
    try:
        np.save(path, array, allow_pickle=False)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror or error}): see that there is "
            "room, and write the folder again"
        ) from error
    return {
        "name": path.name,
        "bytes": path.stat().st_size,
        "sha256": _sha256(path),
    }


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
