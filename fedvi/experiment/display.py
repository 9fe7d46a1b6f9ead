"""What is seen while a run goes on: a bar or lines, and TensorBoard's event files."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedvi.experiment import processes
from fedvi.experiment.config import RunOptions

__all__ = ["RunProgress", "event_files"]

# Rich forgets speeds older than this; a block of rounds may take minutes.
_SPEED_PERIOD_SECONDS = 3600.0


class RunProgress:
    """Context manager that shows how far a run is: a bar with the time left on a
    terminal, one line per evaluation elsewhere.

    Args:
      title: stands before the bar.
      rounds: rounds of the whole run.
      done: rounds done before.
      console: default: standard output.
    """

    def __init__(
        self, title: str, rounds: int, done: int = 0, console: Console | None = None
    ):
        self._console = console or Console(soft_wrap=True)
        self._bar = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=self._console,
                speed_estimate_period=_SPEED_PERIOD_SECONDS,
            )
            self._task = self._bar.add_task(
                title, total=rounds, completed=done, status=""
            )

    def __enter__(self):
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception):
        if self._bar is not None:
            self._bar.stop()

    def advance(self, rounds: int, status: str) -> None:
        """`rounds` more are done; `status` is one line on how they went."""
        if self._bar is None:
            self.print(status)
        else:
            self._bar.update(self._task, advance=rounds, status=status)

    def print(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def event_files(
    options: RunOptions, done: int
) -> Iterator[Callable[[Sequence[Mapping[str, Any]]], None]]:
    """Gives a function that writes rows of `metrics.csv` as TensorBoard scalars; it
    does nothing without `options.tensorboard`.

    Args:
      options: of the run.
      done: rounds done before; what an earlier stretch wrote after them is dropped.
    """
    if not options.tensorboard or not processes.is_first():
        yield lambda rows: None
        return
    from tensorboardX import SummaryWriter

    def write(rows):
        for row in rows:
            for key, value in row.items():
                if isinstance(value, float):
                    events.add_scalar(f"{key}/seed_{row['seed']}", value, row["round"])

    with SummaryWriter(options.run_dir, purge_step=done + 1) as events:
        yield write
