"""FedAvg, with an optional server optimiser (FedAvgM, FedAdam, FedYogi).

McMahan et al., "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017; Reddi et al., "Adaptive federated optimization", ICLR 2021.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi import checks
from fedvi.algorithm import Algorithm, ClientOutput, Task, difference_to
from fedvi.algorithms.common import (
    classification_loss,
    finetune,
    log_probabilities,
    predict_with_params,
)
from fedvi.local import minimise

__all__ = ["Server", "fedavg"]


class Server(NamedTuple):
    """Server state.

    Attributes:
      params: the global model.
      moments: the server optimiser's state; not sent to clients.
    """

    params: Any
    moments: Any


def fedavg(
    task: Task,
    *,
    server_optimizer: Literal["sgd", "adam", "yogi"] = "sgd",
    server_learning_rate: float = 1.0,
    server_momentum: float = 0.0,
) -> Algorithm:
    """Builds FedAvg: the size-weighted mean of the clients' models.

    With Δ = Σ_i n_i θ_i / Σ_i n_i - θ the server takes -Δ as its gradient. `sgd`
    with rate 1 and no momentum is plain averaging; with momentum it is FedAvgM.

    Args:
      task: model, local training, population.
      server_optimizer: `sgd`, or `adam` / `yogi` with the constants of Reddi et al.
        (β1 = server_momentum, β2 = 0.99, ε = 1e-3).
      server_learning_rate: of the server optimiser.
      server_momentum: of the server optimiser, in [0, 1).
    """
    checks.fraction("server_momentum", server_momentum)
    checks.positive("server_learning_rate", server_learning_rate)
    optimizers = {
        "sgd": lambda: optax.sgd(server_learning_rate, server_momentum or None),
        "adam": lambda: optax.adam(server_learning_rate, server_momentum, 0.99, 1e-3),
        "yogi": lambda: optax.yogi(server_learning_rate, server_momentum, 0.99, 1e-3),
    }
    checks.one_of("server_optimizer", server_optimizer, optimizers)
    optimizer = optimizers[server_optimizer]()
    model = task.model

    def loss(key, params, batch):
        return classification_loss(model, params, batch)

    def init(key):
        params = model.init(key)
        return Server(params, optimizer.init(params))

    def client_update(key, round, server, client, data):
        params, value = minimise(key, round, server.params, data, task.training, loss)
        return ClientOutput(params, data.size, metrics={"loss": value})

    def server_update(key, round, server, aggregate):
        gradient = jax.tree.map(jnp.subtract, server.params, aggregate.mean())
        updates, moments = optimizer.update(gradient, server.moments, server.params)
        return Server(optax.apply_updates(server.params, updates), moments)

    def global_predictive(key, server, x, mask):
        return log_probabilities(model, server.params, x, mask)[None]

    def personalise(key, server, client, data):
        return finetune(task, key, server.params, data)

    return Algorithm(
        name="fedavg",
        init=init,
        client_update=client_update,
        server_update=server_update,
        global_predictive=global_predictive,
        personalise=personalise,
        personal_predictive=predict_with_params(model),
        broadcast=lambda server: server._replace(moments=()),
        wire=difference_to(lambda server: server.params),
    )
