"""PNG plots of a run: learning curves and reliability diagrams.

matplotlib comes with the `plots` extra and is imported only when a plot is drawn,
through its object-oriented API: no global state, no display.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvi.experiment.files import write_atomically

__all__ = ["learning_curves", "reliability_diagram"]

# From the palette of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MODELS = {"global": "-", "personal": "--"}
_BAND = "± std over seeds"
_PANELS = {"accuracy": "accuracy (%)", "nll": "NLL (nats)"}


def learning_curves(
    path: str | Path, rows: Sequence[Mapping[str, Any]], *, title: str = ""
) -> bool:
    """Draws accuracy and NLL against the round: mean over seeds, shaded ± std.

    The global model is a solid line, the personal one dashed, with one colour per
    method. The standard deviation is the sample one (divisor seeds - 1).

    Args:
      path: the PNG to write.
      rows: as in `metrics.csv`, one per round and seed: `round`; any of
        `global_accuracy`, `personal_accuracy` (per cent), `global_nll`,
        `personal_nll` (nats), absent or None where not measured; `method` if there
        are several.
      title: over the figure.

    Returns:
      False if matplotlib is not installed (the `plots` extra): nothing is drawn.

    Raises:
      ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("rows is empty: nothing to plot; evaluate at least once")
    figure = _figure(9.0, 4.0)
    if figure is None:
        return False
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        methods.setdefault(str(row.get("method", "")), []).append(row)
    handles = {}
    for axis, (metric, label) in zip(figure.subplots(1, 2), _PANELS.items()):
        handles |= _curves(axis, methods, metric)
        axis.set(xlabel="round", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        _tidy(axis)
    if _BAND in handles:
        handles[_BAND] = handles.pop(_BAND)  # last in the legend
    _legend(figure, handles.values(), handles.keys(), columns=4)
    figure.suptitle(title)
    _save(figure, path)
    return True


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
    figure = _figure(4.2 * len(models), 5.2)
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
    _legend(figure, handles, labels, columns=min(3, len(models) + 1))
    figure.suptitle(title)
    _save(figure, path)
    return True


def _curves(
    axis: Any, methods: Mapping[str, Sequence[Mapping[str, Any]]], metric: str
) -> dict[str, Any]:
    """Draws one metric of every method and model; returns label to line or band."""
    handles = {}
    for number, (method, rows) in enumerate(methods.items()):
        for offset, (model, style) in enumerate(_MODELS.items()):
            rounds, mean, std = _over_seeds(rows, f"{model}_{metric}")
            if rounds.size == 0:
                continue
            # With one method, colour is free to tell the two models apart.
            shade = number if len(methods) > 1 else offset
            colour = _COLOURS[shade % len(_COLOURS)]
            marker = "o" if rounds.size <= 30 else None
            (line,) = axis.plot(
                rounds, mean, style, color=colour, marker=marker, markersize=3
            )
            handles[f"{method} {model}".strip()] = line
            if std.any():
                handles[_BAND] = axis.fill_between(
                    rounds, mean - std, mean + std, color=colour, alpha=0.2, lw=0
                )
    return handles


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

    above.bar(centre, accuracy, width, color=_COLOURS[4], ec="white", label="accuracy")
    above.bar(
        centre,
        gap,
        width,
        bottom=np.minimum(accuracy, confidence),
        facecolor="#D55E0040",
        edgecolor=_COLOURS[1],
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
    _tidy(above)
    _tidy(below)
    return float(np.sum(share[full] * gap)) if full.any() else np.nan


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


def _figure(width: float, height: float) -> Any:
    """A matplotlib figure of that size in inches, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _legend(figure: Any, handles: Any, labels: Any, columns: int) -> None:
    figure.legend(
        list(handles),
        list(labels),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
    )


def _tidy(axis: Any) -> None:
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: str | Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format="png"))
