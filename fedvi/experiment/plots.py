"""PNG plots of a run.

matplotlib comes with the `plots` extra and is imported only when a plot is drawn,
through its object-oriented API: no global state, no display.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedvi.evaluation import Scores, Uncertainty, reliability
from fedvi.experiment import folder
from fedvi.experiment.rows import ABSURD_NLL, by_method
from fedvi.experiment.setup import Experiment

__all__ = [
    "comparison_curves",
    "draw",
    "entropy_density",
    "finetune_curve",
    "kernel_density",
    "learning_curves",
    "reliability_diagram",
    "uncertainty_curves",
]

# From the palette of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_POINTS = 200  # of a density
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


def draw(
    run_dir: Path,
    experiment: Experiment,
    *,
    rows: Sequence[Mapping[str, Any]],
    scores: Mapping[str, Scores],
    uncertainty: tuple[Uncertainty, Uncertainty] | None,
    summary: Mapping[str, Any],
) -> bool:
    """Draws a run's plots; diagrams and densities are of the training clients.

    Args:
      run_dir: the run folder.
      experiment: what was run.
      rows: of `metrics.csv`.
      scores: after the last round, leaves `[seeds, clients, ...]`, by model.
      uncertainty: in and out of distribution, leaves `[seeds, clients, capacity]`.
      summary: what `summary.json` holds.

    Returns:
      False if matplotlib is not installed: nothing is drawn.
    """
    config = experiment.config
    title = f"{config.method}, {config.dataset}, {config.evaluated_on} data"
    if summary["failed"]:
        title += " (failed)"
    if not learning_curves(run_dir / folder.LEARNING_CURVES, rows, title=title):
        return False
    uncertainty_curves(run_dir / folder.UNCERTAINTY, rows, title=title)
    reliability_diagram(
        run_dir / folder.RELIABILITY,
        {name: reliability(_pooled(experiment, s)) for name, s in scores.items()},
        ece={name: summary[name]["ece"] for name in scores},
        title=title,
    )
    if summary["finetune_curve"] is not None:
        finetune_curve(
            run_dir / folder.FINETUNE_CURVE, summary["finetune_curve"], title=title
        )
    if uncertainty is not None:
        entropy_density(
            run_dir / folder.ENTROPY_DENSITY,
            *(_entropies(experiment, one) for one in uncertainty),
            classes=experiment.data.classes,
            title=f"{title}, out of distribution: {config.ood_name}",
        )
    return True


def _pooled(experiment: Experiment, scores: Scores) -> Scores:
    """The training clients of all seeds as if they were one seed's."""
    return jax.tree.map(
        lambda leaf: leaf[:, experiment.trained].reshape(-1, *leaf.shape[2:]), scores
    )


def _entropies(experiment: Experiment, uncertainty: Uncertainty) -> list[np.ndarray]:
    """Of every training client, those of all seeds together."""
    return [
        uncertainty.entropy[:, client][uncertainty.mask[:, client]]
        for client in experiment.trained
    ]


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
      ValueError: there are no rows, or two of one method, round and seed.
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
    figure = _new_figure(5.5, 4.0)
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
    _tidy(axis)
    _add_legend(figure, *axis.get_legend_handles_labels(), columns=3)
    figure.suptitle(title)
    _save(figure, path)
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
    figure = _new_figure(4.5 * len(panels), 4.0)
    if figure is None:
        return False
    methods = by_method(rows)
    handles = {}
    axes = figure.subplots(1, len(panels))
    for axis, (metric, panel) in zip(axes, panels.items()):
        handles |= _curves(axis, methods, metric, panel.factor, look)
        axis.set(xlabel="round", ylabel=panel.label)
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        _tidy(axis)
    if _BAND in handles:
        handles[_BAND] = handles.pop(_BAND)  # last in the legend
    columns = look.columns if len(methods) > 1 else 5
    _add_legend(figure, handles.values(), handles.keys(), columns)
    figure.suptitle(title)
    _save(figure, path)
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
    # A diverged seed must neither stop the plot nor squeeze all else to a line.
    largest = ABSURD_NLL if column.endswith("nll") else np.inf
    values = [np.where(np.isfinite(v) & (v <= largest), v, np.nan) for v in values]
    mean = [np.mean(v) for v in values]
    std = [np.std(v, ddof=1) if v.size > 1 else 0.0 for v in values]
    return np.asarray(rounds), np.asarray(mean), np.asarray(std)


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
    figure = _new_figure(9.0, 4.0)
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
        _tidy(axis)
    axes[0].set_ylabel("density, one curve per client")
    axes[0].set_ylim(bottom=0.0)
    figure.suptitle(title)
    _save(figure, path)
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
    figure = _new_figure(4.2 * len(models), 5.2)
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
    _add_legend(figure, handles, labels, columns=min(3, len(models) + 1))
    figure.suptitle(title)
    _save(figure, path)
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
    _tidy(above)
    _tidy(below)
    return float(np.sum(share[full] * gap)) if full.any() else np.nan


# What the plots share.


def _new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of that size in inches, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _add_legend(figure: Any, handles: Any, labels: Any, columns: int) -> None:
    """A legend below all axes."""
    figure.legend(
        list(handles),
        list(labels),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
    )


def _tidy(axis: Any) -> None:
    """A light grid behind the data, and no frame."""
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: str | Path) -> None:
    """Writes the PNG atomically; makes its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    folder.write_atomically(path, lambda file: figure.savefig(file, format="png"))
