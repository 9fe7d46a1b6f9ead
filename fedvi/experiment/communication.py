"""Bytes that a round sends up and down, counted from the shapes of what is sent."""

from collections.abc import Mapping
from typing import NamedTuple

from fedvi import codecs
from fedvi.codecs import tree_bytes
from fedvi.contract_checks import Messages
from fedvi.experiment.setup import Experiment

__all__ = ["RoundBytes", "bytes_per_round"]

_WEIGHT = 4  # bytes of a client's weight; no codec touches it


class RoundBytes(NamedTuple):
    """Bytes of a round, of all participants together, from the shapes of what is sent.

    Attributes:
      up: of the uploads by the codec and their weights, if nothing is withheld.
      up_as_sums: if clients made the statistics and only sums left them, as in secure
        aggregation: float32, by no codec; None with `reduce="stack"`.
      down: of what they are sent.
      withheld: that `up` falls by for every value that each participant withholds.
    """

    up: int
    up_as_sums: int | None
    down: int
    withheld: int

    def sent_up(self, metrics: Mapping[str, float | None]) -> float:
        """Bytes up of rounds with these mean metrics, of which one is `withheld`."""
        return self.up - self.withheld * (metrics.get("withheld") or 0.0)


def bytes_per_round(experiment: Experiment, messages: Messages) -> RoundBytes:
    """Counts the bytes of a round.

    Where clients are chosen by their importance, every candidate gets what goes down
    before, and the participants no second time; and every candidate's report goes up.
    """
    codec = codecs.named(experiment.config.codec)
    participants, measure = experiment.selection.size, experiment.selection.measure
    receivers, reports = participants, 0
    if measure is not None:
        receivers = len(experiment.trained)
        reports = tree_bytes(messages.reports[measure]) * receivers
    upload = codecs.payload_bytes(codec, messages.upload) + _WEIGHT
    as_sums = None
    if experiment.algorithm.reduce == "sum":
        summands = tree_bytes(messages.summands) + _WEIGHT
        as_sums = summands * participants + reports
    return RoundBytes(
        upload * participants + reports,
        as_sums,
        tree_bytes(messages.down) * receivers,
        codecs.bytes_per_value(codec) * participants,
    )
