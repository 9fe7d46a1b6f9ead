"""TensorBoard event files, written by tensorboardX (extra: `tensorboard`)."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from fedvi.experiment.config import RunOptions

__all__ = ["check", "writer"]


def check(options: RunOptions) -> None:
    """Raises `ValueError` if event files are asked for and cannot be written."""
    if options.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "tensorboard=True needs tensorboardX: pip install 'fedvi[tensorboard]'"
        )


def writer(options: RunOptions, done: int) -> Callable[[Mapping[str, Any]], None]:
    """A function that writes a row of `metrics.csv` as scalars; without
    `options.tensorboard` it does nothing.

    Args:
      options: of the run.
      done: rounds done before; what an earlier stretch wrote after them is dropped.
    """
    if not options.tensorboard:
        return lambda row: None
    from tensorboardX import SummaryWriter

    events = SummaryWriter(options.run_dir, purge_step=done + 1)

    def write(row):
        for key, value in row.items():
            if isinstance(value, float):
                events.add_scalar(f"{key}/seed_{row['seed']}", value, row["round"])
        events.flush()

    return write
