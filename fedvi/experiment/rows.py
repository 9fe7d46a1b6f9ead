"""Rows of the CSV files that a run writes as it goes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedvi.evaluation import Scores, adjusted_rand_index, summarise
from fedvi.experiment.communication import RoundBytes
from fedvi.experiment.setup import Experiment
from fedvi.federation import RoundMetrics, take
from fedvi.selection import Choice

__all__ = [
    "MODELS",
    "choice_rows",
    "client_rows",
    "evaluation_rows",
]

MODELS = ("global", "personal")


def evaluation_rows(
    experiment: Experiment,
    *,
    round_index: int,
    seeds: Sequence[int],
    metrics: RoundMetrics,
    scores: Mapping[str, Scores],
    clusters: np.ndarray | None,
    seconds: float,
    per_round: RoundBytes,
) -> list[dict[str, Any]]:
    """One row per seed.

    Figures are over the clients that take part in training, `global_...` and
    `personal_...`; novel clients, if there are any, have their own `novel_global_...`
    and `novel_personal_...`. `adjusted_rand` is there if the true clusters are known
    and the method has clusters: over the training clients that hold data. `clipped`
    is there if clients are chosen by their importance: the mean over the rounds.
    `bytes_up`, of a round, is there if participants withhold values: what was sent.

    Args:
      experiment: what is run.
      round_index: rounds done.
      seeds: the seeds.
      metrics: leaves `[seeds, rounds, ...]`, numpy, of the rounds since the last row.
      scores: leaves `[seeds, clients, ...]`, numpy, of the `global` models and, where
        evaluated, of the `personal` ones.
      clusters: `[seeds, clients]`, or None.
      seconds: of one round of one seed, in this block.
      per_round: bytes.
    """
    counted = ~(metrics.empty | metrics.failed).all(-1)
    groups = {"": experiment.trained}
    if len(experiment.novel):
        groups["novel_"] = experiment.novel
    rows = []
    for index, seed in enumerate(seeds):
        row = {
            "round": round_index,
            "seed": seed,
            "split": experiment.config.evaluated_on,
            "seconds": seconds,
            **_mean_metrics(take(metrics.metrics, index), counted[index]),
        }
        if "withheld" in row:
            row["bytes_up"] = int(np.rint(per_round.sent_up(row)))
        if metrics.choice:
            row["clipped"] = float(metrics.choice.clipped[index].mean())
        for group, ids in groups.items():
            own = {
                model: summarise(take(take(tree, index), ids))
                for model, tree in scores.items()
            }
            for model in MODELS:
                figures = own.get(model, dict.fromkeys(own["global"]))
                row |= {f"{group}{model}_{key}": v for key, v in figures.items()}
        if clusters is not None and experiment.data.clusters is not None:
            row["adjusted_rand"] = _agreement(experiment, clusters[index])
        rows.append(row)
    return rows


def choice_rows(
    first_round: int, seeds: Sequence[int], metrics: RoundMetrics
) -> list[dict[str, Any]]:
    """One row per round and seed where clients are chosen by their importance.

    Args:
      first_round: number of the block's first round, counted from 1.
      seeds: the seeds.
      metrics: leaves `[seeds, rounds, ...]`, numpy.

    Returns:
      `client`, ids of the cohort, and `invalid`, of the clients that could not be
      chosen, with spaces between them; `uniform` 0 or 1; `clipped`; and `p_k`, the
      probability of client k. No rows for other selections.
    """
    if not metrics.choice:
        return []
    return [
        {
            "round": first_round + offset,
            "seed": seed,
            **_choice_row(*take((metrics.client_ids, metrics.choice), (index, offset))),
        }
        for offset in range(metrics.client_ids.shape[1])
        for index, seed in enumerate(seeds)
    ]


def client_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """One row per client: its number, its natural id if it has one, and its sizes."""
    data = experiment.data
    clients = len(data.train.size)
    ids = range(clients) if data.ids is None else data.ids.tolist()
    sizes = (np.asarray(part.size).tolist() for part in (data.train, data.test))
    return [
        {"client": client, "id": name, "train_size": train, "test_size": test}
        for client, (name, train, test) in enumerate(zip(ids, *sizes, strict=True))
    ]


def _choice_row(client_ids: np.ndarray, choice: Choice) -> dict[str, Any]:
    return {
        "client": " ".join(map(str, client_ids)),
        "clipped": _shortest(choice.clipped),
        "uniform": int(choice.uniform),
        "invalid": " ".join(map(str, np.flatnonzero(choice.invalid))),
        **{f"p_{k}": _shortest(p) for k, p in enumerate(choice.probabilities)},
    }


def _shortest(value: np.ndarray) -> float:
    """The double whose text is the shortest one of a float32."""
    return float(str(np.float32(value)))


def _agreement(experiment: Experiment, clusters: np.ndarray) -> float:
    ids = experiment.trained
    ids = ids[np.asarray(experiment.data.train.size)[ids] > 0]
    return adjusted_rand_index(experiment.data.clusters[ids], clusters[ids])


def _mean_metrics(metrics: Mapping[str, np.ndarray], counted) -> dict[str, float]:
    """Means over the rounds that had a participant; NaN if none had."""
    return {
        key: float(values[counted].mean()) if counted.any() else float("nan")
        for key, values in metrics.items()
    }
