"""What a finished run says: figures, `summary.json`, table, comparison of several."""

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.special import stdtrit

from fedvi import __version__, plots
from fedvi.experiment import folder
from fedvi.experiment.communication import RoundBytes
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.experiment.labels import labels, marked
from fedvi.experiment.rows import MODELS, by_method, trouble
from fedvi.experiment.setup import Experiment

__all__ = [
    "PLOT",
    "TABLE",
    "check_comparison",
    "clear_comparison",
    "common_folder",
    "comparison",
    "differences",
    "failures",
    "over_seeds",
    "seed_figures",
    "summary",
    "table",
    "table_rows",
    "table_title",
    "write_comparison",
]

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "distrax", "numpy")
_RECENT = 100  # rounds; pFedBayes' score is the best of them (§6.2)
# Figures that have a spread over seeds beside their mean.
_WITH_SPREAD = (
    "global",
    "personal",
    "novel",
    "mean_of_last_rounds",
    "window",
    "adjusted_rand",
)
# Column of the table: header, key in the rows, factor, digits. It is there if a row
# has a figure for it.
_COLUMNS = (
    ("accuracy %", "accuracy", 1, 2),
    ("std between rounds", "accuracy_std_between_rounds", 1, 2),
    ("ECE %", "ece", 100, 2),
    ("NLL", "nll", 1, 3),
    ("mutual inf.", "mutual_information", 1, 3),
    ("NLL recal.", "recalibrated_nll", 1, 3),
    ("coverage %", "coverage", 100, 1),
    ("set size", "set_size", 1, 2),
    ("worst cov. %", "worst_client", 100, 1),
    ("OOD AUROC", "auroc_entropy", 1, 3),
    ("s/round", "round_seconds", 1, 3),
)
PLOT, TABLE = "comparison.png", "comparison.txt"


# A run's figures.


def _best_names(config: ExperimentConfig) -> tuple[str, str]:
    """Names of the best figure of all and of the recent evaluations: they are chosen
    on what they are named after."""
    split = config.evaluated_on
    return f"best_on_{split}_global_accuracy", f"best_of_last_{_RECENT}_on_{split}"


def seed_figures(
    config: ExperimentConfig, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A seed's figures.

    Args:
      config: of the run.
      rows: of `metrics.csv`, all of one seed, in order.

    Returns:
      `global` and `personal`, what the last row holds, with `novel`, the same two of
      the novel clients, or None; `mean_of_last_rounds`, the same over the last
      `final_rounds` rounds, or None; `window`, the `global` means over the
      evaluations of the last `window` rounds and the population standard deviation of
      the accuracy (per cent) between them, or None; `adjusted_rand` of the last row,
      or None; and the two best figures under `_best_names`.
    """
    best, recent_best = _best_names(config)
    recent = [row for row in rows if row["round"] > config.rounds - _RECENT]
    final = [_models(row) for row in rows if config.is_final(row["round"])]
    return {
        **_models(rows[-1]),
        "mean_of_last_rounds": over_seeds(final, np.mean) if final else None,
        "window": _window(config, rows) if config.window else None,
        "adjusted_rand": rows[-1].get("adjusted_rand"),
        best: _largest(rows, "global_accuracy"),
        recent_best: {
            name: _largest(recent, name)
            for name in (f"{model}_accuracy" for model in MODELS)
        },
    }


def over_seeds(figures: Sequence[Any], reduce: Callable) -> Any:
    """Reduces nested dicts of numbers, figure by figure; None where there is None."""
    if isinstance(figures[0], Mapping):
        return {
            key: over_seeds([one[key] for one in figures], reduce) for key in figures[0]
        }
    return None if figures[0] is None else float(reduce(figures))


def _window(
    config: ExperimentConfig, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    figures = [
        _with_prefix(row, "global_") for row in rows if config.in_window(row["round"])
    ]
    return {
        "global": over_seeds(figures, np.mean),
        "accuracy_std_between_rounds": float(np.std([f["accuracy"] for f in figures])),
    }


def _models(row: Mapping[str, Any]) -> dict[str, Any]:
    novel = {model: _with_prefix(row, f"novel_{model}_") for model in MODELS}
    return {
        **{model: _with_prefix(row, f"{model}_") for model in MODELS},
        "novel": novel if novel["global"] else None,
    }


def _largest(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return max(row[key] for row in rows if row[key] is not None)


def _with_prefix(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)}


# `summary.json`.


def summary(
    experiment: Experiment,
    *,
    rows: Sequence[Mapping[str, Any]],
    problems: Mapping[str, Any],
    finite: Sequence[bool],
    clusters: np.ndarray | None,
    ending: Mapping[str, Any],
    compile_seconds: float,
    plan: str,
    devices: Sequence[jax.Device],
    per_round: RoundBytes,
) -> dict[str, Any]:
    """What `summary.json` holds.

    A seed has `failed`, with the reason under `failure`, if no round had a participant
    that counted, or its last figures say that it diverged (`fedvi.experiment.rows.
    trouble`); a run, if one of its seeds has. The means over the seeds hold it too.

    Args:
      experiment: what was run.
      rows: of `metrics.csv`, all of them.
      problems: of `fedvi.experiment.problems.Problems`.
      finite: per seed, whether the server's state is.
      clusters: `[seeds, clients]`, after the last round, of a clustered method.
      ending: figures of what is measured once, after the last round.
      compile_seconds: tracing and compiling, of this process; little where JAX's
        compilation cache, noted beside it, already knew the programs.
      plan: the line that says how clients and seeds were grouped.
      devices: that it ran on.
      per_round: bytes.
    """
    config, true_clusters = experiment.config, experiment.data.clusters
    per_seed = [
        _seed_summary(experiment, index, rows, problems, finite[index], clusters)
        for index in range(config.seeds)
    ]
    means = _over_seeds(config, per_seed)
    evaluations = len({r["round"] for r in rows if config.in_window(r["round"])})
    for one in (means, *per_seed):
        if one["mean_of_last_rounds"] is not None:
            one["mean_of_last_rounds"] |= {"rounds": config.final_rounds}
        if one["window"] is not None:
            one["window"] |= {"rounds": config.window, "evaluations": evaluations}
    return {
        "algorithm": config.algorithm,
        "method": config.method,
        "dataset": config.dataset,
        "rounds": config.rounds,
        "evaluated_on": config.evaluated_on,
        "failed": any(one["failed"] for one in per_seed),
        "global_model": experiment.algorithm.global_model,
        **means,
        **ending,
        "round_seconds": float(np.median([r["seconds"] for r in rows if r["round"]])),
        "compile_seconds": compile_seconds,
        "compilation_cache": jax.config.jax_compilation_cache_dir is not None,
        "codec": config.codec,
        "bytes_up": _mean_bytes_up(per_round, rows),
        "bytes_up_as_sums": per_round.up_as_sums,
        "bytes_down": per_round.down,
        "seeds": [one["seed"] for one in per_seed],
        "per_seed": per_seed,
        "problems": dict(problems),
        "clients": len(experiment.data.train.size),
        "clients_with_data": experiment.task.clients,
        "classes": experiment.data.classes,
        "novel_clients": experiment.novel.tolist(),
        "true_clusters": None if true_clusters is None else true_clusters.tolist(),
        "participants": experiment.selection.size,
        "train_examples": experiment.task.samples,
        "data": experiment.data.fidelity,
        "class_names": experiment.data.class_names,
        "data_sha256": experiment.data_sha256,
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "plan": plan,
        "versions": _versions(),
        "config": config.to_dict(),
    }


def _seed_summary(
    experiment: Experiment,
    index: int,
    rows: Sequence[Mapping[str, Any]],
    problems: Mapping[str, Any],
    finite: bool,
    clusters: np.ndarray | None,
) -> dict[str, Any]:
    config, seed = experiment.config, experiment.config.seed + index
    own = [row for row in rows if row["seed"] == seed]
    lost = problems["lost_rounds"].get(str(seed), 0) == config.rounds
    failure = _failure(experiment, own, finite, lost)
    return {
        "seed": seed,
        **seed_figures(config, own),
        "clusters": None if clusters is None else clusters[index].tolist(),
        "finite": bool(finite),
        "failed": failure is not None,
        "failure": failure,
    }


def _failure(
    experiment: Experiment,
    rows: Sequence[Mapping[str, Any]],
    finite: bool,
    lost: bool,
) -> str | None:
    """Why a seed's run came to nothing; None: it did not."""
    if lost:
        return "no participant's upload counted in any round"
    config, classes = experiment.config, experiment.data.classes
    shown = [r for r in rows if config.is_final(r["round"]) or r is rows[-1]]
    if config.window:
        shown = [row for row in rows if config.in_window(row["round"])]
    found = [trouble(row, classes, finite) for row in reversed(shown)]
    return next(filter(None, found), None)


def failures(summary: Mapping[str, Any]) -> dict[int, str]:
    """Seed to reason, of the seeds of a run that came to nothing."""
    return {
        one["seed"]: one["failure"] for one in summary["per_seed"] if one.get("failed")
    }


def _over_seeds(
    config: ExperimentConfig, per_seed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Means over the seeds, and sample standard deviations if there are several."""
    several = len(per_seed) > 1
    result = {}
    for key in _WITH_SPREAD:
        figures = [one[key] for one in per_seed]
        result[key] = over_seeds(figures, np.mean)
        spread = over_seeds(figures, _sample_std) if several else None
        result[f"{key}_std_over_seeds"] = spread
    for key in _best_names(config):
        result[key] = over_seeds([one[key] for one in per_seed], np.mean)
    return result


def _sample_std(values) -> float:
    return np.std(values, ddof=1)


def _versions() -> dict[str, str]:
    installed = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {"fedvi": __version__, "python": platform.python_version(), **installed}


def _mean_bytes_up(per_round: RoundBytes, rows: Sequence[Mapping[str, Any]]) -> int:
    """Of a round, mean over the rounds and seeds that the rows tell of: each stands for
    the rounds since its seed's last."""
    total = rounds = 0
    last: dict[int, int] = {}
    for row in rows:
        since = row["round"] - last.get(row["seed"], 0)
        last[row["seed"]] = row["round"]
        if not since:  # before the first round
            continue
        total += since * per_round.sent_up(row)
        rounds += since
    return round(total / rounds)


# The closing table.


def table_title(summary: Mapping[str, Any]) -> str:
    """What the closing table shows, from the summary of one of its runs."""
    rounds, split = summary["rounds"], summary["evaluated_on"]
    when = f"after {rounds} rounds"
    if last := summary.get("mean_of_last_rounds"):
        when = f"mean of the last {last['rounds']} of {rounds} rounds"
    if window := summary.get("window"):
        when = (
            f"mean of the evaluations in the last {window['rounds']} of {rounds} rounds"
        )
    novel = summary.get("novel_clients")
    who = "the clients that took part in training" if novel else "clients"
    return f"{when}, {split} data, mean over {who}"


def table_rows(
    summary: Mapping[str, Any], label: str | None = None
) -> list[dict[str, Any]]:
    """The rows that a finished run adds to the closing table.

    With `final_rounds` they hold the mean of the last rounds, with `window` that of
    the evaluations there, which has no personalised models. A method without a global
    model has no figures of one, and none of the mutual information where there was
    nothing to disagree: a point estimate is one sample.

    Args:
      summary: of the run.
      label: the rows' name; default: the method.
    """
    ood = summary.get("ood")
    rows = []
    for index, one in enumerate(summary["per_seed"]):
        window = one.get("window")
        figures = window or one.get("mean_of_last_rounds") or one
        for model in MODELS:
            found = figures["global"] if model == "global" else figures.get(model)
            if model == "global" and not summary["global_model"]:
                found = None
            row = {
                "method": label or summary["method"],
                "model": model,
                "seed": one.get("seed", index),
                "failed": one.get("failed", summary["failed"]),
            }
            for key in ("accuracy", "ece", "nll"):
                row[key] = None if found is None else found[key]
            row["mutual_information"] = (found or {}).get("mutual_information") or None
            rows.append(row | _calibrated(summary, index, model))
        first, second = rows[-2:]
        if window:
            first["accuracy_std_between_rounds"] = window["accuracy_std_between_rounds"]
        if index == 0:  # one figure for all seeds
            first["round_seconds"] = summary["round_seconds"]
        if ood:
            second["auroc_entropy"] = ood["per_seed"][index]["auroc_entropy"]
    return rows


def _calibrated(summary: Mapping[str, Any], index: int, model: str) -> dict[str, float]:
    """What calibration data gave one seed's model; {} without any."""
    recalibration, sets = (
        ((summary.get(key) or {}).get("per_seed") or {index: {}})[index].get(model)
        for key in ("recalibration", "conformal")
    )
    if not recalibration or not sets:
        return {}
    own = sets["lac"]["global"]
    return {
        "recalibrated_nll": recalibration["global"]["nll"],
        **{key: own[key] for key in ("coverage", "set_size", "worst_client")},
    }


def comparison(
    summaries: Sequence[Mapping[str, Any]], options: Sequence[RunOptions]
) -> str:
    """The closing table, below what it shows; under it the differences.

    Args:
      summaries: what the `summary.json` of each holds.
      options: of the runs.
    """
    titles: dict[str, list[str]] = {}
    rows, names = [], labels(summaries, [one.run_dir for one in options])
    for summary, label in zip(summaries, names):
        titles.setdefault(table_title(summary), []).append(label)
        rows += table_rows(summary, label)
    title = "; ".join(
        f"{', '.join(dict.fromkeys(who))} {title}" if len(titles) > 1 else title
        for title, who in titles.items()
    )
    parts = f"{title}:\n{table(rows)}", differences(summaries, names)
    return "\n\n".join(filter(None, parts))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plain-text table of results: the global models, then the personalised ones.

    Args:
      rows: one dict per method, seed and model: `method`, `model` ("global" or
        "personal"), and any of `seed`, `accuracy`, `accuracy_std_between_rounds` (per
        cent), `ece` (fraction, shown in per cent), `nll`, `mutual_information` (nats),
        of the personal models `auroc_entropy`, of the global one `round_seconds`, and
        with calibration data `recalibrated_nll` (one temperature for all), `coverage`,
        `worst_client` (fractions, shown in per cent) and `set_size` of the prediction
        sets of LAC by one threshold. A value that is absent or None is shown as "-",
        and a column, or a model, of nothing else is left out. A seed that has
        `failed` is counted beside the method's name.

    Returns:
      The table, a line per method. With several seeds of a method, mean ± sample
      standard deviation (divisor seeds - 1) over them.

    Raises:
      ValueError: two rows of one method, model and seed.
    """
    parts = [[row for row in rows if row["model"] == model] for model in MODELS]
    return "\n\n".join(filter(None, map(_aligned, parts)))


def _aligned(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table's part of one model; empty if nothing was measured."""
    methods = by_method(rows)
    columns = [
        column
        for column in _COLUMNS
        if any(row.get(column[1]) is not None for row in rows)
    ]
    if not columns:
        return ""
    lines = [[f"method ({rows[0]['model']})", *(header for header, *_ in columns)]]
    for method, seeds in methods.items():
        lines.append(
            [marked(method, [row.get("failed", False) for row in seeds])]
            + [
                _mean_std([row.get(key) for row in seeds], factor, digits)
                for _, key, factor, digits in columns
            ]
        )
    return _in_columns(lines)


def _in_columns(lines: Sequence[Sequence[str]]) -> str:
    """Cells under their headers, which are underlined."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        )
        for line in lines
    )


def _mean_std(values: Sequence[Any], factor: float, digits: int) -> str:
    numbers = factor * np.asarray([v for v in values if v is not None], np.float64)
    if numbers.size == 0:
        return "-"
    text = f"{numbers.mean():.{digits}f}"
    if numbers.size > 1:
        with np.errstate(invalid="ignore"):  # a diverged seed: inf - inf is NaN
            text += f" ± {numbers.std(ddof=1):.{digits}f}"
    return text


# Several runs side by side, in the folder that holds theirs: one plot, one table.


def differences(summaries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """What every run's models do better or worse than the first run's.

    Args:
      summaries: what the `summary.json` of each holds.
      names: what to call them.

    Returns:
      A table of the accuracy and the NLL of the global models, where the first run has
      one, and one of the personalised models: differences by seed, their mean ±
      standard error (sample standard deviation / √seeds), and how many errors Student's
      t asks for. Empty for one run, one seed, runs of different seeds or evaluated on
      different data, and the means of a `window`.
    """
    seeds = [summary["seeds"] for summary in summaries]
    windows = any(summary.get("window") for summary in summaries)
    if len(seeds) < 2 or len(seeds[0]) < 2 or windows:
        return ""
    measured = {(one["dataset"], one["evaluated_on"]) for one in summaries}
    if seeds.count(seeds[0]) < len(seeds) or len(measured) > 1:
        return ""
    parts = [
        f"minus {names[0]}, seed by seed: mean ± standard error of {len(seeds[0])} "
        "differences; told from 0 (95 %) beyond "
        f"{stdtrit(len(seeds[0]) - 1, 0.975):.1f} errors:"
    ]
    for model in MODELS:
        has = [model != "global" or summary["global_model"] for summary in summaries]
        if has[0] and sum(has) > 1:
            own = [
                (name, summary)
                for name, summary, one in zip(names, summaries, has)
                if one
            ]
            parts.append(_differences_of(model, own))
    return "\n\n".join([f"{parts[0]}\n{parts[1]}", *parts[2:]])


def _differences_of(model: str, runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The table of one model's differences to the first run's."""

    def gaps(summary, key):
        seeds = [one.get("mean_of_last_rounds") or one for one in summary["per_seed"]]
        return np.array([one[model][key] for one in seeds], float)

    columns = (("accuracy %", "accuracy", 2), ("NLL", "nll", 3))
    lines = [[f"method ({model})", *(header for header, *_ in columns)]]
    (_, first), *others = runs
    for name, summary in others:
        cells = []
        for _, key, digits in columns:
            values = gaps(summary, key) - gaps(first, key)
            error = np.std(values, ddof=1) / np.sqrt(values.size)
            cells.append(f"{values.mean():+.{digits}f} ± {error:.{digits}f}")
        lines.append([name, *cells])
    return _in_columns(lines)


def common_folder(options: Sequence[RunOptions]) -> Path | None:
    """The folder that holds the run folders of several runs; None: there is none."""
    folders = [Path(one.run_dir) for one in options]
    several = len({folder.resolve() for folder in folders}) > 1
    together = len({folder.resolve().parent for folder in folders}) == 1
    return folders[0].parent if several and together else None


def check_comparison(where: Path, options: Sequence[RunOptions]) -> None:
    """Raises `ValueError` if a comparison lies there and no run may replace anything.

    Args:
      where: of `common_folder`.
      options: of the runs.
    """
    found = [name for name in (PLOT, TABLE) if (where / name).exists()]
    if found and not any(one.overwrite or one.resume for one in options):
        raise ValueError(
            f"{where} already holds a comparison of runs ({', '.join(found)}): "
            "replace it with --overwrite, add to its runs with --resume, or give "
            "another --run_dir"
        )


def clear_comparison(where: Path) -> None:
    """Removes an older comparison, which would outlive a run that is interrupted."""
    for name in (PLOT, TABLE):
        folder.remove(where / name)


def write_comparison(where: Path, runs: Iterable[Any], text: str) -> None:
    """Writes the picture and the table. Says so, and no more, if that cannot be done:
    the runs are finished.

    Args:
      where: of `common_folder`.
      runs: of `load_run`, which may find something wrong with one.
      text: the closing table with its title.
    """
    try:
        folder.write_atomically(
            where / TABLE, lambda file: file.write(f"{text}\n".encode())
        )
        runs = list(runs)
        if any(run.evaluations for run in runs):
            plots.learning_curves(runs, where / PLOT)
            print(f"learning curves of all: {where / PLOT}")
    except (ImportError, OSError, ValueError) as error:
        print(f"no comparison in {where}: {error}")
