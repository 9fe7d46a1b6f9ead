"""Several runs side by side, in the folder that holds theirs: one plot, one table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvi.experiment import plots, recorder
from fedvi.experiment.csv_file import CsvFile
from fedvi.experiment.files import remove_stale, write_atomically
from fedvi.experiment.run_options import RunOptions

__all__ = ["PLOT", "TABLE", "clear", "folder_of", "prepare", "write"]

PLOT = "comparison.png"
TABLE = "comparison.txt"


def folder_of(options: Sequence[RunOptions]) -> Path | None:
    """The folder that holds the run folders of several runs; None: there is none."""
    folders = [Path(one.run_dir) for one in options]
    several = len({folder.resolve() for folder in folders}) > 1
    together = len({folder.resolve().parent for folder in folders}) == 1
    return folders[0].parent if several and together else None


def prepare(folder: Path, options: Sequence[RunOptions]) -> None:
    """Raises `ValueError` if a comparison lies there and no run may replace anything.

    Args:
      folder: of `folder_of`.
      options: of the runs.
    """
    found = [name for name in (PLOT, TABLE) if (folder / name).exists()]
    if found and not any(one.overwrite or one.resume for one in options):
        raise ValueError(
            f"{folder} already holds a comparison of runs ({', '.join(found)}): "
            "replace it with --overwrite, add to its runs with --resume, or give "
            "another --run_dir"
        )


def clear(folder: Path) -> None:
    """Removes an older comparison, which would outlive a run that is interrupted."""
    for name in (PLOT, TABLE):
        if (folder / name).exists():
            (folder / name).unlink()
    if folder.is_dir():
        for name in (PLOT, TABLE):
            remove_stale(folder / name)


def write(
    folder: Path,
    options: Sequence[RunOptions],
    summaries: Sequence[Mapping[str, Any]],
    text: str,
) -> None:
    """Writes the plot and the table. Says so, and no more, if that cannot be done:
    the runs are finished.

    Args:
      folder: of `folder_of`.
      options: of the runs, whose `metrics.csv` are read.
      summaries: what the `summary.json` of each holds.
      text: the closing table with its title.
    """
    first = summaries[0]
    try:
        write_atomically(folder / TABLE, lambda file: file.write(f"{text}\n".encode()))
        rows = _rows(options, summaries)
        if rows:
            title = f"{first['dataset']}, {first['evaluated_on']} data"
            plots.comparison_curves(folder / PLOT, rows, title=title)
    except (OSError, ValueError) as error:
        print(f"no comparison in {folder}: {error}")


def _rows(
    options: Sequence[RunOptions], summaries: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of all runs, each with its `method`."""
    names = [summary["method"] for summary in summaries]
    if len(set(names)) < len(names):  # runs of one method with different settings
        names = [Path(one.run_dir).name for one in options]
    return [
        {"method": name, **row}
        for name, one in zip(names, options)
        for row in CsvFile(Path(one.run_dir) / recorder.METRICS).rows()
    ]
