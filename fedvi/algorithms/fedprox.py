"""FedProx.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.
"""

import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import train_from
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.registry import builder
from fedvi.local import Quadratic
from fedvi.options import Options, option

__all__ = ["FedProx", "fedprox"]


class FedProx(Options):
    """Options of `fedprox`."""

    mu: float = option(
        0.01,
        "μ, weight of the proximal term; 0 is FedAvg.",
        source="FedHB §6",
        at_least=0,
        traced=True,
    )


@builder(FedProx)
def fedprox(task: Task, options: FedProx) -> Algorithm:
    """Builds FedProx: FedAvg whose clients stay near the global model.

    A client minimises f_i(θ) + μ/2 ‖θ - θ_global‖²; with SGD each step ends with the
    second term's exact proximal step, which no μ can make unstable, at the rate that
    momentum has in the long run: in a short visit μ counts for more than its gradient
    would (`local.minimise`). Metrics: `loss`, the mean of f_i over the steps;
    `penalty`, the second term after the last of them.
    """

    def client_update(key, round_index, server, client, data):
        near = Quadratic(server.params, options.mu)
        start = server.params
        params, value = train_from(task, key, round_index, start, data, near=near)
        metrics = {"loss": value, "penalty": near.value(params)}
        moved = optax.tree.sub(params, start)
        return ClientOutput(moved, data.size, metrics=metrics)

    return fedavg(task)._replace(name="fedprox", client_update=client_update)
