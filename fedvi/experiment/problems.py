"""Participants that were empty or failed, and states that are not finite any more."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedvi.federation import RoundMetrics

__all__ = ["Problems"]

_SHOWN = 10  # ids or rounds named in one line


class Problems:
    """Counts what went wrong in a run and puts it into words.

    Args:
      saved: what `to_dict` of an earlier stretch of the run returned.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        saved = saved or {"empty": {}, "failed": {}, "lost_rounds": {}}
        # JSON has turned the ids into strings.
        self._empty = Counter({int(k): v for k, v in saved["empty"].items()})
        self._failed = Counter({int(k): v for k, v in saved["failed"].items()})
        self._lost = Counter({int(k): v for k, v in saved["lost_rounds"].items()})

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
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Participations by client id, over all rounds and seeds, and lost rounds by
        seed, as JSON holds it.
        """
        return {
            "empty": {str(k): self._empty[k] for k in sorted(self._empty)},
            "failed": {str(k): self._failed[k] for k in sorted(self._failed)},
            "lost_rounds": {str(k): self._lost[k] for k in sorted(self._lost)},
        }


def _count(client_ids: np.ndarray, where: np.ndarray) -> Counter:
    return Counter(client_ids[where].tolist())


def _several(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}{more}"
