"""How well a grouping of the clients agrees with the true one."""

import numpy as np

__all__ = ["adjusted_rand_index"]


def adjusted_rand_index(true: np.ndarray, found: np.ndarray) -> float:
    """Adjusted Rand index of two groupings (Hubert and Arabie 1985).

    Agreement about pairs of clients, together or apart, corrected for chance: 1 for
    the same grouping under any names, about 0 for a random one, below 0 for a worse.

    Args:
      true: `[clients]` int, the true clusters.
      found: `[clients]` int, the recovered ones.

    Raises:
      ValueError: the shapes are not the same `[clients]`, or there is no client.
    """
    true, found = np.asarray(true), np.asarray(found)
    if true.ndim != 1 or true.shape != found.shape or true.size == 0:
        raise ValueError(
            f"true has shape {true.shape} and found {found.shape}: both must be "
            "[clients], with at least one client"
        )
    _, rows = np.unique(true, return_inverse=True)
    _, columns = np.unique(found, return_inverse=True)
    table = np.zeros((rows.max() + 1, columns.max() + 1), np.int64)
    np.add.at(table, (rows, columns), 1)
    together = _pairs(table)
    in_true, in_found = _pairs(table.sum(axis=1)), _pairs(table.sum(axis=0))
    by_chance = in_true * in_found / max(_pairs(np.array([true.size])), 1)
    most = (in_true + in_found) / 2
    # One cluster on both sides, or none that holds two clients: the same grouping.
    return (
        1.0 if most == by_chance else float((together - by_chance) / (most - by_chance))
    )


def _pairs(counts: np.ndarray) -> int:
    """Number of pairs within groups of these sizes."""
    return int((counts * (counts - 1) // 2).sum())
