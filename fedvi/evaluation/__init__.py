"""Evaluation: accuracy and calibration of predictive distributions over clients."""

from fedvi.evaluation.batches import score_in_batches
from fedvi.evaluation.metrics import (
    Scores,
    predictive_log_probs,
    reliability,
    score,
    summarise,
)

__all__ = [
    "Scores",
    "predictive_log_probs",
    "reliability",
    "score",
    "score_in_batches",
    "summarise",
]
