"""What `summary.json` holds, and the rows of the closing table."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedvi import __version__
from fedvi.experiment.build import Experiment
from fedvi.experiment.communication import bytes_per_round, mean_bytes_up
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.headline import best_names, over_seeds, seed_figures
from fedvi.experiment.schedule import in_window

__all__ = ["summary", "table_rows", "table_title"]

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "distrax", "numpy")
# Figures that have a spread over seeds beside their mean.
_WITH_SPREAD = (
    "global",
    "personal",
    "novel",
    "mean_of_last_rounds",
    "window",
    "adjusted_rand",
)


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
) -> dict[str, Any]:
    """What `summary.json` holds.

    A seed has `failed` if its server's state is not finite or no round had a
    participant that counted; a run, if one of its seeds has.

    Args:
      experiment: what was run.
      rows: of `metrics.csv`, all of them.
      problems: of `fedvi.experiment.problems`.
      finite: per seed, whether the server's state is.
      clusters: `[seeds, clients]`, after the last round, of a clustered method.
      ending: figures of `fedvi.experiment.ending`.
      compile_seconds: tracing and compiling, of this process; little where JAX's
        compilation cache, noted beside it, already knew the programs.
      plan: the line that says how clients and seeds were grouped.
      devices: that it ran on.
    """
    config = experiment.config
    per_seed = []
    for index in range(config.seeds):
        seed = config.seed + index
        lost = problems["lost_rounds"].get(str(seed), 0)
        per_seed.append(
            {
                "seed": seed,
                **seed_figures(config, [row for row in rows if row["seed"] == seed]),
                "clusters": None if clusters is None else clusters[index].tolist(),
                "finite": bool(finite[index]),
                "failed": not finite[index] or lost == config.rounds,
            }
        )
    means = _over_seeds(config, per_seed)
    evaluations = len({r["round"] for r in rows if in_window(config, r["round"])})
    for one in (means, *per_seed):
        if one["mean_of_last_rounds"] is not None:
            one["mean_of_last_rounds"] |= {"rounds": config.final_rounds}
        if one["window"] is not None:
            one["window"] |= {"rounds": config.window, "evaluations": evaluations}
    per_round = bytes_per_round(experiment)
    return {
        "algorithm": config.algorithm,
        "method": config.method,
        "dataset": config.dataset,
        "rounds": config.rounds,
        "evaluated_on": config.evaluated_on,
        "failed": any(one["failed"] for one in per_seed),
        **means,
        **ending,
        "round_seconds": float(np.median([row["seconds"] for row in rows])),
        "compile_seconds": compile_seconds,
        "compilation_cache": jax.config.jax_compilation_cache_dir is not None,
        "codec": config.codec,
        "bytes_up": mean_bytes_up(per_round, rows),
        "bytes_down": per_round.down,
        "seeds": [one["seed"] for one in per_seed],
        "per_seed": per_seed,
        "problems": dict(problems),
        "clients": len(experiment.data.train.size),
        "clients_with_data": experiment.task.clients,
        "novel_clients": experiment.novel.tolist(),
        "true_clusters": _listed(experiment.data.clusters),
        "participants": experiment.participants,
        "train_examples": experiment.task.samples,
        "data": experiment.data.fidelity,
        "data_sha256": experiment.data_sha256,
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "plan": plan,
        "versions": _versions(),
        "config": config.to_dict(),
    }


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


def table_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that a finished run, marked if failed, adds to the closing table.

    With `final_rounds` they hold the mean of the last rounds, with `window` that of
    the evaluations there, which has no personalised accuracy.
    """
    method = summary["method"] + (" (failed)" if summary["failed"] else "")
    rows = []
    for index, one in enumerate(summary["per_seed"]):
        window = one.get("window")
        figures = window or one.get("mean_of_last_rounds") or one
        row = {
            "method": method,
            "global_accuracy": figures["global"]["accuracy"],
            "personal_accuracy": figures.get("personal", {}).get("accuracy"),
            "ece": figures["global"]["ece"],
            "nll": figures["global"]["nll"],
            # One figure for all seeds.
            "round_seconds": summary["round_seconds"] if index == 0 else None,
        }
        if window:
            spread = window["accuracy_std_between_rounds"]
            row["accuracy_std_between_rounds"] = spread
        rows.append(row)
    return rows


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
    for key in best_names(config):
        result[key] = over_seeds([one[key] for one in per_seed], np.mean)
    return result


def _listed(array: np.ndarray | None) -> list | None:
    return None if array is None else array.tolist()


def _sample_std(values) -> float:
    return np.std(values, ddof=1)


def _versions() -> dict[str, str]:
    installed = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {"fedvi": __version__, "python": platform.python_version(), **installed}
