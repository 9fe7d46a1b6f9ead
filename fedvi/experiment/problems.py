"""The problems of a run: what was skipped, failed or could not be chosen, counted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedvi.federation import RoundMetrics
from fedvi.selection import Choice

__all__ = ["Problems"]

_SHOWN = 10  # ids or rounds named in one line
_PROBLEMS = ("empty", "failed", "lost_rounds", "invalid", "equal_chances")


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
                    f"{_several('client', sorted(failed))}: NaN, infinity or an "
                    "absurd number returned"
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
