"""Partitions in which clients differ by the classes they hold."""

import numpy as np

from fedvi.checks import at_least
from fedvi.data.dealing import (
    Partition,
    count_labels,
    deal_in_proportion,
)

__all__ = [
    "class_majority",
    "class_shards",
    "class_subsets",
    "dirichlet",
    "label_sorted_shards",
]


def class_shards(
    train_y: np.ndarray, test_y: np.ndarray, *, clients: int, shards: int, seed: int
) -> Partition:
    """Shards of single classes, as in FedRep, FedBABU and FedHB.

    Each class is cut at random into `clients * shards / classes` shards of equal
    size (left-over images go one each to the first shards). A deck with each class
    that many times is shuffled and dealt, `shards` cards a client: a client may draw
    a class twice, so it holds at most `shards` classes. The test split is cut and
    dealt with the same cards; test images of other classes go to nobody.

    Args:
      train_y, test_y: labels of the official splits, `[n]` and `[m]`.
      clients: number of clients (FedHB: 100).
      shards: shards per client, FedHB's s (MNIST 5; CIFAR-100 100, 50 and 10).
      seed: of the random draws.

    Raises:
      ValueError: `clients * shards` is not a multiple of the number of classes, or a
        class has fewer images than shards.
    """
    at_least("clients", clients, 1)
    at_least("shards", shards, 1)
    rng = np.random.default_rng(seed)
    classes = np.unique(train_y)
    per_class, rest = divmod(clients * shards, len(classes))
    if rest:
        raise ValueError(
            f"clients={clients} x shards={shards} = {clients * shards} shards cannot "
            f"be shared equally by {len(classes)} classes: choose clients and shards "
            f"whose product is a multiple of {len(classes)}"
        )
    deck = rng.permutation(np.repeat(classes, per_class)).reshape(clients, shards)

    def deal(split, y):
        hands = [[] for _ in range(clients)]
        for label in classes:
            images = rng.permutation(np.flatnonzero(y == label))
            if len(images) < per_class:
                raise ValueError(
                    f"class {label} has {len(images)} {split} images, too few for "
                    f"clients={clients} x shards={shards} / {len(classes)} classes = "
                    f"{per_class} shards: use fewer clients or shards"
                )
            holders = rng.permutation(np.nonzero(deck == label)[0])
            for client, shard in zip(holders, np.array_split(images, per_class)):
                hands[client].append(shard)
        return [np.concatenate(hand) for hand in hands]

    return Partition(deal("train", train_y), deal("test", test_y))


def label_sorted_shards(
    train_y: np.ndarray, test_y: np.ndarray, *, clients: int, shards: int = 2, seed: int
) -> Partition:
    """McMahan et al. (2017): sort by label, cut into equal shards, deal at random.

    A shard may span two classes. A class's test images go to the clients that hold
    it, in proportion to their training images of it, none to two clients.

    Args:
      train_y, test_y: labels of the official splits, `[n]` and `[m]`.
      clients: number of clients (McMahan: 100).
      shards: shards per client (McMahan: 2).
      seed: of the random draws.

    Raises:
      ValueError: more shards than training images.
    """
    at_least("clients", clients, 1)
    at_least("shards", shards, 1)
    if clients * shards > len(train_y):
        raise ValueError(
            f"clients={clients} x shards={shards} = {clients * shards} shards are more "
            f"than the {len(train_y)} training images: use fewer clients or shards"
        )
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(train_y))
    by_label = shuffled[np.argsort(train_y[shuffled], kind="stable")]
    pieces = np.array_split(by_label, clients * shards)
    deck = rng.permutation(clients * shards).reshape(clients, shards)
    train = [np.concatenate([pieces[shard] for shard in hand]) for hand in deck]
    labels = np.unique(train_y)
    held = count_labels(train, train_y, labels)
    test = deal_in_proportion(test_y, labels, held, rng)
    return Partition(train, test)


def class_subsets(
    train_y: np.ndarray,
    test_y: np.ndarray,
    *,
    clients: int,
    train_per_class: int,
    test_per_class: int,
    seed: int,
    classes_per_client: int = 5,
    pool: bool = False,
) -> Partition:
    """Fixed class subsets with given counts per class, as in pFedBayes and BPFed.

    With L = `classes_per_client`, client u holds the labels (L u + j) mod classes for
    j < L: the papers' 5 of 10 classes give only two label sets, {0-4} and {5-9}. Of
    each of its classes a client gets exactly `train_per_class` training and
    `test_per_class` test images that no other client has. (Train / test in the papers:
    small 50 / 950, medium 200 / 800, large 900 / 300 for MNIST with 10 clients.)

    Args:
      train_y, test_y: labels of the official splits, `[n]` and `[m]`.
      clients: number of clients (the papers: MNIST 10, CIFAR-10 20).
      train_per_class, test_per_class: images per client and class.
      seed: of the random draws.
      classes_per_client: L above.
      pool: True does what the papers do: both splits are pooled first, so training
        images may come from the OFFICIAL TEST SPLIT and accuracies are not
        comparable with others'. False keeps the official split.

    Raises:
      ValueError: a class has too few images, or a client more classes than there are.
    """
    at_least("clients", clients, 1)
    at_least("train_per_class", train_per_class, 1)
    at_least("test_per_class", test_per_class, 0)
    at_least("classes_per_client", classes_per_client, 1)
    rng = np.random.default_rng(seed)
    labels = np.unique(train_y)
    if classes_per_client > len(labels):
        raise ValueError(
            f"classes_per_client={classes_per_client} must be at most {len(labels)}, "
            "the number of classes"
        )
    hands = np.arange(clients * classes_per_client).reshape(clients, -1) % len(labels)

    def deal(split, y, count):
        """Per client `count` images of each of its classes, `[clients, L, count]`."""
        dealt = np.empty((*hands.shape, count), int)
        for place, label in enumerate(labels):
            images = rng.permutation(np.flatnonzero(y == label))
            holders = np.nonzero(hands == place)
            needed = len(holders[0]) * count
            if needed > len(images):
                raise ValueError(
                    f"class {label} has {len(images)} {split} images, but "
                    f"{len(holders[0])} clients need {count} each: use fewer clients "
                    "or smaller train_per_class and test_per_class"
                )
            dealt[holders] = images[:needed].reshape(len(holders[0]), count)
        return dealt

    if pool:
        y = np.concatenate([train_y, test_y])
        both = deal("pooled", y, train_per_class + test_per_class)
        train, test = both[..., :train_per_class], both[..., train_per_class:]
    else:
        train = deal("train", train_y, train_per_class)
        test = deal("test", test_y, test_per_class)
    flat = [list(part.reshape(clients, -1)) for part in (train, test)]
    return Partition(*flat, pooled=pool)


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
        most, least = _majority_counts(
            split, totals, mine.sum(axis=0), clients, majority
        )
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
    return Partition(train, test)


def _majority_counts(
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


def dirichlet(
    train_y: np.ndarray,
    test_y: np.ndarray,
    *,
    clients: int,
    alpha: float,
    seed: int,
    min_size: int = 1,
    retries: int = 100,
) -> Partition:
    """Each class is divided among the clients by a draw from Dir(alpha, ..., alpha).

    Every index is used exactly once. The test images of a class follow the clients'
    shares of its training images, so that both parts have the same classes.

    Args:
      train_y, test_y: labels of the official splits, `[n]` and `[m]`.
      clients: number of clients.
      alpha: concentration; small is uneven (common: 0.1 to 1), large is IID.
      seed: of the random draws.
      min_size: draws that leave a client fewer training images are thrown away.
      retries: number of draws before giving up.

    Raises:
      ValueError: no draw gave every client `min_size` training images.
    """
    at_least("clients", clients, 1)
    at_least("min_size", min_size, 0)
    at_least("retries", retries, 1)
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha={alpha} must be positive and finite")
    rng = np.random.default_rng(seed)
    labels, place = np.unique(np.concatenate([train_y, test_y]), return_inverse=True)
    totals = np.bincount(place[: len(train_y)], minlength=len(labels))
    possible = clients * min_size <= len(train_y)
    for _ in range(retries if possible else 0):
        shares = rng.dirichlet(np.full(clients, alpha), len(labels)).T
        ends = np.round(np.cumsum(shares, axis=0) * totals[None]).astype(int)
        ends[-1] = totals
        counts = np.diff(ends, axis=0, prepend=0)
        if counts.sum(axis=1).min() >= min_size:
            break
    else:
        raise ValueError(
            f"alpha={alpha} with clients={clients} gave no split of {len(train_y)} "
            f"training images with min_size={min_size} each in {retries} draws: use a "
            "larger alpha, fewer clients or a smaller min_size"
        )
    train = deal_in_proportion(train_y, labels, counts, rng)
    # A class without training images has no counts: its shares stand in for them.
    weights = np.where(totals[None] > 0, counts, shares)
    return Partition(train, deal_in_proportion(test_y, labels, weights, rng))
