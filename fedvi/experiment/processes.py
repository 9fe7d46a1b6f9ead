"""Several processes that run one program: how they find each other, what they tell.

Every process runs the same code on its own devices. Here are the few places where
they must wait for each other: one process's mistake is everybody's, and only process 0
touches the run folder. With one process these functions only call what they are given.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedvi.options import check, option

__all__ = [
    "HostOptions",
    "agree",
    "everywhere",
    "exchange",
    "is_first",
    "on_first",
    "quiet",
]

_T = TypeVar("_T")
_SMALLEST = 1024  # bytes; sizes are powers of two, so that few programs compile


def is_first() -> bool:
    """Whether this is process 0: it writes all files and prints."""
    return jax.process_index() == 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what other processes than the first print on standard output."""
    if is_first():
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        yield


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


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """How the processes of a run find each other; by default there is one."""

    distributed: Literal["off", "auto"] = option(
        "off",
        "auto: one of several processes that JAX finds by itself (Slurm, Open MPI, "
        "Kubernetes, TPU pod).",
    )
    coordinator_address: str | None = option(
        None, "HOST:PORT of process 0, where the processes of a run meet."
    )
    num_processes: int | None = option(
        None, "Processes of the run; each gets its own --process_id.", at_least=1
    )
    process_id: int | None = option(
        None, "Of this process, from 0; process 0 writes the files.", at_least=0
    )
    start_timeout: int = option(
        300, "Seconds that the processes wait for each other at the start.", at_least=1
    )
    lost_timeout: int = option(
        100,
        "Seconds without a sign of life after which a process counts as lost (JAX's "
        "own figure).",
        at_least=3,
    )

    @property
    def several(self) -> bool:
        """Whether JAX's distributed service is asked for."""
        return self.distributed == "auto" or self.coordinator_address is not None

    def validate(self, devices: int | None = None) -> None:
        """Checks every field, before anything starts.

        Args:
          devices: of all processes together, if asked for.

        Raises:
          ValueError: names the flag, its value and what would be right.
        """
        check(self)
        three = ("coordinator_address", "num_processes", "process_id")
        given = [name for name in three if getattr(self, name) is not None]
        missing = [name for name in three if name not in given]
        if self.distributed == "off" and given and missing:
            raise ValueError(
                f"{_named(given)} without {_named(missing)}: several processes need "
                "all three, or --distributed=auto where JAX can find them"
            )
        if self.coordinator_address is not None:
            host, _, port = self.coordinator_address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(
                    f"coordinator_address={self.coordinator_address!r} must be "
                    "HOST:PORT, such as node1:12345"
                )
        if self.num_processes is None:
            return
        if self.process_id is not None and self.process_id >= self.num_processes:
            raise ValueError(
                f"process_id={self.process_id} must be at most "
                f"{self.num_processes - 1}: the ids of "
                f"num_processes={self.num_processes} count from 0"
            )
        if devices is not None and devices % self.num_processes:
            raise ValueError(
                f"devices={devices} must be a multiple of "
                f"num_processes={self.num_processes}: each gives as many"
            )


def _named(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)
