"""FedBABU: a federated body under one frozen random head.

Oh, Kim and Yun, "FedBABU: towards enhanced representation for federated image
classification", ICLR 2022.
"""

import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import (
    classification_loss,
    point_estimate,
    require_body,
)
from fedvi.algorithms.registry import builder
from fedvi.local import minimise
from fedvi.options import Options

__all__ = ["fedbabu"]


@builder()
def fedbabu(task: Task, options: Options) -> Algorithm:
    """Builds FedBABU.

    Clients train the body only, the server averages the bodies uniformly, and the
    head stays as it was initialised; personalisation trains both.

    Server state: `{"body": ..., "head": ...}`.

    Raises:
      ValueError: a model without a body.
    """
    require_body(task, "fedbabu")

    def client_update(key, round_index, server, client, data):
        def loss(key, body, batch):
            return classification_loss(task.model, {**server, "body": body}, batch)

        body, value = minimise(
            key, round_index, server["body"], data, task.training, loss
        )
        moved = optax.tree.sub(body, server["body"])
        return ClientOutput(moved, 1.0, metrics={"loss": value})

    def server_update(key, round_index, server, aggregate):
        return {**server, "body": optax.tree.add(server["body"], aggregate.mean())}

    return point_estimate(
        "fedbabu",
        task,
        params_of=lambda server: server,
        init=task.model.init,
        client_update=client_update,
        server_update=server_update,
    )
