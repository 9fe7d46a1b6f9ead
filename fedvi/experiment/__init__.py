"""Running experiments: the run folder, checkpoints and plots."""

from fedvi.experiment import checkpoint, plots
from fedvi.experiment.recorder import Recorder, prepare, table

__all__ = ["Recorder", "checkpoint", "plots", "prepare", "table"]
