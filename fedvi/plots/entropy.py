"""What the personalised models make of inputs unlike those that they learned from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvi.plots.canvas import COLOURS, PANEL, picture
from fedvi.plots.runs import Runs, named, title, trained

__all__ = ["entropy_density", "kernel_density"]

_POINTS = 200
_MOST = 200  # clients whose curves are drawn: more are a black area, and slow


def entropy_density(runs: Runs, path: str | Path | None = None) -> Any:
    """Draws the entropies of every client (FedABML Fig. 5), one row per method.

    Left, those of its own test data; right, those of out-of-distribution inputs; from 0
    to log(classes), all seeds together. Clients that took no part in training, or have
    no values, have no curve; of more than 200, as many are drawn, evenly spaced by id.

    Args:
      runs: as of `learning_curves`; they ran with `--ood_dataset`.
      path: file to write, .png, .svg or .pdf; None: none.

    Returns:
      The matplotlib figure.

    Raises:
      ValueError: another suffix, no run, or none with out-of-distribution inputs.
      ImportError: matplotlib is not installed.
    """
    groups = named(runs)
    rows = {
        name: [r for r in own if r.evaluation.get("ood") is not None]
        for name, own in groups.items()
    }
    rows = {name: own for name, own in rows.items() if own}
    if not rows:
        raise ValueError("runs have no out-of-distribution inputs: use --ood_dataset")
    first = next(iter(rows.values()))[0]
    largest = float(np.log(first.summary["classes"]))
    width, height = PANEL
    with picture(path, title(groups)) as figure:
        figure.set_size_inches(2 * width, 0.4 + height * len(rows))
        axes = figure.subplots(len(rows), 2, squeeze=False, sharex=True)
        for (name, own), row in zip(rows.items(), axes):
            for side, axis in enumerate(row):
                _side(axis, own, side, largest)
                axis.set_ylim(bottom=0.0)
            row[0].set_ylabel(f"{name}: density" if len(rows) > 1 else "density")
        for axis, name in zip(axes[0], ("own test data", first.config.ood_name)):
            axis.set_title(f"{name}, a curve per client")
        for axis in axes[-1]:
            axis.set(xlabel="entropy (nats)", xlim=(0.0, largest))
    return figure


def _side(axis: Any, runs: Sequence[Any], side: int, largest: float) -> None:
    """Draws a curve per client, of the inputs inside (0) or outside (1)."""
    grid = np.linspace(0.0, largest, _POINTS)
    clients = trained(runs[0])
    if clients.size > _MOST:
        clients = clients[np.linspace(0, clients.size - 1, _MOST).astype(int)]
    for client in clients:
        values = []
        for run in runs:
            own = run.evaluation["ood"][side]
            values.append(own.entropy[:, client][own.mask[:, client]])
        values = np.concatenate(values)
        values = values[np.isfinite(values)]
        if values.size:
            colour = COLOURS[client % len(COLOURS)]
            density = kernel_density(values, grid, largest)
            axis.plot(grid, density, color=colour, lw=0.8, alpha=0.6)


def kernel_density(values: np.ndarray, grid: np.ndarray, largest: float) -> np.ndarray:
    """Gaussian kernel density of values in [0, largest], reflected at both ends.

    Without the reflection most of a sure model's mass would lie below entropy 0.
    Bandwidth: Silverman's 0.9 · min(σ, IQR / 1.34) · n^(-1/5), and at least 1 % of
    the range, so that equal values have a density too.

    Args:
      values: `[n]`.
      grid: `[points]` where to evaluate.
      largest: upper end of the range.

    Returns:
      `[points]`; the integral over the range is 1.
    """
    quartiles = np.percentile(values, [25, 75])
    spread = min(np.std(values), np.diff(quartiles)[0] / 1.34)
    bandwidth = max(0.9 * spread * values.size**-0.2, 0.01 * largest)
    mirrored = np.concatenate([values, -values, 2 * largest - values])
    # Point by point: all at once is much memory for clients with many examples.
    total = [np.exp(-0.5 * ((x - mirrored) / bandwidth) ** 2).sum() for x in grid]
    return np.asarray(total) / (values.size * bandwidth * np.sqrt(2 * np.pi))
