"""Which runs a picture shows, under which names."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedvi.evaluation import Scores
from fedvi.experiment.labels import labels, marked

__all__ = [
    "MODELS",
    "Runs",
    "client_rows",
    "failed_seeds",
    "has_model",
    "named",
    "novel_clients",
    "recalibrated",
    "scores",
    "sound",
    "title",
    "trained",
]

# One run, several, or several by name: see `named`. A run is what `fedvi.load_run`
# returns.
Runs = Any
MODELS = {
    "global": "global",
    "personal": "personal",
    "novel_global": "novel clients, global",
    "novel_personal": "novel clients, personal",
}


def named(runs: Runs) -> dict[str, list[Any]]:
    """Runs by the name that a legend gives them.

    Runs that differ in nothing but the seed share a name, their method, and are
    averaged; where runs of one method differ in settings, the name has them. Seeds that
    failed are counted beside it.

    Args:
      runs: one run or several; or a mapping of names to one or several, for names, and
        means, of the caller's choice.

    Raises:
      ValueError: no run, or something else than a finished run.
    """
    groups: dict[str, list[Any]] = {}
    if isinstance(runs, Mapping):
        groups = {str(name): _listed(own) for name, own in runs.items()}
    else:
        runs = _listed(runs)
        names = labels([r.summary for r in runs], [r.folder for r in runs])
        for name, run in zip(names, runs):
            groups.setdefault(name, []).append(run)
    if not groups:
        raise ValueError("runs is empty: give what fedvi.load_run returns")
    return {
        marked(name, [lost for run in own for lost in failed_seeds(run)]): own
        for name, own in groups.items()
    }


def _listed(runs: Any) -> list[Any]:
    several = isinstance(runs, Sequence) and not isinstance(runs, str)
    runs = list(runs) if several else [runs]
    for run in runs:
        if not hasattr(run, "summary"):
            raise ValueError(
                f"runs holds {run!r}: give what fedvi.load_run or load_runs returns"
            )
        if not run.summary:
            raise ValueError(
                f"{run.folder} holds an unfinished run: pictures show finished ones; "
                "go on with --resume"
            )
    if not runs:
        raise ValueError("runs is empty: give what fedvi.load_run returns")
    return runs


def title(groups: Mapping[str, Sequence[Any]]) -> str:
    """What all of a picture is about."""
    summaries = [run.summary for own in groups.values() for run in own]
    data = dict.fromkeys(f"{s['dataset']}, {s['evaluated_on']} data" for s in summaries)
    name = f"{next(iter(groups))}, " if len(groups) == 1 else ""
    return name + ", ".join(data)


def failed_seeds(run: Any) -> list[bool]:
    """Of every seed, whether it came to nothing."""
    summary = run.summary
    return [one.get("failed", summary["failed"]) for one in summary["per_seed"]]


def has_model(run: Any, model: str) -> bool:
    """False for what is the global model of a method that has none (`local_only`)."""
    return run.summary["global_model"] or not model.endswith("global")


def sound(run: Any) -> np.ndarray:
    """`[seeds]` bool, those that did not fail; all, if all did."""
    failed = np.array(failed_seeds(run))
    return failed if failed.all() else ~failed


def novel_clients(run: Any) -> np.ndarray:
    """`[clients]` bool, those that take no part in training."""
    return np.isin(np.arange(run.summary["clients"]), run.summary["novel_clients"])


def trained(run: Any) -> np.ndarray:
    """Numbers of the clients that take part in training."""
    return np.flatnonzero(~novel_clients(run))


def client_rows(run: Any, column: str) -> np.ndarray:
    """A column of `clients.csv`, `[seeds, clients]`; NaN where a cell is empty."""
    rows = run.per_client()
    if not isinstance(rows, list):  # a DataFrame
        rows = rows.to_dict("records")
    cells = [np.nan if row[column] is None else row[column] for row in rows]
    return np.array(cells, float).reshape(-1, run.summary["clients"])


def scores(run: Any) -> dict[str, Scores]:
    """Of the models that the run has, leaves `[seeds, clients, ...]`, float64."""
    return {
        model: Scores(*(np.asarray(leaf, np.float64) for leaf in own))
        for model, own in run.scores.items()
        if has_model(run, model)
    }


def recalibrated(run: Any) -> dict[str, Scores]:
    """The same at the temperature of all clients' calibration data; {} without any."""
    found = run.evaluation.get("recalibration") or {}
    return {model: Scores(*own["global"]) for model, own in found.items() if own}
