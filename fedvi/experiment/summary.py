"""The figures of a run: rows of `metrics.csv`, `summary.json`, bytes sent."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedvi import __version__
from fedvi.evaluation import Scores, summarise
from fedvi.experiment.build import Experiment
from fedvi.federation import RoundMetrics

__all__ = ["bytes_per_round", "evaluation_rows", "seed_of", "summary", "table_rows"]

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "distrax", "numpy")


def seed_of(tree: Any, index: int) -> Any:
    """One seed's part of a pytree with leaves `[seeds, ...]`."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def evaluation_rows(
    *,
    round: int,
    split: str,
    seeds: Sequence[int],
    metrics: RoundMetrics,
    global_scores: Scores,
    personal_scores: Scores | None,
    seconds: float,
) -> list[dict[str, Any]]:
    """One row of `metrics.csv` per seed.

    Args:
      round: rounds done.
      split: what the scores were measured on.
      seeds: the seeds.
      metrics: leaves `[seeds, rounds, ...]`, numpy, of the rounds since the last row.
      global_scores: leaves `[seeds, clients, ...]`.
      personal_scores: the same, or None where not evaluated.
      seconds: of one round of one seed, in this block.
    """
    counted = ~(metrics.empty | metrics.failed).all(-1)
    rows = []
    for index, seed in enumerate(seeds):
        figures = summarise(seed_of(global_scores, index))
        personal = dict.fromkeys(figures)
        if personal_scores is not None:
            personal = summarise(seed_of(personal_scores, index))
        rows.append(
            {
                "round": round,
                "seed": seed,
                "split": split,
                "seconds": seconds,
                **_mean_metrics(seed_of(metrics.metrics, index), counted[index]),
                **{f"global_{key}": value for key, value in figures.items()},
                **{f"personal_{key}": value for key, value in personal.items()},
            }
        )
    return rows


def _mean_metrics(metrics: Mapping[str, np.ndarray], counted) -> dict[str, float]:
    """Means over the rounds that had a participant; NaN if none had."""
    return {
        key: float(values[counted].mean()) if counted.any() else float("nan")
        for key, values in metrics.items()
    }


def bytes_per_round(experiment: Experiment) -> tuple[int, int]:
    """(bytes up, bytes down) of a round, from the shapes of what is sent.

    Up: every participant's statistics and weight. Down: what `broadcast` lets
    through, to every participant.
    """
    algorithm = experiment.algorithm
    one_client = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
        experiment.data.train,
    )

    def messages(seed, round, data):
        key = jax.random.key(seed)
        server = algorithm.init(key)
        down = algorithm.broadcast(server)
        client = algorithm.init_client(key, server)
        output = algorithm.client_update(key, round, down, client, data)
        return (output.statistics, output.weight), down

    scalar = jax.ShapeDtypeStruct((), np.int32)
    sent = jax.eval_shape(messages, scalar, scalar, one_client)
    up, down = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        for tree in sent
    )
    return up * experiment.participants, down * experiment.participants


def summary(
    experiment: Experiment,
    *,
    rows: Sequence[Mapping[str, Any]],
    problems: Mapping[str, Any],
    finite: Sequence[bool],
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
      compile_seconds: tracing and compiling, of this process; little where JAX's
        compilation cache, noted beside it, already knew the programs.
      plan: the line that says how clients and seeds were grouped.
      devices: that it ran on.
    """
    config = experiment.config
    last = [row for row in rows if row["round"] == config.rounds]
    best = f"best_on_{config.evaluated_on}_global_accuracy"
    per_seed = []
    for row, is_finite in zip(last, finite):
        own = [r["global_accuracy"] for r in rows if r["seed"] == row["seed"]]
        lost = problems["lost_rounds"].get(str(row["seed"]), 0)
        per_seed.append(
            {
                "seed": row["seed"],
                "global": _with_prefix(row, "global_"),
                "personal": _with_prefix(row, "personal_"),
                best: max(own),
                "finite": bool(is_finite),
                "failed": not is_finite or lost == config.rounds,
            }
        )
    bytes_up, bytes_down = bytes_per_round(experiment)
    result = {
        "algorithm": config.algorithm,
        "dataset": config.dataset,
        "rounds": config.rounds,
        "evaluated_on": config.evaluated_on,
        "failed": any(one["failed"] for one in per_seed),
    }
    for model in ("global", "personal"):
        figures = [one[model] for one in per_seed]
        result[model] = _over_seeds(figures, np.mean)
        result[f"{model}_std_over_seeds"] = (
            _over_seeds(figures, _sample_std) if len(figures) > 1 else None
        )
    return result | {
        best: float(np.mean([one[best] for one in per_seed])),
        "round_seconds": float(np.median([row["seconds"] for row in rows])),
        "compile_seconds": compile_seconds,
        "compilation_cache": jax.config.jax_compilation_cache_dir is not None,
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
        "seeds": [one["seed"] for one in per_seed],
        "per_seed": per_seed,
        "problems": dict(problems),
        "clients": len(experiment.data.train.size),
        "clients_with_data": experiment.task.clients,
        "participants": experiment.participants,
        "train_examples": experiment.task.samples,
        "data": experiment.data.fidelity,
        "data_sha256": experiment.data_sha256,
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "plan": plan,
        "versions": _versions(),
        "config": config.to_dict(),
    }


def table_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that a finished run, marked if failed, adds to the closing table."""
    method = summary["algorithm"] + (" (failed)" if summary["failed"] else "")
    return [
        {
            "method": method,
            "global_accuracy": one["global"]["accuracy"],
            "personal_accuracy": one["personal"]["accuracy"],
            "ece": one["global"]["ece"],
            "nll": one["global"]["nll"],
            # One figure for all seeds.
            "round_seconds": summary["round_seconds"] if index == 0 else None,
        }
        for index, one in enumerate(summary["per_seed"])
    ]


def _with_prefix(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)}


def _over_seeds(figures: Sequence[Mapping[str, Any]], reduce) -> dict[str, float]:
    return {key: float(reduce([one[key] for one in figures])) for key in figures[0]}


def _sample_std(values) -> float:
    return np.std(values, ddof=1)


def _versions() -> dict[str, str]:
    installed = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {"fedvi": __version__, "python": platform.python_version(), **installed}
