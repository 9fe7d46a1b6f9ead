"""cFedBayes: several global posteriors, one for each cluster of clients.

Zhang et al., "Federated learning via variational Bayesian inference: personalization,
sparsity and clustering" (2023), §5.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.algorithm import Algorithm, Task, Wire
from fedvi.algorithms.alternating import where
from fedvi.algorithms.pfedbayes import pfedbayes_of
from fedvi.local import fold_minibatches
from fedvi.variational import BayesianNetwork, normal

__all__ = ["cfedbayes"]


def cfedbayes(
    task: Task,
    *,
    clusters: int = 2,
    zeta: float = 10.0,
    rho: float = -2.5,
    init_std: float | None = None,
    personal_steps: int = 5,
    global_steps: int = 1,
    global_learning_rate: float | None = None,
    start: Literal["personal", "global"] = "personal",
    upload: Literal["localised", "personal"] = "localised",
    average: Literal["parameters", "moments"] = "parameters",
    beta: float = 1.0,
    sampling: Literal["weight", "local"] = "local",
    mc_samples: int = 1,
    num_samples: int = 10,
    eps_scale: float = 1.0,
) -> Algorithm:
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

    Args:
      task: model, local training, population.
      clusters: K, at most the number of clients.
      zeta: as of `pfedbayes`.
      rho: as of `pfedbayes`; Eq. 54's log(1 + ρ) is not defined at its ρ = -2.5.
      init_std: as of `pfedbayes`.
      personal_steps: as of `pfedbayes`.
      global_steps: as of `pfedbayes`.
      global_learning_rate: as of `pfedbayes`.
      start: as of `pfedbayes`.
      upload: as of `pfedbayes`.
      average: as of `pfedbayes`.
      beta: as of `pfedbayes`.
      sampling: as of `pfedbayes`.
      mc_samples: as of `pfedbayes`; the clusters are compared with as many.
      num_samples: as of `pfedbayes`.
      eps_scale: as of `pfedbayes`.

    Raises:
      ValueError: an option outside its range, more clusters than clients, or more draws
        than fit in memory.
    """
    checks.at_least("clusters", clusters, 1)
    if clusters > task.clients:
        raise ValueError(
            f"clusters={clusters} are more than the {task.clients} clients with data: "
            "use fewer"
        )
    network = BayesianNetwork(
        task.model, normal(rho), sampling, mc_samples, num_samples, eps_scale
    )
    one = pfedbayes_of(
        "cfedbayes",
        task,
        network,
        zeta=zeta,
        init_std=init_std,
        personal_steps=personal_steps,
        global_steps=global_steps,
        global_learning_rate=global_learning_rate,
        start=start,
        upload=upload,
        average=average,
        beta=beta,
    )

    def init(key):
        return jax.vmap(one.init)(jax.random.split(key, clusters))

    def loss(key, data, server):
        """E_u[-log p(D_i | θ)], estimated by draws that depend on the key only."""
        once = task.training._replace(epochs=1, steps=None, augment=None)

        def add(key, total, batch):
            return total + batch.mask.sum() * network.loss(key, server.posterior, batch)

        return fold_minibatches(key, data, once, add, jnp.zeros(()))

    def assign(key, server, client, data):
        losses = jax.lax.map(lambda own: loss(key, data, own), server)
        # An overflowing cluster attracts nobody.
        losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
        cluster = jnp.argmin(losses).astype(jnp.int32)
        return cluster, jax.tree.map(lambda u: u[cluster], server)

    def init_client(key, server):
        return one.init_client(key, jax.tree.map(lambda u: u[0], server))

    def statistics_of(member, upload):
        """Of one client: its upload at its cluster's place, zeros elsewhere."""
        uploads = jax.tree.map(
            lambda v: member.reshape(-1, *[1] * v.ndim) * v[None], upload
        )
        return {"members": member, "uploads": uploads}

    def pack(server, statistics):
        """The cluster's number, and w_i as `pfedbayes` sends it."""
        cluster = jnp.argmax(statistics["members"]).astype(jnp.int32)
        own, upload = jax.tree.map(
            lambda u: u[cluster], (server, statistics["uploads"])
        )
        return {"cluster": cluster, "upload": one.wire.pack(own, upload)}

    def unpack(server, sent):
        own = jax.tree.map(lambda u: u[sent["cluster"]], server)
        member = jax.nn.one_hot(sent["cluster"], clusters)
        return statistics_of(member, one.wire.unpack(own, sent["upload"]))

    def client_update(key, round, server, client, data):
        assign_key, train_key = jax.random.split(key)
        cluster, own = assign(assign_key, server, client, data)
        output = one.client_update(train_key, round, own, client, data)
        member = jax.nn.one_hot(cluster, clusters)
        shares = {f"share_{k}": member[k] for k in range(clusters)}
        return output._replace(
            statistics=statistics_of(member, output.statistics),
            metrics={**output.metrics, **shares},
        )

    def server_update(key, round, server, aggregate):
        def update(own, members, uploads):
            new = one.server_update(
                key, round, own, aggregate._replace(statistics=uploads, weight=members)
            )
            return where(members > 0, new, own)

        members = aggregate.statistics["members"]
        uploads = aggregate.statistics["uploads"]
        return jax.lax.map(lambda a: update(*a), (server, members, uploads))

    def personalise(key, server, client, data):
        assign_key, train_key = jax.random.split(key)
        _, own = assign(assign_key, server, client, data)
        return one.personalise(train_key, own, client, data)

    return one._replace(
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalise=personalise,
        init_client=init_client,
        assign=assign,
        wire=Wire(pack, unpack),
    )
