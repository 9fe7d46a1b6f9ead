"""Which clients take part in a round.

A plain rule is a function here and a line in `RULES`. A measure of importance is no
rule: it belongs to an algorithm, in `Algorithm.importance`, and `proportional` goes by
any of them.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedvi import checks

__all__ = [
    "RULES",
    "Choice",
    "Selection",
    "full",
    "proportional",
    "round_robin",
    "stratified",
    "uniform",
]

Candidates = Sequence[int] | np.ndarray | None

PERMUTED_BELOW = 100_000
"""Candidates from which on `uniform` no longer permutes all of them. A permutation of
fewer takes at most 45 ms of a core, and the cohorts of the runs in flag files and run
folders, all of fewer, rest on it."""


class Choice(NamedTuple):
    """How a selection that goes by the clients' importance came to its cohort.

    Attributes:
      probabilities: `[clients]` of the first draw; a cohort of several is drawn
        without replacement.
      invalid: `[clients]` bool, candidates with data whose report or score was not
        finite: they have probability 0.
      clipped: `[]` share of Σ|score| that was negative and counted as 0.
      uniform: `[]` bool, no score was positive: all candidates had the same chance.
    """

    probabilities: jax.Array
    invalid: jax.Array
    clipped: jax.Array
    uniform: jax.Array


class Selection(NamedTuple):
    """A rule that picks the cohort of a round.

    Attributes:
      clients: number of clients of the federation.
      size: cohort size N_f, static.
      select: `(key, round_index, scores, counts) -> (ids [size] int32, all different,
        Choice or ())`. Where `measure` is given, `scores` is `[clients]`, NaN where a
        client's report was not finite, and `counts` `[clients]` bool marks the clients
        with data; else both are None.
      measure: name of the algorithm's `importance` that the rule goes by, of which
        the round then computes every candidate's score; None: none.
      candidates: ids of the clients that can be picked, the population of N clients,
        in order; None: all.
      strata: parts of equal size into which clients and cohort fall in order of id: the
        cohort's k-th part is of the clients' k-th. Devices that divide them train
        clients where their data lie. None: any client may come anywhere.
    """

    clients: int
    size: int
    select: Callable[..., tuple[jax.Array, Choice | tuple[()]]]
    measure: str | None = None
    candidates: np.ndarray | None = None
    strata: int | None = None

    @property
    def pool(self) -> np.ndarray:
        """`[N]` int32 ids of the clients that can be picked, in order."""
        if self.candidates is None:
            return np.arange(self.clients, dtype=np.int32)
        return self.candidates


def _population(
    clients: int, candidates: Candidates, participants: int | None = None
) -> tuple[np.ndarray | None, int]:
    """(the candidates' ids in order, `[N]` int32; None: all clients; N).

    An array of all ids would be a constant of every program, of 40 MB for ten million.
    None participants are all of them.
    """
    checks.whole("clients", clients)
    ids, count = None, clients
    if candidates is not None:
        ids = np.unique(np.asarray(candidates, np.int32))
        if len(ids) < len(candidates) or not ((0 <= ids) & (ids < clients)).all():
            raise ValueError(
                f"candidates={np.asarray(candidates).tolist()} must be different "
                f"client ids from 0 to {clients - 1}"
            )
        ids, count = (None if len(ids) == clients else ids), len(ids)
    number = count if participants is None else participants
    integral = isinstance(number, numbers.Integral) and not isinstance(number, bool)
    if not integral or not 1 <= number <= count:
        raise ValueError(
            f"participants={number} must be a whole number between 1 and the number "
            f"of clients ({count})"
        )
    return ids, count


def _at(ids: np.ndarray | None, places: jax.Array) -> jax.Array:
    """The ids at some places of `_population`'s."""
    return places if ids is None else jnp.asarray(ids)[places]


def full(clients: int, candidates: Candidates = None) -> Selection:
    """Every client, every round, in order of id.

    Args:
      clients: number of clients of the federation.
      candidates: ids of those that take part; default: all.

    Raises:
      ValueError: no clients, or candidates that are not different ids.
    """
    ids, count = _population(clients, candidates)

    def select(key, round_index, scores, counts):
        return _at(ids, jnp.arange(count, dtype=jnp.int32)), ()

    everyone = clients if ids is None else None
    return Selection(clients, count, select, candidates=ids, strata=everyone)


def uniform(
    clients: int, participants: int, candidates: Candidates = None
) -> Selection:
    """`participants` of the clients, uniformly without replacement, in random order.

    Args:
      clients: number of clients of the federation.
      participants: N_f, clients in a round.
      candidates: ids of those that may take part; default: all.

    Raises:
      ValueError: participants not a whole number from 1 to the number of candidates,
        or candidates that are not different ids.
    """
    ids, count = _population(clients, candidates, participants)
    if participants == count:
        return full(clients, ids)

    def select(key, round_index, scores, counts):
        return _at(ids, _sample(key, count, participants)), ()

    return Selection(clients, participants, select, candidates=ids)


def _sample(key: jax.Array, population: int, size: int) -> jax.Array:
    """`[size]` int32 different numbers below `population`, all ordered ones equally
    likely; of a large population in time and memory of `size` only."""
    if population < PERMUTED_BELOW or 2 * size > population:
        everyone = jnp.arange(population, dtype=jnp.int32)
        return jax.random.permutation(key, everyone)[:size]

    # Renaming the ids changes neither the distribution of independent draws nor whether
    # enough of them differ, so given that event, too, all results are equally likely.
    def draw(carry):
        key, now = jax.random.split(carry[0])
        draws = jax.random.randint(now, (2 * size,), 0, population, jnp.int32)
        return key, *_first_different(draws, size)

    start = key, jnp.zeros(size, jnp.int32), jnp.int32(0)
    return jax.lax.while_loop(lambda carry: carry[2] < size, draw, start)[1]


def _first_different(draws: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(the first `size` different ones in the order drawn, how many there are)."""
    by_value = jnp.argsort(draws, stable=True)
    sorted_draws = draws[by_value]
    changes = sorted_draws[1:] != sorted_draws[:-1]
    first = jnp.ones(draws.shape, bool).at[by_value[1:]].set(changes)
    place = jnp.cumsum(first, dtype=jnp.int32) - 1
    kept = jnp.where(first, place, size)  # out of range: dropped
    different = jnp.zeros(size, draws.dtype).at[kept].set(draws, mode="drop")
    return different, first.sum(dtype=jnp.int32)


def round_robin(clients: int, participants: int, order: Candidates = None) -> Selection:
    """The next `participants` of the clients, in a fixed order, over and over.

    Args:
      clients: number of clients of the federation.
      participants: N_f, clients in a round.
      order: ids of the clients that take part, in the order of their turns; default:
        all, by id.

    Raises:
      ValueError: participants not a whole number from 1 to the number of turns, or an
        order that is not of different ids.
    """
    ids, count = _population(clients, order, participants)
    turns = None if order is None else np.asarray(order, np.int32)

    def select(key, round_index, scores, counts):
        turn = jnp.arange(participants, dtype=jnp.int32)
        places = round_index * participants + turn
        return _at(turns, places % count), ()

    return Selection(clients, participants, select, candidates=ids)


def stratified(
    clients: int,
    participants: int,
    candidates: Candidates = None,
    *,
    strata: int | None,
) -> Selection:
    """As many of each of `strata` equal parts of the clients, in order of id, uniformly
    without replacement.

    Every candidate has the chance of `uniform` where the parts have as many of them,
    but no cohort has more of one part than of another: a mean over the cohort does not
    vary by what parts differ in. Where they do not differ it varies a little more than
    that of `uniform`, of the order of one over a part's clients. Over as many devices,
    or fewer that divide the strata, all data stay where they lie.

    Args:
      clients: number of clients of the federation.
      participants: N_f, clients in a round.
      candidates: ids of those that may take part; default: all.
      strata: number of parts.

    Raises:
      ValueError: as `uniform`; no strata, or some that do not divide clients and
        participants, or a part with too few candidates.
    """
    ids, _ = _population(clients, candidates, participants)
    if strata is None:
        raise ValueError(
            "strata=None (selection_strata): give a number of equal parts of the "
            "clients, such as that of the devices"
        )
    checks.whole("strata", strata)
    if clients % strata or participants % strata:
        raise ValueError(
            f"strata={strata} (selection_strata) must divide the {clients} clients and "
            f"the {participants} participants of a round"
        )
    everyone = np.arange(clients)
    allowed = np.isin(everyone, everyone if ids is None else ids).reshape(strata, -1)
    each = participants // strata
    if allowed.sum(1).min() < each:
        raise ValueError(
            f"strata={strata}: one of them has {allowed.sum(1).min()} candidates and "
            f"{each} are to be drawn of each: use fewer strata or participants"
        )

    def select(key, round_index, scores, counts):
        drawn = jnp.where(allowed, jax.random.uniform(key, allowed.shape), 2.0)
        places = jnp.argsort(drawn, axis=1)[:, :each]
        first = jnp.arange(strata)[:, None] * allowed.shape[1]
        return (first + places).reshape(-1).astype(jnp.int32), ()

    return Selection(clients, participants, select, candidates=ids, strata=strata)


RULES: dict[str, Callable[..., Selection]] = {
    rule.__name__: rule for rule in (uniform, round_robin, stratified)
}
"""`(clients, participants, candidates in the order of their turns) -> Selection`;
`stratified` also takes `strata`."""


def proportional(
    clients: int,
    participants: int,
    measure: str,
    *,
    temperature: float = 1.0,
    floor: float = 1e-6,
    candidates: Candidates = None,
) -> Selection:
    r"""In proportion to the clients' importance, a cohort without replacement.

    $P_k = (1 - f) \frac{\max(s_k, 0)^{1/T}}{\sum_m \max(s_m, 0)^{1/T}} + f / M$ over
    the M clients with data and a finite score: with T = 1 it is Eq. 17 of Yang, Liu and
    Kassab for the KSD and Eq. 24 for the HIP, whose inner products may be negative and
    then are no distribution.

    A client without data, and one whose score is not finite, has P_k = 0. If no score
    is positive, the M clients have the same chance; if no score is finite, all with
    data.

    Args:
      clients: number of clients of the federation.
      participants: N_f, clients in a round.
      measure: name of the algorithm's `importance`, such as "ksd".
      temperature: T ≥ 0: 1 as in the paper; between 0 and 1 sharper, above 1 flatter;
        0 takes the clients of the largest scores (greedy), whatever the floor.
      floor: f in [0, 1], the share that is uniform; of the order of 1e-6 it only keeps
        every probability positive.
      candidates: ids of those that may take part; default: all.

    Raises:
      ValueError: as `uniform`; a negative or NaN temperature, or a floor outside
        [0, 1].
    """
    ids, _ = _population(clients, candidates, participants)
    checks.at_least("temperature", temperature, 0)
    if not isinstance(measure, str):
        raise ValueError(f"measure={measure!r} must be a name in Algorithm.importance")
    checks.share("floor", floor)
    allowed = np.ones(clients, bool)
    if ids is not None:
        allowed = np.isin(np.arange(clients), ids)

    def select(key, round_index, scores, counts):
        present = allowed & counts
        valid = present & jnp.isfinite(scores)
        choice, log_p = _choose(scores, valid, present, temperature, floor)
        noise = jax.random.gumbel(key, (clients,), mode="high")
        drawn = scores if temperature == 0 else log_p + noise
        # With fewer clients of positive probability than places, the places left over
        # go to valid clients before others, and to absent ones last.
        ranks = (allowed, present, valid, log_p > -jnp.inf)
        rank = sum(mask.astype(jnp.int32) for mask in ranks)
        chosen = jnp.lexsort((noise, drawn, rank))[::-1][:participants]
        return chosen.astype(jnp.int32), choice

    return Selection(clients, participants, select, measure, ids)


def _choose(scores, valid, present, temperature, floor) -> tuple[Choice, jax.Array]:
    """The choice, and the logs of its probabilities, which do not underflow."""
    size = jnp.where(valid, jnp.abs(scores), 0.0)
    positive = jnp.where(valid, jnp.maximum(scores, 0.0), 0.0)
    flat = positive.max() == 0
    if temperature == 0:
        floor, weights = 0.0, jnp.where(positive == positive.max(), 0.0, -jnp.inf)
    else:
        logs = jnp.log(jnp.where(positive > 0, positive, 1.0))
        weights = jnp.where(positive > 0, logs / temperature, -jnp.inf)
    everyone = jnp.where(valid.any(), valid, present)
    even = jnp.log(everyone) - jnp.log(jnp.maximum(everyone.sum(), 1))
    shares = jax.nn.log_softmax(jnp.where(flat, 0.0, weights))
    mixed = jnp.logaddexp(jnp.log1p(-floor) + shares, jnp.log(floor) + even)
    log_p = jnp.where(flat, even, mixed)
    choice = Choice(
        probabilities=jnp.exp(log_p),
        invalid=present & ~valid,
        clipped=(size - positive).sum() / jnp.maximum(size.sum(), 1e-30),
        uniform=flat,
    )
    return choice, log_p
