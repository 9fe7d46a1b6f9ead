"""FedBABU: a federated body under one frozen random head.

Oh, Kim and Yun, "FedBABU: towards enhanced representation for federated image
classification", ICLR 2022.
"""

import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import (
    Head,
    check_trained,
    plain_loss,
    point_estimate,
    split_head,
    train_from,
)
from fedvi.algorithms.registry import builder

__all__ = ["FedBABU", "fedbabu"]


class FedBABU(Head):
    """Options of `fedbabu`."""


@builder(FedBABU)
def fedbabu(task: Task, options: FedBABU) -> Algorithm:
    """Builds FedBABU.

    Clients train the body only, the server averages the bodies uniformly, and the
    head stays as it was initialised; personalisation trains both. `head=trained` leaves
    of it what is FedAvg, averaged uniformly.

    Server state: `{"body": ..., "head": ...}`.

    Raises:
      ValueError: a model without a body, and nothing else to train.
    """
    check_trained(task, options, "fedbabu")

    def client_update(key, round_index, server, client, data):
        start, frozen = split_head(server, options)
        loss = plain_loss(task.model, frozen)
        learned, value = train_from(task, key, round_index, start, data, loss)
        moved = optax.tree.sub(learned, start)
        return ClientOutput(moved, 1.0, metrics={"loss": value})

    def server_update(key, round_index, server, aggregate):
        learned, frozen = split_head(server, options)
        return {**frozen, **optax.tree.add(learned, aggregate.mean())}

    return point_estimate(
        "fedbabu",
        task,
        params_of=lambda server: server,
        init=task.model.init,
        client_update=client_update,
        server_update=server_update,
    )
