"""What a run writes down as it goes: rows of its CSV files, and its problems."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedvi import codecs
from fedvi.codecs import tree_bytes
from fedvi.contract import Messages
from fedvi.evaluation import Scores, adjusted_rand_index, summarise
from fedvi.experiment.setup import Experiment
from fedvi.federation import RoundMetrics, take
from fedvi.selection import Choice

__all__ = [
    "MODELS",
    "Problems",
    "RoundBytes",
    "bytes_per_round",
    "choice_rows",
    "evaluation_rows",
]

MODELS = ("global", "personal")
_WEIGHT = 4  # bytes of a client's weight; no codec touches it
_SHOWN = 10  # ids or rounds named in one line
_PROBLEMS = ("empty", "failed", "lost_rounds", "invalid", "equal_chances")


class RoundBytes(NamedTuple):
    """Bytes of a round, of all participants together, from the shapes of what is sent.

    Attributes:
      up: of the uploads by the codec and their weights, if nothing is withheld.
      up_as_sums: if clients made the statistics and only sums left them, as in secure
        aggregation: float32, by no codec; None with `reduce="stack"`.
      down: of what they are sent.
      withheld: that `up` falls by for every value that each participant withholds.
    """

    up: int
    up_as_sums: int | None
    down: int
    withheld: int

    def sent_up(self, metrics: Mapping[str, float]) -> float:
        """Bytes up of rounds with these mean metrics, of which one is `withheld`."""
        saved = self.withheld * metrics.get("withheld", 0.0)
        return self.up - (saved if np.isfinite(saved) else 0.0)


def bytes_per_round(experiment: Experiment, messages: Messages) -> RoundBytes:
    """Counts the bytes of a round.

    Where clients are chosen by their importance, every candidate gets what goes down
    before, and the participants no second time; and every candidate's report goes up.
    """
    codec = codecs.named(experiment.config.codec)
    participants, measure = experiment.selection.size, experiment.selection.measure
    receivers, reports = participants, 0
    if measure is not None:
        receivers = len(experiment.trained)
        reports = tree_bytes(messages.reports[measure]) * receivers
    upload = codecs.payload_bytes(codec, messages.upload) + _WEIGHT
    as_sums = None
    if experiment.algorithm.reduce == "sum":
        summands = tree_bytes(messages.summands) + _WEIGHT
        as_sums = summands * participants + reports
    return RoundBytes(
        upload * participants + reports,
        as_sums,
        tree_bytes(messages.down) * receivers,
        codecs.bytes_per_value(codec) * participants,
    )


def evaluation_rows(
    experiment: Experiment,
    *,
    round: int,
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
      round: rounds done.
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
            "round": round,
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


class Problems:
    """Counts what went wrong in a run and puts it into words.

    Args:
      saved: what `to_dict` of an earlier stretch of the run returned.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        # JSON has turned the ids into strings.
        self._counts = {
            name: Counter({int(k): v for k, v in (saved or {}).get(name, {}).items()})
            for name in _PROBLEMS
        }

    def add(self, first_round: int, seeds: Sequence[int], metrics: RoundMetrics):
        """Counts a block of rounds.

        Args:
          first_round: number of the block's first round, counted from 1.
          seeds: the seeds.
          metrics: leaves `[seeds, rounds, ...]`, numpy.

        Returns:
          Lines for the user; none if nothing happened.
        """
        lines = []
        empty = _count(metrics.client_ids, metrics.empty)
        new = sorted(set(empty) - set(self._counts["empty"]))
        if new:
            lines.append(f"without training data, skipped: {_several('client', new)}")
        self._counts["empty"] += empty
        for index, seed in enumerate(seeds):
            failed = _count(metrics.client_ids[index], metrics.failed[index])
            if failed:
                last = first_round + metrics.failed.shape[1] - 1
                lines.append(
                    f"WARNING: seed {seed}, rounds {first_round} to {last}: left out "
                    f"{_several('client', sorted(failed))}: NaN or infinity returned"
                )
            self._counts["failed"] += failed
            lost = (metrics.empty[index] | metrics.failed[index]).all(-1)
            if lost.any():
                rounds = (np.flatnonzero(lost) + first_round).tolist()
                lines.append(
                    f"WARNING: seed {seed}: no participant's upload counted in "
                    f"{_several('round', rounds)}; the server stayed as it was"
                )
                self._counts["lost_rounds"][seed] += int(lost.sum())
            if metrics.choice:
                lines += self._add_choice(first_round, seed, metrics.choice, index)
        return lines

    def _add_choice(
        self, first_round: int, seed: int, choice: Choice, index: int
    ) -> list[str]:
        lines = []
        invalid = Counter(np.nonzero(choice.invalid[index])[1].tolist())
        if invalid:
            rounds = np.flatnonzero(choice.invalid[index].any(-1)) + first_round
            lines.append(
                f"WARNING: seed {seed}, {_several('round', rounds.tolist())}, "
                f"{_several('client', sorted(invalid))}: report or score not finite: "
                "not selectable"
            )
        self._counts["invalid"] += invalid
        equal = choice.uniform[index]
        if equal.any():
            rounds = (np.flatnonzero(equal) + first_round).tolist()
            lines.append(
                f"seed {seed}: no score was positive in {_several('round', rounds)}: "
                "all clients had the same chance"
            )
            self._counts["equal_chances"][seed] += int(equal.sum())
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: by client id, over all rounds and seeds, participations
        that were `empty` or `failed` and rounds in which it was `invalid` for the
        selection; by seed, `lost_rounds` and those of `equal_chances`.
        """
        return {
            name: {str(k): counts[k] for k in sorted(counts)}
            for name, counts in self._counts.items()
        }


def _count(client_ids: np.ndarray, where: np.ndarray) -> Counter:
    return Counter(client_ids[where].tolist())


def _several(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}{more}"
