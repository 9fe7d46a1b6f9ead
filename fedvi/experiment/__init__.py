"""Running experiments: from a configuration, or a command line, to a run folder."""

from fedvi.experiment.config import ExperimentConfig, HostOptions, RunOptions
from fedvi.experiment.loaded_run import load_run, load_runs
from fedvi.experiment.loading import load_data
from fedvi.experiment.run import run, run_all
from fedvi.experiment.sweep import Sweep, sweep, sweep_all

__all__ = [
    "ExperimentConfig",
    "HostOptions",
    "RunOptions",
    "Sweep",
    "load_data",
    "load_run",
    "load_runs",
    "run",
    "run_all",
    "start",
    "sweep",
    "sweep_all",
]


def __getattr__(name: str):
    """`start`, when it is asked for: absl's flags are for scripts."""
    if name == "start":
        from fedvi.experiment.command_line import start

        return start
    raise AttributeError(f"module 'fedvi.experiment' has no attribute {name!r}")
