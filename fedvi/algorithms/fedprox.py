"""FedProx.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.
"""

from fedvi import checks
from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import (
    classification_loss,
    quadratic_penalty,
    quadratic_pull,
)
from fedvi.algorithms.fedavg import fedavg
from fedvi.local import minimise

__all__ = ["fedprox"]


def fedprox(task: Task, *, mu: float = 0.01) -> Algorithm:
    """Builds FedProx: FedAvg whose clients stay near the global model.

    A client minimises f_i(θ) + μ/2 ‖θ - θ_global‖², by gradient steps. Metrics: `loss`,
    the mean of f_i over the steps; `penalty`, the second term after the last of them.

    Args:
      task: model, local training, population.
      mu: weight μ ≥ 0 of the proximal term; 0 is FedAvg. FedHB §6 uses 0.01.
    """
    checks.at_least("mu", mu, 0)

    def client_update(key, round, server, client, data):
        def loss(key, params, batch):
            proximal = quadratic_pull(params, server.params, mu)
            return classification_loss(task.model, params, batch) + proximal

        params, value = minimise(key, round, server.params, data, task.training, loss)
        penalty = quadratic_penalty(params, server.params, mu)
        metrics = {"loss": value, "penalty": penalty}
        return ClientOutput(params, data.size, metrics=metrics)

    return fedavg(task)._replace(name="fedprox", client_update=client_update)
