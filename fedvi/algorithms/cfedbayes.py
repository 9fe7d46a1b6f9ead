"""cFedBayes: several global posteriors, one for each cluster of clients.

Zhang et al., "Federated learning via variational Bayesian inference: personalization,
sparsity and clustering" (2023), §5.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.pfedbayes import PFedBayesKin, pfedbayes_of
from fedvi.algorithms.registry import builder
from fedvi.local import LocalTraining, fold_minibatches
from fedvi.options import option
from fedvi.variational import BayesianNetwork, mean_field_normal

__all__ = ["CFedBayes", "cfedbayes", "data_loss"]


class CFedBayes(PFedBayesKin):
    """Options of `cfedbayes`; the clusters are compared with `mc_samples` draws."""

    clusters: int = option(2, "K, at most the number of clients.", at_least=1)


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
    clusters = options.clusters
    if clusters > task.clients:
        raise ValueError(
            f"clusters={clusters} are more than the {task.clients} clients with data: "
            "use fewer"
        )
    network = BayesianNetwork(task.model, mean_field_normal(options.rho), options)
    one = pfedbayes_of("cfedbayes", task, network)

    def init(key):
        return jax.vmap(one.init)(jax.random.split(key, clusters))

    def assign(key, server, client, data):
        loss = partial(data_loss, key, network, data, task.training)
        losses = jax.lax.map(loss, server.posterior)
        # An overflowing cluster attracts nobody.
        losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
        cluster = jnp.argmin(losses).astype(jnp.int32)
        return cluster, _at(server, cluster)

    def init_client(key, server):
        return one.init_client(key, _at(server, 0))

    def client_update(key, round_index, server, client, data):
        assign_key, train_key = jax.random.split(key)
        cluster, own = assign(assign_key, server, client, data)
        output = one.client_update(train_key, round_index, own, client, data)
        shares = {f"share_{k}": jnp.float32(cluster == k) for k in range(clusters)}
        return output._replace(
            upload={"cluster": cluster, "upload": output.upload},
            metrics={**output.metrics, **shares},
        )

    def statistics(server, sent):
        """Of one client: its statistics at its cluster's place, zeros elsewhere."""
        member = jax.nn.one_hot(sent["cluster"], clusters)
        own = one.statistics(_at(server, sent["cluster"]), sent["upload"])
        placed = jax.tree.map(lambda s: jnp.multiply.outer(member, s), own)
        return {"members": member, "placed": placed}

    def server_update(key, round_index, server, aggregate):
        def update(own, members, placed):
            mine = aggregate._replace(statistics=placed, weight=members)
            new = one.server_update(key, round_index, own, mine)
            return optax.tree.where(members > 0, new, own)

        sums = aggregate.statistics
        return jax.vmap(update)(server, sums["members"], sums["placed"])

    def personalise(key, server, client, data):
        assign_key, train_key = jax.random.split(key)
        _, own = assign(assign_key, server, client, data)
        return one.personalise(train_key, own, client, data)

    return one._replace(
        init=init,
        init_client=init_client,
        client_update=client_update,
        server_update=server_update,
        personalise=personalise,
        assign=assign,
        statistics=statistics,
    )


def data_loss(key, network: BayesianNetwork, data, training: LocalTraining, u):
    """E_u[-log p(D_i | θ)], estimated by draws that depend on the key only."""

    def add(key, total, batch):
        return total + batch.mask.sum() * network.loss(key, u, batch)

    return fold_minibatches(key, data, training.one_pass(), add, jnp.zeros(()))


def _at(server, cluster):
    return jax.tree.map(lambda leaf: leaf[cluster], server)
