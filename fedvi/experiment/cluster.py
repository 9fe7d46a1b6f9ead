"""Joining the processes of a run, and ending well when one of them is lost.

A process that dies takes its sockets along, and on CPU the others' next collective
raises. On an accelerator, or where a whole machine is gone, it only never returns. So
every process counts up a number in the key-value store of JAX's coordination service
and watches those of the others; JAX's own heartbeat would end the survivors too, but
by an abort that no program can put into words.
"""

import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax._src import distributed

from fedvi.experiment import checkpoint, folder
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.experiment.processes import HostOptions
from fedvi.experiment.setup import usable_cores

__all__ = ["LOST", "Cluster", "Watchdog", "lost_line", "show_cpus"]

LOST = 3  # exit code of a process that lost another one
# What a collective says whose other end is gone (gloo on CPU, NCCL on GPU), and JAX's
# coordination service.
_GONE = re.compile(r"gloo|nccl|unavailable|aborted|heartbeat|coordination", re.I)
# Process 0 holds the coordination service: without it the others' JAX aborts before
# they can say anything.
_LINGER_SECONDS = 1.0
_PREFIX = "fedvi/alive/"
_DONE = "done"


class Cluster:
    """The processes that a run consists of; by default this one alone.

    Args:
      options: how they find each other; validated.
      runs: what is run, to tell where a lost run can go on.
    """

    def __init__(
        self,
        options: HostOptions,
        runs: Sequence[tuple[ExperimentConfig, RunOptions]] = (),
    ):
        self._options, self._runs = options, runs
        self._watchdog: Watchdog | None = None
        self._leaving = threading.Lock()

    def join(self, devices: int | None = None) -> None:
        """Waits until all processes are there; before JAX touches any device.

        Ends the process with one line if they are not after `start_timeout`: JAX
        itself would abort.

        Args:
          devices: of all processes together, as asked for.

        Raises:
          ValueError: the coordinator's port is taken, or JAX finds no cluster.
        """
        options = self._options
        if not options.several:
            show_cpus(usable_cores() if devices is None else devices)
            return
        if options.process_id == 0 and options.coordinator_address is not None:
            _check_port(options.coordinator_address)
        alarm = threading.Timer(options.start_timeout, self._nobody_came)
        alarm.daemon = True
        alarm.start()
        try:
            _initialize(options)
            # What jax.distributed does not tell without starting the devices.
            state = distributed.global_state
            if devices is not None and devices % state.num_processes == 0:
                show_cpus(devices // state.num_processes)
            jax.devices()  # the processes tell each other of theirs
        finally:
            alarm.cancel()
        self._watchdog = Watchdog(
            state.client,
            state.process_id,
            state.num_processes,
            options.lost_timeout,
            self._lose,
        )
        self._watchdog.start()

    def done(self) -> None:
        """Tells the others that this process has nothing left to do with them."""
        if self._watchdog is not None:
            self._watchdog.stop()

    def check(self, error: BaseException) -> None:
        """Ends the process if `error` comes of the loss of another one."""
        if self._watchdog is None or not isinstance(error, Exception):
            return
        broken = bool(_GONE.search(str(error)))
        # gloo's errors are ValueErrors; others are a mistake, told by all processes.
        if isinstance(error, ValueError) and "gloo" not in str(error).lower():
            return
        missing = self._watchdog.missing()
        if missing or broken:
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
            sys.stdout.flush()  # the line comes last where both go to one file
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
        self.leave(LOST, lost_line(missing, count, self._runs))

    def _nobody_came(self) -> NoReturn:
        options = self._options
        who = "the processes of this run"
        if options.num_processes is not None:
            who = f"the {options.num_processes} processes of num_processes"
        where = options.coordinator_address or "the address that JAX found"
        line = (
            f"error: {who} did not all come together at coordinator_address={where} "
            f"within start_timeout={options.start_timeout} s: start them all with the "
            "same address and number, each with its own process_id, and see that they "
            "can reach it"
        )
        print(line, file=sys.stderr, flush=True)
        os._exit(1)


def show_cpus(devices: int) -> None:
    """Lets JAX show a CPU as `devices` devices, unless it has been used before.

    A number that XLA_FLAGS asks for stays.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if devices < 1:
        return  # refused with the other settings
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        pass  # too late: `clients_mesh` says how many there are


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
            done = checkpoint.read_metadata(path)["round"]
        except ValueError as error:
            return f"{line}; {error}"
        return (
            f"{line}; {path} holds round {done} of {config.rounds}: start all "
            f"{processes} again with --resume"
        )
    return line


def _check_port(address: str) -> None:
    # A port that is taken makes JAX 0.10.2 crash at times, instead of raising.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(address.rpartition(":")[2])))
        except OSError as error:
            raise ValueError(
                f"coordinator_address={address!r}: its port cannot be used on this "
                f"machine ({error.strerror}): give another one to all processes"
            ) from error


def _initialize(options: HostOptions) -> None:
    # JAX would take SIGTERM for the notice of a preemption, and run on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            options.coordinator_address,
            options.num_processes,
            options.process_id,
            # Both abort the process: only if our own timers fail.
            initialization_timeout=2 * options.start_timeout + 10,
            heartbeat_timeout_seconds=2 * options.lost_timeout + 10,
            **(
                {"cluster_detection_method": "deactivate"}
                if options.distributed == "off"
                else {}
            ),
        )
    except (RuntimeError, ValueError) as error:
        if options.distributed == "auto" and "defined" in str(error):
            raise ValueError(
                "distributed='auto': JAX finds no cluster (Slurm, Open MPI, "
                "Kubernetes, TPU pod) around this process: give --coordinator_address, "
                "--num_processes and --process_id"
            ) from error
        raise ValueError(
            f"coordinator_address={options.coordinator_address!r} cannot be used "
            f"({error}): give another one to all processes"
        ) from error


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
