"""A machine's matrix rate and bandwidth, and how far measured seconds are from them.

What `counting.py` counts takes at least its floors: the FLOPs at the matrix rate, the
bytes at the memory's bandwidth, both measured in the same run.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from counting import Work

from fedvi.local import Batch, LocalTraining
from fedvi.nn import Model

__all__ = [
    "describe_peaks",
    "floors_of",
    "gradient_step",
    "measure_peaks",
    "over_floor",
    "step_flops",
    "xla_cost",
]

# Big enough to run at the full rate, and an array far beyond any cache: for a CPU with
# a few cores, and for an accelerator, where several are queued to hide the dispatch.
CPU = {"matrix": 1536, "array_bytes": 2**27, "queued": 1}
ACCELERATOR = {"matrix": 8192, "array_bytes": 2**31, "queued": 8}

CALLS = 5


def measure_peaks(
    dtypes: tuple[str, ...] = ("float32",),
    *,
    matrix: int | None = None,
    array_bytes: int | None = None,
    queued: int | None = None,
) -> dict[str, Any]:
    """The best of several products and passes over memory, on one device.

    Args:
      dtypes: of the matrices; float32 is multiplied as JAX does by default (TF32 on
        NVIDIA GPUs that have it).
      matrix: n of an n x n product; default by platform, as the rest.
      array_bytes: of the array that is read and written in place.
      queued: products or passes in a row before the clock is read.

    Returns:
      `flops_per_second` by dtype, `bytes_per_second` (what is read and what is
      written both count), and the two sizes.
    """
    defaults = CPU if jax.default_backend() == "cpu" else ACCELERATOR
    n, size = matrix or defaults["matrix"], array_bytes or defaults["array_bytes"]
    queued = queued or defaults["queued"]
    rates = {
        dtype: 2 * n**3 / _least_seconds(*_product(n, dtype), queued)
        for dtype in dtypes
    }
    bandwidth = 2 * size / _least_seconds(*_pass(size), queued)
    return {
        "flops_per_second": rates,
        "bytes_per_second": bandwidth,
        "matrix": n,
        "array_bytes": size,
    }


def _product(n: int, dtype: str) -> tuple[Callable, jax.Array]:
    """x -> x @ w, which keeps the size of x."""
    w = jnp.full((n, n), 1 / n, dtype)
    return jax.jit(lambda x: x @ w), jnp.ones((n, n), dtype)


def _pass(size: int) -> tuple[Callable, jax.Array]:
    """Reads an array and writes it in place.

    A copy to other memory moves more than it says on most CPUs, which read what they
    are about to overwrite; and fresh pages cost the operating system's time.
    """
    return jax.jit(lambda x: x + 1, donate_argnums=0), jnp.zeros(size // 4)


def _least_seconds(step: Callable, x: jax.Array, queued: int) -> float:
    """Seconds of one step, the best of `CALLS` after the first."""
    seconds = []
    for _ in range(1 + CALLS):
        start = time.perf_counter()
        for _ in range(queued):
            x = step(x)
        jax.block_until_ready(x)
        seconds.append((time.perf_counter() - start) / queued)
    return min(seconds[1:])


def xla_cost(program: jax.stages.Lowered | jax.stages.Compiled) -> dict[str, float]:
    """FLOPs and bytes by XLA's cost analysis.

    It counts the body of a loop once, however often it runs: give it a program
    without loops, and multiply. Of a lowered program it counts the bytes of every
    operation, of a compiled one those of the fused kernels, but there it misses what
    a library call does.
    """
    cost = program.cost_analysis() or {}
    return {
        "flops": cost.get("flops", float("nan")),
        "bytes": cost.get("bytes accessed", float("nan")),
    }


def gradient_step(model: Model, training: LocalTraining) -> Callable:
    """`(params, moments, Batch) -> (params, moments, loss)`, as a client does it."""
    optimizer = training.optimizer_at(0)

    def loss(params, batch):
        return model.loss(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)

    def step(params, moments, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return step


def step_flops(model: Model, training: LocalTraining, x: jax.Array) -> float:
    """FLOPs of one gradient step by XLA, before it fuses: all that is elementwise too.

    Args:
      model: the network.
      training: batch size and optimiser.
      x: [clients, capacity, ...] of the clients' data, for shape and number format.
    """
    n = min(training.batch_size, x.shape[1])
    batch = Batch(
        jax.ShapeDtypeStruct((n, *x.shape[2:]), x.dtype),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.ShapeDtypeStruct((n,), bool),
    )
    params = jax.eval_shape(model.init, jax.random.key(0))
    moments = jax.eval_shape(training.optimizer_at(0).init, params)
    step = jax.jit(gradient_step(model, training))
    return xla_cost(step.lower(params, moments, batch))["flops"]


def floors_of(work: Work, peaks: dict[str, Any], dtype: str = "float32") -> dict:
    """Seconds that the FLOPs and the bytes of `work` take at the measured peaks."""
    return {
        "flops": work.flops,
        "bytes": work.bytes,
        "activation_bytes": work.activation_bytes,
        "parameter_bytes": work.parameter_bytes,
        "flops_seconds": work.flops / peaks["flops_per_second"][dtype],
        "bytes_seconds": work.bytes / peaks["bytes_per_second"],
    }


def over_floor(seconds: float, floor: dict[str, float]) -> float:
    """Measured seconds over the higher of the two floors."""
    return seconds / max(floor["flops_seconds"], floor["bytes_seconds"])


def describe_peaks(peaks: dict[str, Any] | None) -> str:
    """A sentence with the machine's measured peaks."""
    if not peaks:
        return "No peaks measured."
    rates = ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s in {dtype}"
        for dtype, rate in peaks["flops_per_second"].items()
    )
    return (
        f"Peaks measured in this run: {rates} (a product of two {peaks['matrix']} × "
        f"{peaks['matrix']} matrices), {peaks['bytes_per_second'] / 1e9:.1f} GB/s ("
        f"{peaks['array_bytes'] / 2**20:.0f} MiB read and written in place)."
    )
