"""The bytes of a round, counted from the shapes of what is sent."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedvi import codecs
from fedvi.algorithm import Algorithm, Importance
from fedvi.codecs import tree_bytes
from fedvi.data import ClientData
from fedvi.experiment import build
from fedvi.experiment.build import Experiment

__all__ = ["Messages", "RoundBytes", "bytes_per_round", "mean_bytes_up", "messages"]


class RoundBytes(NamedTuple):
    """Bytes of a round, of all participants together.

    Attributes:
      up: of the uploads, if nothing is withheld.
      down: of what they are sent.
      withheld: that `up` falls by for every value that each participant withholds.
    """

    up: int
    down: int
    withheld: int

    def sent_up(self, metrics: Mapping[str, float]) -> float:
        """Bytes up of rounds with these mean metrics, of which one is `withheld`."""
        saved = self.withheld * metrics.get("withheld", 0.0)
        return self.up - (saved if np.isfinite(saved) else 0.0)


class Messages(NamedTuple):
    """What one client and the server send each other in a round, as shapes.

    Attributes:
      upload: of a client, before a codec.
      weight: [] of the upload; no codec touches it.
      report: to the measure of importance by which clients are chosen; no codec.
      down: what `broadcast` lets through.
    """

    upload: Any
    weight: Any
    report: Any
    down: Any


def messages(
    algorithm: Algorithm, data: ClientData, measure: Importance | None = None
) -> Messages:
    """Finds the shapes of the messages; nothing is computed.

    Args:
      algorithm: the algorithm.
      data: one client's, arrays or `jax.ShapeDtypeStruct`s.
      measure: of importance, by which clients are chosen; None: by none.
    """

    def sent(seed, round, data):
        key = jax.random.key(seed)
        server = algorithm.init(key)
        down = algorithm.broadcast(server)
        client = algorithm.init_client(key, server)
        output = algorithm.client_update(key, round, down, client, data)
        upload, report = output.upload, ()
        if measure is not None:
            report = measure.report(key, down, client, data)
        return Messages(upload, jnp.asarray(output.weight, jnp.float32), report, down)

    scalar = jax.ShapeDtypeStruct((), np.int32)
    return jax.eval_shape(sent, scalar, scalar, data)


def bytes_per_round(experiment: Experiment) -> RoundBytes:
    """Counts the bytes of a round.

    Up: every participant's upload, by the codec, and its weight.
    Down: what `broadcast` lets through, to every participant. Where clients are chosen
    by their importance, every candidate gets that before, and the participants no
    second time; and every candidate's report goes up.
    """
    algorithm, participants = experiment.algorithm, experiment.participants
    codec = codecs.named(experiment.config.codec)
    measure = build.selection(experiment).measure
    one_client = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
        experiment.data.train,
    )
    sent = messages(
        algorithm, one_client, measure and algorithm.importance.get(measure)
    )
    up = codecs.payload_bytes(codec, sent.upload) + tree_bytes(sent.weight)
    candidates = len(experiment.trained)
    receivers = participants if measure is None else candidates
    return RoundBytes(
        up * participants + tree_bytes(sent.report) * candidates,
        tree_bytes(sent.down) * receivers,
        codecs.bytes_per_value(codec) * participants,
    )


def mean_bytes_up(per_round: RoundBytes, rows: Sequence[Mapping[str, Any]]) -> int:
    """Bytes up of a round, mean over the rounds and seeds that the rows tell of.

    Args:
      per_round: from `bytes_per_round`.
      rows: of `metrics.csv`, each of which stands for the rounds since its seed's last.
    """
    total = rounds = 0
    last: dict[int, int] = {}
    for row in rows:
        since = row["round"] - last.get(row["seed"], 0)
        last[row["seed"]] = row["round"]
        total += since * per_round.sent_up(row)
        rounds += since
    return round(total / rounds)
