"""The figures of a run that its rows hold: of each seed, and over the seeds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.rows import MODELS
from fedvi.experiment.schedule import in_window, is_final

__all__ = ["best_names", "over_seeds", "seed_figures"]

_RECENT = 100  # rounds; pFedBayes' score is the best of them (§6.2)


def best_names(config: ExperimentConfig) -> tuple[str, str]:
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
      or None; and the two best figures under `best_names`.
    """
    best, recent_best = best_names(config)
    recent = [row for row in rows if row["round"] > config.rounds - _RECENT]
    final = [_models(row) for row in rows if is_final(config, row["round"])]
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
        _with_prefix(row, "global_") for row in rows if in_window(config, row["round"])
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
