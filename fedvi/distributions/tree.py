"""Distributions over one long vector, seen as distributions over a parameter tree."""

from collections.abc import Sequence
from typing import Any

import distrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from tensorflow_probability.substrates import jax as tfp

from fedvi.flat import Flat, Layout, flatten, trees

__all__ = ["Blocks", "Frozen", "Tree", "as_tree", "with_head"]


class Tree(distrax.Distribution):
    """A distribution over vectors `[d]` as one over trees of arrays.

    Samples, mean and standard deviations are trees, leaves `[*sample_shape, *shape]`;
    `log_prob` takes one, or `Flat`s. What the base has no closed form of it does not
    have either.

    Args:
      base: over vectors, event shape `[d]`.
      layout: how a vector falls into a tree.
    """

    def __init__(self, base: distrax.Distribution, layout: Layout):
        super().__init__()
        self.base = base
        self.layout = layout

    def __repr__(self) -> str:
        return f"Tree({type(self.base).__name__}, {sum(self.layout.sizes)} weights)"

    def _view(self, vector: jax.Array) -> Any:
        return Flat(vector, self.layout).tree()

    def _vector(self, tree: Any) -> jax.Array:
        leaves = self.layout.treedef.flatten_up_to(trees(tree))
        lead = jnp.ndim(leaves[0]) - len(self.layout.shapes[0])
        parts = [jnp.reshape(x, (*jnp.shape(x)[:lead], -1)) for x in leaves]
        return jnp.concatenate(parts, axis=-1)

    def _sample_n(self, key, n: int) -> Any:
        return self._view(self.base._sample_n(key, n))

    def log_prob(self, value: Any) -> jax.Array:
        """`[*sample_shape]`, at a tree of the distribution's structure."""
        return self.base.log_prob(self._vector(value))

    def mean(self) -> Any:
        """The tree of means."""
        return self._view(self.base.mean())

    def stddev(self) -> Any:
        """The tree of standard deviations."""
        return self._view(self.base.stddev())

    def variance(self) -> Any:
        """The tree of variances."""
        return self._view(self.base.variance())

    def entropy(self) -> jax.Array:
        """In nats, of the joint distribution of all weights."""
        return self.base.entropy()

    @property
    def event_shape(self) -> Any:
        """Tree of the shapes of one sample's leaves."""
        return self.layout.treedef.unflatten(self.layout.shapes)


@tfp.distributions.RegisterKL(Tree, Tree)
def _kl(p: Tree, q: Tree, *_, **__):
    return p.base.kl_divergence(q.base)


class Blocks(distrax.Distribution):
    """Independent distributions over the consecutive parts of one vector.

    Args:
      parts: each over vectors.
    """

    def __init__(self, parts: Sequence[distrax.Distribution]):
        super().__init__()
        self.parts = tuple(parts)
        self._ends = np.cumsum([part.event_shape[0] for part in self.parts])

    def _cut(self, vector: jax.Array) -> list[jax.Array]:
        return jnp.split(vector, self._ends[:-1], axis=-1)

    def _sample_n(self, key, n: int) -> jax.Array:
        keys = jax.random.split(key, len(self.parts))
        draws = [part._sample_n(k, n) for part, k in zip(self.parts, keys)]
        return jnp.concatenate(draws, axis=-1)

    def log_prob(self, value: jax.Array) -> jax.Array:
        """Sum over the parts."""
        pairs = zip(self.parts, self._cut(value))
        return sum(part.log_prob(own) for part, own in pairs)

    def mean(self) -> jax.Array:
        """`[d]`."""
        return jnp.concatenate([part.mean() for part in self.parts])

    def stddev(self) -> jax.Array:
        """`[d]`."""
        return jnp.concatenate([part.stddev() for part in self.parts])

    def variance(self) -> jax.Array:
        """`[d]`."""
        return jnp.square(self.stddev())

    def entropy(self) -> jax.Array:
        """Sum over the parts, in nats."""
        return sum(part.entropy() for part in self.parts)

    @property
    def event_shape(self) -> tuple[int, ...]:
        """`(d,)`."""
        return (int(self._ends[-1]),)


@tfp.distributions.RegisterKL(Blocks, Blocks)
def _kl_of_blocks(p: Blocks, q: Blocks, *_, **__):
    return sum(a.kl_divergence(b) for a, b in zip(p.parts, q.parts, strict=True))


class Frozen(distrax.Independent):
    """Weights that never change, such as a frozen random head: all mass at one vector.

    Its `log_prob` is with respect to counting, 0 there and minus infinity elsewhere.

    Args:
      vector: `[d]`.
    """

    def __init__(self, vector: jax.Array):
        super().__init__(distrax.Deterministic(vector), reinterpreted_batch_ndims=1)

    def entropy(self):
        """Raises `ValueError`: a single point has no differential entropy."""
        raise ValueError(
            "frozen weights have no differential entropy (minus infinity): take that "
            "of the posterior's other part, distribution.base.parts"
        )


def as_tree(base: distrax.Distribution, params: Any) -> Tree:
    """`Tree` of a distribution over the concatenated leaves of `params`.

    Args:
      base: over vectors, the leaves of `params` one after another.
      params: the parameters, or shapes, that say where each weight belongs.
    """
    shapes = jax.eval_shape(lambda p: flatten(trees(p)), params)
    return Tree(base, shapes.layout)


def with_head(base: distrax.Distribution, learned: Any, frozen: Any) -> Tree:
    """Over `{"body", "head"}`: a distribution over what is learned, the rest as it is.

    Args:
      base: over the vector of all weights of `learned`.
      learned: `{"body"}`, or `{"body", "head"}`, which say where weights belong.
      frozen: `{"head"}`, or `{}` if the head is learned too.
    """
    if not frozen:
        return as_tree(base, learned)
    head = Frozen(ravel_pytree(frozen["head"])[0])
    return as_tree(Blocks([base, head]), {**learned, **frozen})
