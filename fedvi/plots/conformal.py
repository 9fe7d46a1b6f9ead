"""How often prediction sets hold the true class, and how large they are."""

from collections.abc import Mapping, Sequence
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
    classes in them, over a grid of levels; large dots are at the run's own level, and
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
    first = next(iter(groups.values()))[0]
    found = first.evaluation["conformal"]
    models = [model for model in ("global", "personal") if _has(groups, model)]
    known = list(next(found[m] for m in ("personal", "global") if m in found))
    if score not in known:
        raise ValueError(f"score={score!r}: it must be one of {', '.join(known)}")
    alone = len(groups) == 1
    strips = {model: _strips(groups, model) for model in models}
    most = max(map(len, strips.values()))
    width, height = PANEL
    with picture(path, title(groups)) as figure:
        below = 0.5 + STRIP * most
        figure.set_size_inches(
            width * max(len(models), 1.5), 0.4 + 1.2 * height + below
        )
        axes = figure.subplots(
            2, len(models), squeeze=False, height_ratios=(1.2 * height, below)
        )
        handles: dict[str, Any] = {}
        for model, (above, under) in zip(models, axes.T):
            above.set_title(model)
            handles |= _curves(above, groups, model, score, alone)
            for place, strip in enumerate(strips[model]):
                points = draw_strip(under, place, strip, 0)
            under.axvline(_promised(first), color="0.4", ls="--", lw=0.8, zorder=0)
            under.set(xlabel="coverage of a client (%)", ylim=(most - 0.4, -0.6))
            under.set_yticks(range(most), [strip.name for strip in strips[model]])
            under.grid(visible=False, axis="y")
            handles |= points
        for under in axes[1, 1:]:
            under.tick_params(labelleft=False)
        axes[0, 0].set_ylabel("coverage (%)")
        legend(figure, handles)
    return figure


def _has(groups: Mapping[str, Sequence[Any]], model: str) -> bool:
    return any(_is_there(own[0], model) for own in groups.values())


def _is_there(run: Any, model: str) -> bool:
    return has_model(run, model) and model in run.evaluation["conformal"]


def _promised(run: Any) -> float:
    """Per cent."""
    return 100 * (1 - run.summary["conformal"]["level"])


def _curves(
    axis: Any,
    groups: Mapping[str, Sequence[Any]],
    model: str,
    score: str,
    alone: bool,
) -> dict[str, Any]:
    """Draws coverage against set size; returns name to line."""
    handles: dict[str, Any] = {}
    first = next(iter(groups.values()))[0]
    axis.axhline(_promised(first), color="0.4", ls="--", lw=0.8, zorder=1)
    for number, (name, runs) in enumerate(groups.items()):
        if not _is_there(runs[0], model):
            continue
        for place, (rule, text) in enumerate(_RULES.items()):
            if not alone and rule != "global":
                continue
            line = look(place if alone else number)
            size, coverage = (
                np.concatenate(
                    [
                        r.evaluation["conformal"][model][score][rule][key][s]
                        for r in runs
                        for s in [sound(r)]
                    ]
                ).mean(axis=0)
                for key in ("set_size", "coverage")
            )
            (handles[text if alone else name],) = axis.plot(
                size, 100 * coverage, marker="o", ms=2, **line
            )
            at = [_at_level(r, model, score, rule) for r in runs]
            size, coverage = np.concatenate(at).mean(axis=0)
            axis.plot(size, 100 * coverage, "o", ms=5, color=line["color"])
    axis.set_xlabel("classes in a set")
    return handles


def _at_level(run: Any, model: str, score: str, rule: str) -> np.ndarray:
    """`[seeds, 2]`, set size and coverage at the run's own level."""
    figures = [one[model][score][rule] for one in run.summary["conformal"]["per_seed"]]
    found = np.array([(one["set_size"], one["coverage"]) for one in figures], float)
    return found[sound(run)]


def _strips(groups: Mapping[str, Sequence[Any]], model: str) -> list[Strip]:
    """Coverage of every client; of several methods with the threshold of all."""
    strips = []
    for number, (name, runs) in enumerate(groups.items()):
        if not _is_there(runs[0], model):
            if len(groups) > 1:
                strips.append(Strip.empty(name, novel_clients(runs[0])))
            continue
        for place, (column, text) in enumerate(_COLUMNS.items()):
            if len(groups) > 1 and column != "coverage":
                continue
            values = np.concatenate(
                [client_rows(run, f"{model}_{column}")[sound(run)] for run in runs]
            )
            novel = novel_clients(runs[0])
            colour = COLOURS[(place if len(groups) == 1 else number) % len(COLOURS)]
            strips.append(
                Strip(
                    text if len(groups) == 1 else name,
                    100 * values.mean(axis=0)[None],
                    novel,
                    np.full(novel.size, colour),
                )
            )
    return strips
