"""What clients keep between rounds, in memory or on disk: of those met so far only."""

import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedvi.folder_lock import LOCK, FolderLock
from fedvi.keys import is_key

__all__ = ["ClientStore"]

INDEX = "index.npz"
BEFORE = "index_before.npz"
MINIMUM = 64  # slots
# The store of this process that may write to a folder: the last one that opened it.
_WRITERS: "weakref.WeakValueDictionary[Path, ClientStore]" = (
    weakref.WeakValueDictionary()
)


class ClientStore:
    """States of the clients that took part so far, one slot each.

    Slots that the last `commit` refers to are not written to before the next one is
    settled: a process that is killed at any moment leaves the last commit, or between
    `commit` and `settle` both (a machine that loses its power may not). A client thus
    takes up to two slots. In a folder slots are mapped files; in memory stay eight
    bytes a client of the population and four a free slot.

    A folder has one writer: other processes are refused while a store of this one lives
    (`fedvi.folder_lock`), and of several stores of this process only the last one that
    opened it may write, as a cell of a notebook does that is run again.

    Args:
      like: pytree of shapes and types of ONE client's state; typed keys are allowed.
      clients: size of the population.
      folder: where the slots lie; None: in memory. What an earlier store committed
        there is taken over.
      read_only: takes no lock and changes nothing in the folder, which others must not
        write to meanwhile.

    Raises:
      ValueError: another process writes to the folder, its states have another
        structure or population, a file of it is damaged (named), or, when it grows, its
        disk is too small; in `write` and `commit`, a later store has opened it, or this
        one is there to read only.
    """

    def __init__(
        self,
        like: Any,
        clients: int,
        folder: str | Path | None = None,
        read_only: bool = False,
    ):
        self._like = like
        self._leaves = [_plain(leaf) for leaf in jax.tree.leaves(like)]
        self._folder = None if folder is None else Path(folder).expanduser()
        self._lock: FolderLock | None = None
        self._index = np.full(clients, -1, np.int32)
        self._arrays = [np.empty((0, *s.shape), s.dtype) for s in self._leaves]
        self._free = np.empty(0, np.int32)
        self.note: dict[str, Any] = {}
        self._replaced = np.empty(0, np.int32)
        self._read_only = read_only
        if read_only:
            for path in (self._folder / BEFORE, self._folder / INDEX):
                self._take_over(path)
        elif self._folder is not None:
            older = _WRITERS.get(self._folder.resolve())
            if older is not None and (self._folder / LOCK).exists():
                lock = older._lock
            else:  # the folder may have been removed under an older one
                lock = FolderLock(self._folder)
            index, before = self._folder / INDEX, self._folder / BEFORE
            if before.exists() and not index.exists():
                before.replace(index)
            self._take_over(index)
            if older is not None:
                older._lock = None
            self._lock = lock
            _WRITERS[self._folder.resolve()] = self
        self._committed = self._index.copy()

    def _check_writer(self) -> None:
        if self._read_only:
            raise ValueError(f"folder={self._folder} was opened to be read only")
        if self._folder is not None and self._lock is None:
            raise ValueError(
                f"folder={self._folder} was opened by a later store of this process, "
                "which alone may write to it: go on with that one"
            )

    @property
    def keeps(self) -> bool:
        """Whether clients keep anything at all."""
        return bool(self._leaves)

    @property
    def visited(self) -> int:
        """Number of clients that have a state here."""
        return int((self._index >= 0).sum())

    @property
    def bytes(self) -> int:
        """Bytes of all slots, used and free."""
        return sum(array.nbytes for array in self._arrays)

    def read(self, ids: np.ndarray) -> tuple[Any, np.ndarray]:
        """(states of some clients, leaves `[len(ids), ...]`; which were met before).

        The state of a client that was not is zeros.
        """
        slots = self._index[ids]
        known = slots >= 0
        leaves = []
        for array, plain in zip(self._arrays, self._leaves):
            rows = np.zeros((len(ids), *plain.shape), plain.dtype)
            rows[known] = array[slots[known]]
            leaves.append(rows)
        keys = zip(leaves, jax.tree.leaves(self._like))
        leaves = [_typed(rows, leaf) for rows, leaf in keys]
        return jax.tree.unflatten(jax.tree.structure(self._like), leaves), known

    def write(
        self, ids: np.ndarray, states: Any, rows: np.ndarray | slice = slice(None)
    ) -> None:
        """Keeps the states of some clients, all different: those `rows` of `states`,
        leaves `[len(ids), ...]`."""
        self._check_writer()
        slots = self._index[ids]
        fresh = (slots < 0) | (slots == self._committed[ids])
        slots[fresh] = self._take_free(int(fresh.sum()))
        for array, leaf in zip(self._arrays, jax.tree.leaves(states)):
            array[slots] = _untyped(leaf)[rows]
        self._index[ids] = slots

    def commit(self, note: dict[str, Any] | None = None) -> None:
        """Makes what was written since the last time permanent, all or nothing.

        The commit before stays too, until `settle`.

        Args:
          note: JSON-like; kept in `note`, such as the round that the states belong to.
        """
        self._check_writer()
        self.note = note or {}
        if self._folder is not None:
            for array in self._arrays:
                if isinstance(array, np.memmap):
                    array.flush()
            self._save_index()
        replaced = self._committed[self._committed != self._index]
        self._replaced = np.concatenate([self._replaced, replaced[replaced >= 0]])
        self._committed = self._index.copy()

    def settle(self) -> None:
        """Forgets the commit before the last one."""
        if self._folder is not None:
            (self._folder / BEFORE).unlink(missing_ok=True)
        self._free = np.concatenate([self._free, self._replaced])
        self._replaced = self._replaced[:0]

    def pick(self, note: dict[str, Any]) -> bool:
        """Of a store whose last commit was not settled, goes back to the one before if
        that is the one of this note; and settles."""
        if self._folder is None or not (self._folder / BEFORE).exists():
            return False
        before = self._folder / BEFORE
        found = self._read_index(before)[1]["note"] == note
        if found:
            if not self._read_only:
                before = before.replace(self._folder / INDEX)
            self._take_over(before)
            self._committed = self._index.copy()
        elif note == self.note and not self._read_only:
            self.settle()
        return found

    def rollback(self) -> None:
        """Forgets what was written since the last `commit`."""
        written = self._index[self._index != self._committed]
        self._free = np.concatenate([self._free, written])
        self._index = self._committed.copy()

    def _take_free(self, count: int) -> np.ndarray:
        if count > len(self._free):
            self._grow(count - len(self._free))
        rest = len(self._free) - count
        taken, self._free = self._free[rest:], self._free[:rest]
        return taken

    def _grow(self, wanted: int) -> None:
        old = self._slots
        new = max(MINIMUM, old + wanted, old + old // 2)
        self._check_room(new - old)
        try:
            self._arrays = [
                self._resize(number, array, new)
                for number, array in enumerate(self._arrays)
            ]
        except OSError as error:
            raise ValueError(
                f"folder={self._folder} cannot hold the states of more clients "
                f"({error.strerror}): give a folder on a larger disk"
            ) from error
        fresh = np.arange(new - 1, old - 1, -1, dtype=np.int32)
        self._free = np.concatenate([fresh, self._free])

    def _check_room(self, slots: int) -> None:
        """A full disk would end the process when a mapped page is written."""
        if self._folder is None:
            return
        needed = slots * sum(s.size * s.dtype.itemsize for s in self._leaves)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise ValueError(
                f"folder={self._folder} needs {needed:,} more bytes for clients' "
                f"states and has {free:,}: give a folder on a larger disk"
            )

    @property
    def _slots(self) -> int:
        return len(self._arrays[0]) if self._arrays else 0

    def _resize(self, number: int, array: np.ndarray, slots: int) -> np.ndarray:
        shape = (slots, *array.shape[1:])
        if self._folder is None:
            larger = np.empty(shape, array.dtype)
            larger[: len(array)] = array
            return larger
        path = self._path(number)
        _reserve(path, int(np.prod(shape)) * array.dtype.itemsize)
        return _mapped(path, array.dtype, shape)

    def _path(self, number: int) -> Path:
        return self._folder / f"leaf_{number:03d}.bin"

    def _save_index(self) -> None:
        header = {
            "slots": self._slots,
            "leaves": [[list(s.shape), str(s.dtype)] for s in self._leaves],
            "note": self.note,
        }
        temporary = self._folder / f"{INDEX}.tmp"
        with open(temporary, "wb") as file:
            text = np.frombuffer(json.dumps(header).encode(), np.uint8)
            np.savez(file, index=self._index, header=text)
            file.flush()
            os.fsync(file.fileno())
        if (self._folder / INDEX).exists():
            (self._folder / INDEX).replace(self._folder / BEFORE)
        temporary.replace(self._folder / INDEX)

    def _read_index(self, path: Path) -> tuple[np.ndarray, dict[str, Any]]:
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
                return saved["index"], json.loads(saved["header"].tobytes())
        except Exception as error:  # zipfile's, numpy's and json's are many
            raise ValueError(
                f"cannot read {path} ({error}): it is damaged; delete the folder and "
                "start again"
            ) from error

    def _take_over(self, path: Path) -> None:
        """Takes over what was committed, if anything was."""
        if not path.exists():
            return
        index, header = self._read_index(path)
        leaves = [[list(s.shape), str(s.dtype)] for s in self._leaves]
        if header["leaves"] != leaves or index.shape != self._index.shape:
            raise ValueError(
                f"folder={self._folder} holds states of {len(index)} clients with "
                f"leaves {header['leaves']}, not of {len(self._index)} with {leaves}: "
                "give another folder"
            )
        for number, array in enumerate(self._arrays):
            shape = (header["slots"], *array.shape[1:])
            file = self._path(number)
            wanted = int(np.prod(shape)) * array.dtype.itemsize
            length = file.stat().st_size if file.exists() else 0
            if length < wanted:
                raise ValueError(
                    f"client states {file} has {length:,} bytes, not {wanted:,}: it is "
                    "damaged; delete the folder and start again"
                )
            mode = "r" if self._read_only else "r+"
            self._arrays[number] = _mapped(file, array.dtype, shape, mode)
        self._index, self.note = index, header["note"]
        used = np.zeros(header["slots"], bool)
        used[index[index >= 0]] = True
        self._free = np.flatnonzero(~used)[::-1].astype(np.int32)


def _reserve(path: Path, size: int) -> None:
    """Makes a file longer, with its room on the disk: where that is full, or its share
    used up, this is an error, and a later write to the mapped file the process's end.
    """
    with open(path, "ab") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)


def _mapped(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], mode: str = "r+"
) -> np.ndarray:
    if 0 in shape:  # a model without a body
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, mode, shape=shape)


def _plain(leaf: Any) -> jax.ShapeDtypeStruct:
    """What stands for a leaf in a file: the bits of a key."""
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))


def _untyped(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _typed(rows: np.ndarray, leaf: Any) -> Any:
    return jax.random.wrap_key_data(rows) if is_key(leaf) else rows
