"""Figures against the round, or against the epochs of fine-tuning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedvi.experiment.rows import ABSURD_NLL
from fedvi.plots.canvas import (
    COLOURS,
    PANEL,
    SEEDS,
    band,
    integer_rounds,
    legend,
    look,
    picture,
)
from fedvi.plots.runs import MODELS, Runs, failed_seeds, has_model, named, title

__all__ = ["finetune_curve", "learning_curves"]

# Heading, factor and largest value of what `metrics.csv` has of every model.
_METRICS = {
    "accuracy": ("accuracy (%)", 1.0, 100.0),
    "nll": ("NLL (nats)", 1.0, np.inf),
    "ece": ("ECE (%)", 100.0, 100.0),
    "brier": ("Brier score", 1.0, 2.0),
    "entropy": ("entropy (nats)", 1.0, np.inf),
    "mutual_information": ("mutual information (nats)", 1.0, np.inf),
}
_CLIENTS = "± std over clients"
_FEW = 12  # evaluations, which have markers
_MANY = 6  # evaluations, among which there may be some that are far out
_FAR_OUT = 3.0  # interquartile ranges, as Tukey has it
_NEAR = 2.0  # lengths of an axis without round 0


class _Curve(NamedTuple):
    """One metric of one model of runs that differ in the seed."""

    rounds: np.ndarray  # [rounds]
    values: np.ndarray  # [seeds, rounds]; NaN: not measured; inf: absurd
    over_clients: np.ndarray | None  # [rounds] standard deviation, mean over seeds
    failed: np.ndarray  # [seeds] bool
    largest: float  # that the metric can be

    @property
    def mean(self) -> np.ndarray:
        """`[rounds]`, NaN where a seed's value is absurd."""
        mean = np.nanmean(self.values, axis=0)
        return np.where(np.isfinite(mean), mean, np.nan)

    @property
    def std(self) -> np.ndarray:
        """`[rounds]`, the sample one over the seeds; 0 for one seed."""
        count = np.sum(~np.isnan(self.values), axis=0)
        gaps = np.where(np.isnan(self.values), 0.0, self.values - self.mean)
        return np.sqrt(np.sum(gaps**2, axis=0) / np.maximum(count - 1, 1))


def learning_curves(
    runs: Runs, path: str | Path | None = None, *, metrics: Sequence[str] | None = None
) -> Any:
    """Draws figures against the round: a column per metric, a row per model.

    Lines are means over the seeds, the shade about them ± the sample standard deviation
    over seeds (divisor seeds - 1). Where one method is shown, a lighter shade is the
    mean ± standard deviation over clients, of metrics that have one in `metrics.csv`
    (accuracy). Where a seed failed, all are drawn as thin lines in place of the shade:
    the mean, which holds it, goes astray or has a gap.

    The axes show what matters, of the seeds that did not fail: the values after round
    0, where there are many those within three interquartile ranges of the curve's
    quartiles (Tukey's outer fences), always the last one with its shade; and round 0 if
    the axis grows to no more than twice its length by it. A triangle on the edge says
    that a curve's first or last point lies beyond it.

    Args:
      runs: one run that `fedvi.load_run` returned, several, or a mapping of names to
        such. Runs that differ in nothing but the seed are averaged.
      path: file to write, .png, .svg or .pdf; None: none.
      metrics: any of `accuracy`, `nll`, `ece`, `brier`, `entropy`,
        `mutual_information`; default: the first two of one method, the first three of
        several.

    Returns:
      The matplotlib figure, which a notebook shows.

    Raises:
      ValueError: an unknown metric or suffix, no run, or runs without an evaluation.
      ImportError: matplotlib is not installed.
    """
    groups = named(runs)
    metrics = _checked(metrics, len(groups))
    panels = {
        (model, metric): curves
        for model in MODELS
        for metric in metrics
        if (curves := _curves(groups, model, metric))
    }
    if not panels:
        raise ValueError(
            f"runs have no {' or '.join(metrics)} in metrics.csv: nothing to draw; "
            "evaluate at least once"
        )
    models = [model for model in MODELS if any(row == model for row, _ in panels)]
    columns = [name for name in metrics if any(column == name for _, column in panels)]
    with picture(path, title(groups)) as figure:
        width, height = PANEL
        figure.set_size_inches(
            width * max(len(columns), 1.5), 0.4 + height * len(models)
        )
        axes = figure.subplots(len(models), len(columns), squeeze=False, sharex=True)
        handles: dict[str, Any] = {}
        for model, row in zip(models, axes):
            row[0].set_ylabel(MODELS[model])
            for metric, axis in zip(columns, row):
                handles |= _panel(axis, panels.get((model, metric), {}), list(groups))
        for metric, axis in zip(columns, axes[0]):
            axis.set_title(_METRICS[metric][0])
        for axis in axes[-1]:
            axis.set_xlabel("round")
            integer_rounds(axis)
        legend(figure, handles, (*groups, SEEDS))
    return figure


def _checked(metrics: Sequence[str] | None, methods: int) -> Sequence[str]:
    if metrics is None:
        return ("accuracy", "nll", "ece")[: 3 if methods > 1 else 2]
    for name in metrics:
        if name not in _METRICS:
            raise ValueError(
                f"metrics has {name!r}: it must be one of {', '.join(_METRICS)}"
            )
    return metrics


def _curves(
    groups: Mapping[str, Sequence[Any]], model: str, metric: str
) -> dict[str, _Curve]:
    """Name to curve, of those groups that have one. A metric that is 0 throughout, the
    mutual information of point estimates, has none."""
    curves = {}
    for name, runs in groups.items():
        if not has_model(runs[0], model):
            continue
        rounds, values = _table(runs, f"{model}_{metric}")
        if not rounds.size:
            continue
        _, std = _table(runs, f"{model}_{metric}_std")
        _, factor, largest = _METRICS[metric]
        over_clients = None
        if std.shape == values.shape and np.isfinite(std).all():
            over_clients = factor * std.mean(axis=0)
        failed = np.array([lost for run in runs for lost in failed_seeds(run)])
        curves[name] = _Curve(rounds, factor * values, over_clients, failed, largest)
    if metric == "mutual_information":
        known = [c for c in curves.values() if np.nanmax(c.values) > 0]
        return curves if known else {}
    return curves


def _table(runs: Sequence[Any], column: str) -> tuple[np.ndarray, np.ndarray]:
    """`[rounds]`, and the column as `[seeds, rounds]`: NaN where it was not measured,
    infinity where it is absurd, which must not squeeze all else to a line."""
    cells, seeds = {}, []
    for number, run in enumerate(runs):
        seeds += [(number, one["seed"]) for one in run.summary["per_seed"]]
        for row in run.evaluations:
            if row.get(column) is not None:
                cells[(number, row["seed"]), row["round"]] = float(row[column])
    rounds = sorted({number for _, number in cells})
    table = np.array([[cells.get((s, r)) for r in rounds] for s in seeds], object)
    absent = table == None  # noqa: E711, elementwise
    values = np.where(absent, 0.0, table).astype(float)
    largest = ABSURD_NLL if column.endswith("nll") else np.inf
    values = np.where(np.isfinite(values) & (values <= largest), values, np.inf)
    return np.asarray(rounds), np.where(absent, np.nan, values)


def _panel(
    axis: Any, curves: Mapping[str, _Curve], names: Sequence[str]
) -> dict[str, Any]:
    """Draws one metric of one model; returns name to line or band."""
    handles: dict[str, Any] = {}
    for name, curve in curves.items():
        line = look(names.index(name))
        colour, rounds, mean = line["color"], curve.rounds, curve.mean
        if len(names) == 1 and curve.over_clients is not None:
            about = _about(curve, curve.over_clients)
            handles[_CLIENTS] = band(axis, rounds, *about, colour, 0.12)
        if len(curve.values) > 1 and curve.failed.any():
            axis.plot(rounds, curve.values.T, **line, lw=0.6, alpha=0.6)
        elif len(curve.values) > 1:
            about = _about(curve, curve.std)
            handles[SEEDS] = band(axis, rounds, *about, colour, 0.3)
        marker = "o" if rounds.size <= _FEW else None
        (handles[name],) = axis.plot(rounds, mean, marker=marker, **line)
    if curves:
        axis.set_ylim(*_limits(list(curves.values())))
        for name, curve in curves.items():
            _mark_beyond(axis, curve, look(names.index(name))["color"])
    else:
        axis.set_axis_off()
    return handles


def _about(curve: _Curve, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`[rounds]` each: the mean ± std, as far as the metric goes."""
    return (
        np.maximum(curve.mean - std, 0.0),
        np.minimum(curve.mean + std, curve.largest),
    )


def _limits(curves: Sequence[_Curve]) -> tuple[float, float]:
    """Of an axis, as `learning_curves` says; of failed seeds if there are no others."""
    inside: list[float] = []
    for curve in [c for c in curves if not c.failed.all()] or curves:
        own = curve.values if curve.failed.all() else curve.values[~curve.failed]
        own = np.where(np.isfinite(own), own, np.nan)
        later = own[:, curve.rounds > 0]
        later = later if np.isfinite(later).any() else own
        inside += [*_without_far_out(later), *later[:, -1]]
        if not curve.failed.any():
            shown = curve.rounds > 0 if later.shape[1] < _MANY else slice(-1, None)
            inside += [v for edge in _about(curve, curve.std) for v in edge[shown]]
            if len(curves) == 1 and curve.over_clients is not None:
                inside += [edge[-1] for edge in _about(curve, curve.over_clients)]
    inside = [value for value in inside if np.isfinite(value)]
    if not inside:
        return 0.0, 1.0
    low, high = min(inside), max(inside)
    for first in (curve.mean[0] for curve in curves):
        near = max(high, first) - min(low, first) <= _NEAR * (high - low)
        if near or curves[0].rounds.size <= 2:
            low, high = min(low, first), max(high, first)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _without_far_out(values: np.ndarray) -> np.ndarray:
    """What lies within Tukey's outer fences; all of few rounds."""
    known = values[np.isfinite(values)]
    if values.shape[1] < _MANY or not known.size:
        return known
    first, third = np.percentile(known, [25, 75])
    reach = max(_FAR_OUT * (third - first), 0.05 * np.ptp(known))
    return known[(known >= first - reach) & (known <= third + reach)]


def _mark_beyond(axis: Any, curve: _Curve, colour: str) -> None:
    """Triangles where the first or the last point lies beyond the axis."""
    low, high = axis.get_ylim()
    for x, y in {(curve.rounds[end], curve.mean[end]) for end in (0, -1)}:
        for beyond, edge, marker in ((y < low, low, "v"), (y > high, high, "^")):
            if beyond:
                axis.plot(x, edge, marker, color=colour, ms=4, clip_on=False)


def finetune_curve(runs: Runs, path: str | Path | None = None) -> Any:
    """Draws accuracy against the epochs of fine-tuning: mean over seeds, ± std.

    Solid of the clients that took part in training, dashed of the novel ones.

    Args:
      runs: as of `learning_curves`; they ran with `--finetune_curve`.
      path: file to write, .png, .svg or .pdf; None: none.

    Returns:
      The matplotlib figure.

    Raises:
      ValueError: another suffix, no run, or none with a fine-tuning curve.
      ImportError: matplotlib is not installed.
    """
    groups = named(runs)
    curves = {
        name: found
        for name, own in groups.items()
        if (found := [c for r in own if (c := r.summary.get("finetune_curve"))])
    }
    if not curves:
        raise ValueError("runs have no finetune_curve: run with --finetune_curve=0,1,5")
    with picture(path, title(groups)) as figure:
        width, height = PANEL
        figure.set_size_inches(1.6 * width, 1.3 * height)
        axis = figure.subplots()
        handles = {}
        for number, (name, own) in enumerate(curves.items()):
            for clients, style in (("training_clients", "-"), ("novel_clients", "--")):
                if clients not in own[0]:
                    continue
                label = clients.replace("_", " ")
                if len(curves) > 1:
                    label = name + ", novel clients" * clients.startswith("novel")
                again, kind = divmod(number, len(COLOURS))
                colour, marker = COLOURS[kind], "os^D"[again % 4]
                seeds = [seed[clients] for curve in own for seed in curve["per_seed"]]
                values = np.array(seeds, float)
                mean, epochs = values.mean(axis=0), own[0]["epochs"]
                line = axis.plot(epochs, mean, style, marker=marker, color=colour)
                handles[label] = line[0]
                if len(values) > 1:
                    std = values.std(axis=0, ddof=1)
                    about = mean - std, np.minimum(mean + std, 100.0)
                    handles[SEEDS] = band(axis, epochs, *about, colour, 0.2)
        axis.set(xlabel="epochs of fine-tuning", ylabel="accuracy (%)")
        integer_rounds(axis)
        legend(figure, handles, [name for name in handles if name != SEEDS])
    return figure
