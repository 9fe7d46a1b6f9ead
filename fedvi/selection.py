"""Which clients take part in a round."""

import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Selection", "full", "uniform"]


class Selection(NamedTuple):
    """A rule that picks the cohort of a round.

    Attributes:
      clients: number of clients of the federation.
      size: cohort size N_f, static.
      select: `(key, round, scores) -> [size]` int32 client ids, all different.
        `scores` is `[clients]` where `needs_scores`, else None.
      needs_scores: whether the round computes the algorithm's `score` of every
        client first.
      candidates: ids of the clients that can be picked, the population of N clients;
        None: all.
    """

    clients: int
    size: int
    select: Callable[..., jax.Array]
    needs_scores: bool = False
    candidates: np.ndarray | None = None


def _check(clients: int, participants: int) -> None:
    whole = isinstance(participants, numbers.Integral)
    if not whole or not 1 <= participants <= clients:
        raise ValueError(
            f"participants={participants} must be a whole number between 1 and the "
            f"number of clients ({clients})"
        )


def _ids(clients: int, candidates: Sequence[int] | np.ndarray | None) -> np.ndarray:
    """The candidates' ids in order, `[N]` int32."""
    if candidates is None:
        return np.arange(clients, dtype=np.int32)
    ids = np.unique(np.asarray(candidates, np.int32))
    if len(ids) < len(candidates) or not ((0 <= ids) & (ids < clients)).all():
        raise ValueError(
            f"candidates={np.asarray(candidates).tolist()} must be different client "
            f"ids from 0 to {clients - 1}"
        )
    return ids


def full(
    clients: int, candidates: Sequence[int] | np.ndarray | None = None
) -> Selection:
    """Every client, every round, in order of id.

    Args:
      clients: number of clients of the federation.
      candidates: ids of those that take part; default: all.

    Raises:
      ValueError: no clients, or candidates that are not different ids.
    """
    ids = _ids(clients, candidates)
    _check(len(ids), len(ids))
    return Selection(
        clients, len(ids), lambda key, round, scores: jnp.asarray(ids), candidates=ids
    )


def uniform(
    clients: int,
    participants: int,
    candidates: Sequence[int] | np.ndarray | None = None,
) -> Selection:
    """`participants` of the clients, uniformly without replacement.

    Args:
      clients: number of clients of the federation.
      participants: N_f, clients in a round.
      candidates: ids of those that may take part; default: all.

    Raises:
      ValueError: participants not a whole number from 1 to the number of candidates,
        or candidates that are not different ids.
    """
    ids = _ids(clients, candidates)
    _check(len(ids), participants)
    if participants == len(ids):
        return full(clients, ids)

    def select(key, round, scores):
        return jax.random.permutation(key, jnp.asarray(ids))[:participants]

    return Selection(clients, participants, select, candidates=ids)
