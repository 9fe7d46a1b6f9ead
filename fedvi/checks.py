"""A user's mistakes, named in one line before anything is compiled.

What JAX traces has no value yet and passes.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedvi import names

__all__ = [
    "at_least",
    "client_data",
    "finite",
    "finite_inputs",
    "fraction",
    "index",
    "labels",
    "one_of",
    "open_unit",
    "positive",
    "same_clients",
    "share",
    "sizes",
    "whole",
]


def one_of(name: str, value, choices) -> None:
    """Raises `ValueError` unless `value` is one of `choices`."""
    known = tuple(choices)
    if value not in known:
        raise ValueError(
            f"{name}={value!r} must be one of {', '.join(map(str, known))}"
            f"{names.near(value, known)}"
        )


def at_least(name: str, value, least) -> None:
    """Raises `ValueError` unless `value >= least` (NaN fails)."""
    _require(name, value, lambda v: v >= least, f"be at least {least}")


def share(name: str, value) -> None:
    """Raises `ValueError` unless `0 <= value <= 1` (NaN fails)."""
    _require(name, value, lambda v: 0 <= v <= 1, "lie in [0, 1]")


def finite(name: str, value) -> None:
    """Raises `ValueError` for NaN and infinities."""
    _require(name, value, math.isfinite, "be a finite number")


def positive(name: str, value) -> None:
    """Raises `ValueError` unless `0 < value < inf` (NaN fails)."""
    _require(name, value, lambda v: 0 < v < math.inf, "be a positive number")


def fraction(name: str, value) -> None:
    """Raises `ValueError` unless `0 <= value < 1` (NaN fails)."""
    _require(name, value, lambda v: 0 <= v < 1, "lie in [0, 1)")


def open_unit(name: str, value) -> None:
    """Raises `ValueError` unless `0 < value < 1` (NaN fails)."""
    _require(name, value, lambda v: 0 < v < 1, "lie strictly between 0 and 1")


def whole(name: str, value, least: int = 1) -> None:
    """Raises `ValueError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, jax.core.Tracer):
        return
    number = _integer(value)
    if number is None or number < least:
        raise ValueError(f"{name}={value!r} must be a whole number, at least {least}")


def index(name: str, value, count: int) -> int:
    """`value`, a whole number of Python, NumPy or JAX, if it counts one of `count`.

    Raises:
      ValueError: no whole number, or one outside 0..count - 1.
    """
    number = _integer(value)
    if number is None or not 0 <= number < count:
        raise ValueError(f"{name}={value!r} must be an id, 0 to {count - 1}")
    return number


def _integer(value: Any) -> int | None:
    """A whole number of Python, NumPy or JAX; None: it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def client_data(name: str, data: Any) -> None:
    """Checks the shapes, types and sizes of stacked `ClientData`, whoever made them.

    Raises:
      ValueError: no `ClientData`, leaves of different clients or capacities, labels or
        sizes of another type than numbers, a size outside 0..capacity; names which.
    """
    if not all(hasattr(getattr(data, f, None), "shape") for f in ("x", "y", "size")):
        raise ValueError(
            f"{name}={type(data).__name__} must be a fedvi.ClientData of arrays: x "
            "[clients, capacity, ...], y [clients, capacity] and size [clients]"
        )
    x, y, size = (tuple(a.shape) for a in (data.x, data.y, data.size))
    if len(y) != 2 or x[:2] != y or size != y[:1] or not y[1]:
        raise ValueError(
            f"{name}.x has shape {x}, {name}.y {y} and {name}.size {size}: they must "
            "be (clients, capacity, ...), (clients, capacity) and (clients,)"
        )
    for field, kinds in (("x", (jnp.number, jnp.bool_)), ("y", (jnp.number,))):
        dtype = getattr(data, field).dtype
        if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            raise ValueError(
                f"{name}.{field} is {dtype}: it must be numbers, and labels integers "
                "from 0"
            )
    if not jnp.issubdtype(data.size.dtype, jnp.integer):
        raise ValueError(f"{name}.size is {data.size.dtype}: it must be integers")
    sizes(f"{name}.size", data.size, y[1])


def sizes(name: str, size: Any, capacity: int) -> None:
    """Raises `ValueError` unless every client's size lies in 0..capacity."""
    sizes = np.asarray(size)
    bad = (sizes < 0) | (sizes > capacity)
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"{name}[{i}]={sizes[i]} must lie in 0..{capacity}: a client has "
            f"{capacity} slots for examples"
        )


def finite_inputs(name: str, data: Any) -> None:
    """Raises `ValueError` for a NaN or an infinity in an example of `ClientData`."""
    x, y = np.asarray(data.x), data.y
    if not np.issubdtype(x.dtype, np.floating):
        return
    real = np.arange(y.shape[1])[None] < np.asarray(data.size)[:, None]
    whole = np.isfinite(x).reshape(*y.shape, -1).all(axis=-1)
    if (bad := real & ~whole).any():
        client, slot = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"{name}.x[{client}, {slot}] is not finite: remove or repair that example"
        )


def labels(name: str, y: np.ndarray, classes: int, whose: str, real: Any = True):
    """Raises `ValueError` unless all labels lie in 0..classes - 1.

    Args:
      name: of the array.
      y: labels of any shape. Floats, the targets of a regression, pass.
      classes: number of classes.
      whose: classes they are, for the message.
      real: of y's shape: False where the slot is padding, which may hold anything.
    """
    if not np.issubdtype(y.dtype, np.integer):
        return
    bad = ((y < 0) | (y >= classes)) & real
    if bad.any():
        where = np.unravel_index(np.argmax(bad), bad.shape)
        place = ", ".join(str(int(i)) for i in where)
        raise ValueError(
            f"{name}[{place}] = {y[where]} is outside 0..{classes - 1}, the labels of "
            f"the {classes} classes of {whose}: correct the label"
        )


def same_clients(train: int, test: int, name: str = "test") -> None:
    """Raises `ValueError` unless train and test data are of as many clients."""
    if train != test:
        raise ValueError(
            f"{name} holds {test} clients and train {train}: they must be the same "
            "clients"
        )


def _require(name: str, value: Any, holds: Callable, what: str) -> None:
    if isinstance(value, jax.core.Tracer):
        return
    try:
        if isinstance(value, jax.Array):
            value = np.asarray(value)[()]  # which a trace around it does not trace
        fits = not isinstance(value, bool) and bool(holds(value))
    except (TypeError, ValueError):  # text, an array of several
        fits = False
    if not fits:
        raise ValueError(f"{name}={value!r} must {what}")
