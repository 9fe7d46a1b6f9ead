"""Several global models in place of one: what the clustered methods share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import (
    at,
    data_loss,
    finetune,
    plain_loss,
    point_estimate,
    train_from,
)
from fedvi.options import Options, option

__all__ = [
    "Clusters",
    "Members",
    "clustered",
    "least_loss",
    "weighted_mean",
    "with_members",
]


class Clusters(Options):
    """Option of methods with a given number of global models."""

    clusters: int = option(2, "K, at most the number of clients.", at_least=1)

    def check_clients(self, task: Task) -> None:
        """Raises `ValueError` for more clusters than clients."""
        if self.clusters > task.clients:
            raise ValueError(
                f"clusters={self.clusters} are more than the {task.clients} clients "
                "with data: use fewer"
            )


def weighted_mean(weights, stacked):
    """Mean of leaves `[cohort, ...]`; zeros where all weights are 0."""
    share = weights / jnp.maximum(weights.sum(), 1)
    return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, 1), stacked)


def least_loss(loss: Callable, models):
    """[] int32: the model k of leaves `[clusters, ...]` of the least `loss(model)`."""
    losses = jax.lax.map(loss, models)
    # An overflowing cluster attracts nobody.
    losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
    return jnp.argmin(losses).astype(jnp.int32)


def clustered(
    name: str, one: Algorithm, clusters: int, loss: Callable | None
) -> Algorithm:
    """K servers of a method with one; every client takes part in that of one cluster.

    Server state: that of `one` with leaves `[clusters, ...]`, from K initialisations.
    Client: its cluster k, then the client's side of `one` with server k; it sends k
    and that upload, which is counted in cluster k alone.
    Server: `one`'s for every cluster over the participants that chose it, whose
    `participants` and `population` are those of all clusters; a cluster that nobody
    chose stays as it is. Metrics: those of `one`; `share_k`, the share of the
    participants that chose cluster k.

    Args:
      name: of the method.
      one: that method; `reduce="sum"`, and what it predicts personally with is all in
        `personal`.
      clusters: K.
      loss: `(key, server, data) -> []` of server k of `one` on a client's training
        data: the least chooses. None: client i is in cluster i mod K for good, and
        its functions get `(i mod K, server)`.
    """
    servers_of = (lambda sent: sent) if loss else (lambda sent: sent[1])

    def init(key):
        return jax.vmap(one.init)(jax.random.split(key, clusters))

    def assign(key, server, client, data):
        if loss is None:
            cluster = server[0]
        else:
            cluster = least_loss(lambda own: loss(key, own, data), server)
        return cluster, at(servers_of(server), cluster)

    def init_client(key, server):
        return one.init_client(key, at(server, 0))

    def client_update(key, round_index, server, client, data):
        assign_key, train_key = jax.random.split(key)
        cluster, own = assign(assign_key, server, client, data)
        output = one.client_update(train_key, round_index, own, client, data)
        shares = {f"share_{k}": jnp.float32(cluster == k) for k in range(clusters)}
        return output._replace(
            upload={"cluster": cluster, "upload": output.upload},
            metrics={**dict(output.metrics), **shares},
        )

    def statistics(server, sent):
        """Of one client: its statistics at its cluster's place, zeros elsewhere."""
        member = jax.nn.one_hot(sent["cluster"], clusters)
        own = at(servers_of(server), sent["cluster"])
        own = one.statistics(own, sent["upload"])
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

    def unicast(server, client_id):
        return client_id % clusters, server

    return one._replace(
        name=name,
        init=init,
        init_client=init_client,
        client_update=client_update,
        server_update=server_update,
        personalise=personalise,
        assign=assign,
        statistics=statistics,
        unicast=None if loss else unicast,
    )


class Members(NamedTuple):
    """Server state of a method that notes which cluster every client is in.

    Attributes:
      models: leaves `[clusters, ...]`, of which the first `count` are in use.
      cluster: [total] int32, of every client; -1: not known. A client gets its own.
      count: [] int32.
      scale: [] of CFL, the largest norm of an update in round 0; 0 before.
    """

    models: Any
    cluster: jax.Array
    count: jax.Array
    scale: jax.Array


def with_members(
    name: str, task: Task, clusters: int, server_update: Callable, **functions
) -> Algorithm:
    """The `Algorithm` of a method whose server looks at every upload to form clusters.

    All models start equal and one is in use. A client trains from its cluster's; one
    whose cluster is not known from that of the least training loss. It sends its
    cluster k and θ_i - θ_k, and weighs n_i. Metrics: `loss`; `clusters`, in use.

    Args:
      name: of the method.
      task: model, local training and number of clients.
      clusters: how many there can be.
      server_update: of `Algorithm`, of `Members` and a `StackedAggregate` of
        `{"cluster", "moved"}`.
      **functions: other fields of `Algorithm`.
    """

    def init(key):
        params = task.model.init(key)
        models = jax.tree.map(lambda leaf: jnp.stack([leaf] * clusters), params)
        unknown = jnp.full(task.ids, -1, jnp.int32)
        return Members(models, unknown, jnp.int32(1), jnp.zeros(()))

    def unicast(server, client_id):
        return server._replace(cluster=server.cluster[client_id])

    def assign(key, server, client, data):
        def loss(numbered):
            k, params = numbered
            found = data_loss(key, plain_loss(task.model), params, data, task.training)
            return jnp.where(k < server.count, found, jnp.inf)

        cluster = jax.lax.cond(
            server.cluster < 0,
            lambda: least_loss(loss, (jnp.arange(clusters), server.models)),
            lambda: server.cluster,
        )
        return cluster, at(server.models, cluster)

    def client_update(key, round_index, server, client, data):
        assign_key, train_key = jax.random.split(key)
        cluster, own = assign(assign_key, server, client, data)
        params, value = train_from(task, train_key, round_index, own, data)
        upload = {"cluster": cluster, "moved": optax.tree.sub(params, own)}
        metrics = {"loss": value, "clusters": server.count.astype(jnp.float32)}
        return ClientOutput(upload, data.size, metrics=metrics)

    def personalise(key, server, client, data):
        assign_key, train_key = jax.random.split(key)
        own = assign(assign_key, server, client, data)[1]
        return finetune(task, train_key, own, data)

    return point_estimate(
        name,
        task,
        params_of=lambda params: params,
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalise=personalise,
        assign=assign,
        unicast=unicast,
        reduce="stack",
        **functions,
    )
