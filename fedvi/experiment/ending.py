"""What is measured once, after the last round, on the personalised models."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedvi.evaluation import Uncertainty, auroc, summarise
from fedvi.experiment import build
from fedvi.experiment.build import Experiment
from fedvi.experiment.headline import over_seeds
from fedvi.experiment.programs import Programs
from fedvi.experiment.rows import seed_of
from fedvi.federation import State

__all__ = ["Ending", "measure"]


class Ending(NamedTuple):
    """What was measured.

    Attributes:
      figures: for `summary.json`: `finetune_curve` and `ood`, None where not asked.
      uncertainty: on the test data and on the out-of-distribution inputs, numpy,
        leaves `[seeds, clients, capacity]`; None where not asked.
      compile_seconds: spent on programs of its own.
    """

    figures: dict[str, Any]
    uncertainty: tuple[Uncertainty, Uncertainty] | None
    compile_seconds: float


def measure(
    experiment: Experiment,
    states: State,
    programs: Programs,
    programs_of: Callable[[Experiment], Programs],
) -> Ending:
    """Measures what the configuration asks for; prints a line on each.

    Args:
      experiment: what was run, its data on the devices.
      states: of all seeds, after the last round.
      programs: that it was run with.
      programs_of: makes those of an experiment that differs in its algorithm.
    """
    config = experiment.config
    curve, uncertainty, out, compile_seconds = None, None, None, 0.0
    if config.finetune_curve:
        curve, compile_seconds = _finetune_curve(
            experiment, states, programs, programs_of
        )
    if experiment.ood is not None:
        uncertainty = jax.device_get(
            programs.uncertainty_personal(states, experiment.data.test, experiment.ood)
        )
        out = _out_of_distribution(experiment, *uncertainty)
    return Ending({"finetune_curve": curve, "ood": out}, uncertainty, compile_seconds)


def _finetune_curve(
    experiment: Experiment,
    states: State,
    programs: Programs,
    programs_of: Callable[[Experiment], Programs],
) -> tuple[dict[str, Any], float]:
    """Accuracy (per cent) of training and novel clients for each number of epochs."""
    config = experiment.config
    groups = {"training_clients": experiment.trained}
    if len(experiment.novel):
        groups["novel_clients"] = experiment.novel
    curves = [{name: [] for name in groups} for _ in range(config.seeds)]
    compile_seconds = 0.0
    for epochs in config.finetune_curve:
        if epochs == config.finetune_epochs:  # compiled already
            scores = programs.evaluate_personal(states)
        else:
            other = programs_of(build.with_finetuning(experiment, epochs))
            scores = other.evaluate_personal(states)
            compile_seconds += other.compile_seconds
        scores = jax.device_get(scores)
        for index, curve in enumerate(curves):
            for name, ids in groups.items():
                own = seed_of(seed_of(scores, index), ids)
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
        print(f"fine-tuning epochs and accuracy of {name.replace('_', ' ')}: {shown}")
    per_seed = _with_seeds(config.seed, curves)
    epochs = list(config.finetune_curve)
    return {"epochs": epochs, **means, "per_seed": per_seed}, compile_seconds


def _out_of_distribution(
    experiment: Experiment, inside: Uncertainty, outside: Uncertainty
) -> dict[str, Any]:
    """How well uncertainty tells the two data sets apart, and its means (nats).

    Over the training clients: values pooled for the AUROC, means over clients.
    """
    config = experiment.config
    per_seed = []
    for index in range(config.seeds):
        pair = [
            seed_of(seed_of(one, index), experiment.trained)
            for one in (inside, outside)
        ]
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
    print(
        f"out of distribution, {config.ood_dataset}: AUROC of entropy "
        f"{means['auroc_entropy']:.4f}, of mutual information "
        f"{means['auroc_mutual_information']:.4f}"
    )
    return {
        "dataset": config.ood_dataset,
        **means,
        "per_seed": _with_seeds(config.seed, per_seed),
    }


def _mean_over_clients(values: np.ndarray, mask: np.ndarray) -> float:
    held = mask.any(axis=1)
    sums = np.where(mask, values, 0.0).sum(axis=1, dtype=np.float64)
    return float(np.mean(sums[held] / mask.sum(axis=1)[held]))


def _with_seeds(first: int, figures: Sequence[dict]) -> list[dict[str, Any]]:
    return [{"seed": first + index, **one} for index, one in enumerate(figures)]
