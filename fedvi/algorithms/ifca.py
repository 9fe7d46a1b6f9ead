"""IFCA, and an ensemble of networks with a group of clients each.

Ghosh et al., "An efficient framework for clustered federated learning", NeurIPS 2020;
FedHB, "A hierarchical Bayesian approach to federated learning", appendix F.2.
"""

from typing import Literal

import jax

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.clustered import Clusters, clustered
from fedvi.algorithms.common import data_loss, plain_loss
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.fedbabu import fedbabu
from fedvi.algorithms.registry import builder
from fedvi.options import inherited, option

__all__ = ["IFCA", "Ensemble", "ensemble", "ifca"]

Assignment = Literal["loss", "preset"]
PredictWith = Literal["cluster", "ensemble"]


class IFCA(Clusters):
    """Options of `ifca`."""

    head: Literal["frozen", "trained"] = option(
        "trained",
        "The network's last layer, until personalisation. frozen: as it was "
        "initialised, one for each cluster, and bodies averaged uniformly (FedBABU in "
        "place of FedAvg); trained: like the body.",
    )
    assignment: Assignment = option(
        "loss",
        "A client's cluster. loss: that of the least loss on its training data; "
        "preset: its number mod K.",
    )
    predict_with: PredictWith = option(
        "cluster",
        "cluster: the network of the client's own; ensemble: the mean of all K "
        "networks' probabilities, each of them fine-tuned.",
    )


class Ensemble(IFCA):
    """Options of `ensemble`."""

    assignment: Assignment = inherited(IFCA, "assignment", "preset", "FedHB F.2")
    predict_with: PredictWith = inherited(
        IFCA, "predict_with", "ensemble", "FedHB F.2: both"
    )


@builder(IFCA)
def ifca(task: Task, options: IFCA) -> Algorithm:
    """Builds IFCA: K times FedAvg, every client in that which suits its data best.

    Client: k_i = argmin_k Σ_j CE(θ_k; x_j, y_j), then FedAvg's from θ_{k_i}; it sends
    (k_i, θ_i - θ_{k_i}).
    Server: θ_k <- mean of the θ_i with k_i = k, weighted by n_i; a cluster that nobody
    chose stays as it is. The K models start from different initialisations.
    The loss is that on all of the client's training data, for prediction too (the
    public code predicts with the model of the least *test* loss). With
    predict_with=ensemble the predictive's samples `[clusters, batch, classes]` are the
    networks'.

    Metrics: `loss`, the mean over the local steps; `share_k`, the share of the
    participants in cluster k.

    Raises:
      ValueError: more clusters than clients, or a frozen head without a body.
    """
    return _networks("ifca", task, options)


@builder(Ensemble)
def ensemble(task: Task, options: Ensemble) -> Algorithm:
    """Builds FedHB's ensemble baseline: `ifca` with fixed groups of equal size.

    Client i trains network i mod K from the start; predict_with=cluster is the paper's
    "preset" prediction, ensemble that of the same name. head=frozen is its FedBABU.

    Raises:
      ValueError: as `ifca`.
    """
    return _networks("ensemble", task, options)


def _networks(name: str, task: Task, options: IFCA) -> Algorithm:
    options.check_clients(task)
    frozen, preset = options.head == "frozen", options.assignment == "preset"
    one = fedbabu(task) if frozen else fedavg(task)

    def loss(key, server, data):
        params = server if frozen else server.params
        return data_loss(key, plain_loss(task.model), params, data, task.training)

    algorithm = clustered(name, one, options.clusters, None if preset else loss)
    if options.predict_with == "cluster":
        return algorithm

    def every(function, server):
        return jax.lax.map(function, server[1] if preset else server)

    def global_predictive(key, server, x, mask):
        return every(lambda own: one.global_predictive(key, own, x, mask)[0], server)

    def personalise(key, server, client, data):
        return every(lambda own: one.personalise(key, own, client, data), server)

    def personal_predictive(key, server, personal, x, mask):
        return jax.lax.map(
            lambda own: one.personal_predictive(key, (), own, x, mask)[0], personal
        )

    return algorithm._replace(
        assign=None,
        global_predictive=global_predictive,
        personalise=personalise,
        personal_predictive=personal_predictive,
    )
