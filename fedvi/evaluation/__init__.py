"""Evaluation: accuracy, calibration and uncertainty of predictions over clients."""

from fedvi.evaluation import conformal, recalibration
from fedvi.evaluation.batches import (
    fold_batches,
    predictions_in_batches,
    score_in_batches,
)
from fedvi.evaluation.bootstrap import bootstrap_intervals
from fedvi.evaluation.clustering import adjusted_rand_index
from fedvi.evaluation.confidence import adaptive_ece, risk_coverage, smooth_ece
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
    "adaptive_ece",
    "adjusted_rand_index",
    "auroc",
    "bootstrap_intervals",
    "conformal",
    "fold_batches",
    "per_client",
    "predictions_in_batches",
    "predictive_log_probs",
    "predictive_uncertainty",
    "recalibration",
    "reliability",
    "risk_coverage",
    "score",
    "score_in_batches",
    "smooth_ece",
    "summarise",
]
