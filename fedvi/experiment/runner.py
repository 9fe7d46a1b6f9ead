"""Runs an experiment from its configuration to its run folder."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from fedvi import __version__ as fedvi_version
from fedvi.algorithm import Algorithm
from fedvi.cohort import AXIS
from fedvi.data import class_histogram
from fedvi.experiment import (
    build,
    comparison,
    ending,
    hosts,
    plan,
    recorder,
    schedule,
    tensorboard,
)
from fedvi.experiment.build import Experiment, LoadedData
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.programs import Programs, state_shapes
from fedvi.experiment.recorder import make_folder, prepare, table
from fedvi.experiment.run_options import RunOptions
from fedvi.experiment.session import Session, restore
from fedvi.experiment.summary import table_rows, table_title
from fedvi.federation import State

__all__ = ["run", "run_all"]


def run(
    config: ExperimentConfig,
    options: RunOptions,
    builder: Callable[..., Algorithm] | None = None,
    *,
    loaded: LoadedData | None = None,
) -> dict[str, Any]:
    """Runs one experiment and writes its run folder.

    Everything that can be wrong with the input is found before anything is compiled,
    and before an old run is overwritten. Where several processes run it, each on its
    devices, all must call it, and process 0 alone writes the run folder; the others
    read the checkpoint there.

    Args:
      config: what the result depends on.
      options: where and how to run.
      builder: a user's own `(task, **options) -> Algorithm`; default: the registered
        algorithm that `config.algorithm` names.
      loaded: `build.load_data(config)`, where several runs share it.

    Returns:
      What `summary.json` holds.

    Raises:
      ValueError: a mistake in the configuration, the data or the run folder, or a
        checkpoint there that belongs to another configuration; in one process, then
        in all.
    """
    with hosts.quiet():
        return _run(config, options, builder, loaded)


def _run(
    config: ExperimentConfig,
    options: RunOptions,
    builder: Callable[..., Algorithm] | None,
    loaded: LoadedData | None,
) -> dict[str, Any]:
    config = hosts.everywhere(lambda: _checked(config, options, builder))
    hosts.agree(_common(config, options))
    mesh = hosts.everywhere(lambda: build.mesh(options.devices, options.model_devices))
    run_dir = options.run_dir
    resuming = hosts.on_first(
        lambda: not options.overwrite and prepare(run_dir, resume=options.resume)
    )
    experiment = hosts.everywhere(lambda: build.experiment(config, builder, loaded))
    hosts.agree({"data_sha256": experiment.data_sha256})
    if resuming and (
        finished := hosts.on_first(lambda: _finished(experiment, options))
    ):
        print(f"{run_dir} holds this run, finished: nothing to do")
        return finished
    hosts.on_first(lambda: make_folder(run_dir))
    if loaded is None:
        print(class_histogram(experiment.data))
    if options.devices is None:
        together = build.together(experiment)
        mesh = build.mesh(None, options.model_devices, together)
    experiment = build.on_devices(experiment, mesh)
    shapes = state_shapes(build.federation(experiment, 1, mesh), mesh, config.seeds)
    restored = None
    if resuming:
        restored = hosts.everywhere(lambda: restore(experiment, options, shapes))
        hosts.agree(
            {f"the round of {run_dir}'s checkpoint": restored and restored.round}
        )
    if options.resume and restored is None:
        print(f"{run_dir} holds no checkpoint: starting with the first round")
    chosen, programs = _plan(experiment, options, mesh, shapes)
    print(chosen.reason)
    if options.overwrite:
        hosts.on_first(lambda: prepare(run_dir, overwrite=True))
    session = Session(experiment, options, programs, restored)
    session.compile()
    session.train()
    measured = ending.measure(
        experiment,
        session.states,
        programs,
        lambda other: _programs(other, mesh, chosen.chunk_size, chosen.seeds_at_once),
    )
    return session.finish(measured, chosen.reason, list(mesh.devices.flat))


def run_all(runs: Sequence[tuple[ExperimentConfig, RunOptions]]) -> list[dict]:
    """Runs experiments one after another; ends with a table that compares them.

    Several runs of one folder also leave there the table and a plot of their learning
    curves (`fedvi.experiment.comparison`).

    Mistakes in any of them are found before the first one starts: all algorithms are
    built first. Data are loaded once for neighbours that differ in the algorithm only.

    Returns:
      What the `summary.json` of each holds; `failed` there says whether a run came to
      nothing, which its row of the table says too.

    Raises:
      ValueError: as `run`.
    """
    with hosts.quiet():
        return _run_all(runs)


def _run_all(runs: Sequence[tuple[ExperimentConfig, RunOptions]]) -> list[dict]:
    all_options = [options for _, options in runs]
    folder = comparison.folder_of(all_options)
    hosts.agree({"algorithms": [config.method for config, _ in runs]})
    hosts.everywhere(lambda: [_checked(*one) for one in runs])
    for one in runs:
        hosts.agree(_common(*one))
    hosts.on_first(lambda: _check_folders(folder, all_options))
    loaded_for = _shared_data()
    methods = hosts.everywhere(
        lambda: [
            build.experiment(config, loaded=loaded_for(config)).config.method
            for config, _ in runs
        ]
    )
    if folder is not None and any(options.overwrite for options in all_options):
        hosts.on_first(lambda: comparison.clear(folder))
    summaries = []
    for method, (config, options) in zip(methods, runs):
        loaded = loaded_for(config)
        print(f"\n{method} on {config.dataset} -> {options.run_dir}")
        summaries.append(run(config, options, loaded=loaded))
    results = table([row for one in summaries for row in table_rows(one)])
    text = f"{table_title(summaries[0])}:\n{results}"
    print(f"\n{text}")
    if folder is not None:
        hosts.on_first(lambda: comparison.write(folder, all_options, summaries, text))
    print("run folders:" if len(runs) > 1 else "run folder:")
    for _, options in runs:
        print(f"  {options.run_dir}")
    return summaries


def _checked(
    config: ExperimentConfig,
    options: RunOptions,
    builder: Callable[..., Algorithm] | None = None,
) -> ExperimentConfig:
    """The configuration with all its options; finds what can be wrong with it."""
    config.validate()
    options.validate()
    tensorboard.check(options)
    return build.resolve(config, builder)


def _check_folders(folder: Path | None, all_options: Sequence[RunOptions]) -> None:
    for options in all_options:
        if not options.overwrite:
            prepare(options.run_dir, resume=options.resume)
    if folder is not None:
        comparison.prepare(folder, all_options)


def _common(config: ExperimentConfig, options: RunOptions) -> dict[str, Any]:
    """What all processes of a run must agree on, or their programs differ."""
    return {
        **build.identity(config.to_dict(), None),
        **dataclasses.asdict(options),
        "the version of fedvi": fedvi_version,
        "the version of jax": jax.__version__,
    }


def _shared_data() -> Callable[[ExperimentConfig], LoadedData]:
    """A `load_data` that keeps what it loaded last, and shows it."""
    loaded, loaded_for = None, None

    def load(config):
        nonlocal loaded, loaded_for
        setting = dataclasses.replace(
            config, algorithm="", options={}, selection="uniform"
        )
        if setting != loaded_for:
            loaded, loaded_for = build.load_data(config), setting
            print(class_histogram(loaded.federated))
        return loaded

    return load


def _finished(experiment: Experiment, options: RunOptions) -> dict | None:
    """The summary of this very configuration and data, if the folder holds one."""
    path = Path(options.run_dir) / recorder.SUMMARY
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    here = build.identity(experiment.config.to_dict(), experiment.data_sha256)
    there = build.identity(found["config"], found.get("data_sha256"))
    return found if there == here else None


def _programs(
    experiment: Experiment, mesh: Mesh, chunk_size: int, seeds_at_once: int
) -> Programs:
    federation = build.federation(experiment, chunk_size, mesh)
    return Programs(federation, mesh, experiment.config.seeds, seeds_at_once)


def _plan(
    experiment: Experiment, options: RunOptions, mesh: Mesh, shapes: State
) -> tuple[plan.Plan, Programs]:
    """Chooses chunk size and seeds at once; compiles a block of rounds on the way."""
    config = experiment.config
    candidates: dict[tuple[int, int], Programs] = {}

    def compile_block(chunk_size: int, seeds_at_once: int):
        programs = _programs(experiment, mesh, chunk_size, seeds_at_once)
        candidates[chunk_size, seeds_at_once] = programs
        return programs.compile_rounds(shapes, next(schedule.blocks(config)))

    device = mesh.local_devices[0]
    free = plan.free_memory(device)
    if free is not None and device.platform == "cpu":
        free //= len(mesh.local_devices)  # they share it
    frees = hosts.exchange(free)  # one plan for all
    free = None if None in frees else min(frees)
    if free is not None:
        free -= sum(
            math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize
            for s in jax.tree.leaves(shapes)
        )
    chosen, _ = hosts.everywhere(
        lambda: plan.choose(
            compile_block,
            cohort=-(-build.together(experiment) // mesh.shape[AXIS]),
            seeds=config.seeds,
            requested=options.chunk_size,
            platform=device.platform,
            limit=free,
        )
    )
    hosts.agree({"chunk_size and seeds at once": list(chosen[:2])})
    return chosen, candidates[chosen.chunk_size, chosen.seeds_at_once]
