"""A setting: a dataclass field with its help text and its bounds."""

import dataclasses
import math
import numbers
from typing import Any

__all__ = ["check_bounds", "setting"]


def setting(default, help: str, **bounds) -> Any:
    """A field with its help text and, of `at_least, above, at_most, below`, bounds."""
    return dataclasses.field(default=default, metadata={"help": help, **bounds})


_BOUNDS = {
    "at_least": ("at least", lambda value, bound: value >= bound),
    "above": ("above", lambda value, bound: value > bound),
    "at_most": ("at most", lambda value, bound: value <= bound),
    "below": ("below", lambda value, bound: value < bound),
}


def check_bounds(config) -> None:
    """Raises `ValueError` for a field outside the bounds of its `setting`."""
    for field in dataclasses.fields(config):
        bounds = {key: field.metadata[key] for key in _BOUNDS if key in field.metadata}
        value = getattr(config, field.name)
        if not bounds or (value is None and field.default is None):
            continue
        wanted = " and ".join(f"{_BOUNDS[key][0]} {b}" for key, b in bounds.items())
        if not isinstance(value, numbers.Real):
            raise ValueError(f"{field.name}={value!r} must be a number {wanted}")
        if not math.isfinite(value) or not all(
            _BOUNDS[key][1](value, bound) for key, bound in bounds.items()
        ):
            raise ValueError(f"{field.name}={value} must be {wanted}")
