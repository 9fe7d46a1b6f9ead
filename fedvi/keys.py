"""Where every random number comes from: one root key, a purpose, a round, a client.

A key never depends on a client's place in the cohort, so results do not depend on
the order of clients, the chunk size or the number of devices, and a resumed run
draws the same numbers. That takes a generator whose numbers are the same in a `vmap`
as alone: Threefry, whatever JAX's default is.
"""

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["GENERATOR", "Purpose", "by_bits", "derive", "is_key", "root_key"]

GENERATOR = "threefry2x32"
"""The generator of every run. XLA's own (`rbg`, `unsafe_rbg`) draws other numbers in a
`vmap` than alone, so that results would depend on the chunk size."""


class Purpose(enum.IntEnum):
    """What a key is for; the numbers are part of the reproducibility promise."""

    INIT = 0
    INIT_CLIENT = 1
    SELECT = 2
    CLIENT_UPDATE = 3
    SERVER_UPDATE = 4
    PERSONALISE = 5
    PREDICT_GLOBAL = 6
    PREDICT_PERSONAL = 7
    REPORT = 8
    ASSIGN = 9
    ENCODE = 10


def root_key(seed):
    """The root key of a run, [] typed: Threefry's, whatever JAX's default is."""
    return jax.random.key(seed, impl=GENERATOR)


def derive(root, purpose: Purpose, round_index=0, client_id=0, *numbers):
    """Returns `fold_in(fold_in(fold_in(root, purpose), round_index), client_id)`.

    Args:
      root: typed PRNG key of the run.
      purpose: what the key is for.
      round_index: round number, Python or traced integer.
      client_id: the client's number in the population (not its place in the
        cohort), Python or traced integer.
      *numbers: folded in likewise, where one key a client is not enough: a data set
        and a batch of it in an evaluation.
    """
    key = jax.random.fold_in(root, int(purpose))
    for number in (round_index, client_id, *numbers):
        key = jax.random.fold_in(key, number)
    return key


def is_key(leaf: Any) -> bool:
    """Whether a leaf, an array or its shape, is one or several typed PRNG keys."""
    return jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def by_bits(function: Callable, keys: jax.Array) -> jax.Array:
    """What a function of plain arrays makes of typed keys."""
    bits = jnp.asarray(function(jax.random.key_data(keys)))
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(keys))
