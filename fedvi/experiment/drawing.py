"""Which plots a finished run has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedvi.evaluation import Scores, Uncertainty, reliability
from fedvi.experiment import plots, recorder
from fedvi.experiment.build import Experiment

__all__ = ["draw"]


def draw(
    run_dir: Path,
    experiment: Experiment,
    *,
    rows: Sequence[Mapping[str, Any]],
    scores: Mapping[str, Scores],
    uncertainty: tuple[Uncertainty, Uncertainty] | None,
    summary: Mapping[str, Any],
) -> bool:
    """Draws a run's plots; diagrams and densities are of the training clients.

    Args:
      run_dir: the run folder.
      experiment: what was run.
      rows: of `metrics.csv`.
      scores: after the last round, leaves `[seeds, clients, ...]`, by model.
      uncertainty: in and out of distribution, leaves `[seeds, clients, capacity]`.
      summary: what `summary.json` holds.

    Returns:
      False if matplotlib is not installed: nothing is drawn.
    """
    config = experiment.config
    title = f"{config.method}, {config.dataset}, {config.evaluated_on} data"
    if not plots.learning_curves(run_dir / recorder.LEARNING_CURVES, rows, title=title):
        return False
    plots.uncertainty_curves(run_dir / recorder.UNCERTAINTY, rows, title=title)
    plots.reliability_diagram(
        run_dir / recorder.RELIABILITY,
        {name: reliability(_pooled(experiment, s)) for name, s in scores.items()},
        ece={name: summary[name]["ece"] for name in scores},
        title=title,
    )
    if summary["finetune_curve"] is not None:
        plots.finetune_curve(
            run_dir / recorder.FINETUNE_CURVE, summary["finetune_curve"], title=title
        )
    if uncertainty is not None:
        plots.entropy_density(
            run_dir / recorder.ENTROPY_DENSITY,
            *(_entropies(experiment, one) for one in uncertainty),
            classes=experiment.data.classes,
            title=f"{title}, out of distribution: {config.ood_dataset}",
        )
    return True


def _pooled(experiment: Experiment, scores: Scores) -> Scores:
    """The training clients of all seeds as if they were one seed's."""
    return jax.tree.map(
        lambda leaf: leaf[:, experiment.trained].reshape(-1, *leaf.shape[2:]), scores
    )


def _entropies(experiment: Experiment, uncertainty: Uncertainty) -> list[np.ndarray]:
    """Of every training client, those of all seeds together."""
    return [
        uncertainty.entropy[:, client][uncertainty.mask[:, client]]
        for client in experiment.trained
    ]
