"""Runs experiments: from configurations to run folders and a table."""

import contextlib
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedvi import __version__ as fedvi_version
from fedvi.algorithm import Algorithm
from fedvi.data import class_histogram
from fedvi.evaluation import Scores
from fedvi.experiment import (
    checkpoint,
    chunking,
    devices,
    display,
    final_measurements,
    folder,
    plots,
    processes,
    report,
    rows,
    setup,
)
from fedvi.experiment.checkpoint import Kept
from fedvi.experiment.communication import bytes_per_round
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.experiment.folder import CsvFile
from fedvi.experiment.loading import LoadedData, load_data
from fedvi.experiment.problems import Problems
from fedvi.experiment.setup import Experiment, identity
from fedvi.federation import BaseFederation
from fedvi.folder_lock import FolderLock
from fedvi.keys import root_key

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
            return _carry_out(experiment, options)


def run_all(runs: Sequence[tuple[ExperimentConfig, RunOptions]]) -> list[dict]:
    """Runs experiments one after another; ends with a table that compares them.

    Several runs of one folder also leave there the table and a plot of their learning
    curves (`fedvi.experiment.report`).

    Mistakes in any of them are found before the first one starts: all algorithms are
    built first. Data are loaded once for neighbours that differ in the algorithm and
    its learning rates only.

    Returns:
      What the `summary.json` of each holds; `failed` there says whether a run came to
      nothing, which its row of the table says too.

    Raises:
      ValueError: as `run`.
    """
    with processes.printing():
        return _run_all(runs)


def _run_all(runs: Sequence[tuple[ExperimentConfig, RunOptions]]) -> list[dict]:
    all_options = [options for _, options in runs]
    common = report.common_folder(all_options)
    processes.agree({"algorithms": [config.method for config, _ in runs]})
    _check(runs)
    folders = [one.run_dir for one in all_options]
    with _alone(folders if common is None else [common, *folders]):
        experiments = _prepared(runs, common=common)
        if common is not None and any(options.overwrite for options in all_options):
            with folder.writing(common):
                processes.on_first(lambda: report.clear_comparison(common))
        summaries = []
        for experiment, options in zip(experiments, all_options):
            config = experiment.config
            print(f"\n{config.method} on {config.dataset} -> {options.run_dir}")
            summaries.append(_carry_out(experiment, options))
        text = report.comparison(summaries, all_options)
        if common is not None:
            processes.on_first(
                lambda: report.write_comparison(common, all_options, summaries, text)
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
            setting = dataclasses.replace(
                config,
                algorithm="",
                options={},
                selection="uniform",
                learning_rate=1.0,
                finetune_learning_rate=1.0,
            )
            if new := loaded is None and setting != shared_for:
                shared, shared_for = load_data(config), setting
                print(class_histogram(shared.federated))
            experiments.append(
                setup.experiment(config, builder, shared, options.model_devices)
            )
            if new:
                print(setup.applied(config, experiments[-1]))
        return experiments

    processes.on_first(check_folders)
    experiments = processes.everywhere(build)
    processes.agree({"data_sha256": [one.data_sha256 for one in experiments]})
    return experiments


def _carry_out(experiment: Experiment, options: RunOptions) -> dict[str, Any]:
    """Runs what is prepared; returns its summary."""
    run_dir = Path(options.run_dir)
    resuming = processes.on_first(
        lambda: not options.overwrite and folder.prepare(run_dir, resume=options.resume)
    )
    if resuming and (
        finished := processes.on_first(lambda: _finished(experiment, options))
    ):
        print(f"{run_dir} holds this run, finished: nothing to do")
        return finished
    processes.on_first(lambda: folder.make(run_dir))
    with folder.writing(run_dir):
        return _train(experiment, options, resuming)


def _train(
    experiment: Experiment, options: RunOptions, resuming: bool
) -> dict[str, Any]:
    config, run_dir = experiment.config, Path(options.run_dir)
    mesh = devices.mesh(options.devices, options.model_devices, experiment.together)
    federation = setup.federation(experiment, options, mesh)
    shapes = federation.shapes(config.seeds)
    restored = None
    if resuming:
        restored = processes.everywhere(
            lambda: checkpoint.restore_run(experiment, run_dir, shapes)
        )
        processes.agree(
            {f"the round of {run_dir}'s checkpoint": restored and restored.round}
        )
    if restored is not None:
        processes.on_first(
            lambda: checkpoint.check_rows(config, run_dir, restored.round)
        )
    if options.resume and restored is None:
        print(f"{run_dir} holds no checkpoint: starting with the first round")
    chosen, federation = chunking.grouped(federation, experiment, options, shapes)
    print(chosen.reason)
    if options.overwrite:
        processes.on_first(lambda: folder.prepare(run_dir, overwrite=True))
    session = Session(experiment, options, federation, restored)
    session.compile()
    session.train()
    return session.finish(chosen.reason)


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
        if there != here:
            return None
        report.comparison([found], [options])
        if (run_dir / folder.METRICS).exists():
            checkpoint.check_rows(experiment.config, run_dir, found["rounds"])
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(folder.damaged(path, why)) from error
    return found


# The run itself.


class Session:
    """A run of all its seeds: blocks of rounds, evaluations, checkpoints, its folder.

    Args:
      experiment: what is run.
      options: where and how.
      federation: its clients, grouped as planned.
      restored: where to go on; None: at the beginning.
    """

    def __init__(
        self,
        experiment: Experiment,
        options: RunOptions,
        federation: BaseFederation,
        restored: Kept | None = None,
    ):
        self.experiment, self.config = experiment, experiment.config
        self.options, self.federation = options, federation
        self.run_dir = Path(options.run_dir)
        self.seeds = range(self.config.seed, self.config.seed + self.config.seeds)
        self.per_round = bytes_per_round(experiment, federation.messages)
        self.scores: dict[str, Scores] = {}
        self.finite = np.ones(len(self.seeds), bool)
        self.clusters: np.ndarray | None = None
        done = -1 if restored is None else restored.round
        processes.on_first(lambda: self._open(done))
        if restored is None:
            keys = jax.vmap(root_key)(np.array(self.seeds, np.uint32))
            restored = Kept(federation.init(keys), 0, Problems())
        else:
            print(f"resumed after round {restored.round} of {self.config.rounds}")
        self.states, self.round, self.problems = restored

    def _open(self, done: int) -> None:
        """Brings the run folder's files to round `done`; -1: to before the first."""
        for name in (folder.METRICS, folder.SELECTION):
            CsvFile(self.run_dir / name).drop_after(done)
        if done < 0:
            folder.remove(self.run_dir / folder.STORE)
        (self.run_dir / folder.SUMMARY).unlink(missing_ok=True)  # not finished any more
        folder.write_json(self.run_dir / folder.CONFIG, self.config.to_dict())
        clients = rows.client_rows(self.experiment)
        folder.write_csv(self.run_dir / folder.CLIENTS, clients)

    def compile(self) -> None:
        """Compiles what is left of the run, so that nothing waits in the middle."""
        for n in sorted(set(self.config.blocks(self.round))):
            self.federation.compile("rounds", self.states, n=n)
        self.federation.compile("evaluate", self.states)
        self.federation.compile("evaluate_personal", self.states)
        print(f"compiled in {self.federation.compile_seconds:.1f} s")

    def train(self) -> None:
        """Blocks of rounds, each with its evaluation, until all rounds are done."""
        writes = processes.is_first()
        metrics = CsvFile(self.run_dir / folder.METRICS) if writes else None
        choices = CsvFile(self.run_dir / folder.SELECTION) if writes else None
        with (
            display.event_files(self.options, self.round) as write_scalars,
            display.RunProgress(
                self.config.method, self.config.rounds, self.round
            ) as progress,
        ):
            evaluations = 0
            for n in self.config.blocks(self.round):
                evaluation, chosen, lines = self._block(n)
                for line in lines:
                    progress.print(line)
                if writes:
                    choices.append(*chosen)
                    # Before the checkpoint, so that no row can be missing.
                    metrics.append(*evaluation)
                    write_scalars(evaluation)
                evaluations += 1
                if evaluations % self.options.checkpoint_every == 0:
                    self._save()
                progress.advance(n, self._status(evaluation))
            if evaluations % self.options.checkpoint_every:
                self._save()
            if not self.scores:  # resumed after the last round
                self._evaluate(personal=True)

    def _block(self, n: int) -> tuple[list[dict], list[dict], list[str]]:
        """`n` rounds and an evaluation: (rows, rows of choices, lines for the user)."""
        compiled, start = self.federation.compile_seconds, time.perf_counter()
        self.states, metrics = jax.block_until_ready(
            self.federation.rounds(self.states, n)
        )
        seconds = time.perf_counter() - start
        seconds -= self.federation.compile_seconds - compiled
        metrics = jax.tree.map(np.asarray, metrics)
        lines = self.problems.add(self.round + 1, self.seeds, metrics)
        chosen = rows.choice_rows(self.round + 1, self.seeds, metrics)
        self.round += n
        self._evaluate(personal=self.config.personal_too(self.round))
        evaluation = rows.evaluation_rows(
            self.experiment,
            round_index=self.round,
            seeds=self.seeds,
            metrics=metrics,
            scores=self.scores,
            clusters=self.clusters,
            seconds=seconds / n / len(self.seeds),
            per_round=self.per_round,
        )
        classes = self.experiment.data.classes
        for row, finite in zip(evaluation, self.finite):
            if trouble := rows.trouble(row, classes, finite):
                lines.append(
                    f"WARNING: seed {row['seed']}: {trouble} after round {self.round}; "
                    "a smaller learning_rate may help"
                )
        return evaluation, chosen, lines

    def _evaluate(self, personal: bool) -> None:
        federation, states = self.federation, self.states
        self.scores = {"global": jax.device_get(federation.evaluate(states))}
        self.finite = jax.device_get(federation.finite(states))
        if self.experiment.algorithm.assign is not None:
            self.clusters = jax.device_get(federation.clusters(states))
        if personal:
            scores = federation.evaluate_personal(states)
            self.scores["personal"] = jax.device_get(scores)

    def _save(self) -> None:
        checkpoint.save_run(
            self.experiment,
            self.run_dir,
            self.federation,
            Kept(self.states, self.round, self.problems),
        )

    def _status(self, evaluation: Sequence[dict]) -> str:
        """One line on the last evaluation, means over the seeds."""

        def mean(key):
            known = [row[key] for row in evaluation if row[key] is not None]
            return np.mean(known) if known else np.nan

        first = evaluation[0]
        parts = [f"round {self.round}/{self.config.rounds}"]
        if "loss" in first:
            parts.append(f"loss {mean('loss'):.3f}")
        parts.append(f"{self.config.evaluated_on} accuracy")
        if self.experiment.algorithm.global_model:
            parts.append(f"global {mean('global_accuracy'):.2f} %")
        if "personal" in self.scores:
            parts.append(f"personalised {mean('personal_accuracy'):.2f} %")
            if "novel_personal_accuracy" in first:
                parts.append(f"novel {mean('novel_personal_accuracy'):.2f} %")
        if "adjusted_rand" in first:
            parts.append(f"adjusted Rand {mean('adjusted_rand'):.2f}")
        parts.append(f"{mean('seconds'):.3f} s/round")
        return "  ".join(parts)

    def finish(self, plan_line: str) -> dict[str, Any]:
        """What is measured once, plots, `summary.json`; all processes get what that
        holds."""
        ending = final_measurements.after_training(
            self.experiment,
            self.federation,
            self.states,
            self.scores,
            self.options.stream,
        )
        compiled = self.federation.compile_seconds + ending.compile_seconds

        def write():
            evaluations = folder.metrics_rows(self.run_dir)
            result = report.summary(
                self.experiment,
                rows=evaluations,
                problems=self.problems.to_dict(),
                finite=self.finite,
                clusters=self.clusters,
                ending=ending.figures,
                compile_seconds=compiled,
                plan=plan_line,
                devices=list(self.federation.mesh.devices.flat),
                per_round=self.per_round,
            )
            drawn = plots.draw(
                self.run_dir,
                self.experiment,
                rows=evaluations,
                scores=self.scores,
                uncertainty=ending.arrays.get("ood"),
                summary=result,
            )
            folder.write_json(self.run_dir / folder.SUMMARY, result)
            if not drawn:
                print("no plots: they need matplotlib (pip install 'fedvi[plots]')")
            return result

        return processes.on_first(write)
