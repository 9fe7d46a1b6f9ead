"""Runs experiments: from configurations to run folders and a table."""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from fedvi import __version__ as fedvi_version
from fedvi.algorithm import Algorithm
from fedvi.data import class_histogram
from fedvi.experiment import (
    checkpoint,
    chunking,
    devices,
    folder,
    processes,
    report,
    setup,
)
from fedvi.experiment.checkpoint import Kept
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.experiment.loaded_run import load_run
from fedvi.experiment.loading import LoadedData, load_data
from fedvi.experiment.session import Session
from fedvi.experiment.setup import Experiment, identity
from fedvi.federation import BaseFederation
from fedvi.folder_lock import FolderLock

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
      loaded: what `load_data(config)` gave, perhaps changed.

    Returns:
      What `summary.json` holds.

    Raises:
      ValueError: a mistake in the configuration, the data or the run folder; a run
        folder that another process writes to, or cannot be written to; a checkpoint
        there that belongs to another configuration. In one process, then in all.
    """
    runs = [(config, options)]
    with processes.printing():
        _check(runs, builder)
        with _alone([options.run_dir]):
            [experiment] = _prepared(runs, builder, loaded)
            return _carry_out([(experiment, options)])[0]


def run_all(
    runs: Sequence[tuple[ExperimentConfig, RunOptions]],
    builder: Callable[..., Algorithm] | None = None,
) -> list[dict]:
    """Runs experiments; ends with a table that compares them.

    They run one after another, but for those that differ in numbers of their formulas
    only (options that are `traced`, learning rates, momentum) and in their folders:
    these share one compiled program, and their results differ from those of the same
    runs alone by rounding. Each has its folder and checkpoint as if it were alone.

    Several runs of one folder also leave there the table and a plot of their learning
    curves (`fedvi.experiment.report`).

    Mistakes in any of them are found before the first one starts: all algorithms are
    built first. Data are loaded once for neighbours that differ in the algorithm and
    its learning rates only.

    Args:
      runs: what is asked for.
      builder: as of `run`, of all of them.

    Returns:
      What the `summary.json` of each holds; `failed` there says whether a run came to
      nothing, which its row of the table says too.

    Raises:
      ValueError: as `run`.
    """
    with processes.printing():
        return _run_all(runs, builder)


def _run_all(
    runs: Sequence[tuple[ExperimentConfig, RunOptions]],
    builder: Callable[..., Algorithm] | None,
) -> list[dict]:
    all_options = [options for _, options in runs]
    common = report.common_folder(all_options)
    processes.agree({"algorithms": [config.method for config, _ in runs]})
    _check(runs, builder)
    folders = [one.run_dir for one in all_options]
    with _alone(folders if common is None else [common, *folders]):
        experiments = _prepared(runs, builder, common=common)
        if common is not None and any(options.overwrite for options in all_options):
            with folder.writing(common):
                processes.on_first(lambda: report.clear_comparison(common))
        summaries = _carry_out(list(zip(experiments, all_options)))
        text = report.comparison(summaries, all_options)
        if common is not None:
            processes.on_first(
                lambda: report.write_comparison(common, map(load_run, folders), text)
            )
    print(f"\n{text}")
    print("run folders:" if len(runs) > 1 else "run folder:")
    for options in all_options:
        print(f"  {options.run_dir}")
    return summaries


@contextlib.contextmanager
def _alone(folders: Sequence[str | Path]) -> Iterator[None]:
    """Keeps other processes than those of this run out of its folders: process 0 holds
    their locks."""
    with contextlib.ExitStack() as locks:

        def lock():
            for run_dir in {Path(one).resolve(): one for one in folders}.values():
                locks.enter_context(FolderLock(run_dir, "run_dir"))

        processes.on_first(lock)
        yield


# Before the first round.


def _check(
    runs: Sequence[tuple[ExperimentConfig, RunOptions]],
    builder: Callable[..., Algorithm] | None = None,
) -> None:
    """Finds what is wrong with the settings alone, or differs between processes."""

    def check():
        for config, options in runs:
            config.validate()
            options.validate()
            if options.tensorboard and importlib.util.find_spec("tensorboardX") is None:
                raise ValueError(
                    "tensorboard=True needs tensorboardX: pip install "
                    "'fedvi[tensorboard]'"
                )
            setup.resolve(config, builder)
        folders = [Path(options.run_dir).resolve() for _, options in runs]
        for run_dir in folders:
            if folders.count(run_dir) > 1:
                raise ValueError(f"run_dir={run_dir} is given twice: give each run one")

    processes.everywhere(check)
    for config, options in runs:
        processes.agree(
            {
                **identity(config.to_dict(), None),
                **dataclasses.asdict(options),
                "the version of fedvi": fedvi_version,
                "the version of jax": jax.__version__,
            }
        )
        processes.everywhere(
            lambda options=options: devices.mesh(options.devices, options.model_devices)
        )


def _prepared(
    runs: Sequence[tuple[ExperimentConfig, RunOptions]],
    builder: Callable[..., Algorithm] | None = None,
    loaded: LoadedData | None = None,
    common: Path | None = None,
) -> list[Experiment]:
    """Builds all experiments, by which all that can be wrong with them is found.

    Args:
      runs: what is asked for; their folders are this run's alone.
      builder: as of `run`.
      loaded: as of `run`.
      common: the folder of all run folders, which gets the comparison.
    """

    def check_folders():
        for _, options in runs:
            if not options.overwrite:
                folder.prepare(options.run_dir, resume=options.resume)
        if common is not None:
            report.check_comparison(common, [options for _, options in runs])

    def build():
        shared, shared_for, experiments = loaded, None, []
        for config, options in runs:
            setting = config.of_data()
            if new := loaded is None and setting != shared_for:
                shared, shared_for = load_data(config), setting
            experiments.append(
                setup.experiment(config, builder, shared, options.model_devices)
            )
            if new:  # after the method's own mistakes, of which a line says enough
                print(class_histogram(shared.federated))
                print(setup.applied(config, experiments[-1]))
        # The first method's turn comes at once.
        methods = {one.config.algorithm: one for one in experiments}
        methods.pop(runs[0][0].algorithm)
        for one in methods.values():
            setup.check_own(one)
        return experiments

    processes.on_first(check_folders)
    experiments = processes.everywhere(build)
    hashes = [(one.data_sha256, one.ood_sha256) for one in experiments]
    processes.agree({"data_sha256": hashes})
    return experiments


# A run, or several that share a program.

Run = tuple[Experiment, RunOptions]


def _carry_out(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Runs what is prepared; returns the summaries, in order.

    Runs that share a program go together, unless some are further than others.
    """
    summaries: dict[int, dict[str, Any]] = {}
    groups: dict[Any, list[tuple[int, Run, bool]]] = {}
    for number, (experiment, options) in enumerate(runs):
        run_dir = Path(options.run_dir)
        resuming = processes.on_first(
            lambda options=options: (
                not options.overwrite
                and folder.prepare(options.run_dir, resume=options.resume)
            )
        )
        if resuming and (
            finished := processes.on_first(
                lambda one=(experiment, options): _finished(*one)
            )
        ):
            print(f"{run_dir} holds this run, finished: nothing to do")
            summaries[number] = finished
            continue
        processes.on_first(lambda run_dir=run_dir: folder.make(run_dir))
        key = setup.program_of(experiment, options) or number
        groups.setdefault(key, []).append((number, (experiment, options), resuming))
    if sum(map(len, groups.values())) > 1:
        print(_sharing([[one for _, (one, _), _ in own] for own in groups.values()]))
    for group in groups.values():
        numbers, own, resuming = zip(*group)
        names = ", ".join(options.run_dir for _, options in own)
        print(f"\n{own[0][0].config.method} on {own[0][0].config.dataset} -> {names}")
        summaries |= zip(numbers, _train(own, resuming))
    return [summaries[number] for number in range(len(runs))]


def _sharing(groups: Sequence[Sequence[Experiment]]) -> str:
    """One line: how many programs there are, and why."""
    programs = "one compiled program" if len(groups) == 1 else f"{len(groups)} programs"
    line = f"{sum(map(len, groups))} runs, {programs}"
    shared = dict.fromkeys(name for own in groups for name in setup.differing(own)[0])
    if shared:
        line += f"; one program for all values of {', '.join(shared)}"
    if len(groups) > 1:
        by_method: dict[str, list[dict[str, Any]]] = {}
        for one, *_ in groups:
            settings = {
                name.removeprefix("options."): value
                for name, value in setup.settings(one.config.to_dict()).items()
            }
            fixed = {k: v for k, v in settings.items() if k not in one.numbers()}
            by_method.setdefault(one.config.method, []).append(fixed)
        names = ["method"] * (len(by_method) > 1) + [
            name
            for own in by_method.values()
            for name in dict.fromkeys(name for one in own for name in one)
            if len({str(one.get(name)) for one in own}) > 1
        ]
        why = ", ".join(dict.fromkeys(names)) or "setting that is no number"
        line += f"; another for each {why}"
    return line


def _train(runs: Sequence[Run], resuming: Sequence[bool]) -> list[dict[str, Any]]:
    """Trains runs that share a program; those that were stopped after different rounds
    go one group after another."""
    experiment, options = runs[0]
    settings = setup.differing([experiment for experiment, _ in runs])
    together = 1 if experiment.algorithm.host else experiment.together
    mesh = devices.mesh(options.devices, options.model_devices, together)
    federation = setup.federation(experiment, options, mesh, settings[0])
    stretches: dict[int, list[tuple[int, Kept | None]]] = {}
    for number, (one, resumes) in enumerate(zip(runs, resuming)):
        restored = _restored(*one, federation) if resumes else None
        if one[1].resume and restored is None:
            print(
                f"{one[1].run_dir} holds no checkpoint: starting with the first round"
            )
        done = -1 if restored is None else restored.round
        stretches.setdefault(done, []).append((number, restored))
    summaries: dict[int, dict[str, Any]] = {}
    for done, members in stretches.items():
        numbers, restored = zip(*members)
        own = [runs[number] for number in numbers]
        with contextlib.ExitStack() as stack:
            for _, one in own:
                stack.enter_context(folder.writing(one.run_dir))
            shapes = federation.shapes(sum(e.config.seeds for e, _ in own))
            chosen, planned = chunking.grouped(federation, experiment, options, shapes)
            print(chosen.reason)
            if (cohort := experiment.algorithm.cohort) is not None:
                many = "1 client" if cohort == 1 else f"{cohort} clients"
                print(
                    f"{experiment.config.method} takes {many} in every round: "
                    f"fraction={experiment.config.fraction} is not looked at"
                )
            for _, one in own:
                if one.overwrite:
                    processes.on_first(
                        lambda one=one: folder.prepare(one.run_dir, overwrite=True)
                    )
            session = Session(
                own,
                planned,
                [settings[number] for number in numbers],
                None if done < 0 else restored,
            )
            session.compile()
            session.train()
            summaries |= zip(numbers, session.finish(chosen.reason))
    return [summaries[number] for number in range(len(runs))]


def _restored(
    experiment: Experiment, options: RunOptions, federation: BaseFederation
) -> Kept | None:
    """What the run's checkpoint holds; None: there is none."""
    run_dir = Path(options.run_dir)
    # As if the run had been alone: what is traced is no part of its checkpoint.
    shapes = federation.portable(federation.shapes(experiment.config.seeds))
    shapes = shapes._replace(settings=())
    with folder.writing(run_dir):
        restored = processes.everywhere(
            lambda: checkpoint.restore_run(experiment, run_dir, shapes)
        )
        done = restored and restored.round
        processes.agree({f"the round of {run_dir}'s checkpoint": done})
        if restored is not None:
            restored = restored._replace(states=federation.placed(restored.states))
            if restored.note:
                print(restored.note)
            extended = restored.extended_from
            processes.on_first(
                lambda: checkpoint.check_rows(
                    experiment.config, run_dir, done, extended
                )
            )
    return restored


def _finished(experiment: Experiment, options: RunOptions) -> dict | None:
    """The summary of this very configuration and data, if the folder holds one."""
    run_dir = Path(options.run_dir)
    path = run_dir / folder.SUMMARY
    if not path.exists():
        return None
    found = folder.read_json(path)
    here = identity(experiment.config.to_dict(), experiment.data_sha256)
    try:
        there = identity(found["config"], found.get("data_sha256"))
        if there != here or not checkpoint.is_measured(experiment, run_dir):
            return None
        report.comparison([found], [options])
        if (run_dir / folder.METRICS).exists():
            extended = found["extended_from"]
            done = found["rounds"]
            checkpoint.check_rows(experiment.config, run_dir, done, extended)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(folder.damaged(path, why)) from error
    return found
