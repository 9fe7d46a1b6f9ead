"""Evaluation: accuracy and calibration of predictive distributions over clients."""

from fedvi.evaluation.metrics import (
    Scores,
    predictive_log_probs,
    reliability,
    score,
    summarise,
)

__all__ = ["Scores", "predictive_log_probs", "reliability", "score", "summarise"]
