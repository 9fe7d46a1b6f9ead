"""One point per client."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedvi.evaluation import per_client
from fedvi.plots import runs as of_runs
from fedvi.plots.canvas import COLOURS, PANEL, legend, picture
from fedvi.plots.runs import Runs, named, novel_clients, sound, title

__all__ = ["STRIP", "Strip", "clients", "draw_strip", "jitter"]

_COLUMNS = ("accuracy (%)", "NLL (nats)", "ECE (%)")
STRIP = 0.27  # inches high
_FEW = 25  # clients, whose models are joined by lines
_MANY = 1000  # points of a strip, from which on it is a bitmap


class Strip(NamedTuple):
    """A point per client, in a row."""

    name: str
    figures: np.ndarray  # [metrics, clients], mean over the seeds that did not fail
    novel: np.ndarray  # [clients] bool
    colours: np.ndarray  # [clients] str


def clients(runs: Runs, path: str | Path | None = None) -> Any:
    """Draws accuracy, NLL and ECE of every client: a strip per method and model.

    A point is a client, its figures after the last round, mean over the seeds that did
    not fail; a hollow one took no part in training. The bar is the median, the diamond
    the mean of those that took part. Of one method a client's points are joined where
    there are few clients, and have the colour of its cluster, in the first seed, where
    clients have one.

    Args:
      runs: as of `learning_curves`.
      path: file to write, .png, .svg or .pdf; None: none.

    Returns:
      The matplotlib figure.

    Raises:
      ValueError: another suffix, no run, or runs under one name whose clients are not
        the same.
      ImportError: matplotlib is not installed.
    """
    groups = named(runs)
    strips = [
        strip
        for number, (name, own) in enumerate(groups.items())
        for strip in _strips(name, own, None if len(groups) == 1 else number)
    ]
    with picture(path, title(groups)) as figure:
        figure.set_size_inches(3 * PANEL[0], 0.75 + STRIP * len(strips))
        axes = figure.subplots(1, len(_COLUMNS), sharey=True)
        for column, (axis, label) in enumerate(zip(axes, _COLUMNS)):
            for place, strip in enumerate(strips):
                handles = draw_strip(axis, place, strip, column)
            if len(groups) == 1:
                _join(axis, strips, column)
            axis.set_xlabel(label)
            axis.grid(visible=False, axis="y")
        axes[0].set_yticks(range(len(strips)), [strip.name for strip in strips])
        axes[0].set_ylim(len(strips) - 0.4, -0.6)
        handles |= _clusters(axes[0], strips) if len(groups) == 1 else {}
        legend(figure, handles)
    return figure


def jitter(count: int) -> np.ndarray:
    """`[count]` places in (-0.3, 0.3), spread evenly however many there are: multiples
    of the golden ratio, modulo 1."""
    return 0.6 * (np.arange(1, count + 1) * 0.6180339887498949 % 1.0 - 0.5)


def _strips(name: str, runs: Sequence[Any], number: int | None) -> list[Strip]:
    """One per model that the runs have; coloured by `number`, None: by cluster."""
    count = {run.summary["clients"] for run in runs}
    if len(count) > 1:
        raise ValueError(
            f"{name!r} has runs of {' and '.join(map(str, sorted(count)))} clients: "
            "give those of the same clients one name"
        )
    figures: dict[str, list[np.ndarray]] = {}
    for run in runs:
        for model, scores in of_runs.scores(run).items():
            figures.setdefault(model, []).append(_figures(scores)[sound(run)])
    novel = novel_clients(runs[0])
    if number is None:
        clusters = runs[0].summary["per_seed"][0]["clusters"] or np.zeros(novel.size)
    else:
        clusters = np.full(novel.size, number)
    colours = np.array(COLOURS)[np.asarray(clusters, int) % len(COLOURS)]
    label = "" if number is None else f"{name}, "
    return [
        Strip(f"{label}{model}", np.concatenate(own).mean(axis=0), novel, colours)
        for model, own in figures.items()
    ]


def _figures(scores: Any) -> np.ndarray:
    """`[seeds, metrics, clients]`; NaN without examples, and for infinity."""
    own = per_client(scores)
    figures = np.stack([own["accuracy"], own["nll"], 100 * own["ece"]], axis=1)
    return np.where(np.isfinite(figures), figures, np.nan)


def draw_strip(axis: Any, place: int, strip: Strip, column: int) -> dict[str, Any]:
    """Draws a strip; returns name to point."""
    x, y = strip.figures[column], place + jitter(strip.novel.size)
    handles = {}
    for novel, name in ((False, "client"), (True, "novel client")):
        own = strip.novel == novel
        if own.any():
            handles[name] = axis.scatter([], [], **_point(novel, "0.4", 1))
            axis.scatter(
                x[own],
                y[own],
                **_point(novel, strip.colours[own], x.size),
                rasterized=bool(own.sum() > _MANY),
            )
    known = x[~strip.novel & np.isfinite(x)]
    if known.size:
        middle = {"color": "black", "zorder": 3}
        handles["median"] = axis.scatter(
            np.median(known), place, marker="|", s=130, linewidth=1.5, **middle
        )
        handles["mean"] = axis.scatter(
            known.mean(), place, marker="D", s=16, facecolor="white", **middle
        )
    return handles


def _point(novel: bool, colour: Any, count: int) -> dict[str, Any]:
    """How one of so many clients is drawn."""
    few = count <= 300
    return {
        "s": 9 if few else 2,
        "facecolor": "none" if novel else colour,
        "edgecolor": colour,
        "linewidth": 0.7 if few else 0.2,
        "alpha": 0.6 if few else 0.3,
    }


def _join(axis: Any, strips: Sequence[Strip], column: int) -> None:
    """Lines from strip to strip of every client, where they are few."""
    count = strips[0].novel.size
    if len(strips) > 1 and count <= _FEW:
        x = np.stack([strip.figures[column] for strip in strips])
        y = np.arange(len(strips))[:, None] + jitter(count)
        axis.plot(x, y, color="0.6", lw=0.5, alpha=0.5, zorder=0)


def _clusters(axis: Any, strips: Sequence[Strip]) -> Mapping[str, Any]:
    """Name to point of every cluster, where there are several."""
    found = [colour for colour in COLOURS if colour in strips[0].colours]
    if len(found) < 2:
        return {}
    return {
        f"cluster {COLOURS.index(colour)}": axis.scatter([], [], s=9, color=colour)
        for colour in found
    }
