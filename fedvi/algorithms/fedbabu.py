"""FedBABU: a federated body under one frozen random head.

Oh, Kim and Yun, "FedBABU: towards enhanced representation for federated image
classification", ICLR 2022.
"""

from fedvi.algorithm import Algorithm, ClientOutput, Task, difference_to
from fedvi.algorithms.common import (
    classification_loss,
    finetune,
    log_probabilities,
    predict_with_params,
    require_body,
)
from fedvi.local import minimise

__all__ = ["fedbabu"]


def fedbabu(task: Task) -> Algorithm:
    """Builds FedBABU.

    Clients train the body only, the server averages the bodies uniformly, and the
    head stays as it was initialised; personalisation trains both.

    Server state: `{"body": ..., "head": ...}`.

    Raises:
      ValueError: a model without a body.
    """
    require_body(task, "fedbabu")
    model = task.model

    def client_update(key, round, server, client, data):
        def loss(key, body, batch):
            return classification_loss(model, {**server, "body": body}, batch)

        body, value = minimise(key, round, server["body"], data, task.training, loss)
        return ClientOutput(body, 1.0, metrics={"loss": value})

    def server_update(key, round, server, aggregate):
        return {**server, "body": aggregate.mean()}

    def global_predictive(key, server, x, mask):
        return log_probabilities(model, server, x, mask)[None]

    def personalise(key, server, client, data):
        return finetune(task, key, server, data)

    return Algorithm(
        name="fedbabu",
        init=model.init,
        client_update=client_update,
        server_update=server_update,
        global_predictive=global_predictive,
        personalise=personalise,
        personal_predictive=predict_with_params(model),
        wire=difference_to(lambda server: server["body"]),
    )
