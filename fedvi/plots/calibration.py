"""How far predictions can be trusted."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedvi.evaluation import Scores, reliability
from fedvi.plots import runs as of_runs
from fedvi.plots.canvas import COLOURS, PANEL, SEEDS, band, legend, look, picture
from fedvi.plots.runs import Runs, named, title

__all__ = ["reliability_diagram", "risk_coverage"]


def reliability_diagram(runs: Runs, path: str | Path | None = None) -> Any:
    """Draws accuracy against confidence per bin, one column per model.

    Above: accuracy against mean confidence of every bin that holds examples, with the
    diagonal of perfect calibration. Of one method the gap to it is shaded, the heading
    has the ECE, mean over seeds, and dashed is the model at the temperature of all
    clients' calibration data, where there are such. A dot's area grows with its bin's
    share of the examples, which is below.
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
    alone = len(groups) == 1
    tables_after = _tables(next(iter(groups.values())), of_runs.recalibrated)
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
                    found = _diagram(above, below, own[model], number, alone)
                    handles.setdefault(list(groups)[number], found)
            if alone and (after := tables_after.get(model)):
                line = {"color": COLOURS[2], "ls": "--", "marker": "o", "ms": 2}
                full = after["count"] > 0
                points = after["confidence"][full], after["accuracy"][full]
                (handles["recalibrated"],) = above.plot(*points, **line)
            diagonal = above.plot([0, 1], [0, 1], "--", color="0.4", lw=0.8, zorder=1)
            above.set(xlim=(0, 1), ylim=(0, 1), title=_heading(groups, model))
            below.set_xlabel("confidence")
        axes[0, 0].set_ylabel("accuracy")
        axes[1, 0].set_ylabel("share (%)")
        handles["perfect calibration"] = diagonal[0]
        legend(figure, handles, groups)
    return figure


def _tables(
    runs: Sequence[Any], scores: Callable = of_runs.scores
) -> dict[str, Mapping[str, np.ndarray]]:
    """Model to its figures per bin, all seeds as if they were one seed's clients."""
    parts: dict[str, list[Scores]] = {}
    for run in runs:
        ids = of_runs.trained(run)
        for model, own in scores(run).items():
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
    shown = [_mean(runs, lambda one: one[model]["ece"])]
    if all(run.summary.get("recalibration") for run in runs):
        shown.append(
            _mean(runs, lambda one: one[model]["global"]["ece"], "recalibration")
        )
    return f"{model}: ECE {' → '.join(f'{100 * error:.2f}' for error in shown)} %"


def _mean(runs: Sequence[Any], figure: Callable, of: str | None = None) -> float:
    """Over the seeds of all runs, of what `summary.json` has under a name."""
    figures = [(run.summary[of] if of else run.summary)["per_seed"] for run in runs]
    # None stands for NaN in JSON.
    return np.array([figure(one) for seeds in figures for one in seeds], float).mean()


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


def risk_coverage(runs: Runs, path: str | Path | None = None) -> Any:
    """Draws the error of a model that answers only where it is sure enough.

    Share of errors among the most confident examples against their share of all, a
    column per model, pooled over the clients that took part in training; mean over the
    seeds, shaded ± std. Of one method the heading has the area under the curve.

    Args:
      runs: as of `learning_curves`; they ran with `--risk_coverage` or
        `--calibration_fraction`.
      path: file to write, .png, .svg or .pdf; None: none.

    Returns:
      The matplotlib figure.

    Raises:
      ValueError: another suffix, no run, or none with such a curve.
      ImportError: matplotlib is not installed.
    """
    groups = {
        name: own
        for name, runs_of_name in named(runs).items()
        if (own := [r for r in runs_of_name if r.evaluation.get("risk_coverage")])
    }
    models = [
        model
        for model in ("global", "personal")
        if any(model in own[0].evaluation["risk_coverage"] for own in groups.values())
    ]
    if not models:
        raise ValueError("runs have no risk-coverage curve: run with --risk_coverage")
    with picture(path, title(groups)) as figure:
        width, height = PANEL
        figure.set_size_inches(width * max(len(models), 1.5), 0.4 + 1.1 * height)
        axes = figure.subplots(1, len(models), squeeze=False)[0]
        handles: dict[str, Any] = {}
        for model, axis in zip(models, axes):
            axis.set(title=model, xlabel="examples answered (%)")
            if len(groups) == 1:
                [own] = groups.values()
                area = _mean(own, lambda one, m=model: one[m]["aurc"], "risk_coverage")
                axis.set_title(f"{model}: AURC {100 * area:.2f} %")
            for number, (name, own) in enumerate(groups.items()):
                curves = [r.evaluation["risk_coverage"].get(model) for r in own]
                if curves[0] is None:
                    continue
                risk = 100 * np.concatenate([one["risk"] for one in curves])
                answered, line = 100 * curves[0]["coverage"][0], look(number)
                mean = risk.mean(axis=0)
                (handles[name],) = axis.plot(answered, mean, **line)
                if len(risk) > 1:
                    std = risk.std(axis=0, ddof=1)
                    about = np.maximum(mean - std, 0), mean + std
                    handles[SEEDS] = band(axis, answered, *about, line["color"], 0.3)
        axes[0].set_ylabel("errors among them (%)")
        legend(figure, handles, groups)
    return figure
