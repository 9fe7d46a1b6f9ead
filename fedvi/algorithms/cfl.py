"""CFL: clusters that are split where their clients' updates disagree.

Sattler, Müller and Samek, "Clustered federated learning: model-agnostic distributed
multi-task optimization under privacy constraints", TNNLS 2020.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.clustered import Members, weighted_mean, with_members
from fedvi.algorithms.common import at
from fedvi.algorithms.registry import builder
from fedvi.options import Options, option

__all__ = ["CFL", "cfl", "split"]


class CFL(Options):
    """Options of `cfl`."""

    max_clusters: int = option(
        4, "Clusters at most: so many models are held.", at_least=1
    )
    eps1: float = option(
        0.4,
        "A cluster is split only if the norm of its mean update is below this.",
        source="public code; it depends on the problem",
        at_least=0,
        traced=True,
    )
    eps2: float = option(
        1.6,
        "And the largest norm of an update is above this.",
        source="public code; it depends on the problem",
        at_least=0,
        traced=True,
    )
    min_rounds: int = option(
        20, "And the round, from 1, is above this.", source="public code", at_least=0
    )
    norms: Literal["absolute", "relative"] = option(
        "absolute",
        "What eps1 and eps2 are compared with. absolute: the norms, which grow with "
        "the network, the rate and the local steps; relative: their quotients by the "
        "largest norm of an update in round 0, of which no values suit all problems "
        "either: look at how `clusters` grows, and on what does not differ.",
        source="absolute: the paper",
    )


@builder(CFL)
def cfl(task: Task, options: CFL) -> Algorithm:
    """Builds CFL.

    Client: FedAvg's from its cluster's model θ_c: Δ_i = θ_i - θ_c.
    Server, for every cluster: if ‖Σ_i n_i Δ_i / Σ_i n_i‖ < eps1, max_i ‖Δ_i‖ > eps2, it
    has more than two members and the round is above min_rounds, its members are split
    in two by complete linkage of 1 - cos(Δ_i, Δ_j). (That is the public code's; the
    paper's bipartition has the least largest cosine across, which is single linkage,
    and is kept only if that is small enough.) Then θ_c <- θ_c + Σ_i n_i Δ_i /
    Σ_i n_i over the members of each cluster, one that was split off beginning at its
    parent's model. All clients take part in every round. A client that never did, or
    failed when its cluster was split, takes the model of the least training loss (the
    paper keeps the tree of splits for that).
    Before a split it is FedAvg.

    The condition max_i ‖Δ_i‖ > eps2 is of one client, not of a gradient: local steps of
    noise add up to a norm of their own, so eps2 must be above what equal clients show.
    The public code's mean is unweighted; the paper's weighs n_i.

    Metrics: `loss`, the mean over the local steps; `clusters`, before the round.
    """

    def server_update(key, round_index, server, aggregate):
        moved, n = aggregate.uploads["moved"], aggregate.weight
        gram = sum(
            jnp.matmul(flat, flat.T, precision="highest")
            for flat in (leaf.reshape(len(n), -1) for leaf in jax.tree.leaves(moved))
        )
        old = jnp.where(n > 0, aggregate.uploads["cluster"], -1)
        largest = jnp.sqrt(jnp.max(jnp.diag(gram)))
        scale = jnp.where(server.scale > 0, server.scale, largest)
        unit = scale if options.norms == "relative" else 1.0
        new, count = jax.pure_callback(
            partial(split, max_clusters=options.max_clusters),
            (jax.ShapeDtypeStruct(old.shape, jnp.int32), server.count),
            gram,
            n,
            old,
            server.count,
            options.eps1 * unit,
            options.eps2 * unit,
            round_index + 1 > options.min_rounds,
            vmap_method="sequential",
        )

        def update(k):
            mean = weighted_mean((new == k) * n, moved)
            parent = jnp.max(jnp.where(new == k, old, -1))
            start = at(server.models, jnp.where(parent < 0, k, parent))
            return optax.tree.add(start, mean)

        models = jax.lax.map(update, jnp.arange(options.max_clusters))
        was_split = jnp.zeros(options.max_clusters, bool).at[old].max(new != old)
        known = jnp.where(was_split[server.cluster], -1, server.cluster)
        return Members(models, aggregate.noted(known, new), count, scale)

    return with_members(
        "cfl", task, options.max_clusters, server_update, cohort="all", host=True
    )


def split(gram, n, cluster, count, eps1, eps2, late, *, max_clusters):
    """(cluster [clients] int32, count [] int32) after the splits of a round; NumPy.

    Args:
      gram: [clients, clients] Δ_i · Δ_j.
      n: [clients] weights of the mean.
      cluster: [clients], -1 for who counts nothing.
      count: [] clusters so far.
      eps1: of the mean's norm.
      eps2: of the largest norm.
      late: [] bool, whether any split may be.
      max_clusters: of which there are no more.
    """
    gram, n, cluster = (np.array(a) for a in (gram, n, cluster))
    count, norms = int(count), np.sqrt(np.diag(gram))
    for k in range(count if late else 0):
        own = np.flatnonzero(cluster == k)
        if len(own) <= 2 or count == max_clusters:
            continue
        share = n[own] / n[own].sum()
        mean = np.sqrt(max(share @ gram[np.ix_(own, own)] @ share, 0.0))
        if mean >= eps1 or norms[own].max() <= eps2:
            continue
        length = np.maximum(norms[own], 1e-30)
        cosine = gram[np.ix_(own, own)] / np.outer(length, length)
        far = np.maximum(1 - cosine, 0.0)  # rounding; SciPy refuses less than 0
        tree = linkage(squareform(far, checks=False), method="complete")
        if tree[-1, 2] > 1e-6:  # not where all are equal but for rounding
            half = cut_tree(tree, 2)[:, 0] == 1
            cluster[own[half]] = count
            count += 1
    return cluster.astype(np.int32), np.int32(count)
