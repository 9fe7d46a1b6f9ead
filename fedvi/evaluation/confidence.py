"""What single examples' confidences say: selective prediction, calibration errors.

All take pooled examples: the confidence of each, its largest probability, and whether
it was right. Examples of one confidence have no order, so each counts as their mean.
"""

from typing import NamedTuple

import numpy as np
from scipy.fft import dct, idct

from fedvi import checks

__all__ = ["RiskCoverage", "adaptive_ece", "risk_coverage", "smooth_ece"]

_GRID = 4096  # points in [0, 1]; widths go down to 1 / 1000
_LEAST_WIDTH = 1e-3


class RiskCoverage(NamedTuple):
    """Of a model that answers only where it is sure enough."""

    risk: np.ndarray  # [n] share of errors among the k most confident, k = 1..n
    aurc: float  # area under it: its mean
    excess: float  # above that of the best order, with every error last


def risk_coverage(confidence: np.ndarray, correct: np.ndarray) -> RiskCoverage:
    """Error against coverage, the most confident first (Geifman and El-Yaniv 2017).

    AURC = (1/n) Σ_k (errors among the k most confident) / k; E-AURC = AURC less that of
    an order that puts all errors last (Geifman et al. 2019).

    Args:
      confidence: `[n]`, in any scale: only the order counts.
      correct: `[n]` bool.

    Raises:
      ValueError: no examples, or arrays of different lengths.
    """
    _, right = _sorted(confidence, correct)
    n = right.size
    answered = np.arange(1, n + 1)
    risk = np.cumsum(1 - right[::-1]) / answered
    first_error = n - np.sum(~np.asarray(correct, bool))
    best = np.mean(np.maximum(answered - first_error, 0) / answered)
    aurc = float(np.mean(risk))
    return RiskCoverage(risk, aurc, float(aurc - best))


def adaptive_ece(confidence: np.ndarray, correct: np.ndarray, bins: int = 15) -> float:
    """ECE of bins that hold equally many examples (Nguyen and O'Connor 2015).

    Args:
      confidence: `[n]` in [0, 1].
      correct: `[n]` bool.
      bins: as many as there are examples at most.

    Raises:
      ValueError: no examples, arrays of different lengths, or `bins` below 1.
    """
    checks.whole("bins", bins)
    confidence, right = _sorted(confidence, correct)
    gaps = np.array_split(right - confidence, min(bins, right.size))
    return float(sum(abs(gap.sum()) for gap in gaps) / right.size)


def smooth_ece(confidence: np.ndarray, correct: np.ndarray) -> float:
    """The smooth ECE of Błasiok and Nakkiran (2023), which has no bins to choose.

    With residuals r_i = y_i - f_i and the Gaussian kernel K_σ reflected at 0 and 1,

        smECE_σ = ∫_0^1 |(1/n) Σ_i K_σ(t, f_i) r_i| dt,

    which does not rise with σ; smECE is its value where that equals the width. The
    reflected kernel is that of heat between two walls: cos(πkt) keeps its shape and
    shrinks by exp(-(πkσ)²/2), so a width costs one cosine transform.

    Args:
      confidence: `[n]` in [0, 1].
      correct: `[n]` bool.

    Returns:
      smECE in [0, 1], to 2·10⁻⁴; one below 0.001 is given as that of the width 0.001.

    Raises:
      ValueError: no examples, or arrays of different lengths.
    """
    f, right = _sorted(confidence, correct)
    if np.isnan(f).any():
        return float("nan")
    # Shared between the two nearest of the cells' centres, so that means are kept.
    place = np.clip(f * _GRID - 0.5, 0, _GRID - 1)
    low = np.minimum(place.astype(int), _GRID - 2)
    part = place - low
    residuals = (right - f) / f.size
    cells = np.bincount(low, (1 - part) * residuals, _GRID)
    cells += np.bincount(low + 1, part * residuals, _GRID)
    waves, number = dct(cells), np.arange(_GRID)

    def at(width):
        return np.abs(idct(waves * np.exp(-((np.pi * number * width) ** 2) / 2))).sum()

    low, high = _LEAST_WIDTH, 1.0
    if at(low) <= low:
        return float(at(low))
    for _ in range(14):  # to 6·10⁻⁵
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) >= middle else (low, middle)
    return float(at((low + high) / 2))


def _sorted(confidence, correct) -> tuple[np.ndarray, np.ndarray]:
    """Rising confidences, and the share that is right of those that equal each."""
    confidence = np.asarray(confidence, np.float64)
    correct = np.asarray(correct, np.float64)
    if confidence.ndim != 1 or confidence.shape != correct.shape or not correct.size:
        raise ValueError(
            f"confidence has shape {confidence.shape} and correct {correct.shape}: "
            "both must be [n], with at least one example"
        )
    values, group = np.unique(confidence, return_inverse=True, equal_nan=True)
    means = np.bincount(group, correct) / np.bincount(group)
    order = np.sort(group)
    return values[order], means[order]
