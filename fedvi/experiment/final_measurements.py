"""What is measured once, after training."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedvi import data
from fedvi.evaluation import (
    Predictions,
    Scores,
    auroc,
    bootstrap_intervals,
    summarise,
)
from fedvi.experiment import calibration
from fedvi.experiment.calibration import Examples
from fedvi.experiment.report import over_seeds
from fedvi.experiment.setup import Experiment
from fedvi.federation import BaseFederation, State, take

__all__ = ["Ending", "after_training"]

_LEVEL, _DRAWS = 0.95, 1000  # of the bootstrap


class Ending(NamedTuple):
    """What is measured after training.

    Attributes:
      figures: what `summary.json` gets; None for what was not asked for.
      arrays: what pictures need, leaves `[seeds, ...]`: `ood` (uncertainty in and out
        of distribution), `risk_coverage` and `conformal`, as far as asked for.
      per_client: columns of `clients.csv`, `[seeds, clients]` each.
      compile_seconds: spent on other federations than the run's own.
    """

    figures: dict[str, Any]
    arrays: dict[str, Any]
    per_client: dict[str, np.ndarray]
    compile_seconds: float


def after_training(
    experiment: Experiment,
    federation: BaseFederation,
    states: State,
    scores: Mapping[str, Scores],
    stream: bool = False,
) -> Ending:
    """All that the configuration asks to be measured of the last round's state.

    Args:
      experiment: what was run.
      federation: its clients.
      states: after the last round, `[seeds]`.
      scores: of the last evaluation by model, leaves `[seeds, clients, ...]`.
      stream: whether the federation takes sources and not arrays.
    """
    curve, seconds = None, 0.0
    if experiment.config.finetune_curve:
        curve, seconds = finetune_curve(experiment, federation, states)
    figures = {
        "finetune_curve": curve,
        "intervals": intervals(experiment, scores),
        **dict.fromkeys(("ood", "risk_coverage", "recalibration", "conformal")),
    }
    predictions = _predictions(experiment, federation, states, stream)
    arrays, per_client = {}, {}
    if experiment.ood is not None:
        inside, outside = (predictions["personal"][name] for name in ("test", "ood"))
        figures["ood"], arrays["ood"] = out_of_distribution(experiment, inside, outside)
    if predictions and (
        experiment.config.risk_coverage or experiment.calibration is not None
    ):
        found = _calibration(experiment, predictions)
        figures |= found.figures
        arrays |= found.arrays
        per_client = found.per_client
    return Ending(figures, arrays, per_client, seconds)


def _predictions(
    experiment: Experiment, federation: BaseFederation, states: State, stream: bool
) -> dict[str, dict[str, Predictions]]:
    """By model and data set, as far as needed, leaves `[seeds, clients, ...]` numpy."""
    config = experiment.config
    source = data.ClientArrays if stream else lambda arrays: arrays
    others = {"calibration": experiment.calibration}
    asked = {
        "global": (federation.predictions, others),
        "personal": (federation.predictions_personal, {"ood": experiment.ood} | others),
    }
    found = {}
    for model, (predict, sets) in asked.items():
        sets = {name: source(one) for name, one in sets.items() if one is not None}
        idle = not sets and not config.risk_coverage
        if idle or (model == "global" and not experiment.algorithm.global_model):
            continue
        results = predict(states, federation.test, *sets.values())
        found[model] = dict(zip(("test", *sets), jax.device_get(results)))
    return found


# Of all clients together.


def intervals(experiment: Experiment, scores: Mapping[str, Scores]) -> dict[str, Any]:
    """95 % intervals over clients of each model's headline figures."""

    def of(ids):
        return {
            model: bootstrap_intervals(
                jax.tree.map(lambda leaf: leaf[:, ids], one),
                level=_LEVEL,
                draws=_DRAWS,
            )
            for model, one in scores.items()
        }

    figures = {"level": _LEVEL, "draws": _DRAWS, **of(experiment.trained)}
    if len(experiment.novel):
        figures["novel"] = of(experiment.novel)
    return figures


def finetune_curve(
    experiment: Experiment, federation: BaseFederation, states: State
) -> tuple[dict[str, Any], float]:
    """Accuracy (per cent) of training and novel clients for each number of epochs;
    seconds of compilation."""
    config = experiment.config
    groups = {"training_clients": experiment.trained}
    if len(experiment.novel):
        groups["novel_clients"] = experiment.novel
    curves = [{name: [] for name in groups} for _ in range(config.seeds)]
    seconds = 0.0
    for epochs in config.finetune_curve:
        other = federation
        if epochs != config.finetune_epochs:  # else compiled already
            other = other.variant(algorithm=experiment.finetuned(epochs))
        scores = jax.device_get(other.evaluate_personal(states))
        seconds += 0.0 if other is federation else other.compile_seconds
        for index, curve in enumerate(curves):
            for name, ids in groups.items():
                own = take(take(scores, index), ids)
                curve[name].append(summarise(own)["accuracy"])
    means = {
        name: np.mean([curve[name] for curve in curves], axis=0).tolist()
        for name in groups
    }
    for name, values in means.items():
        shown = ", ".join(
            f"{epochs}: {value:.2f} %"
            for epochs, value in zip(config.finetune_curve, values)
        )
        who = name.replace("_", " ")
        print(f"fine-tuning epochs and accuracy of {who}: {shown}")
    per_seed = _with_seeds(config.seed, curves)
    epochs = list(config.finetune_curve)
    return {"epochs": epochs, **means, "per_seed": per_seed}, seconds


def out_of_distribution(
    experiment: Experiment, inside: Predictions, outside: Predictions
) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """How well uncertainty tells the two data sets apart, and its means (nats); the
    uncertainty inside and outside, of all seeds and clients.

    Over the training clients: values pooled for the AUROC, means over clients.
    """
    config = experiment.config
    uncertainty = tuple(
        jax.tree.map(np.asarray, one.uncertainty) for one in (inside, outside)
    )
    per_seed = []
    for index in range(config.seeds):
        pair = [take(take(one, index), experiment.trained) for one in uncertainty]
        figures = {}
        for name in ("entropy", "mutual_information"):
            pooled = [getattr(one, name)[one.mask] for one in pair]
            figures[f"auroc_{name}"] = auroc(*pooled)
            for side, one in zip(("in", "out"), pair):
                figures[f"{name}_{side}"] = _mean_over_clients(
                    getattr(one, name), one.mask
                )
        per_seed.append(figures)
    means = over_seeds(per_seed, np.mean)
    shown = f"AUROC of entropy {means['auroc_entropy']:.4f}"
    if means["mutual_information_in"] > 0:  # several samples, which may disagree
        shown += f", of mutual information {means['auroc_mutual_information']:.4f}"
    print(f"out of distribution, {config.ood_name}: {shown}")
    per_seed = _with_seeds(config.seed, per_seed)
    figures = {"dataset": config.ood_dataset, **means, "per_seed": per_seed}
    return figures, uncertainty


def _mean_over_clients(values: np.ndarray, mask: np.ndarray) -> float:
    held = mask.any(axis=1)
    sums = np.where(mask, values, 0.0).sum(axis=1, dtype=np.float64)
    return float(np.mean(sums[held] / mask.sum(axis=1)[held]))


# Of every example's prediction.


def _calibration(
    experiment: Experiment, predictions: Mapping[str, Mapping[str, Predictions]]
) -> Ending:
    """`risk_coverage`, and with calibration data `recalibration` and `conformal`."""
    config = experiment.config
    groups = {"": experiment.trained}
    if len(experiment.novel):
        groups["novel"] = experiment.novel

    def measured(found: Mapping[str, Predictions], index: int):
        sets = {"test": experiment.data.test, "calibration": experiment.calibration}
        pair = [
            Examples.of(take(found[name], index), one.y, config.seed + index, number)
            if one is not None
            else None
            for number, (name, one) in enumerate(sets.items())
        ]
        return calibration.measure(
            *pair, groups, level=config.conformal_level, bins=config.calibration_bins
        )

    by_model = {
        model: [measured(found, index) for index in range(config.seeds)]
        for model, found in predictions.items()
    }
    figures, arrays, per_client = {}, {}, {}
    for name in next(iter(by_model.values()))[0]:
        per_seed = [
            {model: seeds[index][name].figures for model, seeds in by_model.items()}
            for index in range(config.seeds)
        ]
        figures[name] = over_seeds(per_seed, np.mean)
        figures[name]["per_seed"] = _with_seeds(config.seed, per_seed)
        stacked = {m: _stack(o[name].arrays for o in s) for m, s in by_model.items()}
        if jax.tree.leaves(stacked):
            arrays[name] = stacked
        for model, seeds in by_model.items():
            columns = _stack(one[name].per_client for one in seeds)
            per_client |= {f"{model}_{key}": v for key, v in columns.items()}
    if experiment.calibration is not None:
        _describe(experiment, figures)
        arrays["conformal"]["levels"] = np.array(calibration.LEVELS)
    return Ending(figures, arrays, per_client, 0.0)


def _describe(experiment: Experiment, figures: dict[str, Any]) -> None:
    """Adds what the figures are of, and prints the main ones."""
    level, size = experiment.config.conformal_level, experiment.calibration.size
    few = calibration.too_few(size, level)
    figures["conformal"] |= {"level": level, "clients_with_too_few": few.tolist()}
    figures["recalibration"]["examples"] = int(size[experiment.trained].sum())
    if len(few):
        print(
            f"{len(few)} of {len(size)} clients have fewer than "
            f"1/conformal_level - 1 = {1 / level - 1:g} calibration examples: by their "
            "own threshold their prediction sets hold all classes"
        )
    for model in ("global", "personal"):
        if model not in figures["conformal"]:
            continue
        errors, sets = figures["recalibration"][model], figures["conformal"][model]
        before, after, lac = errors["before"], errors["global"], sets["lac"]["global"]
        print(
            f"{model} model: at temperature {errors['temperature']:.2f} NLL "
            f"{before['nll']:.3f} -> {after['nll']:.3f}, ECE {100 * before['ece']:.2f} "
            f"-> {100 * after['ece']:.2f} %; sets for {100 * (1 - level):g} % hold "
            f"{lac['set_size']:.2f} classes, cover {100 * lac['coverage']:.1f} %, of "
            f"the worst client {100 * lac['worst_client']:.1f} %"
        )


def _stack(trees: Iterable[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _with_seeds(first: int, figures: Sequence[dict]) -> list[dict[str, Any]]:
    return [{"seed": first + index, **one} for index, one in enumerate(figures)]
