"""What is measured once, after training: fine-tuning curve, out-of-distribution."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedvi import data
from fedvi.evaluation import Uncertainty, auroc, summarise
from fedvi.experiment.report import over_seeds
from fedvi.experiment.setup import Experiment
from fedvi.federation import BaseFederation, State, take

__all__ = ["finetune_curve", "out_of_distribution"]


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
    experiment: Experiment,
    federation: BaseFederation,
    states: State,
    stream: bool = False,
) -> tuple[dict[str, Any], tuple[Uncertainty, Uncertainty]]:
    """How well uncertainty tells the two data sets apart, and its means (nats); the
    uncertainty inside and outside, of all seeds and clients.

    Over the training clients: values pooled for the AUROC, means over clients.
    """
    config, ood = experiment.config, experiment.ood
    predictions = jax.device_get(
        federation.predictions_personal(
            states, federation.test, data.ClientArrays(ood) if stream else ood
        )
    )
    uncertainty = tuple(
        jax.tree.map(np.asarray, one.uncertainty) for one in predictions
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


def _with_seeds(first: int, figures: Sequence[dict]) -> list[dict[str, Any]]:
    return [{"seed": first + index, **one} for index, one in enumerate(figures)]
