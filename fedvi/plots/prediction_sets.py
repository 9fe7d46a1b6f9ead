"""How often prediction sets hold the true class, and how large they are."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvi.plots.canvas import COLOURS, PANEL, legend, look, picture
from fedvi.plots.per_client import STRIP, Strip, draw_strip
from fedvi.plots.runs import (
    Runs,
    client_rows,
    has_model,
    named,
    novel_clients,
    sound,
    title,
)

__all__ = ["conformal"]

_RULES = {
    "global": "threshold of all",
    "client": "own thresholds",
    "quantile_of_quantiles": "quantile of quantiles",
}
_COLUMNS = {"coverage": "threshold of all", "own_coverage": "own thresholds"}


def conformal(runs: Runs, path: str | Path | None = None, *, score: str = "lac") -> Any:
    """Draws the coverage of prediction sets against their size, a column per model.

    Above: mean share of sets that hold the true class against the mean number of
    classes in them, over a grid of levels; circles are at the run's own level, and
    dashed is what that promises. Of one method a line per rule for the threshold, of
    several a line per method, with the threshold of all. Below: every client's coverage
    at that level, by LAC, one strip per rule or method. Means are over the clients that
    took part in training, and over the seeds that did not fail.

    Args:
      runs: as of `learning_curves`; they ran with `--calibration_fraction`.
      path: file to write, .png, .svg or .pdf; None: none.
      score: `lac`, `aps` or `raps`, of the curves.

    Returns:
      The matplotlib figure.

    Raises:
      ValueError: another suffix or score, no run, or none with prediction sets.
      ImportError: matplotlib is not installed.
    """
    groups = {
        name: own
        for name, runs_of_name in named(runs).items()
        if (own := [r for r in runs_of_name if r.evaluation.get("conformal")])
    }
    if not groups:
        raise ValueError(
            "runs have no prediction sets: run with --calibration_fraction=0.2"
        )
    models = [model for model in ("global", "personal") if _has(groups, model)]
    known = list(groups[next(iter(groups))][0].evaluation["conformal"][models[-1]])
    if score not in known:
        raise ValueError(f"score={score!r}: it must be one of {', '.join(known)}")
    names = list(_COLUMNS.values()) if len(groups) == 1 else list(groups)
    width, height = PANEL
    heights = 1.2 * height, 0.5 + STRIP * len(names)
    with picture(path, title(groups)) as figure:
        figure.set_size_inches(width * max(len(models), 1.5), 0.4 + sum(heights))
        axes = figure.subplots(
            2,
            len(models),
            squeeze=False,
            sharex="row",
            sharey="row",
            height_ratios=heights,
        )
        axes[0, 0].set_xscale("log", base=2)
        axes[0, 0].xaxis.set_major_formatter("{x:g}")
        curves: dict[str, Any] = {}
        for model, (above, below) in zip(models, axes.T):
            above.set(title=model, xlabel="classes in a set")
            curves |= _curves(above, groups, model, score)
            below.set_xlabel("coverage of a client (%)")
            points = _strips(below, groups, model)
        low, high = axes[0, 0].get_xlim()
        between = (1.0, 1.5) if high < 4 * low else (1.0,)
        axes[0, 0].xaxis.get_major_locator().set_params(subs=between, numticks=9)
        axes[0, 0].set_ylabel("coverage (%)")
        axes[1, 0].set_yticks(range(len(names)), names)
        axes[1, 0].set_ylim(len(names) - 0.4, -0.6)
        legend(figure, curves | points, (*groups, *_RULES.values(), *curves))
    return figure


def _has(groups: Mapping[str, Sequence[Any]], model: str) -> bool:
    return any(_is_there(own[0], model) for own in groups.values())


def _is_there(run: Any, model: str) -> bool:
    return has_model(run, model) and model in run.evaluation["conformal"]


def _promise(groups: Mapping[str, Sequence[Any]], line: Callable) -> None:
    """Draws what the runs' level promises, per cent."""
    for level in {
        r.summary["conformal"]["level"] for own in groups.values() for r in own
    }:
        line(100 * (1 - level), color="0.4", ls="--", lw=0.8, zorder=1)


def _curves(
    axis: Any, groups: Mapping[str, Sequence[Any]], model: str, score: str
) -> dict[str, Any]:
    """Draws coverage against set size; returns name to line."""
    _promise(groups, axis.axhline)
    if len(groups) == 1:
        [runs] = groups.values()
        lines = {text: (runs, rule) for rule, text in _RULES.items()}
    else:
        lines = {name: (runs, "global") for name, runs in groups.items()}
    handles: dict[str, Any] = {}
    for number, (name, (runs, rule)) in enumerate(lines.items()):
        if not _is_there(runs[0], model):
            continue
        along, at = [], []
        for run in runs:
            own = run.evaluation["conformal"][model][score][rule]
            along.append(np.stack([own["set_size"], own["coverage"]], 1)[sound(run)])
            seeds = [
                s[model][score][rule] for s in run.summary["conformal"]["per_seed"]
            ]
            own = np.array([(s["set_size"], s["coverage"]) for s in seeds], float)
            at.append(own[sound(run)])
        line = look(number)
        size, coverage = np.concatenate(along).mean(axis=0)
        (handles[name],) = axis.plot(size, 100 * coverage, marker="o", ms=2, **line)
        size, coverage = np.concatenate(at).mean(axis=0)
        axis.plot(size, 100 * coverage, "o", ms=6, mfc="none", color=line["color"])
    return handles


def _strips(
    axis: Any, groups: Mapping[str, Sequence[Any]], model: str
) -> dict[str, Any]:
    """Draws the coverage of every client; returns name to point."""
    _promise(groups, axis.axvline)
    axis.grid(visible=False, axis="y")
    if len(groups) == 1:
        [runs] = groups.values()
        strips = [(runs, column) for column in _COLUMNS]
    else:
        strips = [(runs, "coverage") for runs in groups.values()]
    handles: dict[str, Any] = {}
    for place, (runs, column) in enumerate(strips):
        if not _is_there(runs[0], model):
            continue
        values = np.concatenate(
            [client_rows(run, f"{model}_{column}")[sound(run)] for run in runs]
        )
        novel = novel_clients(runs[0])
        colours = np.full(novel.size, COLOURS[place % len(COLOURS)])
        figures = 100 * values.mean(axis=0)[None]
        handles |= draw_strip(axis, place, Strip("", figures, novel, colours), 0)
    return handles
