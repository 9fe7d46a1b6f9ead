"""Densities of the predictive entropy, one curve per client."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedvi.experiment.plots.figure import COLOURS, new_figure, save, tidy

__all__ = ["entropy_density", "kernel_density"]

_POINTS = 200


def entropy_density(
    path: str | Path,
    inside: Sequence[np.ndarray],
    outside: Sequence[np.ndarray],
    *,
    classes: int,
    title: str = "",
) -> bool:
    """Draws the entropies of every client (FedABML Fig. 5).

    Left, those of its own test data; right, those of out-of-distribution inputs; on
    one scale, from 0 to log(classes). Clients without values have no curve.

    Args:
      path: the PNG to write.
      inside: entropies of each client, nats.
      outside: the same, out of distribution.
      classes: number of classes.
      title: over the figure.

    Returns:
      False if matplotlib is not installed (the `plots` extra): nothing is drawn.
    """
    figure = new_figure(9.0, 4.0)
    if figure is None:
        return False
    largest = float(np.log(classes))
    grid = np.linspace(0.0, largest, _POINTS)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, clients, where in zip(axes, (inside, outside), ("in", "out of")):
        for number, values in enumerate(clients):
            values = values[np.isfinite(values)]
            if values.size:
                colour = COLOURS[number % len(COLOURS)]
                density = kernel_density(values, grid, largest)
                axis.plot(grid, density, color=colour, lw=1, alpha=0.6)
        axis.set(xlabel="entropy (nats)", xlim=(0.0, largest))
        axis.set_title(f"{where} distribution")
        tidy(axis)
    axes[0].set_ylabel("density, one curve per client")
    axes[0].set_ylim(bottom=0.0)
    figure.suptitle(title)
    save(figure, path)
    return True


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
