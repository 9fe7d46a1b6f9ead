"""The files of one run folder, and the table that ends a run.

`config.json` is written first, `metrics.csv` grows by one row per evaluation and
seed, `summary.json` comes last: its presence means that the run is finished.
"""

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
    "SUMMARY",
    "UNCERTAINTY",
    "Recorder",
    "make_folder",
    "prepare",
    "table",
]

CONFIG = "config.json"
METRICS = "metrics.csv"
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
    SUMMARY,
    CHECKPOINT,
    LEARNING_CURVES,
    RELIABILITY,
    UNCERTAINTY,
    FINETUNE_CURVE,
    ENTROPY_DENSITY,
)

# Column of the table: header, key in the rows, factor, digits.
_COLUMNS = (
    ("global accuracy", "global_accuracy", 1, 2),
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
      ValueError: `metrics.csv` lies there but is not one of ours.
    """

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._columns = self._read()[0]

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
        columns = self._columns or list(row)
        if "round" not in row or set(row) != set(columns):
            raise ValueError(
                f"row with columns {sorted(row)} does not fit {METRICS}, which needs "
                f"{sorted({'round', *columns})}; give every row the same columns"
            )
        if not self._columns:
            self._write_text(METRICS, _csv_text(columns, [row], header=True))
            self._columns = columns
            return
        with open(self.run_dir / METRICS, "a", encoding="utf-8", newline="") as file:
            file.write(_csv_text(columns, [row], header=False))
            file.flush()
            os.fsync(file.fileno())

    def drop_after(self, round: int) -> None:
        """Drops the rows of later rounds, atomically: for a resume at `round`.

        With -1 all rows go: for a run that was killed before its first checkpoint.
        A row that the kill cut short is dropped too.
        """
        columns, rows = self._read()
        kept = [row for row in rows if int(row["round"]) <= round]
        if kept:
            self._write_text(METRICS, _csv_text(columns, kept, header=True))
        else:
            (self.run_dir / METRICS).unlink(missing_ok=True)
            self._columns = []

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.csv`: int, float, str, or None for an empty cell."""
        return [
            {key: _parse(value) for key, value in row.items()}
            for row in self._read()[1]
        ]

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and complete rows as text; no columns if there is no file yet."""
        path = self.run_dir / METRICS
        if not path.exists() or path.stat().st_size == 0:
            return [], []
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row.values()]
        columns = list(reader.fieldnames or ())
        if "round" not in columns:
            raise ValueError(
                f"{path} has no column 'round', so fedvi did not write it: move it "
                "away or give another --run_dir"
            )
        return columns, rows

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

    Returns:
      The table. With several seeds of a method, mean ± sample standard deviation
      (divisor seeds - 1) over them.
    """
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        methods.setdefault(str(row["method"]), []).append(row)
    lines = [["method", *(header for header, *_ in _COLUMNS)]]
    for method, seeds in methods.items():
        lines.append(
            [method]
            + [
                _mean_std([row.get(key) for row in seeds], factor, digits)
                for _, key, factor, digits in _COLUMNS
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


def _csv_text(columns: Sequence[str], rows: Sequence[Mapping], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _parse(text: str) -> Any:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return text or None


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
