"""FedDyn: a linear term at every client that makes their minima agree.

Acar et al., "Federated learning based on dynamic regularization", ICLR 2021.
"""

from typing import Any, NamedTuple

import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import tilted_loss, train_from
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.registry import builder
from fedvi.local import Quadratic
from fedvi.options import Options, option

__all__ = ["FedDyn", "Server", "feddyn"]


class Server(NamedTuple):
    """Server state.

    Attributes:
      params: θ, the global model.
      drift: h, the mean of all clients' h_i; not sent.
    """

    params: Any
    drift: Any


class FedDyn(Options):
    """Options of `feddyn`."""

    alpha_coef: float = option(
        0.01,
        "α, weight of the dynamic regularisation's quadratic term.",
        source="public code; the paper chooses among 0.1, 0.01 and 0.001",
        above=0,
        traced=True,
    )


@builder(FedDyn)
def feddyn(task: Task, options: FedDyn) -> Algorithm:
    """Builds FedDyn.

    Client: θ_i = argmin f_i(θ) - <h_i, θ> + α/2 ‖θ - θ^t‖², by `task.training` from
    θ^t, then h_i <- h_i - α (θ_i - θ^t), which is ∇f_i(θ_i) at the minimum.
    Server: h <- h - α/N Σ_{i∈S} (θ_i - θ^t), θ^{t+1} = mean_{i∈S} θ_i - h/α, from what
    arrived: under a codec that rounds, h is not quite the mean of the h_i.
    At rest all θ_i are θ, so that h = mean_i ∇f_i(θ) = 0: a stationary point of the
    mean of the f_i, where FedAvg's is another. All clients weigh the same.

    Any optimiser will do for the minimum: h_i is ∇f_i there, whatever found it. With
    SGD the quadratic is an exact proximal step. The linear term is a part of the
    gradient: at rest it cancels ∇f_i in every step, with momentum too.

    Metrics: `loss`, the mean of f_i over the steps; `penalty`, the quadratic at θ_i.
    """
    alpha = options.alpha_coef

    def init(key):
        params = task.model.init(key)
        return Server(params, optax.tree.zeros_like(params))

    def client_update(key, round_index, server, slope, data):
        start, near = server.params, Quadratic(server.params, alpha)
        loss = tilted_loss(task.model, optax.tree.scale(-1.0, slope))
        params, value = train_from(task, key, round_index, start, data, loss, near)
        moved = optax.tree.sub(params, start)
        metrics = {"loss": value, "penalty": near.value(params)}
        slope = optax.tree.add_scale(slope, -alpha, moved)
        return ClientOutput(moved, 1.0, slope, metrics)

    def server_update(key, round_index, server, aggregate):
        share = alpha / aggregate.population
        drift = optax.tree.add_scale(server.drift, -share, aggregate.statistics)
        mean = optax.tree.add(server.params, aggregate.mean())
        return Server(optax.tree.add_scale(mean, -1 / alpha, drift), drift)

    return fedavg(task)._replace(
        name="feddyn",
        init=init,
        client_update=client_update,
        server_update=server_update,
        init_client=lambda key, server: optax.tree.zeros_like(server.params),
        broadcast=lambda server: server._replace(drift=()),
    )
