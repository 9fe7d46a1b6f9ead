"""Initial weights from one long draw, because every separate draw compiles anew."""

from collections.abc import Callable
from math import prod, sqrt
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["one_draw"]

# Standard deviation of a standard normal truncated to [-2, 2].
TRUNCATED_STD = 0.87962566103423978


def one_draw(init: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """A function with the distribution of `init` that compiles several times faster.

    Only for modules with `flax.linen`'s default initialisers: a `kernel` is
    LeCun-normal (a normal truncated at two standard deviations, of variance
    1 / fan-in), a `scale` is one, a `bias` zero.

    Args:
        init: maps a key to nested dicts of parameters; only their shapes are used.

    Returns:
        A compiled function from a key to the same tree with other draws.
    """

    @jax.jit
    def initialise(key: jax.Array) -> Any:
        flat, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(init, key))
        kinds = [path[-1].key for path, _ in flat]
        total = sum(s.size for kind, (_, s) in zip(kinds, flat) if kind == "kernel")
        draws = jax.random.truncated_normal(key, -2.0, 2.0, (total,), jnp.float32)
        draws = draws / TRUNCATED_STD
        leaves, used = [], 0
        for kind, (_, s) in zip(kinds, flat):
            if kind == "kernel":
                draw = draws[used : used + s.size].reshape(s.shape)
                leaves.append(draw / sqrt(prod(s.shape[:-1])))
                used += s.size
            else:
                leaves.append(jnp.full(s.shape, float(kind == "scale"), s.dtype))
        return jax.tree.unflatten(treedef, leaves)

    return initialise
