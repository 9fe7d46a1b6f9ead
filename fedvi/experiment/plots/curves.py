"""Curves over the rounds, and over the epochs of fine-tuning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedvi.experiment.plots.figure import COLOURS, add_legend, new_figure, save, tidy

__all__ = [
    "comparison_curves",
    "finetune_curve",
    "learning_curves",
    "uncertainty_curves",
]

_BAND = "± std over seeds"


class _Panel(NamedTuple):
    label: str
    factor: float = 1.0


class _Look(NamedTuple):
    """How a figure of curves looks.

    Attributes:
      models: line style and name in the legend by model.
      columns: of the legend.
      width: of the lines.
      shade: opacity of the bands.
      markers: whether few rounds have markers.
      least: evaluations that a curve of another model than the global one needs.
    """

    models: Mapping[str, tuple[str, str]]
    columns: int
    width: float = 1.5
    shade: float = 0.2
    markers: bool = True
    least: int = 1


_ONE_RUN = _Look(
    {
        "global": ("-", "global"),
        "personal": ("--", "personal"),
        "novel_global": ("-.", "novel global"),
        "novel_personal": (":", "novel personal"),
    },
    columns=4,
)
_SEVERAL_RUNS = _Look(
    {"global": ("-", ""), "personal": ("--", "personal")},
    columns=6,
    width=0.9,
    shade=0.12,
    markers=False,
    least=2,
)

_LEARNING = {"accuracy": _Panel("accuracy (%)"), "nll": _Panel("NLL (nats)")}
_COMPARISON = {**_LEARNING, "ece": _Panel("ECE (%)", 100.0)}
_UNCERTAINTY = {
    "ece": _Panel("ECE (%)", 100.0),
    "entropy": _Panel("entropy (nats)"),
    "mutual_information": _Panel("mutual information (nats)"),
}


def learning_curves(
    path: str | Path, rows: Sequence[Mapping[str, Any]], *, title: str = ""
) -> bool:
    """Draws accuracy and NLL against the round: mean over seeds, shaded ± std.

    The global model is a solid line, the personal one dashed, those of novel clients
    dash-dotted and dotted, with one colour per method. The standard deviation is the
    sample one (divisor seeds - 1).

    Args:
      path: the PNG to write.
      rows: as in `metrics.csv`, one per round and seed: `round`; any of
        `global_accuracy`, `personal_accuracy` (per cent), `global_nll`,
        `personal_nll` (nats), absent or None where not measured; `method` if there
        are several; `novel_global_accuracy` and so on of novel clients.
      title: over the figure.

    Returns:
      False if matplotlib is not installed (the `plots` extra): nothing is drawn.

    Raises:
      ValueError: there are no rows.
    """
    return _over_rounds(path, rows, _LEARNING, title, _ONE_RUN)


def uncertainty_curves(
    path: str | Path, rows: Sequence[Mapping[str, Any]], *, title: str = ""
) -> bool:
    """Draws ECE, entropy and mutual information against the round.

    As `learning_curves`, from `global_ece`, `personal_entropy` and so on.
    """
    return _over_rounds(path, rows, _UNCERTAINTY, title, _ONE_RUN)


def comparison_curves(
    path: str | Path, rows: Sequence[Mapping[str, Any]], *, title: str = ""
) -> bool:
    """Draws accuracy, NLL and ECE of several methods against the round.

    As `learning_curves`, from rows with a `method`; thin lines for noisy curves. The
    personal models (dashed) are drawn where they were measured more than once.
    """
    return _over_rounds(path, rows, _COMPARISON, title, _SEVERAL_RUNS)


def finetune_curve(
    path: str | Path, curve: Mapping[str, Any], *, title: str = ""
) -> bool:
    """Draws accuracy against the epochs of fine-tuning: mean over seeds, ± std.

    Args:
      path: the PNG to write.
      curve: `finetune_curve` of `summary.json`.
      title: over the figure.

    Returns:
      False if matplotlib is not installed (the `plots` extra): nothing is drawn.
    """
    figure = new_figure(5.5, 4.0)
    if figure is None:
        return False
    axis = figure.subplots()
    epochs, seeds = np.asarray(curve["epochs"]), curve["per_seed"]
    for name, colour in zip(("training_clients", "novel_clients"), COLOURS):
        if name in curve:
            mean = np.asarray(curve[name])
            line = {"color": colour, "label": name.replace("_", " ")}
            axis.plot(epochs, mean, "-o", markersize=4, **line)
            if len(seeds) > 1:
                std = np.std([one[name] for one in seeds], axis=0, ddof=1)
                _band(axis, epochs, mean, std, colour, _ONE_RUN.shade)
    axis.set(xlabel="epochs of fine-tuning", ylabel="accuracy (%)")
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    tidy(axis)
    add_legend(figure, *axis.get_legend_handles_labels(), columns=3)
    figure.suptitle(title)
    save(figure, path)
    return True


def _over_rounds(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    panels: Mapping[str, _Panel],
    title: str,
    look: _Look,
) -> bool:
    if not rows:
        raise ValueError("rows is empty: nothing to plot; evaluate at least once")
    figure = new_figure(4.5 * len(panels), 4.0)
    if figure is None:
        return False
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        methods.setdefault(str(row.get("method", "")), []).append(row)
    handles = {}
    axes = figure.subplots(1, len(panels))
    for axis, (metric, panel) in zip(axes, panels.items()):
        handles |= _curves(axis, methods, metric, panel.factor, look)
        axis.set(xlabel="round", ylabel=panel.label)
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        tidy(axis)
    if _BAND in handles:
        handles[_BAND] = handles.pop(_BAND)  # last in the legend
    columns = look.columns if len(methods) > 1 else 5
    add_legend(figure, handles.values(), handles.keys(), columns)
    figure.suptitle(title)
    save(figure, path)
    return True


def _curves(
    axis: Any,
    methods: Mapping[str, Sequence[Mapping[str, Any]]],
    metric: str,
    factor: float,
    look: _Look,
) -> dict[str, Any]:
    """Draws one metric of every method and model; returns label to line or band."""
    handles = {}
    for number, (method, rows) in enumerate(methods.items()):
        for offset, (model, (style, name)) in enumerate(look.models.items()):
            rounds, mean, std = _over_seeds(rows, f"{model}_{metric}")
            if rounds.size < (1 if model == "global" else look.least):
                continue
            mean, std = factor * mean, factor * std
            # With one method, colour is free to tell the two models apart.
            shade = number if len(methods) > 1 else offset
            colour = COLOURS[shade % len(COLOURS)]
            few = look.markers and rounds.size <= 30
            (line,) = axis.plot(
                rounds,
                mean,
                style,
                color=colour,
                linewidth=look.width,
                marker="o" if few or rounds.size == 1 else None,
                markersize=3,
            )
            handles[f"{method} {name}".strip()] = line
            if std.any():
                handles[_BAND] = _band(axis, rounds, mean, std, colour, look.shade)
    return handles


def _band(
    axis: Any, x, mean: np.ndarray, std: np.ndarray, colour: str, shade: float
) -> Any:
    low, high = mean - std, mean + std
    return axis.fill_between(x, low, high, color=colour, alpha=shade, lw=0)


def _over_seeds(
    rows: Sequence[Mapping[str, Any]], column: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds, and the column's mean and standard deviation over the rows of each."""
    by_round: dict[int, list[float]] = {}
    for row in rows:
        if row.get(column) is not None:
            by_round.setdefault(int(row["round"]), []).append(float(row[column]))
    rounds = sorted(by_round)
    values = [np.asarray(by_round[number]) for number in rounds]
    # A diverged seed: its infinite loss must not stop the plot.
    values = [np.where(np.isfinite(v), v, np.nan) for v in values]
    mean = [np.mean(v) for v in values]
    std = [np.std(v, ddof=1) if v.size > 1 else 0.0 for v in values]
    return np.asarray(rounds), np.asarray(mean), np.asarray(std)
