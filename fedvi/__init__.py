"""Variational-Bayesian federated learning in JAX: a whole round is one jitted call."""

import importlib

from fedvi import algorithms, codecs, data, distributions, nn, selection, stein
from fedvi.algorithm import (
    Aggregate,
    Algorithm,
    ClientOutput,
    Importance,
    StackedAggregate,
    Task,
)
from fedvi.client_map import clients_mesh
from fedvi.data import ClientData
from fedvi.federation import Federation, RoundMetrics, State
from fedvi.flat import Flat, flatten, trees
from fedvi.local import LocalTraining
from fedvi.options import Options, option
from fedvi.streaming import StreamedFederation

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "Algorithm",
    "ClientData",
    "ClientOutput",
    "Federation",
    "Flat",
    "Importance",
    "LocalTraining",
    "Options",
    "RoundMetrics",
    "StackedAggregate",
    "State",
    "StreamedFederation",
    "Task",
    "algorithms",
    "clients_mesh",
    "codecs",
    "data",
    "distributions",
    "experiment",
    "flatten",
    "load_run",
    "load_runs",
    "nn",
    "option",
    "plots",
    "selection",
    "stein",
    "sweep",
    "trees",
]


def __getattr__(name: str):
    """`fedvi.experiment`, what it gives, and `fedvi.plots`, when they are first asked
    for: notebooks often do without."""
    if name in ("experiment", "plots"):
        return importlib.import_module(f"fedvi.{name}")
    if name in ("load_run", "load_runs", "sweep"):
        return getattr(importlib.import_module("fedvi.experiment"), name)
    raise AttributeError(f"module 'fedvi' has no attribute {name!r}")
