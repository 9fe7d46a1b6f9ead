"""Where every random number comes from: one root key, a purpose, a round, a client.

A key never depends on a client's place in the cohort, so results do not depend on
the order of clients, the chunk size or the number of devices, and a resumed run
draws the same numbers.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Purpose", "derive", "is_key"]


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


def derive(root, purpose: Purpose, round_index=0, client_id=0):
    """Returns `fold_in(fold_in(fold_in(root, purpose), round_index), client_id)`.

    Args:
      root: typed PRNG key of the run.
      purpose: what the key is for.
      round_index: round number, Python or traced integer.
      client_id: the client's number in the population (not its place in the
        cohort), Python or traced integer.
    """
    key = jax.random.fold_in(root, int(purpose))
    return jax.random.fold_in(jax.random.fold_in(key, round_index), client_id)


def is_key(leaf: Any) -> bool:
    """Whether a leaf, an array or its shape, is one or several typed PRNG keys."""
    return jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
