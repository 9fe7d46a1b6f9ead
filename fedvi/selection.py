"""Which clients take part in a round."""

import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Selection", "full", "uniform"]


class Selection(NamedTuple):
    """A rule that picks the cohort of a round.

    Attributes:
      clients: N, the number of clients to choose from.
      size: cohort size N_f, static.
      select: `(key, round, scores) -> [size]` int32 client ids, all different.
        `scores` is `[clients]` where `needs_scores`, else None.
      needs_scores: whether the round computes the algorithm's `score` of every
        client first.
    """

    clients: int
    size: int
    select: Callable[..., jax.Array]
    needs_scores: bool = False


def _check(clients: int, participants: int) -> None:
    whole = isinstance(participants, numbers.Integral)
    if not whole or not 1 <= participants <= clients:
        raise ValueError(
            f"participants={participants} must be a whole number between 1 and the "
            f"number of clients ({clients})"
        )


def full(clients: int) -> Selection:
    """Every client, every round, in order of id."""
    _check(clients, clients)
    return Selection(clients, clients, lambda key, round, scores: jnp.arange(clients))


def uniform(clients: int, participants: int) -> Selection:
    """`participants` of `clients`, uniformly without replacement.

    Raises:
      ValueError: participants not a whole number from 1 to clients.
    """
    _check(clients, participants)
    if participants == clients:
        return full(clients)

    def select(key, round, scores):
        return jax.random.permutation(key, clients)[:participants]

    return Selection(clients, participants, select)
