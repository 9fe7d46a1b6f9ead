"""Random draws of the shape of a parameter pytree."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from fedvi.flat import Flat, Layout
from fedvi.keys import for_many

__all__ = ["draw_like", "standard_normal_like"]


def draw_like(draw: Callable, tree: chex.ArrayTree) -> chex.ArrayTree:
    """Makes one flat draw for all of `tree` and cuts it into its leaves.

    One generator call compiles several times faster than one a leaf: 3 s instead of
    12 s for the 80 leaves of a MobileNet.

    Args:
      draw: `(shape, dtype) -> array` of independent entries.
      tree: pytree whose structure, shapes and dtypes the draw takes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    layout = Layout(treedef, tuple(jnp.shape(leaf) for leaf in leaves))
    drawn = draw((sum(layout.sizes),), jnp.result_type(*leaves) if leaves else None)
    # In most trees a cast to the leaves' own types does nothing.
    return jax.tree.map(
        lambda own, leaf: own.astype(leaf.dtype), Flat(drawn, layout).tree(), tree
    )


def standard_normal_like(key: chex.PRNGKey, tree: chex.ArrayTree) -> chex.ArrayTree:
    """Independent N(0, 1) draws, structure and shapes of `tree`."""
    key = for_many(key)
    return draw_like(lambda shape, dtype: jax.random.normal(key, shape, dtype), tree)
