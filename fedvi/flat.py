"""Pytrees of arrays as one long vector with a static layout, and back.

XLA compiles, launches and schedules an operation once for every array: on 60 small ones
a mean-field ResNet-18 round took five times longer to compile than on two vectors. What
algorithms carry, add up, decay and draw noise for is therefore `Flat`; a network, and
whoever needs columns, layers or names, takes the tree as a view.
"""

from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "Flat",
    "Layout",
    "flatten",
    "has_flats",
    "in_one_piece",
    "is_flat",
    "like_flats",
    "trees",
]


@dataclass(frozen=True)
class Layout:
    """How a vector falls into the leaves of a tree. Static, hashable.

    Attributes:
      treedef: structure of the tree.
      shapes: of its leaves, in order.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of values of each leaf."""
        return tuple(prod(shape) for shape in self.shapes)

    def vector(self, leaves: list[Any]) -> jax.Array:
        """`[size]` from one value, or one array of its shape, for each leaf."""
        if not leaves:
            return jnp.zeros(0)
        parts = zip(leaves, self.shapes, self.sizes, strict=True)
        return _join(
            [jnp.broadcast_to(leaf, shape).reshape(size) for leaf, shape, size in parts]
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Flat:
    """A pytree of arrays of one dtype as one vector: a pytree node with one leaf.

    `jax.tree.map` over several of one layout sees their vectors. Leading axes, such as
    clients or particles, are the vector's.

    Attributes:
      vector: `[..., size]`.
      layout: static.
    """

    vector: jax.Array
    layout: Layout = field(metadata={"static": True})

    def tree(self) -> Any:
        """The tree, leaves `[..., *shape]`: a view, from which a gradient flows back
        as one vector."""
        lead = self.vector.shape[:-1]
        leaves = []
        if self.layout.shapes:
            leaves = _cut(self.vector, self.layout.sizes)
        shaped = (x.reshape(*lead, *s) for x, s in zip(leaves, self.layout.shapes))
        return self.layout.treedef.unflatten(shaped)


def _join(parts: list[jax.Array]) -> jax.Array:
    """The concatenation along the last axis.

    XLA on CPU may fuse `jnp.concatenate` with what comes after and then runs value by
    value: 18 ns each on two devices, ten times the time of updates in place. Those of
    25 MobileNets a TPU's program counts with 42 GB, and the concatenation with 2.7.
    """
    if jax.default_backend() != "cpu":
        return jnp.concatenate(parts, axis=-1)
    sizes = [part.shape[-1] for part in parts]
    lead = parts[0].shape[:-1]
    whole = jnp.zeros((*lead, sum(sizes)), jnp.result_type(*parts))
    start = 0
    for part, size in zip(parts, sizes):
        place = (0,) * len(lead) + (start,)
        whole = jax.lax.dynamic_update_slice(whole, part.astype(whole.dtype), place)
        start += size
    return whole


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _cut(vector: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """The parts of the last axis; what flows back is joined by `_join`."""
    return jax.lax.split(vector, sizes, axis=vector.ndim - 1)


_cut.defvjp(
    lambda vector, sizes: (_cut(vector, sizes), None),
    lambda sizes, _, cotangents: (_join(cotangents),),
)


def flatten(tree: Any) -> Flat:
    """One vector of all leaves of a tree, in the order of `jax.tree.leaves`.

    Args:
      tree: pytree of arrays without leading axes.

    Raises:
      ValueError: leaves of several dtypes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = sorted({str(jnp.result_type(leaf)) for leaf in leaves})
    if len(dtypes) > 1:
        raise ValueError(
            f"parameters of dtypes {', '.join(dtypes)} make no one vector: give all "
            "of them one dtype"
        )
    layout = Layout(treedef, tuple(jnp.shape(leaf) for leaf in leaves))
    return Flat(layout.vector(leaves), layout)


def trees(pytree: Any) -> Any:
    """The pytree with every `Flat` in it replaced by its tree."""
    return jax.tree.map(
        lambda node: node.tree() if is_flat(node) else node, pytree, is_leaf=is_flat
    )


def has_flats(pytree: Any) -> bool:
    """Whether there is a `Flat` in a pytree."""
    return any(map(is_flat, jax.tree.leaves(pytree, is_leaf=is_flat)))


def in_one_piece(pytree: Any) -> Any:
    """All `Flat`s of a pytree as one, for who never tells them apart.

    A tree without them, as of a model that lies on several devices, stays as it is.
    """
    return flatten(trees(pytree)) if has_flats(pytree) else pytree


def like_flats(tree: Any, like: Any) -> Any:
    """The reverse of `trees`: the `Flat`s stand where `like` has them.

    Raises:
      ValueError: a tree of another structure or other shapes than `like` has there.
    """

    def restore(node, part):
        if not is_flat(node):
            return part
        flat = flatten(part)
        if flat.layout != node.layout:
            raise ValueError(
                f"a tree of shapes {flat.layout.shapes} stands where "
                f"{node.layout.shapes} belong"
            )
        return flat

    return jax.tree.map(restore, like, tree, is_leaf=is_flat)


def is_flat(node: Any) -> bool:
    """Whether a node of a pytree is a `Flat`; the `is_leaf` that stops there."""
    return isinstance(node, Flat)
