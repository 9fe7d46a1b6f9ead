"""The files of one run folder, and the table that ends a run.

`config.json` is written first, `metrics.csv` grows by one row per evaluation and
seed, `selection.csv` by one per round and seed where clients are chosen by their
importance, `summary.json` comes last: its presence means that the run is finished.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvi.experiment.csv_file import CsvFile
from fedvi.experiment.files import remove_stale, write_atomically

__all__ = [
    "CHECKPOINT",
    "CONFIG",
    "ENTROPY_DENSITY",
    "FINETUNE_CURVE",
    "LEARNING_CURVES",
    "METRICS",
    "RELIABILITY",
    "RUN_FILES",
    "SELECTION",
    "SUMMARY",
    "UNCERTAINTY",
    "Recorder",
    "make_folder",
    "prepare",
    "table",
]

CONFIG = "config.json"
METRICS = "metrics.csv"
SELECTION = "selection.csv"
SUMMARY = "summary.json"
CHECKPOINT = "checkpoint.npz"
LEARNING_CURVES = "learning_curves.png"
RELIABILITY = "reliability.png"
UNCERTAINTY = "uncertainty.png"
FINETUNE_CURVE = "finetune_curve.png"
ENTROPY_DENSITY = "entropy_density.png"
RUN_FILES = (
    CONFIG,
    METRICS,
    SELECTION,
    SUMMARY,
    CHECKPOINT,
    LEARNING_CURVES,
    RELIABILITY,
    UNCERTAINTY,
    FINETUNE_CURVE,
    ENTROPY_DENSITY,
)

# Shown only where a row has them.
_OPTIONAL = ("accuracy_std_between_rounds",)
# Column of the table: header, key in the rows, factor, digits.
_COLUMNS = (
    ("global accuracy", "global_accuracy", 1, 2),
    ("std between rounds", "accuracy_std_between_rounds", 1, 2),
    ("personalised accuracy", "personal_accuracy", 1, 2),
    ("global ECE %", "ece", 100, 2),
    ("global NLL", "nll", 1, 3),
    ("s/round", "round_seconds", 1, 3),
)


def prepare(
    run_dir: str | Path, *, overwrite: bool = False, resume: bool = False
) -> bool:
    """Decides what to do with what already lies in the run folder.

    Args:
      run_dir: the run folder; need not exist.
      overwrite: remove the files that fedvi wrote there (`RUN_FILES`), no others.
      resume: go on with the run that lies there; with no run there, start one.

    Returns:
      True if there is a run to continue, False if a new one starts.

    Raises:
      ValueError: both flags are given, `run_dir` is a file, or it holds a run,
        finished or not, and neither flag is given.
    """
    run_dir = Path(run_dir)
    if overwrite and resume:
        raise ValueError(
            f"run_dir={run_dir}: --overwrite and --resume exclude each other; give one"
        )
    if not os.path.exists(run_dir):  # Path.exists may raise: permissions, long names
        return False
    if not run_dir.is_dir():
        raise ValueError(f"run_dir={run_dir} is a file: give the name of a folder")
    found = [name for name in RUN_FILES if (run_dir / name).exists()]
    if overwrite:
        for name in found:
            (run_dir / name).unlink()
        for name in RUN_FILES:
            remove_stale(run_dir / name)
        return False
    if found and not resume:
        state = "a finished" if SUMMARY in found else "an unfinished"
        raise ValueError(
            f"run_dir={run_dir} already holds {state} run ({', '.join(found)}): "
            "continue it with --resume, replace it with --overwrite, or give another "
            "--run_dir"
        )
    return bool(found)


def make_folder(run_dir: str | Path) -> None:
    """Makes the run folder, if missing.

    Raises:
      ValueError: it cannot be made or written to.
    """
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise ValueError(
            f"run_dir={run_dir} cannot be made or written to "
            f"({error.strerror}): give another --run_dir"
        ) from error


class Recorder:
    """Writes one run folder and reads its metrics back.

    Args:
      run_dir: made if missing. Call `prepare` first.

    Raises:
      ValueError: `metrics.csv` or `selection.csv` lies there but is not one of ours.
    """

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = CsvFile(self.run_dir / METRICS)
        self._selection = CsvFile(self.run_dir / SELECTION)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes `config.json` atomically: once, when a run starts or resumes.

        A `summary.json` of an earlier stretch goes: the run is not finished any more.
        """
        (self.run_dir / SUMMARY).unlink(missing_ok=True)
        self._write_json(CONFIG, config)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json` atomically, which marks the run as finished.

        numpy and jax values become plain ones, NaN and infinity become null.
        """
        self._write_json(SUMMARY, summary)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds one row to `metrics.csv` and flushes it to disk.

        The first row fixes the columns; `round` must be one of them. Append before
        the checkpoint of the same round is saved, so that no row can be missing.

        Raises:
          ValueError: the row's columns are not those of the file.
        """
        self._metrics.append(row)

    def append_choices(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows to `selection.csv` as `append` does to `metrics.csv`."""
        self._selection.append(*rows)

    def drop_after(self, round: int) -> None:
        """Drops both files' rows of later rounds: for a resume at `round`.

        With -1 all rows go: for a run that was killed before its first checkpoint.
        A row that the kill cut short is dropped too.
        """
        self._metrics.drop_after(round)
        self._selection.drop_after(round)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.csv`: int, float, str, or None for an empty cell."""
        return self._metrics.rows()

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(_plain(value), indent=2, allow_nan=False)
        self._write_text(name, text + "\n")

    def _write_text(self, name: str, text: str) -> None:
        write_atomically(
            self.run_dir / name, lambda file: file.write(text.encode("utf-8"))
        )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Aligned plain-text table of results, one line per method.

    Args:
      rows: one dict per method and seed: `method`, and any of `global_accuracy`,
        `personal_accuracy` (per cent), `ece` (fraction, shown in per cent), `nll`
        (nats), `round_seconds`. A value that is absent or None is shown as "-".
        `accuracy_std_between_rounds` (per cent) has a column where a row has it.

    Returns:
      The table. With several seeds of a method, mean ± sample standard deviation
      (divisor seeds - 1) over them.
    """
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        methods.setdefault(str(row["method"]), []).append(row)
    columns = [
        column
        for column in _COLUMNS
        if column[1] not in _OPTIONAL or any(column[1] in row for row in rows)
    ]
    lines = [["method", *(header for header, *_ in columns)]]
    for method, seeds in methods.items():
        lines.append(
            [method]
            + [
                _mean_std([row.get(key) for row in seeds], factor, digits)
                for _, key, factor, digits in columns
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        )
        for line in lines
    )


def _mean_std(values: Sequence[Any], factor: float, digits: int) -> str:
    numbers = factor * np.asarray([v for v in values if v is not None], np.float64)
    if numbers.size == 0:
        return "-"
    text = f"{numbers.mean():.{digits}f}"
    if numbers.size > 1:
        with np.errstate(invalid="ignore"):  # a diverged seed: inf - inf is NaN
            text += f" ± {numbers.std(ddof=1):.{digits}f}"
    return text


def _plain(value: Any) -> Any:
    """Plain Python values that JSON can express."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
