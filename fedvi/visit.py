"""One client's part of a round and of an evaluation: functions of a single `Visit`.

Where clients' data and states come from is not known here: `fedvi.federation` takes
them out of arrays, `fedvi.streaming` out of files.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedvi.algorithm import Algorithm, Importance
from fedvi.codecs import IDENTITY, Codec
from fedvi.data import ClientData
from fedvi.evaluation import BINS, predictions_in_batches, score_in_batches
from fedvi.keys import Purpose, derive

__all__ = [
    "ABSURD",
    "Call",
    "Evaluation",
    "Visit",
    "all_finite",
    "cluster",
    "participate",
    "personal_model",
    "predictions_global",
    "predictions_personal",
    "report",
    "score_global",
    "score_personal",
    "told",
]


ABSURD = 1e12
"""No upload that counts holds a number as large. Beside 2^24 = 2e7 float32 keeps
nothing of a 1, so that a diverged client's upload would be the cohort's whole mean."""


class Call(NamedTuple):
    """What the clients of a round, or of an evaluation, are told.

    Attributes:
      key: [] typed PRNG key, the run's root.
      round: [] int32.
      server: in a round what the algorithm's `broadcast` lets through; in an evaluation
        the server's whole state; of either what `unicast` gives one client.
    """

    key: jax.Array
    round: jax.Array
    server: Any


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


class Evaluation(NamedTuple):
    """How an evaluation looks at examples.

    Attributes:
      batch_size: most examples in one forward pass.
      bins: of confidence, for the calibration errors.
    """

    batch_size: int = 128
    bins: int = BINS


def told(algorithm: Algorithm, call: Call, client_id: jax.Array) -> Call:
    """What one client is told of what all are: the functions below get that."""
    if algorithm.unicast is None:
        return call
    return call._replace(server=algorithm.unicast(call.server, client_id))


def _ask(function: Callable, purpose: Purpose, call: Call, visit: Visit):
    """Calls a function of `(key, server, client, data)` with the client's own key."""
    key = derive(call.key, purpose, call.round, visit.id)
    return function(key, call.server, visit.client, visit.train)


# In a round: (what is summed over the cohort, what is stacked).


def participate(
    algorithm: Algorithm, call: Call, visit: Visit, codec: Codec = IDENTITY
):
    """Trains one participant.

    An empty client, and one of which a NaN, an infinity, an absurd number (`ABSURD`) or
    a negative weight arrives, counts nothing.

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
        call.server,
        visit.client,
        visit.train,
    )
    output = jax.tree.map(jnp.asarray, output)  # what are Python's own numbers
    summed = algorithm.reduce == "sum"
    upload = output.upload
    if codec is not IDENTITY:
        key = derive(call.key, Purpose.ENCODE, call.round, visit.id)
        upload = codec.decode(codec.encode(key, upload))
    arrived = upload
    if summed:
        arrived = jax.tree.map(jnp.asarray, algorithm.statistics(call.server, upload))
    weight = output.weight.astype(jnp.float32)
    empty = visit.train.size == 0
    known = {id(leaf) for leaf in jax.tree.leaves(upload)}  # looked at below anyway
    others = [leaf for leaf in jax.tree.leaves(arrived) if id(leaf) not in known]
    sane = all_finite((others, output.client, weight)) & all_below(ABSURD, upload)
    sane &= weight >= 0
    counts = ~empty & sane
    # `where`, not a product with 0, which would let a NaN through.
    weight = jnp.where(counts, weight, 0.0)
    keep = partial(jax.tree.map, lambda leaf: jnp.where(counts, leaf, 0))
    arrived = keep(arrived)
    sums = {
        "weight": weight,
        "participants": counts.astype(jnp.float32),
        "metrics": keep(dict(output.metrics)),
        "statistics": jax.tree.map(lambda s: weight * s, arrived) if summed else (),
    }
    outputs = {
        "client": output.client,
        "weight": weight,
        "counts": counts,
        "empty": empty,
        "failed": ~empty & ~sane,
        "uploads": () if summed else arrived,
    }
    return sums, outputs


def report(measure: Importance, call: Call, visit: Visit):
    """`((), (report, whether it is finite))`; zeros where it is not."""
    told = _ask(measure.report, Purpose.REPORT, call, visit)
    told = jax.tree.map(jnp.asarray, told)
    finite = all_finite(told)
    return (), (jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), told), finite)


def all_finite(tree: Any) -> jax.Array:
    """[] bool: no leaf holds a NaN or an infinity."""
    return all_below(jnp.inf, tree)


def all_below(limit: float, tree: Any) -> jax.Array:
    """[] bool: every number of a float leaf is smaller than `limit`, and none a NaN."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.abs(leaf) < limit) for leaf in leaves]))


# In an evaluation: all take (algorithm, by, call, visit).


def score_global(algorithm: Algorithm, by: Evaluation, call: Call, visit: Visit):
    """`Scores` of the client's global model on its first other data set."""
    predict = _global_predictives(algorithm, call, visit)[0]
    return score_in_batches(predict, visit.others[0], by.batch_size, by.bins)


def score_personal(algorithm: Algorithm, by: Evaluation, call: Call, visit: Visit):
    """`Scores` of the personalised model on the client's first other data set."""
    predict = _personal_predictives(algorithm, call, visit)[0]
    return score_in_batches(predict, visit.others[0], by.batch_size, by.bins)


def predictions_global(algorithm: Algorithm, by: Evaluation, call: Call, visit: Visit):
    """A tuple of `Predictions` of the global model, one for each other data set."""
    predictives = _global_predictives(algorithm, call, visit)
    return _predictions(predictives, by, visit)


def predictions_personal(
    algorithm: Algorithm, by: Evaluation, call: Call, visit: Visit
):
    """A tuple of `Predictions` of the personalised model, one for each other data."""
    predictives = _personal_predictives(algorithm, call, visit)
    return _predictions(predictives, by, visit)


def cluster(algorithm: Algorithm, by: Evaluation, call: Call, visit: Visit):
    """[] int32, the client's cluster."""
    return _ask(algorithm.assign, Purpose.ASSIGN, call, visit)[0]


def personal_model(algorithm: Algorithm, by: Evaluation, call: Call, visit: Visit):
    """What the client kept to predict with, or else what `personalise` makes of it."""
    if algorithm.kept is None:
        return _ask(algorithm.personalise, Purpose.PERSONALISE, call, visit)
    known, own = algorithm.kept(call.server, visit.client)
    # Without data nothing is trained: who kept something is done.
    size = jnp.where(known, 0, visit.train.size)
    visit = visit._replace(train=visit.train._replace(size=size))
    fresh = _ask(algorithm.personalise, Purpose.PERSONALISE, call, visit)
    return jax.tree.map(partial(jnp.where, known), own, fresh)


def _predictions(predictives: list[Callable], by: Evaluation, visit: Visit):
    return tuple(
        predictions_in_batches(predict, data, by.batch_size)
        for predict, data in zip(predictives, visit.others)
    )


def _global_predictives(
    algorithm: Algorithm, call: Call, visit: Visit
) -> list[Callable]:
    """The client's global model as `_by_batch` makes it, for each of its data sets."""
    server = call.server
    if algorithm.assign is not None:
        _, server = _ask(algorithm.assign, Purpose.ASSIGN, call, visit)
    predictive, purpose = algorithm.global_predictive, Purpose.PREDICT_GLOBAL
    return [
        _by_batch(predictive, purpose, call, visit, number, server)
        for number in range(len(visit.others))
    ]


def _personal_predictives(
    algorithm: Algorithm, call: Call, visit: Visit
) -> list[Callable]:
    """The client's own model as `_by_batch` makes it, for each of its data sets."""
    model = call.server, personal_model(algorithm, Evaluation(), call, visit)
    predictive, purpose = algorithm.personal_predictive, Purpose.PREDICT_PERSONAL
    return [
        _by_batch(predictive, purpose, call, visit, number, *model)
        for number in range(len(visit.others))
    ]


def _by_batch(
    predictive: Callable,
    purpose: Purpose,
    call: Call,
    visit: Visit,
    data_set: int,
    *model: Any,
) -> Callable:
    """`(batch number, x, mask) -> log-probabilities`, each batch with its own key.

    With one key for all, the examples at the same place of two batches would share
    their noise where activations are drawn.
    """

    def predict(batch, x, mask):
        key = derive(call.key, purpose, call.round, visit.id, data_set, batch)
        return predictive(key, *model, x, mask)

    return predict
