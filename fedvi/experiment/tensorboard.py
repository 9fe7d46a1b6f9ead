"""TensorBoard event files, written by tensorboardX (extra: `tensorboard`)."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedvi.experiment.run_options import RunOptions

__all__ = ["check", "writer"]


def check(options: RunOptions) -> None:
    """Raises `ValueError` if event files are asked for and cannot be written."""
    if options.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "tensorboard=True needs tensorboardX: pip install 'fedvi[tensorboard]'"
        )


@contextlib.contextmanager
def writer(
    options: RunOptions, done: int
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Gives a function that writes a row of `metrics.csv` as scalars; without
    `options.tensorboard` it does nothing.

    Args:
      options: of the run.
      done: rounds done before; what an earlier stretch wrote after them is dropped.
    """
    if not options.tensorboard:
        yield lambda row: None
        return
    from tensorboardX import SummaryWriter

    def write(row):
        for key, value in row.items():
            if isinstance(value, float):
                events.add_scalar(f"{key}/seed_{row['seed']}", value, row["round"])

    with SummaryWriter(options.run_dir, purge_step=done + 1) as events:
        yield write
