"""One client's part of a round, and what the server makes of all of them.

Where clients' data and states come from is not known here: `fedvi.federation` takes
them out of arrays, `fedvi.streaming` out of files.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedvi.algorithm import Aggregate, Algorithm, Importance, StackedAggregate
from fedvi.codecs import IDENTITY, Codec
from fedvi.data import ClientData
from fedvi.keys import Purpose, derive

__all__ = ["Call", "Visit", "all_finite", "next_server", "participate", "report"]


class Call(NamedTuple):
    """What every participant of a round is told.

    Attributes:
      key: [] typed PRNG key, the run's root.
      round: [] int32.
      message: what the algorithm's `broadcast` lets through.
    """

    key: jax.Array
    round: jax.Array
    message: Any


class Visit(NamedTuple):
    """One client, as a round or an evaluation meets it: no leading clients axis.

    Attributes:
      id: [] int32.
      client: what the client keeps between rounds.
      train: its training data.
      others: further data sets of the client, of an evaluation.
    """

    id: jax.Array
    client: Any
    train: ClientData
    others: tuple[ClientData, ...] = ()


def participate(
    algorithm: Algorithm, call: Call, visit: Visit, codec: Codec = IDENTITY
):
    """Trains one participant.

    An empty client, and one of which a NaN or an infinity arrives, counts nothing.

    Args:
      algorithm: whose `client_update` it is.
      call: what every participant is told.
      visit: the participant.
      codec: of its upload.

    Returns:
      (what is summed over the cohort, what is stacked): two dicts. Summed: `weight`,
      `participants`, `metrics` and weight × `statistics`, () with `reduce="stack"`.
      Stacked: `client`, `weight`, `counts`, `empty`, `failed` and `uploads`, () with
      `reduce="sum"`.
    """
    output = algorithm.client_update(
        derive(call.key, Purpose.CLIENT_UPDATE, call.round, visit.id),
        call.round,
        call.message,
        visit.client,
        visit.train,
    )
    empty = visit.train.size == 0
    weight = jnp.asarray(output.weight, jnp.float32)
    upload = _arrived(codec, call, visit, output.upload)
    summands = ()
    if algorithm.reduce == "sum":
        summands = algorithm.statistics(call.message, upload)
    finite = all_finite((upload, summands, output.client, weight))
    counts = ~empty & finite
    # `where`, not a product with 0, which would let a NaN through.
    weight = jnp.where(counts, weight, 0.0)
    keep = partial(jax.tree.map, lambda leaf: jnp.where(counts, leaf, 0))
    sums = {
        "weight": weight,
        "participants": counts.astype(jnp.int32),
        "metrics": keep(dict(output.metrics)),
        "statistics": jax.tree.map(lambda s: weight * s, keep(summands)),
    }
    outputs = {
        "client": output.client,
        "weight": weight,
        "counts": counts,
        "empty": empty,
        "failed": ~empty & ~finite,
        "uploads": keep(upload) if algorithm.reduce == "stack" else (),
    }
    return sums, outputs


def _arrived(codec: Codec, call: Call, visit: Visit, upload):
    """The upload as it arrives at the server."""
    if codec is IDENTITY:
        return upload
    key = derive(call.key, Purpose.ENCODE, call.round, visit.id)
    return codec.decode(codec.encode(key, upload))


def next_server(
    algorithm: Algorithm,
    key: jax.Array,
    round: jax.Array,
    server: Any,
    population: int,
    ids: jax.Array,
    sums: dict[str, Any],
    outputs: dict[str, Any],
):
    """The server's state after a round, and the participants' mean metrics.

    Args:
      algorithm: whose `server_update` it is.
      key: [] typed PRNG key, the run's root.
      round: [] int32.
      server: its state before.
      population: N.
      ids: [cohort] int32.
      sums: of `participate`, over the cohort.
      outputs: of `participate`, leaves `[cohort, ...]`.
    """
    participants = sums["participants"].astype(jnp.float32)
    if algorithm.reduce == "stack":
        aggregate = StackedAggregate(
            outputs["uploads"], outputs["weight"], ids, participants, population
        )
    else:
        aggregate = Aggregate(
            sums["statistics"], sums["weight"], participants, population
        )
    after = jax.lax.cond(
        sums["weight"] > 0,
        lambda: algorithm.server_update(
            derive(key, Purpose.SERVER_UPDATE, round), round, server, aggregate
        ),
        lambda: server,
    )
    metrics = jax.tree.map(lambda m: m / jnp.maximum(participants, 1), sums["metrics"])
    return after, metrics


def report(measure: Importance, call: Call, visit: Visit):
    """`((), (report, whether it is finite))`; zeros where it is not."""
    told = measure.report(
        derive(call.key, Purpose.REPORT, call.round, visit.id),
        call.message,
        visit.client,
        visit.train,
    )
    finite = all_finite(told)
    return (), (jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), told), finite)


def all_finite(tree: Any) -> jax.Array:
    """[] bool: no leaf holds a NaN or an infinity."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in leaves]))
