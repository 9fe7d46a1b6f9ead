"""Accuracy, likelihood and calibration of Monte-Carlo predictive distributions.

Inside the jitted round each client is reduced to `Scores`, sums over its valid
examples. Sums add up, so batches and clients can be pooled. `summarise` turns the
stacked sums of all clients into the reported numbers, in float64 on the host.

Macro is the mean over clients, micro is pooled over examples: they differ as soon as
clients hold different numbers of test examples, so both are reported.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedvi.evaluation.predictive import predictive_log_probs, unnormalised
from fedvi.evaluation.uncertainty import predictive_uncertainty

__all__ = ["BINS", "Scores", "per_client", "reliability", "score", "summarise"]

BINS = 15  # of confidence, as in Guo et al. (2017)


class Scores(NamedTuple):
    """Sums over the valid examples of one client, all float32."""

    count: Array  # [] number of valid examples
    correct: Array  # [] number classified correctly
    nll: Array  # [] sum of -log p(label)
    brier: Array  # [] sum of sum_c (p_c - [c = label])^2
    entropy: Array  # [] sum of the entropies of the averaged predictions, nats
    mutual_information: Array  # [] sum over examples, of label and weights, nats
    bin_count: Array  # [bins] number whose top probability lies in the bin
    bin_correct: Array  # [bins] how many of them are classified correctly
    bin_confidence: Array  # [bins] sum of their top probabilities
    unnormalised: Array  # [] number whose log-probabilities are none (`unnormalised`)


def score(log_probs: Array, labels: Array, mask: Array, bins: int = BINS) -> Scores:
    """Reduces the predictions for one client's examples to sums.

    The Brier score is the multi-class one, the squared error summed over classes, so
    it lies in [0, 2]. Calibration bins have equal width and are open on the left,
    `(l, r]`. A row with mask False contributes exactly 0, whatever it holds, NaN
    included. A valid row with NaN counts as wrong and makes `nll` NaN. Entropy and
    mutual information are those of `predictive_uncertainty`.

    Args:
      log_probs: `[samples, batch, classes]`, log of S Monte-Carlo predictive
        distributions, averaged by `predictive_log_probs`.
      labels: `[batch]` int32 in [0, classes).
      mask: `[batch]` bool, True for real examples.
      bins: number of calibration bins.

    Raises:
      ValueError: the shapes do not fit together, labels that are no integers, or `bins`
        is not positive.
    """
    _check(log_probs, labels, mask, bins)
    mask = jnp.asarray(mask, bool)
    log_probs = jnp.where(mask[None, :, None], log_probs, 0.0)
    log_probs = log_probs.astype(jnp.float32)
    log_p = predictive_log_probs(log_probs)
    entropy, information = predictive_uncertainty(log_probs)
    classes = log_p.shape[-1]
    labels = jnp.where(mask, labels, 0)
    nll = -jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
    # The average of S exact ones can exceed 1 by a rounding error.
    p = jnp.minimum(jnp.exp(log_p), 1.0)
    brier = jnp.sum((p - jax.nn.one_hot(labels, classes)) ** 2, axis=-1)
    confidence = jnp.max(p, axis=-1)
    correct = (jnp.argmax(p, axis=-1) == labels) & ~jnp.isnan(confidence)

    weight = mask.astype(jnp.float32)
    in_bin = jax.nn.one_hot(_bin_index(confidence, bins), bins) * weight[:, None]
    return Scores(
        count=jnp.sum(weight),
        correct=jnp.sum(weight * correct),
        nll=jnp.sum(jnp.where(mask, nll, 0.0)),
        brier=jnp.sum(jnp.where(mask, brier, 0.0)),
        entropy=jnp.sum(jnp.where(mask, entropy, 0.0)),
        mutual_information=jnp.sum(jnp.where(mask, information, 0.0)),
        bin_count=jnp.sum(in_bin, axis=0),
        bin_correct=jnp.sum(in_bin * correct[:, None], axis=0),
        bin_confidence=jnp.sum(in_bin * confidence[:, None], axis=0),
        unnormalised=jnp.sum(weight * unnormalised(log_probs)),
    )


def summarise(scores: Scores) -> dict[str, float | int]:
    """Turns the sums of many clients into the numbers that are reported.

    Clients without test examples are left out.

    Args:
      scores: stacked `Scores`, every leaf with a leading `[clients]` axis.

    Returns:
      `accuracy` (per cent), `nll` (nats), `brier`, `entropy` and `mutual_information`
      (nats): macro, the mean over clients of the mean over their examples.
      `ece`, `mce`: fractions in [0, 1], from the bins pooled over clients; expected
      and maximum of |accuracy - confidence| over the bins that are not empty.
      `accuracy_std`: population standard deviation over clients, per cent.
      `accuracy_p10`: the 10th percentile over clients, per cent, linearly
      interpolated: the accuracy that nine clients in ten reach.
      `accuracy_micro` (per cent), `nll_micro`, `brier_micro`: pooled over examples.
      `ece_macro`: mean over clients of each client's own ECE.
      `clients`, `examples`: how many were counted.

    Raises:
      ValueError: no client has a test example.
    """
    scores = _with_data(scores)
    accuracy = 100.0 * scores.correct / scores.count
    pooled = Scores(*(leaf.sum(axis=0) for leaf in scores))
    ece, mce = _calibration_errors(pooled)
    ece_each = [_calibration_errors(Scores(*client))[0] for client in zip(*scores)]
    return {
        "accuracy": float(np.mean(accuracy)),
        "nll": float(np.mean(scores.nll / scores.count)),
        "brier": float(np.mean(scores.brier / scores.count)),
        "entropy": float(np.mean(scores.entropy / scores.count)),
        "mutual_information": float(np.mean(scores.mutual_information / scores.count)),
        "ece": ece,
        "mce": mce,
        "accuracy_std": float(np.std(accuracy)),
        "accuracy_p10": float(np.percentile(accuracy, 10)),
        "accuracy_micro": float(100.0 * pooled.correct / pooled.count),
        "nll_micro": float(pooled.nll / pooled.count),
        "brier_micro": float(pooled.brier / pooled.count),
        "ece_macro": float(np.mean(ece_each)),
        "clients": int(scores.count.size),
        "examples": int(pooled.count),
    }


def per_client(scores: Scores) -> dict[str, np.ndarray]:
    """Each client's own figures.

    Args:
      scores: stacked `Scores`, every leaf with a leading `[clients]` axis.

    Returns:
      float64 arrays `[clients]`: `accuracy` (per cent), `nll` (nats) and `ece` (a
      fraction, from the client's own bins); NaN for a client without test examples.
    """
    scores = Scores(*(np.asarray(leaf, np.float64) for leaf in scores))
    count = np.where(scores.count > 0, scores.count, np.nan)
    gaps = np.abs(scores.bin_correct - scores.bin_confidence).sum(-1)
    return {
        "accuracy": 100.0 * scores.correct / count,
        "nll": scores.nll / count,
        "ece": gaps / count,
    }


def reliability(scores: Scores) -> dict[str, np.ndarray]:
    """The reliability diagram's figures per bin, pooled over clients.

    Args:
      scores: stacked `Scores`, every leaf with a leading `[clients]` axis.

    Returns:
      float64 arrays `[bins]`: `count`; `accuracy` and `confidence`, fractions in
      [0, 1] that are NaN where a bin is empty.

    Raises:
      ValueError: no client has a test example.
    """
    pooled = Scores(*(leaf.sum(axis=0) for leaf in _with_data(scores)))
    divisor = np.where(pooled.bin_count > 0, pooled.bin_count, np.nan)
    return {
        "count": pooled.bin_count,
        "accuracy": pooled.bin_correct / divisor,
        "confidence": pooled.bin_confidence / divisor,
    }


def _check(log_probs: Array, labels: Array, mask: Array, bins: int) -> None:
    if log_probs.ndim != 3 or log_probs.shape[0] == 0:
        raise ValueError(
            f"log_probs has shape {log_probs.shape}: it must be "
            "[samples, batch, classes] with at least one sample"
        )
    for name, array in (("labels", labels), ("mask", mask)):
        if array.shape != log_probs.shape[1:2]:
            raise ValueError(
                f"{name} has shape {array.shape}: it must be [batch] = "
                f"{log_probs.shape[1:2]}, as in log_probs {log_probs.shape}"
            )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels are {labels.dtype}: they must be integers, classes from 0; what "
            "has other targets can be trained, but not scored as a classifier"
        )
    if bins < 1:
        raise ValueError(f"bins={bins}: at least 1 calibration bin is needed")


def _bin_index(confidence: Array, bins: int) -> Array:
    """`[batch]` index of the bin (l, r] that holds the confidence."""
    # Comparing with the edges, as multiplying by `bins` would round some edges up.
    right_edges = jnp.asarray(np.linspace(0.0, 1.0, bins + 1)[1:], jnp.float32)
    return jnp.searchsorted(right_edges, confidence, side="left")


def _with_data(scores: Scores) -> Scores:
    """float64 numpy copy, restricted to the clients that have examples."""
    scores = Scores(*(np.asarray(leaf, np.float64) for leaf in scores))
    if scores.count.ndim != 1:
        raise ValueError(
            f"scores.count has shape {scores.count.shape}: it must be [clients]; "
            "stack the Scores of the clients first"
        )
    kept = scores.count > 0
    if not kept.any():
        raise ValueError(
            f"none of the {kept.size} clients in scores has a test example: "
            "nothing to evaluate; give at least one client test data"
        )
    return Scores(*(leaf[kept] for leaf in scores))


def _calibration_errors(scores: Scores) -> tuple[float, float]:
    """(ECE, MCE) of one set of bins; empty bins have no gap."""
    gaps = np.abs(scores.bin_correct - scores.bin_confidence)
    divisor = np.maximum(scores.bin_count, 1.0)
    return float(gaps.sum() / scores.count), float(np.max(gaps / divisor))
