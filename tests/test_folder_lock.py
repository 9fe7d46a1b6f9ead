"""One writer a folder (C34): within a process, between two, after a kill."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fedvi
from fedvi.folder_lock import LOCK, FolderLock

HOLD = """
import sys
from fedvi.folder_lock import FolderLock
lock = FolderLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock of a folder."""
    root = str(Path(fedvi.__path__[0]).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "shared"],
        env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_lock_is_refused_with_the_holder_and_a_remedy(tmp_path):
    with FolderLock(tmp_path, "run_dir"):
        for _ in range(2):
            with pytest.raises(ValueError) as error:
                FolderLock(tmp_path, "run_dir")
            message = str(error.value)
            assert f"run_dir={tmp_path} is in use: process {os.getpid()} " in message
            assert "give another run_dir" in message and "\n" not in message
    with FolderLock(tmp_path):
        pass


def test_another_process_is_refused_until_the_first_is_killed(tmp_path, other):
    """It leaves its file behind, which means nothing then."""
    with pytest.raises(ValueError, match=f"is in use: process {other.pid} on "):
        FolderLock(tmp_path / "shared")
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (tmp_path / "shared" / LOCK).exists()
    with FolderLock(tmp_path / "shared"):
        assert str(os.getpid()) in (tmp_path / "shared" / LOCK).read_text()
    assert list((tmp_path / "shared").iterdir()) == []


def test_what_was_made_and_is_empty_goes_again(tmp_path):
    with FolderLock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    lock = FolderLock(tmp_path / "a" / "b")
    (tmp_path / "a" / "note").touch()
    del lock
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["note"]
    (tmp_path / "mine").mkdir()
    with FolderLock(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir()


def fail_with(monkeypatch, number):
    def flock(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, number):
    fail_with(monkeypatch, number)
    with pytest.warns(UserWarning, match="lies on a file system without locks"):
        FolderLock(tmp_path)


def test_a_folder_that_cannot_be_written_to_needs_no_lock(tmp_path, monkeypatch):
    """Whoever wants to write there is told so then; a finished run can be read."""
    fail_with(monkeypatch, errno.EIO)
    with pytest.raises(ValueError, match="folder=.* cannot be made or written to"):
        FolderLock(tmp_path)
    monkeypatch.setattr("os.access", lambda *arguments: False)
    with FolderLock(tmp_path, "run_dir"):
        pass


def test_what_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="run_dir=.*file is a file"):
        FolderLock(tmp_path / "file", "run_dir")
    with pytest.raises(ValueError, match="run_dir=.* cannot be made"):
        FolderLock(tmp_path / "file" / "below", "run_dir")
