"""How far predictions can be trusted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedvi.evaluation import Scores, reliability
from fedvi.plots import runs as of_runs
from fedvi.plots.canvas import COLOURS, PANEL, legend, look, picture
from fedvi.plots.runs import Runs, named, title

__all__ = ["reliability_diagram"]


def reliability_diagram(runs: Runs, path: str | Path | None = None) -> Any:
    """Draws accuracy against confidence per bin, one column per model.

    Above: accuracy against mean confidence of every bin that holds examples, with the
    diagonal of perfect calibration; of one method the gap to it is shaded, and the
    heading has the ECE, mean over seeds. A dot's area grows with its bin's share of
    the examples, which is below.
    Examples of all seeds and of the clients that took part in training are pooled.

    Args:
      runs: as of `learning_curves`.
      path: file to write, .png, .svg or .pdf; None: none.

    Returns:
      The matplotlib figure.

    Raises:
      ValueError: another suffix, or no run.
      ImportError: matplotlib is not installed.
    """
    groups = named(runs)
    tables = {name: _tables(own) for name, own in groups.items()}
    models = list(dict.fromkeys(model for own in tables.values() for model in own))
    with picture(path, title(groups)) as figure:
        width, height = PANEL
        figure.set_size_inches(width * max(len(models), 1.5), 0.4 + 1.6 * height)
        axes = figure.subplots(
            2, len(models), squeeze=False, sharex=True, height_ratios=(3, 1)
        )
        handles = {}
        for model, (above, below) in zip(models, axes.T):
            for number, own in enumerate(tables.values()):
                if model in own:
                    found = _diagram(above, below, own[model], number, len(groups) == 1)
                    handles.setdefault(list(groups)[number], found)
            diagonal = above.plot([0, 1], [0, 1], "--", color="0.4", lw=0.8, zorder=1)
            above.set(xlim=(0, 1), ylim=(0, 1), title=_heading(groups, model))
            below.set_xlabel("confidence")
        axes[0, 0].set_ylabel("accuracy")
        axes[1, 0].set_ylabel("share (%)")
        legend(figure, {**handles, "perfect calibration": diagonal[0]})
    return figure


def _tables(runs: Sequence[Any]) -> dict[str, Mapping[str, np.ndarray]]:
    """Model to its figures per bin, all seeds as if they were one seed's clients."""
    parts: dict[str, list[Scores]] = {}
    for run in runs:
        ids = of_runs.trained(run)
        for model, own in of_runs.scores(run).items():
            flat = [leaf[:, ids].reshape(-1, *leaf.shape[2:]) for leaf in own]
            parts.setdefault(model, []).append(Scores(*flat))
    return {
        model: reliability(jax.tree.map(lambda *leaves: np.concatenate(leaves), *own))
        for model, own in parts.items()
    }


def _heading(groups: Mapping[str, Sequence[Any]], model: str) -> str:
    if len(groups) > 1:
        return model
    [runs] = groups.values()
    error = np.mean([s[model]["ece"] for r in runs for s in r.summary["per_seed"]])
    return f"{model}: ECE {100 * error:.2f} %"


def _diagram(
    above: Any, below: Any, figures: Mapping[str, np.ndarray], number: int, alone: bool
) -> Any:
    """Draws one curve and its histogram; returns its line."""
    full = figures["count"] > 0
    # A model whose predictions are all NaN has empty bins: its diagram is empty too.
    share = figures["count"] / max(figures["count"].sum(), 1.0)
    accuracy, confidence = figures["accuracy"][full], figures["confidence"][full]
    style = look(number)
    if alone:
        above.vlines(
            confidence, confidence, accuracy, color=COLOURS[1], lw=4, alpha=0.35
        )
    (line,) = above.plot(confidence, accuracy, **style)
    above.scatter(
        confidence,
        accuracy,
        s=4 + 40 * share[full],
        color=style["color"],
        clip_on=False,
        zorder=3,
    )
    edges = np.linspace(0.0, 1.0, len(share) + 1)
    below.stairs(
        100 * share,
        edges,
        fill=alone,
        alpha=0.6 if alone else 1.0,
        color=style["color"],
        ls=style["linestyle"],
    )
    return line
