"""Who takes part in a round: the `Selection` that a configuration asks for."""

import jax
import numpy as np

from fedvi import checks, selection
from fedvi.algorithm import Algorithm
from fedvi.data import ClientData
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.validation import participants
from fedvi.selection import Selection

__all__ = ["cohort_size", "selection_of"]

_PLAIN = ("uniform", "round_robin")


def cohort_size(config: ExperimentConfig, algorithm: Algorithm, clients: int) -> int:
    """Clients in a round: what the algorithm says, else ⌊N·f⌋.

    Args:
      config: the configuration.
      algorithm: that it names.
      clients: number of clients, the novel ones included.

    Raises:
      ValueError: fewer than one client, or fewer clients to train than the algorithm
        takes.
    """
    trained = clients - config.novel_clients
    if algorithm.cohort is None:
        return participants(clients, config.fraction, config.novel_clients)
    if algorithm.cohort == "all":
        return trained
    if algorithm.cohort > trained:
        raise ValueError(
            f"clients={clients} less novel_clients={config.novel_clients} are fewer "
            f"than the {algorithm.cohort} that {algorithm.name} takes in a round: "
            "give more clients"
        )
    return algorithm.cohort


def selection_of(
    config: ExperimentConfig,
    algorithm: Algorithm,
    train: ClientData,
    trained: np.ndarray,
    participants: int,
) -> Selection:
    """The rule that picks the cohort.

    Args:
      config: the configuration; its `selection` is not looked at where the algorithm
        takes all clients.
      algorithm: that it names.
      train: training data of all clients, leaves `[clients, ...]`.
      trained: ids in order of the clients that may take part.
      participants: clients in a round.

    Raises:
      ValueError: an unknown selection, or a measure that the algorithm does not have.
    """
    clients = len(train.size)
    if algorithm.cohort == "all":
        return selection.full(clients, trained)
    known = (*_PLAIN, *algorithm.importance)
    if config.selection not in known:
        raise ValueError(
            f"selection={config.selection!r} must be one of {', '.join(known)} for "
            f"{algorithm.name}"
        )
    if config.selection == "uniform":
        return selection.uniform(clients, participants, trained)
    if config.selection == "round_robin":
        order = _turns(config, train, trained)
        return selection.round_robin(clients, participants, order)
    return selection.proportional(
        clients,
        participants,
        config.selection,
        temperature=config.selection_temperature,
        floor=config.selection_floor,
        candidates=trained,
    )


def _turns(
    config: ExperimentConfig, train: ClientData, trained: np.ndarray
) -> np.ndarray:
    """The ids of `trained` in the order of their turns."""
    checks.one_of(
        "selection_order", config.selection_order, ("id", "sorted", "shuffled")
    )
    if config.selection_order == "sorted":
        labels, sizes = jax.device_get((train.y, train.size))
        classes = [_most_frequent(labels[i, : sizes[i]]) for i in trained]
        return trained[np.argsort(classes, kind="stable")]
    if config.selection_order == "shuffled":
        # Longer than the seed of the partition and that of the novel clients: a stream
        # of its own.
        rng = np.random.default_rng(
            [config.partition_seed, len(train.size), config.novel_clients, 1]
        )
        return rng.permutation(trained)
    return trained


def _most_frequent(labels: np.ndarray) -> int:
    """The class of most examples, the lowest of several; -1 without examples."""
    return int(np.bincount(labels).argmax()) if labels.size else -1
