"""PNG plots of a run.

matplotlib comes with the `plots` extra and is imported only when a plot is drawn,
through its object-oriented API: no global state, no display.
"""

from fedvi.experiment.plots.curves import (
    comparison_curves,
    finetune_curve,
    learning_curves,
    uncertainty_curves,
)
from fedvi.experiment.plots.density import entropy_density
from fedvi.experiment.plots.reliability import reliability_diagram

__all__ = [
    "comparison_curves",
    "entropy_density",
    "finetune_curve",
    "learning_curves",
    "reliability_diagram",
    "uncertainty_curves",
]
