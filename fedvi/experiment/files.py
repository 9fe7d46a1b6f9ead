"""Writing a file so that a kill or a crash never leaves half of it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["remove_stale", "write_atomically"]


def write_atomically(path: str | Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replaces `path` by what `write` puts into the binary file it is given.

    A temporary file in the same folder is flushed to disk, renamed over `path`, and
    the folder is flushed. Missing folders are made. One process at a time may write
    to `path`: temporary files of killed predecessors are removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path)
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_stale(path: str | Path) -> None:
    """Removes the temporary files that killed writers of `path` left behind."""
    path = Path(path)
    for file in path.parent.iterdir():
        if file.name.startswith(f"{path.name}.tmp."):
            file.unlink(missing_ok=True)
