"""Variational-Bayesian federated learning in JAX: a whole round is one jitted call."""

from fedvi.algorithm import (
    Aggregate,
    Algorithm,
    ClientOutput,
    Importance,
    StackedAggregate,
    Task,
)
from fedvi.data import ClientData
from fedvi.federation import Federation, RoundMetrics, State
from fedvi.local import LocalTraining
from fedvi.streaming import StreamedFederation

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "Algorithm",
    "ClientData",
    "ClientOutput",
    "Federation",
    "Importance",
    "LocalTraining",
    "RoundMetrics",
    "StackedAggregate",
    "State",
    "StreamedFederation",
    "Task",
]
