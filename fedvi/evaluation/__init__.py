"""Evaluation: accuracy, calibration and uncertainty of predictions over clients."""

from fedvi.evaluation.batches import (
    fold_batches,
    predictions_in_batches,
    score_in_batches,
)
from fedvi.evaluation.clustering import adjusted_rand_index
from fedvi.evaluation.metrics import (
    BINS,
    Scores,
    per_client,
    reliability,
    score,
    summarise,
)
from fedvi.evaluation.predictive import predictive_log_probs
from fedvi.evaluation.uncertainty import (
    Predictions,
    Uncertainty,
    auroc,
    predictive_uncertainty,
)

__all__ = [
    "BINS",
    "Predictions",
    "Scores",
    "Uncertainty",
    "adjusted_rand_index",
    "auroc",
    "fold_batches",
    "per_client",
    "predictions_in_batches",
    "predictive_log_probs",
    "predictive_uncertainty",
    "reliability",
    "score",
    "score_in_batches",
    "summarise",
]
