"""How many clients and seeds train at once, chosen from backend and memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

__all__ = ["Plan", "choose", "free_memory", "temporary_bytes"]

# Part of the free memory that a plan may fill; the rest is for what XLA's figure does
# not count, such as fragmentation and library workspaces.
_USABLE = 0.9
_GIB = 2.0**30


class Plan(NamedTuple):
    """What was chosen.

    Attributes:
      chunk_size: clients in one vmap on a device.
      seeds_at_once: seeds in one vmap; 1: one after another.
      reason: one line for the user.
    """

    chunk_size: int
    seeds_at_once: int
    reason: str


def choose(
    compile_block: Callable[[int, int], Any],
    *,
    cohort: int,
    seeds: int,
    requested: int | str = "auto",
    platform: str = "cpu",
    limit: float | None = None,
) -> tuple[Plan, Any]:
    """Chooses a plan and compiles for it.

    On CPU one client and one seed at a time is fastest. On an accelerator everything
    at once is, if memory allows; then seeds one after another; then chunks of the
    cohort, shrunk in proportion until they fit.

    Args:
      compile_block: `(chunk_size, seeds_at_once) -> jax.stages.Compiled`, of a block
        of rounds.
      cohort: clients a round on one device.
      seeds: number of seeds.
      requested: `auto`, `whole`, or a number of clients, which is kept.
      platform: of the devices: `cpu`, `gpu`, `tpu`.
      limit: bytes free on a device; None: not known.

    Returns:
      (the plan, what `compile_block` returned for it).
    """
    if platform == "cpu":
        chunk = {"auto": 1, "whole": cohort}.get(requested, requested)
        chunk = min(chunk, cohort)
        why = "fastest on CPU" if requested == "auto" else "as asked"
        return Plan(chunk, 1, _line(chunk, cohort, 1, seeds, why)), compile_block(
            chunk, 1
        )

    fixed = requested != "auto"
    chunk = min(requested, cohort) if isinstance(requested, int) else cohort
    at_once = seeds
    while True:
        block = compile_block(chunk, at_once)
        needed = temporary_bytes(block)
        if limit is None:
            why = "the device tells no memory limit"
            break
        usable = _USABLE * limit
        why = f"needs {needed / _GIB:.2f} GiB of {usable / _GIB:.2f} GiB usable"
        if needed <= usable or (at_once == 1 and (chunk == 1 or fixed)):
            break
        if at_once > 1:
            at_once = 1
        else:
            chunk = max(1, min(chunk - 1, int(chunk * usable / needed)))
    return Plan(chunk, at_once, _line(chunk, cohort, at_once, seeds, why)), block


def temporary_bytes(block: jax.stages.Compiled) -> int:
    """Bytes that a compiled program needs beside its arguments."""
    memory = block.memory_analysis()
    return (
        memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def free_memory(device: jax.Device) -> int | None:
    """Bytes free on a device, None where the backend does not say (CPU)."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _line(chunk: int, cohort: int, at_once: int, seeds: int, why: str) -> str:
    line = f"chunk_size={chunk} of {cohort} clients a round and device"
    if seeds > 1:
        line += f", {at_once} of {seeds} seeds at once"
    return f"{line}: {why}"
