"""What one run writes: rows, checkpoints and, at the end, summary and pictures."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedvi import __version__, plots
from fedvi.evaluation import Scores
from fedvi.experiment import (
    checkpoint,
    display,
    final_measurements,
    folder,
    npz_tree,
    processes,
    report,
    rows,
)
from fedvi.experiment.checkpoint import Kept
from fedvi.experiment.communication import bytes_per_round
from fedvi.experiment.config import RunOptions
from fedvi.experiment.final_measurements import Ending
from fedvi.experiment.folder import CsvFile
from fedvi.experiment.loaded_run import load_run
from fedvi.experiment.problems import Problems
from fedvi.experiment.setup import Experiment
from fedvi.federation import BaseFederation, RoundMetrics, State

__all__ = ["Evaluation", "Recorder"]


class Evaluation(NamedTuple):
    """What was measured after a round, leaves `[seeds, ...]`, numpy.

    Attributes:
      scores: leaves `[seeds, clients, ...]`: of the `global` models, and where
        evaluated of the `personal` ones.
      finite: `[seeds]`, whether the server's state is.
      clusters: `[seeds, clients]` of a clustered method; else None.
    """

    scores: dict[str, Scores]
    finite: np.ndarray
    clusters: np.ndarray | None


class Recorder:
    """Keeps the run folder of one run, all of its seeds.

    Args:
      experiment: what is run.
      options: where and how.
      federation: that runs it.
      restored: where it goes on; None: at the beginning.
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
        self.problems = Problems() if restored is None else restored.problems
        self._extended_from = () if restored is None else restored.extended_from
        self._per_round = bytes_per_round(experiment, federation.messages)
        done = -1 if restored is None else restored.round
        self._trained = done == self.config.rounds
        processes.on_first(lambda: self._open(done))

    def _open(self, done: int) -> None:
        """Brings the run folder's files to round `done`; -1: to before the first."""
        for name in (folder.METRICS, folder.SELECTION):
            CsvFile(self.run_dir / name).drop_after(done)
        if done < 0:
            folder.remove(self.run_dir / folder.STORE)
        if not self._trained:  # else what was measured stays until it is measured anew
            for name in (folder.SUMMARY, folder.EVALUATION):
                folder.remove(self.run_dir / name)
            self._describe()

    def _describe(
        self, evaluation: Evaluation | None = None, further: Sequence[dict] = ()
    ) -> None:
        """Writes what is run, and its clients with their figures as far as known."""
        config = {folder.VERSION: __version__} | self.config.to_dict()
        folder.write_json(self.run_dir / folder.CONFIG, config)
        found = () if evaluation is None else (evaluation.scores, evaluation.clusters)
        clients = rows.client_rows(self.experiment, self.seeds, *found, further=further)
        folder.write_csv(self.run_dir / folder.CLIENTS, clients)

    @contextlib.contextmanager
    def writing(self, done: int) -> Iterator[None]:
        """While it lasts, blocks may be written; `done` rounds were before."""
        if not processes.is_first():
            yield
            return
        self._metrics = CsvFile(self.run_dir / folder.METRICS)
        self._choices = CsvFile(self.run_dir / folder.SELECTION)
        with display.event_files(self.options, done) as self._write_scalars:
            yield

    def write(
        self,
        round_index: int,
        evaluation: Evaluation,
        metrics: RoundMetrics | None = None,
        seconds: float | None = None,
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Writes the rows of an evaluation.

        Args:
          round_index: rounds done.
          evaluation: what was measured after them.
          metrics: of the rounds since the last evaluation, leaves `[seeds, rounds,
            ...]`, numpy; None: before the first round.
          seconds: of one of these rounds, of one seed.

        Returns:
          (the rows, lines for the user).
        """
        lines, chosen = [], []
        if metrics is not None:
            first = round_index - metrics.empty.shape[1] + 1
            lines = self.problems.add(first, self.seeds, metrics)
            chosen = rows.choice_rows(first, self.seeds, metrics)
        written = self._rows(round_index, evaluation, metrics, seconds)
        classes = self.experiment.data.classes
        for row, finite in zip(written, evaluation.finite):
            if metrics is None:  # what has not been trained cannot have diverged
                break
            if trouble := rows.trouble(row, classes, finite):
                lines.append(
                    f"WARNING: seed {row['seed']}: {trouble} after round {round_index};"
                    " a smaller learning_rate may help"
                )
        if processes.is_first():
            self._choices.append(*chosen)
            # Before the checkpoint, so that no row can be missing.
            self._metrics.append(*written)
            self._write_scalars(written)
        return written, lines

    def save(self, states: State, round_index: int) -> None:
        """Writes the checkpoint: the states of all seeds."""
        kept = Kept(states, round_index, self.problems, self._extended_from)
        checkpoint.save_run(self.experiment, self.run_dir, self.federation, kept)

    def finish(
        self, states: State, evaluation: Evaluation, plan: str
    ) -> dict[str, Any]:
        """What is measured once, `summary.json`, pictures; all processes get what that
        holds."""
        ending = final_measurements.after_training(
            self.experiment,
            self.federation,
            states,
            evaluation.scores,
            self.options.stream,
        )
        compile_seconds = self.federation.compile_seconds + ending.compile_seconds

        def write():
            self._write_evaluation(evaluation, ending)
            result = report.summary(
                self.experiment,
                rows=folder.metrics_rows(self.run_dir),
                problems=self.problems.to_dict(),
                finite=evaluation.finite,
                clusters=evaluation.clusters,
                ending=ending.figures | {"extended_from": self._extended_from},
                compile_seconds=compile_seconds,
                plan=plan,
                devices=list(self.federation.mesh.devices.flat),
                per_round=self._per_round,
            )
            folder.write_json(self.run_dir / folder.SUMMARY, result)
            formats = self.options.plot_formats
            if formats and not plots.draw(load_run(self.run_dir), formats):
                print("no pictures: they need matplotlib (pip install 'fedvi[plots]')")
            return result

        return processes.on_first(write)

    def _write_evaluation(self, evaluation: Evaluation, ending: Ending) -> None:
        """What the last evaluation gave, whole, and each client's figures."""
        # First: it says by which settings, should this be interrupted.
        npz_tree.save(
            self.run_dir / folder.EVALUATION,
            {"scores": evaluation.scores, **ending.arrays},
            checkpoint.measured_by(self.experiment),
        )
        if self._trained:
            self._replace_last_rows(evaluation)
            for name in folder.PICTURE_FILES:
                folder.remove(self.run_dir / name)
        self._describe(evaluation, [ending.per_client])

    def _replace_last_rows(self, evaluation: Evaluation) -> None:
        """Of a run that is measured anew: all but what the rounds themselves told."""
        last = self.config.rounds
        old = [r for r in folder.metrics_rows(self.run_dir) if r["round"] == last]
        new = self._rows(last, evaluation)
        merged = [
            {k: v if b.get(k) is None else b[k] for k, v in a.items()}
            for a, b in zip(old, new, strict=True)
        ]
        CsvFile(self.run_dir / folder.METRICS).replace_round(last, *merged)

    def _rows(
        self,
        round_index: int,
        evaluation: Evaluation,
        metrics: RoundMetrics | None = None,
        seconds: float | None = None,
    ) -> list[dict[str, Any]]:
        return rows.evaluation_rows(
            self.experiment,
            round_index=round_index,
            seeds=self.seeds,
            measured=self.federation.messages.metrics,
            metrics=metrics,
            scores=evaluation.scores,
            clusters=evaluation.clusters,
            seconds=seconds,
            per_round=self._per_round,
        )


def status(
    recorders: Sequence[Recorder], written: Sequence[dict], round_index: int
) -> str:
    """One line on an evaluation: means over the seeds of all runs."""

    def mean(key):
        known = [row[key] for row in written if row.get(key) is not None]
        return np.mean(known) if known else np.nan

    first, experiment = written[0], recorders[0].experiment
    config = experiment.config
    parts = [f"round {round_index}/{config.rounds}"]
    if len(recorders) > 1:
        parts.append(f"mean of {len(recorders)} runs")
    if first.get("loss") is not None:
        parts.append(f"loss {mean('loss'):.3f}")
    accuracies = {
        "personalised": mean("personal_accuracy"),
        "novel": mean("novel_personal_accuracy"),
    }
    known = {name: x for name, x in accuracies.items() if not np.isnan(x)}
    if experiment.algorithm.global_model:
        known = {"global": mean("global_accuracy"), **known}
    if known:  # a method without a global model has none between personalisations
        parts.append(f"{config.evaluated_on} accuracy")
        parts += [f"{name} {x:.2f} %" for name, x in known.items()]
    if "adjusted_rand" in first:
        parts.append(f"adjusted Rand {mean('adjusted_rand'):.2f}")
    if first["seconds"] is not None:
        parts.append(f"{mean('seconds'):.3f} s/round")
    return "  ".join(parts)
