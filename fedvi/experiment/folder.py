"""The run folder: its files, written so that a kill never leaves half of one.

`config.json` is written first, and `clients.csv`, which says who the clients are.
`metrics.csv` grows by one row per evaluation and seed, `selection.csv` by one per round
and seed where clients are chosen by their importance. At the end come what the last
evaluation gave, `evaluation.npz`, and each client's figures in `clients.csv`;
`summary.json` comes last: its presence means that the run is finished.
"""

import contextlib
import csv
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "CHECKPOINT",
    "CLIENTS",
    "CONFIG",
    "EVALUATION",
    "FORMATS",
    "METRICS",
    "PICTURES",
    "PICTURE_FILES",
    "RUN_FILES",
    "SELECTION",
    "STORE",
    "SUMMARY",
    "VERSION",
    "CsvFile",
    "clients_rows",
    "damaged",
    "make",
    "metrics_rows",
    "prepare",
    "read_json",
    "remove",
    "write_atomically",
    "write_csv",
    "write_json",
    "writing",
]

CONFIG = "config.json"
VERSION = "fedvi"  # in it: the version that wrote it
CLIENTS = "clients.csv"
METRICS = "metrics.csv"
SELECTION = "selection.csv"
SUMMARY = "summary.json"
CHECKPOINT = "checkpoint.npz"
EVALUATION = "evaluation.npz"
STORE = "clients"  # a folder: clients' states of a stream
PICTURES = (
    "learning_curves",
    "uncertainty",
    "reliability",
    "per_client",
    "finetune_curve",
    "entropy_density",
    "conformal",
    "risk_coverage",
)
FORMATS = ("png", "svg", "pdf")
PICTURE_FILES = tuple(f"{name}.{suffix}" for name in PICTURES for suffix in FORMATS)
RUN_FILES = (
    CONFIG,
    CLIENTS,
    METRICS,
    SELECTION,
    SUMMARY,
    CHECKPOINT,
    EVALUATION,
    STORE,
    *PICTURE_FILES,
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
      ValueError: `run_dir` is a file, or it holds a run, finished or not, and neither
        flag is given.
    """
    run_dir = Path(run_dir)
    if not os.path.exists(run_dir):  # Path.exists may raise: permissions, long names
        return False
    if not run_dir.is_dir():
        raise ValueError(f"run_dir={run_dir} is a file: give the name of a folder")
    found = [name for name in RUN_FILES if (run_dir / name).exists()]
    if overwrite:
        for name in RUN_FILES:
            remove(run_dir / name)
        return False
    if found and not resume:
        state = "a finished" if SUMMARY in found else "an unfinished"
        raise ValueError(
            f"run_dir={run_dir} already holds {state} run ({', '.join(found)}): "
            "continue it with --resume, replace it with --overwrite, or give another "
            "--run_dir"
        )
    return bool(found)


def make(run_dir: str | Path) -> None:
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


@contextlib.contextmanager
def writing(run_dir: str | Path) -> Iterator[None]:
    """Says in one line that the run folder could not be written to.

    Raises:
      ValueError: for an `OSError`, such as a full disk, a quota, a drive that is gone.
    """
    try:
        yield
    except BrokenPipeError:  # nobody reads what is printed
        raise
    except OSError as error:
        name = f"{Path(os.fsdecode(error.filename)).name}: " if error.filename else ""
        saved, remedy = "nothing was saved yet", "go on with --resume"
        if os.path.exists(Path(run_dir) / SUMMARY):
            saved, remedy = "only pictures are missing", "draw them by `fedvi report`"
        elif os.path.exists(Path(run_dir) / CHECKPOINT):
            saved = "its last checkpoint is whole"
        raise ValueError(
            f"run_dir={run_dir} cannot be written to ({name}"
            f"{error.strerror or error}): {saved}; see that there is room, then "
            f"{remedy}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote.

    Raises:
      ValueError: the file is not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(damaged(path, error)) from error
    if not isinstance(value, dict):
        raise ValueError(damaged(path, "not a JSON object"))
    return value


def damaged(path: Path, why: object) -> str:
    """What to say of a file of the run folder that was edited or cut short."""
    remedy = "start again with --overwrite"
    if path.name == SUMMARY:
        remedy = "delete it, and --resume writes it from the checkpoint"
    return f"{path} was changed or cut short ({why}): put it back, or {remedy}"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows of the same columns, at least one, atomically."""
    text = _text(list(rows[0]), rows, header=True).encode("utf-8")
    write_atomically(path, lambda file: file.write(text))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON atomically: numpy and jax values become plain ones, NaN and infinity
    null."""
    text = json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))


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


def write_atomically(path: str | Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replaces `path` by what `write` puts into the binary file it is given.

    A temporary file in the same folder is flushed to disk, renamed over `path`, and
    the folder is flushed. The folder must be there: one that is gone, as with a drive,
    must not come back as another one. One process at a time may write to `path`:
    temporary files of killed predecessors are removed.
    """
    path = Path(path)
    _remove_stale(path)
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove(path: Path) -> None:
    """Removes a file or a folder, if there is one, and what killed writers left."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    _remove_stale(path)


def _remove_stale(path: Path) -> None:
    if path.parent.is_dir():
        for file in path.parent.glob(f"{path.name}.tmp.*"):
            file.unlink(missing_ok=True)


class CsvFile:
    """Rows of one set of columns, `round` among them.

    Args:
      path: of the file; its folder exists.

    Raises:
      ValueError: a file lies there that is not one of ours.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._columns = self._read()[0]

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Adds rows and flushes them to disk; the first one fixes the columns.

        Raises:
          ValueError: a row's columns are not those of the file.
        """
        if not rows:
            return
        columns = self._columns or list(rows[0])
        for row in rows:
            if "round" not in row or set(row) != set(columns):
                raise ValueError(
                    f"row with columns {sorted(row)} does not fit {self.path.name}, "
                    f"which needs {sorted({'round', *columns})}; give every row the "
                    "same columns"
                )
        if not self._columns:
            self._replace(columns, rows)
            return
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.write(_text(columns, rows, header=False))
            file.flush()
            os.fsync(file.fileno())

    def drop_after(self, round_index: int) -> None:
        """Drops the rows of later rounds, atomically; with -1 all, and the columns.

        A row that a kill cut short is dropped too.
        """
        columns, rows = self._read()
        kept = [row for row in rows if int(row["round"]) <= round_index]
        if kept:
            self._replace(columns, kept)
        else:
            self.path.unlink(missing_ok=True)
            self._columns = []

    def replace_round(self, round_index: int, *rows: Mapping[str, Any]) -> None:
        """Puts rows in the place of those of a round, the last one, atomically."""
        columns, found = self._read()
        before = [row for row in found if int(row["round"]) < round_index]
        self._replace(columns, [*before, *rows])

    def rows(self) -> list[dict[str, Any]]:
        """The rows: int, float, str, or None for an empty cell."""
        return [
            {key: _parse(value) for key, value in row.items()}
            for row in self._read()[1]
        ]

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and complete rows as text; no columns if there is no file yet."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return [], []
        try:
            with open(self.path, encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if None not in row.values()]
        except (ValueError, csv.Error) as error:
            raise ValueError(damaged(self.path, error)) from error
        columns = list(reader.fieldnames or ())
        if "round" not in columns:
            raise ValueError(
                f"{self.path} has no column 'round', so fedvi did not write it: move "
                "it away or give another --run_dir"
            )
        for row in rows:
            if None in row or not row["round"].isdecimal():
                raise ValueError(damaged(self.path, f"round {row['round']!r}"))
        return columns, rows

    def _replace(self, columns: Sequence[str], rows: Sequence[Mapping]) -> None:
        write_csv(self.path, [{key: row[key] for key in columns} for row in rows])
        self._columns = list(columns)


def metrics_rows(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of `metrics.csv`.

    Raises:
      ValueError: a cell that fedvi did not write.
    """
    path = Path(run_dir) / METRICS
    rows = CsvFile(path).rows()
    for row in rows:
        for key, value in row.items():
            if isinstance(value, str) and key != "split":
                where = f"round {row['round']}, column {key}: {value!r}"
                raise ValueError(damaged(path, where))
    return rows


def clients_rows(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of `clients.csv`. An `id` is text, unless all are whole numbers.

    Raises:
      ValueError: it is missing, damaged or not one of ours.
    """
    path = Path(run_dir) / CLIENTS
    try:
        with open(path, encoding="utf-8", newline="") as file:
            found = list(csv.DictReader(file))
        names = [row["id"] for row in found]
        whole = all(name == str(_parse(name)) and name.isdecimal() for name in names)
        return [
            {k: _parse(v) if k != "id" or whole else v for k, v in row.items()}
            for row in found
        ]
    except (OSError, ValueError, csv.Error, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(damaged(path, why)) from error


def _text(columns: Sequence[str], rows: Sequence[Mapping], *, header: bool) -> str:
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
