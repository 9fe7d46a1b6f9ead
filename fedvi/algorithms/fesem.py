"""FeSEM: clients and centres in the space of weights, by expectation-maximisation.

Xie et al., "Multi-center federated learning" (2020); Long et al., WWWJ 2023.
"""

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.clustered import Clusters, weighted_mean, with_members
from fedvi.algorithms.common import at
from fedvi.algorithms.registry import builder

__all__ = ["FeSEM", "fesem", "nearest", "spread"]

LLOYD = 5  # steps of the first centres


class FeSEM(Clusters):
    """Options of `fesem`."""


@builder(FeSEM)
def fesem(task: Task, options: FeSEM) -> Algorithm:
    """Builds FeSEM.

    Client: trains from the centre that it is assigned to, θ_i from c_{k_i}.
    Server: k_i = argmin_k ‖θ_i - c_k‖², c_k <- mean of the cohort's θ_i with k_i = k,
    unweighted; a centre without members stays as it is.
    The paper leaves the first centres open: equal ones would never separate, and of
    independent networks all clients are nearest to that which they started from. All
    start equal here; the first cohort's models make the centres: farthest first, then
    Lloyd's steps. A client whose cluster is not known takes the centre of the least
    training loss.

    Metrics: `loss`, the mean over the local steps; `clusters`, 1 before the first
    round and K after it.

    Raises:
      ValueError: more clusters than clients.
    """
    options.check_clients(task)

    def server_update(key, round_index, server, aggregate):
        started = at(server.models, aggregate.uploads["cluster"])
        models = optax.tree.add(started, aggregate.uploads["moved"])
        real = aggregate.weight > 0

        def lloyd(_, centres):
            return means(models, real, nearest(models, centres), centres)

        def first_centres():
            farthest = spread(models, real, server.models)
            return jax.lax.fori_loop(0, LLOYD, lloyd, farthest)

        first = jax.lax.cond(
            server.count < options.clusters, first_centres, lambda: server.models
        )
        cluster = nearest(models, first)
        centres = means(models, real, cluster, first)
        return server._replace(
            models=centres,
            cluster=aggregate.noted(server.cluster, cluster),
            # With fewer uploads than centres some are copies: once more next round.
            count=jnp.where(
                real.sum() < options.clusters, server.count, options.clusters
            ),
        )

    return with_members("fesem", task, options.clusters, server_update)


def distances(models, centre):
    """[cohort] ‖θ_i - c‖² of leaves `[cohort, ...]`."""

    def one(model):
        return optax.tree.norm(optax.tree.sub(model, centre), squared=True)

    return jax.vmap(one)(models)


def nearest(models, centres):
    """[cohort] int32 argmin_k ‖θ_i - c_k‖²."""
    every = jax.lax.map(lambda centre: distances(models, centre), centres)
    return jnp.argmin(every, axis=0).astype(jnp.int32)


def means(models, real, cluster, centres):
    """The centres moved to the mean of their real members; those without stay."""

    def mean(own):
        k, centre = own
        members = (cluster == k) & real
        return optax.tree.where(members.any(), weighted_mean(members, models), centre)

    numbers = jnp.arange(len(jax.tree.leaves(centres)[0]))
    return jax.lax.map(mean, (numbers, centres))


def spread(models, real, centres):
    """First centres, farthest first: each the model farthest from those before it."""

    def place(k, carry):
        centres, least = carry
        chosen = at(models, jnp.argmax(jnp.where(real, least, -1.0)))
        centres = jax.tree.map(lambda c, m: c.at[k].set(m), centres, chosen)
        return centres, jnp.minimum(least, distances(models, chosen))

    start = (centres, jnp.full(real.shape, jnp.inf))
    clusters = len(jax.tree.leaves(centres)[0])
    return jax.lax.fori_loop(0, clusters, place, start)[0]
