"""One client's part of an evaluation: every function maps over `Visit`s.

`state` is the run's (`fedvi.federation.State`); of it only server, round and key are
read, the client's own comes with the visit.
"""

from collections.abc import Callable
from functools import partial

from fedvi.algorithm import Algorithm
from fedvi.evaluation import score_in_batches, uncertainty_in_batches
from fedvi.keys import Purpose, derive
from fedvi.participation import Visit

__all__ = [
    "assign_cluster",
    "personal_uncertainty",
    "score_global",
    "score_personal",
]


def score_global(algorithm: Algorithm, batch_size: int, state, visit: Visit):
    """`Scores` of the client's global model on its first other data set."""
    server = state.server
    if algorithm.assign is not None:
        _, server = _assign(algorithm, state, visit)
    # The same draws of the global model for every client.
    key = derive(state.key, Purpose.PREDICT_GLOBAL, state.round)
    predict = partial(algorithm.global_predictive, key, server)
    return score_in_batches(predict, visit.others[0], batch_size)


def score_personal(algorithm: Algorithm, batch_size: int, state, visit: Visit):
    """`Scores` of the personalised model on the client's first other data set."""
    predict = _personal_predictive(algorithm, state, visit)
    return score_in_batches(predict, visit.others[0], batch_size)


def personal_uncertainty(algorithm: Algorithm, batch_size: int, state, visit: Visit):
    """A tuple of `Uncertainty` of the personalised model, one for each other data."""
    predict = _personal_predictive(algorithm, state, visit)
    return tuple(
        uncertainty_in_batches(predict, data, batch_size) for data in visit.others
    )


def assign_cluster(algorithm: Algorithm, batch_size: int, state, visit: Visit):
    """[] int32, the client's cluster."""
    del batch_size
    return _assign(algorithm, state, visit)[0]


def _assign(algorithm: Algorithm, state, visit: Visit):
    return algorithm.assign(
        derive(state.key, Purpose.ASSIGN, state.round, visit.id),
        state.server,
        visit.client,
        visit.train,
    )


def _personal_predictive(algorithm: Algorithm, state, visit: Visit) -> Callable:
    """Personalises; what `score_in_batches` wants of the result."""
    where = (state.round, visit.id)
    personal = algorithm.personalise(
        derive(state.key, Purpose.PERSONALISE, *where),
        state.server,
        visit.client,
        visit.train,
    )
    key = derive(state.key, Purpose.PREDICT_PERSONAL, *where)
    return partial(algorithm.personal_predictive, key, state.server, personal)
