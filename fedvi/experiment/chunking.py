"""How many clients and runs (seeds) train at once, from backend and memory."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedvi.client_map import AXIS
from fedvi.experiment import processes
from fedvi.experiment.config import RunOptions
from fedvi.experiment.setup import Experiment
from fedvi.federation import BaseFederation, State
from fedvi.visit_order import padded_share

__all__ = ["Plan", "choose", "free_memory", "grouped", "padding", "temporary_bytes"]

# Part of the free memory that a plan may fill; the rest is for what XLA's figure does
# not count, such as fragmentation and library workspaces.
_USABLE = 0.9
_GIB = 2.0**30
_COHORTS = 20  # drawn to tell the padding of a round, where cohorts differ
_MEMINFO = Path("/proc/meminfo")


class Plan(NamedTuple):
    """What was chosen.

    Attributes:
      chunk_size: clients in one vmap on a device.
      runs_at_once: runs (seeds) in one vmap; 1: one after another.
      reason: one line for the user.
    """

    chunk_size: int
    runs_at_once: int
    reason: str


def grouped(
    federation: BaseFederation,
    experiment: Experiment,
    options: RunOptions,
    shapes: State,
) -> tuple[Plan, BaseFederation]:
    """Chooses a plan, compiling a block of rounds on the way; one for all processes.

    Args:
      federation: of the experiment.
      experiment: what is run.
      options: where and how.
      shapes: of the states of all seeds.

    Returns:
      (the plan, the federation that follows it).

    Raises:
      ValueError: as `choose`.
    """
    config, mesh = experiment.config, federation.mesh
    device = mesh.local_devices[0]
    if options.stream:
        return _streamed(federation, options, device.platform)
    candidates: dict[tuple[int, int], BaseFederation] = {}

    def compile_block(chunk_size: int, runs_at_once: int):
        groups = {"chunk_size": chunk_size, "runs_at_once": runs_at_once}
        candidate = federation.variant(**groups)
        candidates[chunk_size, runs_at_once] = candidate
        return candidate.compile("rounds", shapes, n=next(config.blocks()))

    free = free_memory(device)
    if free is not None and device.platform == "cpu":
        free //= len(mesh.local_devices)  # they share it
    frees = processes.exchange(free)
    free = None if None in frees else min(frees)
    if free is not None:
        free -= sum(
            math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize
            for s in jax.tree.leaves(shapes)
        )
    chosen, _ = processes.everywhere(
        lambda: choose(
            compile_block,
            cohort=-(-experiment.together // mesh.shape[AXIS]),
            seeds=config.seeds,
            requested=options.chunk_size,
            platform=device.platform,
            limit=free,
        )
    )
    processes.agree({"chunk_size and seeds at once": list(chosen[:2])})
    stays = federation.homes is not None and federation.stays_home
    share = padding(experiment, chosen.chunk_size, mesh.shape[AXIS], not stays)
    if share >= 0.005:
        line = f"{chosen.reason}; {100 * share:.0f} % of a round's steps are padding"
        chosen = chosen._replace(reason=line)
    return chosen, candidates[chosen.chunk_size, chosen.runs_at_once]


def padding(
    experiment: Experiment, chunk_size: int, devices: int, ordered: bool = True
) -> float:
    """`padded_share` of a round: where not all take part, the mean of cohorts that are
    drawn uniformly, whatever the selection."""
    sizes = np.asarray(experiment.data.train.size)[experiment.trained]
    participants = experiment.selection.size
    cohorts = [sizes]
    if participants < len(sizes):
        rng = np.random.default_rng(0)
        cohorts = [rng.choice(sizes, participants, False) for _ in range(_COHORTS)]
    training = experiment.task.training
    shares = [padded_share(c, training, chunk_size, devices, ordered) for c in cohorts]
    return float(np.mean(shares))


def _streamed(
    federation: BaseFederation, options: RunOptions, platform: str
) -> tuple[Plan, BaseFederation]:
    """Of a stream the size of a block, not of a chunk, is what bounds memory."""
    whole = options.block_size
    auto = 1 if platform == "cpu" else whole
    chunk = {"auto": auto, "whole": whole}.get(options.chunk_size, options.chunk_size)
    line = f"clients streamed in blocks of {whole}, chunk_size={chunk}"
    return Plan(chunk, 1, line), federation.variant(chunk_size=chunk)


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
      compile_block: `(chunk_size, runs_at_once) -> jax.stages.Compiled`, of a block
        of rounds.
      cohort: clients a round on one device.
      seeds: number of seeds.
      requested: `auto`, `whole`, or a number of clients, which is kept.
      platform: of the devices: `cpu`, `gpu`, `tpu`.
      limit: bytes free on a device; None: not known.

    Returns:
      (the plan, what `compile_block` returned for it).

    Raises:
      ValueError: a chunk that was asked for, or one client alone, needs more memory
        than there is; says how much, and which chunk would fit.
    """
    if platform == "cpu":
        chunk = {"auto": 1, "whole": cohort}.get(requested, requested)
        chunk = min(chunk, cohort)
        block = compile_block(chunk, 1)
        _check_fit(chunk, temporary_bytes(block), limit)
        why = "fastest on CPU" if requested == "auto" else "as asked"
        return Plan(chunk, 1, _line(chunk, cohort, 1, seeds, why)), block

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
        if needed <= usable:
            break
        if at_once > 1:
            at_once = 1
        elif fixed or chunk == 1:
            _check_fit(chunk, needed, limit)
        else:
            chunk = max(1, min(chunk - 1, int(chunk * usable / needed)))
    return Plan(chunk, at_once, _line(chunk, cohort, at_once, seeds, why)), block


def _check_fit(chunk: int, needed: float, limit: float | None) -> None:
    if limit is None or needed <= _USABLE * limit:
        return
    usable = _USABLE * limit
    problem = (
        f"chunk_size={chunk} needs {needed / _GIB:.2f} GiB of temporary memory on a "
        f"device with {usable / _GIB:.2f} GiB usable"
    )
    if chunk == 1:
        raise ValueError(
            f"{problem}: spread the model over devices (model_devices), or use a "
            "smaller model or batch_size"
        )
    # Temporaries grow with the clients, beside a part that does not.
    fits = max(1, int(chunk * usable / needed))
    raise ValueError(f"{problem}: about chunk_size={fits} would fit, or auto")


def temporary_bytes(block: jax.stages.Compiled) -> int:
    """Bytes that a compiled program needs beside its arguments."""
    memory = block.memory_analysis()
    return (
        memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def free_memory(device: jax.Device) -> int | None:
    """Bytes free on a device, of a CPU those that the system could give; None: unknown.

    Linux only for CPUs.
    """
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform != "cpu" or not _MEMINFO.exists():
        return None
    available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
    return available and 1024 * int(available[1])


def _line(chunk: int, cohort: int, at_once: int, seeds: int, why: str) -> str:
    line = f"chunk_size={chunk} of {cohort} clients a round and device"
    if seeds > 1:
        line += f", {at_once} of {seeds} seeds at once"
    return f"{line}: {why}"
