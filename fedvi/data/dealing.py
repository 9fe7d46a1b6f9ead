"""What partitions share: their result, and dealing in given proportions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Partition", "count_labels", "deal_in_proportion"]


class Partition(NamedTuple):
    """Which examples of the official splits each client holds."""

    train: list[np.ndarray]  # per client: indices [n_i] into the training split
    test: list[np.ndarray]  # per client: indices [m_i] into the test split
    pooled: bool = False  # True: both index the concatenation of train and test
    ids: np.ndarray | None = None  # [clients] natural ids, if the clients have any


def count_labels(
    hands: Sequence[np.ndarray], y: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """Examples of each label that each client holds: `[clients, labels]`."""
    rows = [
        np.bincount(np.searchsorted(labels, y[hand]), minlength=len(labels))
        for hand in hands
    ]
    return np.stack(rows)


def deal_in_proportion(
    y: np.ndarray, labels: np.ndarray, weights: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Deals all examples of each label to clients in proportion to `weights`.

    No example goes to two clients; a client's number differs from its exact share by
    less than 1. Labels without any weight are not dealt.

    Args:
      y: labels `[n]`.
      labels: sorted label values `[labels]`.
      weights: non-negative `[clients, labels]`.
      rng: decides which examples a client gets, and who gains from rounding.

    Returns:
      Per client its indices into `y`.
    """
    hands = [[] for _ in weights]
    for label, weight in zip(labels, weights.T):
        if weight.sum() == 0:
            continue
        images = rng.permutation(np.flatnonzero(y == label))
        ends = np.cumsum(weight)
        # A random start makes every client's expected number its exact share.
        cuts = ends[:-1] / ends[-1] * len(images) + rng.random()
        for hand, share in zip(hands, np.split(images, cuts.astype(int))):
            hand.append(share)
    empty = np.empty(0, int)
    return [np.concatenate([empty, *hand]) for hand in hands]
