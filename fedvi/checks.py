"""A user's mistakes, named in one line before anything is compiled.

What JAX traces has no value yet and passes.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["at_least", "finite", "fraction", "one_of", "open_unit", "positive"]


def one_of(name: str, value, choices) -> None:
    """Raises `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {list(choices)}")


def at_least(name: str, value, least) -> None:
    """Raises `ValueError` unless `value >= least` (NaN fails)."""
    _require(name, value, lambda v: v >= least, f"be at least {least}")


def finite(name: str, value) -> None:
    """Raises `ValueError` for NaN and infinities."""
    _require(name, value, math.isfinite, "be a finite number")


def positive(name: str, value) -> None:
    """Raises `ValueError` unless `value > 0` (NaN fails)."""
    _require(name, value, lambda v: v > 0, "be positive")


def fraction(name: str, value) -> None:
    """Raises `ValueError` unless `0 <= value < 1` (NaN fails)."""
    _require(name, value, lambda v: 0 <= v < 1, "lie in [0, 1)")


def open_unit(name: str, value) -> None:
    """Raises `ValueError` unless `0 < value < 1` (NaN fails)."""
    _require(name, value, lambda v: 0 < v < 1, "lie strictly between 0 and 1")


def _require(name: str, value: Any, holds: Callable, what: str) -> None:
    if not isinstance(value, jax.core.Tracer) and not holds(value):
        raise ValueError(f"{name}={value!r} must {what}")
