"""Reliability diagrams with their confidence histograms."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedvi.experiment.plots.figure import COLOURS, add_legend, new_figure, save, tidy

__all__ = ["reliability_diagram"]


def reliability_diagram(
    path: str | Path,
    models: Mapping[str, Mapping[str, np.ndarray]],
    *,
    ece: Mapping[str, float] | None = None,
    title: str = "",
) -> bool:
    """Draws accuracy against confidence per bin, one column per model.

    Above: accuracy per bin, the gap to the mean confidence, the diagonal of perfect
    calibration, and the ECE in the title. Below: the share of examples in each bin,
    with the mean confidence and the accuracy as lines.

    Args:
      path: the PNG to write.
      models: name to what `fedvi.evaluation.reliability` returns, for instance
        `{"global": ..., "personal": ...}`.
      ece: name to the ECE to write above its diagram, a fraction, for instance the
        mean over seeds; default: the one of the table that is drawn.
      title: over the figure.

    Returns:
      False if matplotlib is not installed (the `plots` extra): nothing is drawn.

    Raises:
      ValueError: there is no model.
    """
    if not models:
        raise ValueError("models is empty: give at least one reliability table")
    figure = new_figure(4.2 * len(models), 5.2)
    if figure is None:
        return False
    axes = figure.subplots(
        2, len(models), squeeze=False, sharex=True, height_ratios=(3, 1)
    )
    for (name, figures), (above, below) in zip(models.items(), axes.T):
        error = _reliability_column(figures, above, below)
        shown = error if ece is None else ece[name]
        above.set_title(f"{name}: ECE {100 * shown:.2f} %")
    handles, labels = [], []
    for axis in axes[:, 0]:
        more = axis.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    add_legend(figure, handles, labels, columns=min(3, len(models) + 1))
    figure.suptitle(title)
    save(figure, path)
    return True


def _reliability_column(
    figures: Mapping[str, np.ndarray], above: Any, below: Any
) -> float:
    """Draws one model's two axes; returns its ECE, a fraction."""
    full = figures["count"] > 0
    # A model whose predictions are all NaN has empty bins: its diagram is empty too.
    share = figures["count"] / max(figures["count"].sum(), 1.0)
    edges = np.linspace(0.0, 1.0, len(share) + 1)
    width = edges[1]
    centre = edges[:-1][full] + width / 2
    accuracy, confidence = figures["accuracy"][full], figures["confidence"][full]
    gap = np.abs(confidence - accuracy)

    above.bar(centre, accuracy, width, color=COLOURS[4], ec="white", label="accuracy")
    above.bar(
        centre,
        gap,
        width,
        bottom=np.minimum(accuracy, confidence),
        facecolor="#D55E0040",
        edgecolor=COLOURS[1],
        hatch="///",
        linewidth=0.8,
        label="gap to confidence",
    )
    above.plot([0, 1], [0, 1], "--", color="0.4", lw=1, label="perfect calibration")
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    below.bar(edges[:-1] + width / 2, 100 * share, width, color="0.7", ec="white")
    means = {"mean accuracy": (accuracy, "-"), "mean confidence": (confidence, ":")}
    for label, (values, style) in means.items():
        below.axvline(
            np.sum(share[full] * values), ls=style, color="black", lw=1.2, label=label
        )
    below.set(xlabel="confidence", ylabel="examples (%)")
    tidy(above)
    tidy(below)
    return float(np.sum(share[full] * gap)) if full.any() else np.nan
