"""Recalibration, prediction sets and selective prediction of a run's models."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fedvi.evaluation import (
    Predictions,
    Scores,
    adaptive_ece,
    conformal,
    recalibration,
    risk_coverage,
    score,
    smooth_ece,
    summarise,
)
from fedvi.federation import take

__all__ = ["LEVELS", "Examples", "Measured", "measure", "too_few"]

LEVELS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""The α at which pictures show coverage against set size."""

_POINTS = 100  # of a risk-coverage curve
_ERRORS = ("nll", "nll_micro", "brier", "ece", "ece_macro")


class Examples(NamedTuple):
    """What one model of one run says of every client's examples, numpy.

    Attributes:
      log_probs: `[clients, capacity, classes]`, of the averaged predictions.
      labels: `[clients, capacity]` int.
      mask: `[clients, capacity]` bool, real examples.
      uniforms: `[clients, capacity]` in [0, 1], of randomised scores.
    """

    log_probs: np.ndarray
    labels: np.ndarray
    mask: np.ndarray
    uniforms: np.ndarray

    @classmethod
    def of(cls, predictions: Predictions, labels: np.ndarray, *seed: int) -> "Examples":
        """Predictions of one run, with the labels of the data set that they are of.

        Args:
          predictions: numpy leaves `[clients, ...]`.
          labels: `[clients, capacity]`.
          seed: of the uniform numbers, another one for each data set.
        """
        # Not the stream of a partition or a held-out part: a longer seed, since zeros
        # at a seed's end change nothing.
        rng = np.random.default_rng([*seed, *b"uniforms"])
        uniforms = rng.random(predictions.mask.shape)
        return cls(
            predictions.log_probs, np.asarray(labels), predictions.mask, uniforms
        )


class Measured(NamedTuple):
    """Of one model of one run.

    Attributes:
      figures: nested dicts of numbers, for `summary.json`.
      arrays: what pictures need.
      per_client: `[clients]` each.
    """

    figures: dict[str, Any]
    arrays: dict[str, Any]
    per_client: dict[str, np.ndarray]


def measure(
    test: Examples,
    calibration: Examples | None,
    groups: Mapping[str, np.ndarray],
    *,
    level: float,
    bins: int,
) -> dict[str, Measured]:
    """All that predictions say beyond `Scores`.

    Args:
      test: what is evaluated.
      calibration: of the same clients and model, from data that nobody trained on.
      groups: whose figures are given, by name to ids. Those of the group "" trained:
        temperature and thresholds of all are theirs.
      level: α of the prediction sets.
      bins: of confidence.

    Returns:
      `risk_coverage`, and with calibration data `recalibration` and `conformal`.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # of a diverged model
        found = {"risk_coverage": _confidences(test, groups[""], bins)}
        if calibration is not None:
            found |= {
                "recalibration": _recalibrated(test, calibration, groups, bins),
                "conformal": _sets(test, calibration, groups, level),
            }
    return found


def too_few(size: Sequence[int], level: float) -> np.ndarray:
    """Ids of the clients whose own threshold is infinite: n < 1/α - 1."""
    size = np.asarray(size)
    return np.flatnonzero(conformal.conformal_rank(size, level) > size)


def _confidences(test: Examples, ids: np.ndarray, bins: int) -> Measured:
    """Risk-coverage curve and calibration errors of some clients' pooled examples."""
    log_probs, labels, mask, _ = (leaf[ids] for leaf in test)
    top = log_probs.max(axis=-1)[mask].astype(np.float64)
    correct = (log_probs.argmax(axis=-1) == labels)[mask] & ~np.isnan(top)
    curve = risk_coverage(top, correct)
    coverage = np.arange(1, _POINTS + 1) / _POINTS
    at = np.ceil(coverage * top.size).astype(int) - 1
    confidence = np.minimum(np.exp(top), 1.0)
    figures = {
        "aurc": curve.aurc,
        "excess_aurc": curve.excess,
        "adaptive_ece": adaptive_ece(confidence, correct, bins),
        "smooth_ece": smooth_ece(confidence, correct),
    }
    arrays = {"coverage": coverage, "risk": curve.risk[at]}
    return Measured(figures, arrays, {})


def _recalibrated(
    test: Examples, calibration: Examples, groups: Mapping[str, np.ndarray], bins: int
) -> Measured:
    """Temperatures from the calibration data, and what they change."""
    sums = jax.device_get(_temperature_sums(*calibration[:3]))
    of_trained = take(sums, groups[""])
    temperature = recalibration.global_temperature(of_trained)
    variance = recalibration.temperature_variance(of_trained, temperature)
    own = recalibration.client_temperatures(sums, temperature, variance)
    clients = len(test.labels)
    by_rule = {
        "before": np.ones(clients),
        "global": np.full(clients, temperature),
        "client": own,
    }
    scores = {
        rule: jax.device_get(_rescored(*test[:3], values.astype(np.float32), bins=bins))
        for rule, values in by_rule.items()
    }
    figures = {
        "temperature": temperature,
        "log_temperature_std": math.sqrt(variance),
        **_grouped(
            groups,
            lambda ids: {rule: _errors(take(one, ids)) for rule, one in scores.items()},
        ),
    }
    arrays = {rule: scores[rule] for rule in ("global", "client")}
    return Measured(figures, arrays, {"temperature": own})


def _sets(
    test: Examples,
    calibration: Examples,
    groups: Mapping[str, np.ndarray],
    level: float,
) -> Measured:
    """Prediction sets of every score and threshold rule."""
    figures, arrays, per_client, trained = {}, {}, {}, groups[""]
    for name, score_of in conformal.SCORES.items():
        of_test = score_of(test.log_probs, test.uniforms)
        thresholds = _thresholds(score_of, calibration, trained)
        of_level = thresholds(level)
        counted = {
            rule: conformal.prediction_sets(of_test, test.labels, test.mask, found)
            for rule, found in of_level.items()
        }
        figures[name] = _grouped(
            groups,
            lambda ids, counted=counted: {
                rule: take(one, ids).summarise() for rule, one in counted.items()
            },
        )
        for rule in ("global", "quantile_of_quantiles"):
            figures[name][rule]["threshold"] = float(of_level[rule][0])
        arrays[name] = _along_levels(of_test, test, thresholds, trained)
        if name == "lac":
            per_client = _columns(counted, of_level["client"])
    return Measured(figures, arrays, per_client)


def _grouped(groups: Mapping[str, np.ndarray], figures: Callable) -> dict[str, Any]:
    """The figures of the group "", and under their names those of the others."""
    found = {name: figures(ids) for name, ids in groups.items()}
    return found.pop("") | found


def _errors(scores: Scores) -> dict[str, float]:
    figures = summarise(scores)
    return {key: figures[key] for key in _ERRORS}


def _thresholds(
    score_of: Callable, calibration: Examples, trained: np.ndarray
) -> Callable[[float], dict[str, np.ndarray]]:
    """α -> `[clients]` by rule; a threshold of all is the same for each."""
    log_probs, labels, mask, uniforms = calibration
    scores = conformal.of_labels(score_of(log_probs, uniforms), labels)
    # No score is larger: the least likely class where all are as likely.
    classes = log_probs.shape[-1]
    largest = max(1.0, score_of(np.full(classes, -math.log(classes))).max())
    edges = conformal.score_edges(largest)
    of_trained = scores[trained], mask[trained]
    counts = conformal.score_histogram(*of_trained, edges).sum(axis=0)

    def at(level: float) -> dict[str, np.ndarray]:
        of_all = {
            "global": conformal.histogram_threshold(counts, edges, level),
            "quantile_of_quantiles": conformal.quantile_of_quantiles(
                *of_trained, level
            ),
        }
        found = {rule: np.full(len(scores), value) for rule, value in of_all.items()}
        return found | {"client": conformal.client_thresholds(scores, mask, level)}

    return at


def _along_levels(
    of_test: np.ndarray, test: Examples, thresholds: Callable, ids: np.ndarray
) -> dict[str, dict[str, np.ndarray]]:
    """Coverage and set size of each rule, `[levels]`."""
    curves: dict[str, dict[str, list]] = {}
    of_test, labels, mask = of_test[ids], test.labels[ids], test.mask[ids]
    for level in LEVELS:
        for rule, found in thresholds(level).items():
            counted = conformal.prediction_sets(of_test, labels, mask, found[ids])
            figures = counted.summarise()
            curve = curves.setdefault(rule, {"coverage": [], "set_size": []})
            for key, values in curve.items():
                values.append(figures[key])
    return jax.tree.map(np.asarray, curves, is_leaf=lambda x: isinstance(x, list))


def _columns(
    counted: Mapping[str, conformal.PredictionSets], own: np.ndarray
) -> dict[str, np.ndarray]:
    """Of LAC: what each client gets by the threshold of all, and by its own."""
    columns = {"own_threshold": own}
    for prefix, rule in (("", "global"), ("own_", "client")):
        count, covered, size = counted[rule]
        count = np.where(count > 0, count, np.nan)
        columns |= {f"{prefix}coverage": covered / count}
        columns |= {f"{prefix}set_size": size / count}
    return columns


@jax.jit
def _temperature_sums(log_probs, labels, mask) -> recalibration.TemperatureSums:
    return jax.vmap(recalibration.temperature_sums)(log_probs, labels, mask)


@partial(jax.jit, static_argnames="bins")
def _rescored(log_probs, labels, mask, temperatures, *, bins: int) -> Scores:
    """Scores `[clients, ...]` with each client's temperature."""

    def one(log_probs, labels, mask, temperature):
        return score(
            recalibration.rescaled(log_probs, temperature)[None], labels, mask, bins
        )

    return jax.vmap(one)(log_probs, labels, mask, temperatures)
