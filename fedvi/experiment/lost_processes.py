"""Noticing that another process of a run is lost.

A process that dies takes its sockets along, and on CPU the others' next collective
raises. On an accelerator, or where a whole machine is gone, it only never returns. So
every process counts up a number in the key-value store of JAX's coordination service
and watches those of the others; JAX's own heartbeat would end the survivors too, but
by an abort that no program can put into words.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedvi.experiment import checkpoint, folder
from fedvi.experiment.config import ExperimentConfig, RunOptions

__all__ = ["Watchdog", "lost_line"]

# What a collective says whose other end is gone (gloo on CPU, NCCL on GPU), and JAX's
# coordination service.
_GONE = re.compile(r"gloo|nccl|unavailable|aborted|heartbeat|coordination", re.I)
_PREFIX = "fedvi/alive/"
_DONE = "done"


class Watchdog:
    """Tells when another process is lost.

    Args:
      client: of JAX's coordination service.
      process: id of this process.
      processes: how many there are.
      timeout: seconds without a sign of life after which a process is lost
        (`HostOptions.lost_timeout`).
      on_loss: called once, in a thread of its own, with the ids of those lost.
    """

    def __init__(
        self,
        client: Any,
        process: int,
        processes: int,
        timeout: float,
        on_loss: Callable[[list[int]], Any],
    ):
        self._client = client
        self._process = process
        self._timeout = timeout
        self._on_loss = on_loss
        self._interval = min(1.0, timeout / 10)
        now = time.monotonic()
        self._seen = {p: ("", now) for p in range(processes) if p != process}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begins to give and to look for signs of life."""
        self._thread.start()

    def stop(self) -> None:
        """Says that this process is done, so that nobody misses it."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            self._say(_DONE)

    def missing(self, wait: float = 5.0) -> list[int]:
        """Ids of the processes that have just gone, after at most `wait` seconds."""
        deadline = time.monotonic() + wait
        while not (gone := self._silent(4 * self._interval)):
            if time.monotonic() > deadline:
                break
            time.sleep(self._interval / 4)
        return gone

    def behind(self, error: BaseException) -> list[int] | None:
        """Ids of lost processes, as far as known, that `error` comes of; None: of no
        loss."""
        if not isinstance(error, Exception):
            return None
        broken = bool(_GONE.search(str(error)))
        # gloo's errors are ValueErrors; others are a mistake, told by all processes.
        if isinstance(error, ValueError) and "gloo" not in str(error).lower():
            return None
        missing = self.missing()
        return missing if missing or broken else None

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(self._interval):
            count += 1
            try:
                self._say(str(count))
                self._look()
            except (AttributeError, TypeError):
                return  # another version of JAX; its own heartbeat is still there
            except Exception:
                # The store is with process 0. JAX's own heartbeat is still there.
                if self._process == 0 or self._stopped.is_set():
                    return
                self._seen[0] = ("", -self._timeout)
            if gone := self._silent(self._timeout):
                self._on_loss(gone)
                return

    def _say(self, word: str) -> None:
        key = f"{_PREFIX}{self._process}"
        self._client.key_value_set(key, word, allow_overwrite=True)

    def _look(self) -> None:
        now = time.monotonic()
        for key, word in self._client.key_value_dir_get(_PREFIX):
            process = int(key.rsplit("/", 1)[1])
            if process in self._seen and self._seen[process][0] != word:
                self._seen[process] = (word, now)

    def _silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [
            process
            for process, (word, since) in sorted(self._seen.items())
            if word != _DONE and now - since > seconds
        ]


def lost_line(
    missing: Sequence[int],
    processes: int,
    runs: Sequence[tuple[ExperimentConfig, RunOptions]],
) -> str:
    """What to tell when processes are lost: which, and where the run can go on.

    Args:
      missing: their ids, as far as known.
      processes: how many there were.
      runs: in order, of which the first unfinished one was interrupted.
    """
    if missing:
        several = len(missing) > 1
        ids = ", ".join(map(str, missing))
        who = f"process{'es' if several else ''} {ids} of {processes}"
        line = f"{who} {'were' if several else 'was'} lost"
    else:
        line = f"one of the other {processes - 1} processes was lost"
    for config, options in runs:
        run_dir = Path(options.run_dir)
        if (run_dir / folder.SUMMARY).exists():
            continue
        path = run_dir / folder.CHECKPOINT
        if not path.exists():
            return f"{line}; {run_dir} holds no checkpoint: start all {processes} again"
        try:
            done = checkpoint.read_notes(path).round
        except ValueError as error:
            return f"{line}; {error}"
        return (
            f"{line}; {path} holds round {done} of {config.rounds}: start all "
            f"{processes} again with --resume"
        )
    return line
