"""cFedBayes: several global posteriors, one for each cluster of clients.

Zhang et al., "Federated learning via variational Bayesian inference: personalization,
sparsity and clustering" (2023), §5.
"""

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.clustered import Clusters, clustered
from fedvi.algorithms.common import data_loss
from fedvi.algorithms.pfedbayes import PFedBayesKin, pfedbayes_of
from fedvi.algorithms.registry import builder
from fedvi.variational import BayesianNetwork, mean_field_normal

__all__ = ["CFedBayes", "cfedbayes"]


class CFedBayes(PFedBayesKin, Clusters):
    """Options of `cfedbayes`; the clusters are compared with `mc_samples` draws."""


@builder(CFedBayes)
def cfedbayes(task: Task, options: CFedBayes) -> Algorithm:
    """Builds cFedBayes.

    Server state: that of `pfedbayes` with leaves `[clusters, ...]`, the u_k.

    Client: k_i = argmax_k E_{u_k}[log p(D_i | θ)] (Eq. 56), then the client's side of
    `pfedbayes` with w = u_{k_i} (Eq. 55, 57).
    Server: `pfedbayes`' for every cluster, over the participants that chose it; a
    cluster that nobody chose stays as it is (Alg. 3 would divide by the wrong count).

    Eq. 56 compares the clusters on one minibatch. Here they are compared on all of the
    client's training data, which the minibatch estimates, with the same draws for all
    clusters. The clusters start from different draws of the initialiser: equal ones
    would tie for ever.

    The moments of w's optimiser stay with the client when it changes its cluster.

    A client sends (k_i, w_i). Metrics: those of `pfedbayes`; `share_k`, the share of
    the participants that chose cluster k.

    Raises:
      ValueError: an option outside its range, more clusters than clients, or more draws
        than fit in memory.
    """
    options.check_clients(task)
    network = BayesianNetwork(task.model, mean_field_normal(options.rho), options)
    one = pfedbayes_of("cfedbayes", task, network)

    def loss(key, server, data):
        """E_u[-log p(D_i | θ)], estimated by draws that depend on the key only."""
        return data_loss(key, network.loss, server.posterior, data, task.training)

    return clustered("cfedbayes", one, options.clusters, loss)
