"""How a process ends: in one line, or, as one of several, without the others."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from jax._src import distributed

from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.experiment.lost_processes import Watchdog, lost_line

__all__ = ["Ending"]

_LOST = 3  # exit code of a process that lost another one
# Process 0 holds the coordination service: without it the others' JAX aborts before
# they can say anything.
_LINGER_SECONDS = 1.0


class Ending:
    """Ends this process: in one line, or, as one of several, without the others.

    Args:
      runs: what is run, to tell where a lost run can go on.
    """

    def __init__(self, runs: Sequence[tuple[ExperimentConfig, RunOptions]] = ()):
        self._runs = runs
        self._watchdog: Watchdog | None = None
        self._leaving = threading.Lock()

    def watch(self, lost_timeout: float) -> None:
        """Ends the process too if another one of several is lost from now on."""
        state = distributed.global_state
        self._watchdog = Watchdog(
            state.client,
            state.process_id,
            state.num_processes,
            lost_timeout,
            self._lose,
        )
        self._watchdog.start()

    def done(self) -> None:
        """Tells the others that this process has nothing left to do with them."""
        if self._watchdog is not None:
            self._watchdog.stop()

    def check(self, error: BaseException) -> None:
        """Ends the process if `error` comes of the loss of another one."""
        missing = self._watchdog and self._watchdog.behind(error)
        if missing is not None:
            self._lose(missing)

    def give_up(self) -> None:
        """Ends one of several processes with a traceback; alone it does nothing."""
        if self._watchdog is not None:
            traceback.print_exc()
            self.leave(1)

    def leave(self, code: int, error: Any = None) -> NoReturn:
        """Ends the process, in one line if `error` is given.

        One of several does not wait for the others, as Python's own exit would: they
        may be waiting for this one.
        """
        with self._leaving:  # the watchdog has a thread of its own
            try:
                sys.stdout.flush()  # the line comes last where both go to one file
            except BrokenPipeError:  # Python would try again, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error is not None:
                line = f"error: {' '.join(str(error).split())}"
                print(line, file=sys.stderr, flush=True)
            if self._watchdog is None:
                sys.exit(code)
            if distributed.global_state.process_id == 0:
                time.sleep(_LINGER_SECONDS)
            os._exit(code)

    def _lose(self, missing: Sequence[int]) -> NoReturn:
        count = distributed.global_state.num_processes
        self.leave(_LOST, lost_line(missing, count, self._runs))
