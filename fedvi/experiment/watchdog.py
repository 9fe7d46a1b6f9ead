"""Signs of life between the processes of a run.

A process that dies takes its sockets along, and on CPU the others' next collective
raises. On an accelerator, or where a whole machine is gone, it only never returns. So
every process counts up a number in the key-value store of JAX's coordination service
and watches those of the others; JAX's own heartbeat would end the survivors too, but
by an abort that no program can put into words.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Watchdog"]

_PREFIX = "fedvi/alive/"
_DONE = "done"


class Watchdog:
    """Tells when another process is lost.

    Args:
      client: of JAX's coordination service.
      process: id of this process.
      processes: how many there are.
      timeout: seconds without a sign of life after which a process is lost.
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
