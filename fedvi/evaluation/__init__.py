"""Evaluation: accuracy, calibration and uncertainty of predictions over clients."""

from fedvi.evaluation.batches import (
    fold_batches,
    score_in_batches,
    uncertainty_in_batches,
)
from fedvi.evaluation.clustering import adjusted_rand_index
from fedvi.evaluation.metrics import (
    Scores,
    per_client,
    reliability,
    score,
    summarise,
)
from fedvi.evaluation.predictive import predictive_log_probs
from fedvi.evaluation.uncertainty import Uncertainty, auroc, predictive_uncertainty

__all__ = [
    "Scores",
    "Uncertainty",
    "adjusted_rand_index",
    "auroc",
    "fold_batches",
    "per_client",
    "predictive_log_probs",
    "predictive_uncertainty",
    "reliability",
    "score",
    "score_in_batches",
    "summarise",
    "uncertainty_in_batches",
]
