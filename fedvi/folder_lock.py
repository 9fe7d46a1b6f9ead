"""One writer a folder: a lock that ends with the process that holds it."""

import contextlib
import errno
import os
import socket
import uuid
import warnings
import weakref
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["LOCK", "FolderLock"]

LOCK = ".lock"
# What a file system says that has no locks (Lustre and NFS, as they are mounted).
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


class FolderLock:
    """Makes a folder and keeps all others from writing to it.

    The operating system holds the lock, so that it ends with this process, however that
    ends; the file `.lock` in the folder, which says who has it, may stay behind and
    means nothing then. It is released by `release`, at the end of a `with`, or with the
    last reference; what was made and is still empty is removed.

    A folder that this user cannot write to needs no lock, and gets none. Where the file
    system has no locks a warning says so.

    Args:
      folder: made if missing.
      name: of the argument that it comes from, for messages.

    Raises:
      ValueError: another process, or another lock of this one, holds it; or the folder
        cannot be made.
    """

    def __init__(self, folder: str | Path, name: str = "folder"):
        folder = Path(folder)
        missing = _make(folder, name)
        lock = FileLock(
            folder / LOCK, timeout=0, thread_local=False, fallback_to_soft=False
        )
        # For whoever is refused, and to know the file again.
        note = f"process {os.getpid()} on {socket.gethostname()}\n{uuid.uuid4()}\n"
        arguments = (lock, note, missing, os.getpid())
        self._finalizer = weakref.finalize(self, _release, *arguments)
        try:
            lock.acquire()
            with contextlib.suppress(OSError):  # the disk may be full
                Path(lock.lock_file).write_text(note, encoding="utf-8")
        except Timeout:
            self._finalizer.detach()
            raise ValueError(
                f"{name}={folder} is in use: {_holder(folder)} writes there; wait "
                f"until it has ended, or give another {name}"
            ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warnings.warn(
                    f"{name}={folder} lies on a file system without locks "
                    f"({error.strerror}): see that no other process writes there",
                    stacklevel=2,
                )
            elif os.access(folder, os.W_OK):
                self._finalizer()
                raise _unusable(name, folder, error) from error

    def release(self) -> None:
        """Lets others write."""
        self._finalizer()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *exception) -> None:
        self.release()


def _make(folder: Path, name: str) -> list[Path]:
    """Makes a folder; returns what of its path was missing, the deepest first."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(
            f"{name}={folder} is a file: give the name of a folder"
        ) from None
    except OSError as error:
        raise _unusable(name, folder, error) from error
    return missing


def _unusable(name: str, folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"{name}={folder} cannot be made or written to ({error.strerror}): give "
        f"another {name}"
    )


def _holder(folder: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if found := (folder / LOCK).read_text(encoding="utf-8").strip():
            return found.splitlines()[0]
    return "another process"


def _release(lock: FileLock, note: str, missing: list[Path], pid: int) -> None:
    if os.getpid() != pid:  # a fork of the process that holds it
        return
    with contextlib.suppress(OSError):
        # Whoever waits for the lock looks whether its file is still there.
        if lock.is_locked and Path(lock.lock_file).read_text(encoding="utf-8") == note:
            os.unlink(lock.lock_file)
    with contextlib.suppress(OSError):
        lock.release()
    with contextlib.suppress(OSError):
        for path in missing:
            path.rmdir()
