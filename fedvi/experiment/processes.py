"""Several processes that run one program: how they find each other, what they tell.

Every process runs the same code on its own devices. Here are the few places where
they must wait for each other: one process's mistake is everybody's, and only process 0
touches the run folder. With one process these functions only call what they are given.
"""

import contextlib
import io
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from fedvi.experiment.config import HostOptions
from fedvi.experiment.devices import show_cpus, usable_cores

__all__ = [
    "agree",
    "any_letter",
    "everywhere",
    "exchange",
    "is_first",
    "join",
    "on_first",
    "printing",
]

_T = TypeVar("_T")
_SMALLEST = 1024  # bytes; sizes are powers of two, so that few programs compile


def join(options: HostOptions, devices: int | None = None) -> None:
    """Waits until all processes are there; before JAX touches any device.

    Ends the process with one line if they are not after `start_timeout`: JAX itself
    would abort.

    Args:
      options: how they find each other; validated.
      devices: of all processes together, as asked for.

    Raises:
      ValueError: the coordinator's port is taken, or JAX finds no cluster.
    """
    if not options.several:
        show_cpus(usable_cores() if devices is None else devices)
        return
    if options.process_id == 0 and options.coordinator_address is not None:
        _check_port(options.coordinator_address)
    alarm = threading.Timer(options.start_timeout, _nobody_came, (options,))
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


def _nobody_came(options: HostOptions) -> NoReturn:
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


# What they tell each other.


def is_first() -> bool:
    """Whether this is process 0: it writes all files and prints."""
    return jax.process_index() == 0


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Only the first process prints on standard output, and no letter that a terminal
    or a file cannot show ends a run."""
    if is_first():
        with any_letter(sys.stdout):
            yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        yield


@contextlib.contextmanager
def any_letter(stream: Any) -> Iterator[None]:
    """Shows "?" where a stream's encoding lacks a letter, such as ± in ASCII."""
    if not isinstance(stream, io.TextIOWrapper):  # what a notebook or a test puts there
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        stream.reconfigure(errors=before)


def exchange(value: Any) -> list[Any]:
    """The JSON-like values that all processes give, in the order of their ids.

    Every process must call it. With one process the value is returned as it is.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([data.size], np.int32))[:, 0]
    buffer = np.zeros(
        max(_SMALLEST, 1 << (int(sizes.max()) - 1).bit_length()), np.uint8
    )
    buffer[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(buffer))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def everywhere(call: Callable[[], _T]) -> _T:
    """Calls `call` in every process; each gets its own result.

    Raises:
      ValueError: what `call` raised here (an OSError as it is), or the message of the
        first other process in which it did, with that process's id.
    """
    try:
        result, own = call(), None
    except (ValueError, OSError) as error:  # such as a full disk in process 0
        result, own = None, error
    problems = exchange(None if own is None else str(own))
    if own is not None:
        raise own
    for process, problem in enumerate(problems):
        if problem is not None:
            raise ValueError(f"process {process}: {problem}")
    return result


def on_first(call: Callable[[], Any]) -> Any:
    """Calls `call` in process 0 only; all get its JSON-like result.

    Raises:
      ValueError: what `call` raised there.
    """
    return exchange(everywhere(lambda: call() if is_first() else None))[0]


def agree(values: Mapping[str, Any]) -> None:
    """Checks that all processes hold the same JSON-like values.

    Raises:
      ValueError: they do not, in all processes with the same message: it names the
        first process that differs from process 0, and all that differs.
    """
    first, *others = exchange(dict(values))
    for process, other in enumerate(others, 1):
        differing = [
            f"{key} is {first.get(key)!r} in process 0 and {other.get(key)!r} in "
            f"process {process}"
            for key in dict.fromkeys([*first, *other])
            if first.get(key) != other.get(key)
        ]
        if differing:
            raise ValueError(
                f"the processes do not agree: {'; '.join(differing)}; give all the "
                "same flags, files and versions"
            )
