"""A partition in which every client has all classes, one of them in the majority."""

import numpy as np

from fedvi.checks import at_least
from fedvi.data.dealing import Partition

__all__ = ["class_majority"]


def class_majority(
    train_y: np.ndarray,
    test_y: np.ndarray,
    *,
    clients: int,
    seed: int,
    majority: float = 0.9,
) -> Partition:
    """Clients of equal size, each with one class in the majority.

    With C classes, client k's majority class is the (k mod C)-th; it makes up
    `majority` of the client's examples, and the other classes have equal parts of the
    rest. So two classes are mixed 9:1 in half of the clients and 1:9 in the others.
    Clients get as many examples as the scarcest class allows, drawn at random, none
    to two clients. A part of the rest is rounded to the nearest whole number of
    examples, and the majority class makes up the difference. The test split is dealt
    by the same rule, to parts of another size; an empty one stays empty.

    Args:
      train_y, test_y: labels of the two splits, `[n]` and `[m]`.
      clients: number of clients.
      seed: of the random draws.
      majority: share of the majority class, from 1 / C (all alike) to below 1
        (client selection on two classes: 0.9).

    Raises:
      ValueError: fewer than two classes, `majority` outside its range, or so many
        clients that one would be without an example of some class.
    """
    at_least("clients", clients, 1)
    labels = np.unique(train_y)
    if len(labels) < 2:
        raise ValueError(
            f"partition='class_majority' needs at least 2 classes, but the training "
            f"split has {len(labels)}"
        )
    if not 1 / len(labels) <= majority < 1:
        raise ValueError(
            f"majority={majority} must be at least 1/{len(labels)}, an equal share of "
            f"{len(labels)} classes, and below 1"
        )
    rng = np.random.default_rng(seed)
    mine = np.arange(clients)[:, None] % len(labels) == np.arange(len(labels))[None]

    def deal(split, y):
        totals = np.array([np.count_nonzero(y == label) for label in labels])
        most, least = _counts(split, totals, mine.sum(axis=0), clients, majority)
        counts = np.where(mine, most, least)
        hands = [[] for _ in range(clients)]
        for label, count in zip(labels, counts.T):
            examples = rng.permutation(np.flatnonzero(y == label))
            # The last piece is what no client gets.
            for hand, piece in zip(hands, np.split(examples, np.cumsum(count))):
                hand.append(piece)
        return [np.concatenate(hand) for hand in hands]

    train = deal("training", train_y)
    test = deal("test", test_y) if len(test_y) else [np.empty(0, int)] * clients
    return Partition(train, test, dropped_test=len(test_y) - sum(map(len, test)))


def _counts(
    split: str, totals: np.ndarray, leads: np.ndarray, clients: int, majority: float
) -> tuple[int, int]:
    """A client's examples of its majority class, and of each other class.

    Args:
      split: its name, for the error.
      totals: examples of each class, `[classes]`.
      leads: clients in whose majority each class is, `[classes]`.
      clients: number of clients.
      majority: share of the majority class.
    """
    others = len(totals) - 1
    size = np.arange(1, totals.sum() // clients + 1)
    least = np.floor((1 - majority) * size / others + 0.5).astype(int)
    most = size - others * least
    needed = most[:, None] * leads[None] + least[:, None] * (clients - leads)[None]
    fits = (needed <= totals[None]).all(axis=1) & (least >= 1) & (most >= least)
    if not fits.any():
        raise ValueError(
            f"clients={clients} with majority={majority} is too much for the {split} "
            f"split, whose {len(totals)} classes have {totals.min()} to "
            f"{totals.max()} examples: every client needs at least one of each class; "
            "use fewer clients or a smaller majority"
        )
    largest = np.flatnonzero(fits)[-1]
    return int(most[largest]), int(least[largest])
