"""Upload codecs: how a client's upload is written, in how many bytes.

A federation applies them to `ClientOutput.upload`, before `Algorithm.statistics`.
Leaves that are no floats are sent as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.distributions.draws import draw_like
from fedvi.flat import Flat, Layout

__all__ = [
    "BFLOAT16",
    "CODECS",
    "IDENTITY",
    "INT8",
    "Codec",
    "Coded",
    "bytes_per_value",
    "named",
    "payload_bytes",
    "tree_bytes",
]


class Codec(NamedTuple):
    """How an upload is written, two pure functions over ONE client's pytree.

    Attributes:
      name: for flags and tables.
      encode: `(key, upload) -> payload`, any pytree: the bytes of its leaves are those
        that are sent. `key` is a typed PRNG key.
      decode: `(payload) -> upload`, of the structure, shapes and types of what was
        encoded. What is not finite must not become so: it marks a failed client.
    """

    name: str
    encode: Callable[[jax.Array, Any], Any]
    decode: Callable[[Any], Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded:
    """One array of a payload: values × scale.

    Attributes:
      values: the array's shape, in few bytes.
      scale: [] float32, of a `Flat`'s vector `[layers]`; None: 1, and not sent.
      dtype: of the array. Static, and not sent: both ends know it.
      layout: of the `Flat` whose vector it is; None: of none. Static.
    """

    values: jax.Array
    scale: jax.Array | None
    dtype: Any = field(metadata={"static": True})
    layout: Layout | None = field(default=None, metadata={"static": True})

    def restored(self) -> jax.Array:
        """The array as it arrives."""
        values = self.values.astype(jnp.float32)
        if self.scale is not None:
            values = values * _spread(self.scale, self.layout, values)
        return values.astype(self.dtype)


def _spread(scale: jax.Array, layout: Layout | None, values: jax.Array) -> jax.Array:
    """`[]`, or for every value of a `Flat`'s vector `[..., d]` its layer's."""
    if layout is None:
        return scale
    lead = (1,) * (values.ndim - 1)
    return layout.vector(list(scale)).reshape(*lead, -1)


def _round_to_bfloat16(key: jax.Array, upload: Any) -> Any:
    del key

    def leaf(x):
        # XLA may drop a cast to bfloat16 and back; it keeps this.
        rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return Coded(rounded.astype(jnp.bfloat16), None, x.dtype)

    return jax.tree.map(lambda x: leaf(x) if _is_float(x) else x, upload)


def _quantise_to_int8(key: jax.Array, upload: Any) -> Any:
    nodes, structure = jax.tree.flatten(upload, is_leaf=lambda x: isinstance(x, Flat))
    floats = [
        leaf.astype(jnp.float32) for leaf in jax.tree.leaves(upload) if _is_float(leaf)
    ]
    if not floats:
        return upload
    draws = iter(draw_like(partial(jax.random.uniform, key), floats))

    def code(x, layout=None):
        values = x.astype(jnp.float32)
        # A NaN or an infinity becomes the scale's, and so the whole layer's.
        if layout is None:
            scale = jnp.max(jnp.abs(values), initial=0) / 127
        else:
            layers = jax.tree.leaves(Flat(jnp.abs(values), layout).tree())
            scale = jnp.array([jnp.max(a, initial=0) for a in layers]) / 127
        spread = _spread(scale, layout, values)
        steps = values / jnp.where(spread > 0, spread, 1)  # zeros without 0/0
        low = jnp.floor(steps)
        # Not floor(steps + u), whose sum would be rounded.
        rounded = jnp.clip(low + (next(draws) < steps - low), -127, 127)
        return Coded(rounded.astype(jnp.int8), scale, x.dtype, layout)

    def leaf(node):
        if not isinstance(node, Flat):
            return code(node) if _is_float(node) else node
        if not _is_float(node.vector):
            return node
        return replace(node, vector=code(node.vector, node.layout))

    return jax.tree.unflatten(structure, [leaf(node) for node in nodes])


def _restore(payload: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.restored() if isinstance(leaf, Coded) else leaf,
        payload,
        is_leaf=lambda leaf: isinstance(leaf, Coded),
    )


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


IDENTITY = Codec("identity", lambda key, upload: upload, lambda payload: payload)
"""Everything as it is: a round does not even call it."""

BFLOAT16 = Codec("bfloat16", _round_to_bfloat16, _restore)
"""Two bytes a value, rounded to nearest: relative error at most 2⁻⁸."""

INT8 = Codec("int8", _quantise_to_int8, _restore)
"""A byte a value and a float32 scale a layer, with stochastic rounding.

scale = max|x| / 127. E[decode(encode(x))] = x and |decode(encode(x)) - x| <= scale, up
to float32 rounding; zeros stay zeros.
"""

CODECS = {codec.name: codec for codec in (IDENTITY, BFLOAT16, INT8)}


def named(name: str) -> Codec:
    """The codec of that name.

    Raises:
      ValueError: there is none.
    """
    checks.one_of("codec", name, CODECS)
    return CODECS[name]


def payload_bytes(codec: Codec, upload: Any) -> int:
    """Bytes that a codec sends of an upload, from shapes: nothing is computed.

    Args:
      codec: the codec.
      upload: pytree of arrays or `jax.ShapeDtypeStruct`s, of one client.
    """
    return tree_bytes(jax.eval_shape(codec.encode, jax.random.key(0), upload))


def tree_bytes(tree: Any) -> int:
    """Bytes of a pytree's leaves, arrays or `jax.ShapeDtypeStruct`s."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_value(codec: Codec) -> int:
    """What one more float32 value of a leaf adds to a payload."""
    two, one = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (2, 1))
    return payload_bytes(codec, two) - payload_bytes(codec, one)
