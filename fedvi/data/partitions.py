"""Partitions of a data set over clients: the registry, IID and natural groups."""

import inspect
from collections.abc import Callable

import numpy as np

from fedvi import names
from fedvi.checks import at_least, one_of
from fedvi.data.dealing import Partition
from fedvi.data.label_skew import (
    class_majority,
    class_shards,
    class_subsets,
    dirichlet,
    label_sorted_shards,
)
from fedvi.data.labels import natural_order, places
from fedvi.data.sources import Dataset, settled

__all__ = [
    "PARTITIONS",
    "Partition",
    "by_group",
    "class_majority",
    "class_shards",
    "class_subsets",
    "dirichlet",
    "iid",
    "label_sorted_shards",
    "options_of",
    "partition",
]


def iid(
    train_y: np.ndarray, test_y: np.ndarray, *, clients: int, seed: int
) -> Partition:
    """Both splits shuffled and cut into parts whose sizes differ by at most one.

    Args:
      train_y, test_y: labels of the official splits, `[n]` and `[m]`.
      clients: number of clients.
      seed: of the shuffles.

    Raises:
      ValueError: more clients than training images.
    """
    at_least("clients", clients, 1)
    if clients > len(train_y):
        raise ValueError(
            f"clients={clients} must be at most {len(train_y)}, the number of training "
            "images"
        )
    rng = np.random.default_rng(seed)
    train, test = (
        np.array_split(rng.permutation(len(y)), clients) for y in (train_y, test_y)
    )
    return Partition(train, test)


def by_group(
    train_group: np.ndarray,
    test_group: np.ndarray,
    *,
    clients: int | None = None,
    seed: int = 0,
) -> Partition:
    """One client per natural id (writer, device, ...) of the training split.

    Images of ids that no client has are left out. Where train and test ids are
    disjoint, as MNIST's writers are, every client's test part is empty:
    `fedvi.data.hold_out` makes one from its training part.

    Args:
      train_group, test_group: ids of the official splits, `[n]` and `[m]`.
      clients: None takes all ids in natural order (`site_2` before `site_10`), a
        number that many at random, in that order.
      seed: of that choice.

    Returns:
      The parts, and in `ids` whose they are.

    Raises:
      ValueError: more clients than ids.
    """
    ids = natural_order(train_group)
    if clients is not None:
        at_least("clients", clients, 1)
        if clients > len(ids):
            raise ValueError(
                f"clients={clients} must be at most {len(ids)}, the number of "
                "groups in the training split"
            )
        rng = np.random.default_rng(seed)
        ids = ids[np.sort(rng.choice(len(ids), clients, replace=False))]
    train, test = (
        [np.flatnonzero(holder == client) for client in range(len(ids))]
        for holder in (places(train_group, ids), places(test_group, ids))
    )
    return Partition(train, test, ids=ids)


PARTITIONS: dict[str, Callable[..., Partition]] = {
    f.__name__: f
    for f in (
        class_shards,
        label_sorted_shards,
        class_subsets,
        class_majority,
        dirichlet,
        iid,
        by_group,
    )
}


def options_of(name: str) -> dict[str, bool]:
    """The options of a registered partition, and whether each must be given."""
    return {
        key: parameter.default is parameter.empty
        for key, parameter in inspect.signature(PARTITIONS[name]).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and key not in ("clients", "seed")
    }


def partition(
    name: str, dataset: Dataset, *, clients: int | None, seed: int, **options
) -> Partition:
    """Partitions a data set by the registered function `name`.

    Args:
      name: a key of `PARTITIONS`.
      dataset: its labels (or, for `by_group`, its group ids) are divided.
      clients: number of clients; None, for `by_group` only, means one per group.
      seed: of all random draws.
      **options: the further keyword arguments of that function, e.g. `shards=5`.

    Raises:
      ValueError: an unknown name, an unknown or missing option, an invalid data set
        (`sources.settled`) or one without group ids, or what the function itself
        raises.
    """
    one_of("partition", name, PARTITIONS)
    function, accepted = PARTITIONS[name], options_of(name)
    unknown = sorted(options.keys() - accepted.keys())
    missing = [key for key, needed in accepted.items() if needed and key not in options]
    if unknown or missing:
        faults = [f"unknown {key}={options[key]!r}" for key in unknown]
        faults += [f"missing {key}" for key in missing]
        raise ValueError(
            f"options of partition={name!r}: {', '.join(faults)}; it takes "
            f"{', '.join(accepted) or 'none'}"
            f"{names.near(unknown[0], accepted) if unknown else ''}"
        )
    if clients is None and function is not by_group:
        raise ValueError(f"clients=None: give partition={name!r} a number of clients")
    dataset = settled(dataset)
    ids = (dataset.train_y, dataset.test_y)
    if function is by_group:
        ids = (dataset.train_group, dataset.test_group)
        if any(group is None for group in ids):
            raise ValueError(
                f"partition='by_group' needs group ids, which {dataset.name!r} lacks: "
                "add train_group and test_group to its npz file"
            )
    return function(*ids, clients=clients, seed=seed, **options)
