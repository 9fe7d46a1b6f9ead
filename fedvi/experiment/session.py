"""A run in progress: blocks of rounds, evaluations, checkpoints, and its folder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedvi.evaluation import Scores
from fedvi.experiment import (
    checkpoint,
    drawing,
    hosts,
    recorder,
    schedule,
    tensorboard,
)
from fedvi.experiment.build import Experiment, identity
from fedvi.experiment.ending import Ending
from fedvi.experiment.problems import Problems
from fedvi.experiment.programs import Programs
from fedvi.experiment.progress import RunProgress
from fedvi.experiment.recorder import Recorder
from fedvi.experiment.rows import choice_rows, evaluation_rows
from fedvi.experiment.run_options import RunOptions
from fedvi.experiment.summary import summary
from fedvi.federation import State
from fedvi.placement import on_host

__all__ = ["Restored", "Session", "restore"]


class Restored(NamedTuple):
    """What a checkpoint held: the states of all seeds, and the run's own notes."""

    states: State
    round: int
    problems: Problems


def restore(
    experiment: Experiment, options: RunOptions, shapes: State
) -> Restored | None:
    """Reads the checkpoint of a run folder; None if the run was stopped before one.

    Raises:
      ValueError: the folder's run belongs to another configuration or other data, or
        its checkpoint is damaged.
    """
    run_dir = Path(options.run_dir)
    path = run_dir / recorder.CHECKPOINT
    if not path.exists():
        if (run_dir / recorder.SUMMARY).exists():
            raise ValueError(
                f"run_dir={run_dir} holds a finished run of another configuration or "
                "other data, and no checkpoint: replace it with --overwrite, or give "
                "another --run_dir"
            )
        return None
    config = identity(experiment.config.to_dict(), experiment.data_sha256)
    states, saved = checkpoint.restore(
        path, shapes, fingerprint=checkpoint.fingerprint(config), config=config
    )
    return Restored(states, saved["round"], Problems(saved["problems"]))


class Session:
    """A run of all its seeds.

    Args:
      experiment: what is run, its data on the devices.
      options: where and how.
      programs: the compiled programs.
      restored: where to go on; None: at the beginning.
    """

    def __init__(
        self,
        experiment: Experiment,
        options: RunOptions,
        programs: Programs,
        restored: Restored | None = None,
    ):
        self.experiment = experiment
        self.config = experiment.config
        self.options = options
        self.programs = programs
        self.seeds = range(self.config.seed, self.config.seed + self.config.seeds)
        self.scores: dict[str, Scores] = {}
        self.finite = np.ones(len(self.seeds), bool)
        self.clusters: np.ndarray | None = None
        done = -1 if restored is None else restored.round
        self.recorder = hosts.everywhere(lambda: self._open(done))
        if restored is None:
            restored = Restored(programs.init(self.config.seed), 0, Problems())
        else:
            print(f"resumed after round {restored.round} of {self.config.rounds}")
        self.states, self.round, self.problems = restored

    def _open(self, done: int) -> Recorder | None:
        """The run folder's files, of the one process that writes them."""
        if not hosts.is_first():
            self.options = dataclasses.replace(self.options, tensorboard=False)
            return None
        files = Recorder(self.options.run_dir)
        files.drop_after(done)
        files.write_config(self.config.to_dict())
        return files

    def compile(self) -> None:
        """Compiles what is left of the run, so that nothing waits in the middle."""
        for n in sorted(set(schedule.blocks(self.config, self.round))):
            self.programs.compile_rounds(self.states, n)
        self.programs.compile_evaluate(self.states)
        self.programs.compile_personal(self.states)
        print(f"compiled in {self.programs.compile_seconds:.1f} s")

    def train(self) -> None:
        """Blocks of rounds, each with its evaluation, until all rounds are done."""
        rounds = self.config.rounds
        with (
            tensorboard.writer(self.options, self.round) as write_scalars,
            RunProgress(self.config.method, rounds, self.round) as progress,
        ):
            evaluations = 0
            for n in schedule.blocks(self.config, self.round):
                rows, choices, lines = self._block(n)
                for line in lines:
                    progress.print(line)
                if self.recorder is not None:
                    self.recorder.append_choices(choices)
                    for row in rows:
                        self.recorder.append(row)
                        write_scalars(row)
                evaluations += 1
                if evaluations % self.options.checkpoint_every == 0:
                    self._save()
                progress.advance(n, self._status(rows))
            if evaluations % self.options.checkpoint_every:
                self._save()
            if not self.scores:  # resumed after the last round
                self._evaluate(personal=True)

    def _block(self, n: int) -> tuple[list[dict], list[dict], list[str]]:
        """`n` rounds and an evaluation: (rows, rows of choices, lines for the user)."""
        self.states, metrics = self.programs.rounds(self.states, n)
        seconds = self.programs.run_seconds / n / len(self.seeds)
        metrics = jax.tree.map(np.asarray, metrics)
        lines = self.problems.add(self.round + 1, self.seeds, metrics)
        choices = choice_rows(self.round + 1, self.seeds, metrics)
        self.round += n
        self._evaluate(personal=schedule.personal_too(self.config, self.round))
        for seed, finite in zip(self.seeds, self.finite):
            if not finite:
                lines.append(
                    f"WARNING: seed {seed}: the server's state is not finite after "
                    f"round {self.round}; a smaller learning_rate may help"
                )
        rows = evaluation_rows(
            self.experiment,
            round=self.round,
            seeds=self.seeds,
            metrics=metrics,
            scores=self.scores,
            clusters=self.clusters,
            seconds=seconds,
        )
        return rows, choices, lines

    def _evaluate(self, personal: bool) -> None:
        scores, self.finite, self.clusters = jax.device_get(
            self.programs.evaluate(self.states)
        )
        self.scores = {"global": scores}
        if personal:
            self.scores["personal"] = jax.device_get(
                self.programs.evaluate_personal(self.states)
            )

    def _save(self) -> None:
        config = identity(self.config.to_dict(), self.experiment.data_sha256)
        metadata = {
            "fingerprint": checkpoint.fingerprint(config),
            "config": config,
            "round": self.round,
            "problems": self.problems.to_dict(),
        }
        states = jax.tree.map(on_host, self.states)  # by all: parts lie with each
        if self.recorder is not None:
            path = Path(self.options.run_dir) / recorder.CHECKPOINT
            checkpoint.save(path, states, metadata)

    def _status(self, rows: Sequence[dict]) -> str:
        """One line on the last evaluation, means over the seeds."""

        def mean(key):
            return np.mean([row[key] for row in rows])

        parts = [f"round {self.round}/{self.config.rounds}"]
        if "loss" in rows[0]:
            parts.append(f"loss {mean('loss'):.3f}")
        parts.append(f"{self.config.evaluated_on} accuracy")
        parts.append(f"global {mean('global_accuracy'):.2f} %")
        if "personal" in self.scores:
            parts.append(f"personalised {mean('personal_accuracy'):.2f} %")
            if "novel_personal_accuracy" in rows[0]:
                parts.append(f"novel {mean('novel_personal_accuracy'):.2f} %")
        if "adjusted_rand" in rows[0]:
            parts.append(f"adjusted Rand {mean('adjusted_rand'):.2f}")
        parts.append(f"{mean('seconds'):.3f} s/round")
        return "  ".join(parts)

    def finish(
        self, ending: Ending, plan_line: str, devices: Sequence[jax.Device]
    ) -> dict[str, Any]:
        """Plots and `summary.json`; all processes get what it holds."""
        return hosts.on_first(lambda: self._finish(ending, plan_line, devices))

    def _finish(
        self, ending: Ending, plan_line: str, devices: Sequence[jax.Device]
    ) -> dict[str, Any]:
        rows = self.recorder.rows()
        result = summary(
            self.experiment,
            rows=rows,
            problems=self.problems.to_dict(),
            finite=self.finite,
            clusters=self.clusters,
            ending=ending.figures,
            compile_seconds=self.programs.compile_seconds + ending.compile_seconds,
            plan=plan_line,
            devices=devices,
        )
        drawn = drawing.draw(
            Path(self.options.run_dir),
            self.experiment,
            rows=rows,
            scores=self.scores,
            uncertainty=ending.uncertainty,
            summary=result,
        )
        if not drawn:
            print("no plots: they need matplotlib (pip install 'fedvi[plots]')")
        self.recorder.write_summary(result)
        return result
