"""Pictures of runs that `fedvi.load_run` returned: PNG, SVG, PDF, or in a notebook.

Every function takes one run, several, or a mapping of names to such, and a path whose
suffix is the format; it returns the matplotlib figure. matplotlib comes with the
`plots` extra and is imported only when something is drawn.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedvi.experiment import folder
from fedvi.plots.calibration import reliability_diagram, risk_coverage
from fedvi.plots.curves import finetune_curve, learning_curves
from fedvi.plots.entropy import entropy_density
from fedvi.plots.per_client import clients
from fedvi.plots.prediction_sets import conformal

__all__ = [
    "clients",
    "conformal",
    "draw",
    "entropy_density",
    "finetune_curve",
    "learning_curves",
    "reliability_diagram",
    "risk_coverage",
]

_UNCERTAINTY = ("ece", "entropy", "mutual_information")


def draw(run: Any, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draws all pictures of a run, into its folder.

    Args:
      run: what `fedvi.load_run` returns.
      formats: any of png, svg, pdf.

    Returns:
      The files written; none if matplotlib is not installed.

    Raises:
      ValueError: another format.
    """
    unknown = [name for name in formats if name not in folder.FORMATS]
    if unknown:
        raise ValueError(
            f"formats={','.join(formats)}: they must be of {', '.join(folder.FORMATS)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        return []
    paths = []
    for name, picture in _pictures(run).items():
        for suffix in formats:
            path = Path(run.folder) / f"{name}.{suffix}"
            picture(run, path)
            paths.append(path)
    return paths


def _pictures(run: Any) -> Mapping[str, Callable]:
    """Those that the run has figures for, by name (`folder.PICTURES`)."""
    pictures = {}
    if run.evaluations:
        pictures["learning_curves"] = learning_curves
        pictures["uncertainty"] = partial(learning_curves, metrics=_UNCERTAINTY)
    pictures["reliability"] = reliability_diagram
    pictures["per_client"] = clients
    if run.summary["finetune_curve"] is not None:
        pictures["finetune_curve"] = finetune_curve
    for name, of, picture in (
        ("entropy_density", "ood", entropy_density),
        ("conformal", "conformal", conformal),
        ("risk_coverage", "risk_coverage", risk_coverage),
    ):
        if run.evaluation.get(of):
            pictures[name] = picture
    return pictures
