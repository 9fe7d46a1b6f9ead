"""Participants that were empty or failed, and what made a choice of clients hard."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedvi.federation import RoundMetrics
from fedvi.selection import Choice

__all__ = ["Problems"]

_SHOWN = 10  # ids or rounds named in one line


class Problems:
    """Counts what went wrong in a run and puts it into words.

    Args:
      saved: what `to_dict` of an earlier stretch of the run returned.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        saved = saved or {}
        self._empty = _restored(saved, "empty")
        self._failed = _restored(saved, "failed")
        self._lost = _restored(saved, "lost_rounds")
        self._invalid = _restored(saved, "invalid")
        self._equal = _restored(saved, "equal_chances")

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
        new = sorted(set(empty) - set(self._empty))
        if new:
            lines.append(f"without training data, skipped: {_several('client', new)}")
        self._empty += empty
        for index, seed in enumerate(seeds):
            failed = _count(metrics.client_ids[index], metrics.failed[index])
            if failed:
                last = first_round + metrics.failed.shape[1] - 1
                lines.append(
                    f"WARNING: seed {seed}, rounds {first_round} to {last}: left out "
                    f"{_several('client', sorted(failed))}: NaN or infinity returned"
                )
            self._failed += failed
            lost = (metrics.empty[index] | metrics.failed[index]).all(-1)
            if lost.any():
                rounds = (np.flatnonzero(lost) + first_round).tolist()
                lines.append(
                    f"WARNING: seed {seed}: no participant's upload counted in "
                    f"{_several('round', rounds)}; the server stayed as it was"
                )
                self._lost[seed] += int(lost.sum())
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
        self._invalid += invalid
        equal = choice.uniform[index]
        if equal.any():
            rounds = (np.flatnonzero(equal) + first_round).tolist()
            lines.append(
                f"seed {seed}: no score was positive in {_several('round', rounds)}: "
                "all clients had the same chance"
            )
            self._equal[seed] += int(equal.sum())
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: by client id, over all rounds and seeds, participations
        that were `empty` or `failed` and rounds in which it was `invalid` for the
        selection; by seed, `lost_rounds` and those of `equal_chances`.
        """
        counters = {
            "empty": self._empty,
            "failed": self._failed,
            "lost_rounds": self._lost,
            "invalid": self._invalid,
            "equal_chances": self._equal,
        }
        return {
            name: {str(k): counter[k] for k in sorted(counter)}
            for name, counter in counters.items()
        }


def _restored(saved: Mapping[str, Any], name: str) -> Counter:
    # JSON has turned the ids into strings; an older checkpoint may lack a counter.
    return Counter({int(k): v for k, v in saved.get(name, {}).items()})


def _count(client_ids: np.ndarray, where: np.ndarray) -> Counter:
    return Counter(client_ids[where].tolist())


def _several(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}{more}"
