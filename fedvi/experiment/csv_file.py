"""A CSV file that grows with a run and outlives a kill and a resume."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvi.experiment.files import write_atomically

__all__ = ["CsvFile"]


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

    def drop_after(self, round: int) -> None:
        """Drops the rows of later rounds, atomically; with -1 all, and the columns.

        A row that a kill cut short is dropped too.
        """
        columns, rows = self._read()
        kept = [row for row in rows if int(row["round"]) <= round]
        if kept:
            self._replace(columns, kept)
        else:
            self.path.unlink(missing_ok=True)
            self._columns = []

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
        with open(self.path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row.values()]
        columns = list(reader.fieldnames or ())
        if "round" not in columns:
            raise ValueError(
                f"{self.path} has no column 'round', so fedvi did not write it: move "
                "it away or give another --run_dir"
            )
        return columns, rows

    def _replace(self, columns: Sequence[str], rows: Sequence[Mapping]) -> None:
        text = _text(columns, rows, header=True).encode("utf-8")
        write_atomically(self.path, lambda file: file.write(text))
        self._columns = list(columns)


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
