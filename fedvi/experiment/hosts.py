"""Several processes that run one program: what they tell each other.

Every process runs the same code on its own devices. Here are the few places where
they must wait for each other: one process's mistake is everybody's, and only process 0
touches the run folder. With one process these functions only call what they are given.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["agree", "everywhere", "exchange", "is_first", "on_first", "quiet"]

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
