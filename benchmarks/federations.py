"""What the benchmarks time: random clients, a federation of them, its programs."""

import time
from typing import Any

import jax
import numpy as np

import fedvi
from fedvi import algorithms, nn

__all__ = [
    "CLASSES",
    "build",
    "compile_round",
    "first_examples",
    "random_clients",
    "timed_compilation",
]

CLASSES = 10


def random_clients(clients: int, examples: int, shape: tuple[int, ...]):
    """`ClientData` of normal inputs `[clients, examples, *shape]`, random labels."""
    rng = np.random.default_rng(0)
    return fedvi.ClientData(
        rng.normal(size=(clients, examples, *shape)).astype(np.float32),
        rng.integers(0, CLASSES, (clients, examples)).astype(np.int32),
        np.full(clients, examples, np.int32),
    )


def first_examples(data):
    """The first example of every client, for a test set that costs nothing."""
    return data._replace(x=data.x[:, :1], y=data.y[:, :1], size=np.ones_like(data.size))


def build(
    algorithm: str,
    model: nn.Model,
    training: fedvi.LocalTraining,
    train,
    test=None,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> fedvi.Federation:
    """A federation of a method by its name.

    Args:
      algorithm: as for `fedvi.algorithms.build`.
      model: the network.
      training: of a round, and of personalisation.
      train: every client's data.
      test: default one training example each.
      options: of the algorithm.
      **how: selection, chunk_size and so on, as for `fedvi.Federation`.
    """
    size = np.asarray(train.size)
    task = fedvi.Task(model, training, training, len(size), int(size.sum()))
    method = algorithms.build(algorithm, task, **options or {})
    return fedvi.Federation(
        method, train, first_examples(train) if test is None else test, **how
    )


def compile_round(federation, state) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """One round as a program, compiled afresh: call it with state and train data.

    Donates the state, and leaves it on its devices.

    Returns:
      (the program, `trace_seconds`, `compile_seconds` and `lines` of StableHLO).
    """
    jax.clear_caches()
    place = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(
        lambda state, train: federation.pure_rounds(state, train, n=1),
        donate_argnums=0,
        out_shardings=(place, None),
    )
    return timed_compilation(jitted, state, federation.train)


def timed_compilation(jitted, *arguments) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """A jitted function as a program, and what making it took."""
    start = time.perf_counter()
    lowered = jitted.lower(*arguments)
    traced = time.perf_counter()
    program = lowered.compile()
    return program, {
        "trace_seconds": traced - start,
        "compile_seconds": time.perf_counter() - traced,
        "lines": lowered.as_text().count("\n"),
    }
