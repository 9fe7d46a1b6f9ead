"""Ditto: a model of every client's own, near the one of FedAvg.

Li et al., "Ditto: fair and robust federated learning through personalization", ICML
2021.
"""

import jax

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.common import OwnModel, finetune, train_from
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.registry import builder
from fedvi.flat import trees
from fedvi.local import Quadratic
from fedvi.options import Options, option

__all__ = ["Ditto", "ditto"]


class Ditto(Options):
    """Options of `ditto`."""

    personal_penalty: float = option(
        0.75,
        "λ, weight of half the squared distance of a client's own model from what the "
        "server sent.",
        source="FedABML §5",
        at_least=0,
        traced=True,
    )


@builder(Ditto)
def ditto(task: Task, options: Ditto) -> Algorithm:
    """Builds Ditto.

    Client: FedAvg's update of a copy of θ, which is sent; beside it, from where it
    stopped last time (at first the initial model),
      min_v  f_i(v) + λ/2 ‖v - θ‖²      (θ: what the server sent)
    with as many steps; with SGD the second term is an exact proximal step, which no λ
    makes unstable. v stays with the client and predicts for it. Server: FedAvg's.
    A client that never took part makes its v from θ, by `task.finetuning`.

    Metrics: `loss`, the mean of f_i over the steps of the copy.
    """
    shared = fedavg(task)

    def near(server):
        return Quadratic(trees(server.params), options.personal_penalty)

    def client_update(key, round_index, server, client, data):
        copy_key, own_key = jax.random.split(key)
        output = shared.client_update(copy_key, round_index, server, (), data)
        own, _ = train_from(
            task, own_key, round_index, client.params, data, near=near(server)
        )
        return output._replace(client=client.trained(own))

    def personalise(key, server, client, data):
        return finetune(task, key, server.params, data, near(server))

    return shared._replace(
        name="ditto",
        init_client=lambda key, server: OwnModel.of(server.params),
        client_update=client_update,
        personalise=personalise,
        kept=lambda server, client: client.kept(),
    )
