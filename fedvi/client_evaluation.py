"""One client's part of an evaluation; `fedvi.federation` maps it over the clients.

Every function takes `operands`, what all clients read, and a client's id, as
`fedvi.cohort.map_reduce` wants it.
"""

from collections.abc import Callable
from functools import partial

import jax

from fedvi.algorithm import Algorithm
from fedvi.evaluation import score_in_batches, uncertainty_in_batches
from fedvi.keys import Purpose, derive

__all__ = [
    "assign_cluster",
    "personal_uncertainty",
    "score_global",
    "score_personal",
    "take",
]


def take(tree, index):
    """One entry of every leaf's leading axis."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def score_global(algorithm: Algorithm, batch_size: int, operands, client_id):
    """`((), Scores)` of the client's global model; operands: state, train, test."""
    state, train, test = operands
    server = state.server
    if algorithm.assign is not None:
        _, server = _assign(algorithm, state, train, client_id)
    # The same draws of the global model for every client.
    key = derive(state.key, Purpose.PREDICT_GLOBAL, state.round)
    predict = partial(algorithm.global_predictive, key, server)
    return (), score_in_batches(predict, take(test, client_id), batch_size)


def score_personal(algorithm: Algorithm, batch_size: int, operands, client_id):
    """`((), Scores)` of the personal model; operands: state, train, test."""
    state, train, test = operands
    predict = _personal_predictive(algorithm, state, train, client_id)
    return (), score_in_batches(predict, take(test, client_id), batch_size)


def personal_uncertainty(algorithm: Algorithm, batch_size: int, operands, client_id):
    """`((), tuple of Uncertainty)` of the personal model, one for each data set.

    Operands: state, train, then one or several data sets.
    """
    state, train, *data_sets = operands
    predict = _personal_predictive(algorithm, state, train, client_id)
    return (), tuple(
        uncertainty_in_batches(predict, take(data, client_id), batch_size)
        for data in data_sets
    )


def assign_cluster(algorithm: Algorithm, operands, client_id):
    """`((), [] int32)`, the client's cluster; operands: state, train."""
    state, train = operands
    return (), _assign(algorithm, state, train, client_id)[0]


def _assign(algorithm: Algorithm, state, train, client_id):
    return algorithm.assign(
        derive(state.key, Purpose.ASSIGN, state.round, client_id),
        state.server,
        take(state.clients, client_id),
        take(train, client_id),
    )


def _personal_predictive(algorithm: Algorithm, state, train, client_id) -> Callable:
    """Personalises; what `score_in_batches` wants of the result."""
    where = (state.round, client_id)
    personal = algorithm.personalise(
        derive(state.key, Purpose.PERSONALISE, *where),
        state.server,
        take(state.clients, client_id),
        take(train, client_id),
    )
    key = derive(state.key, Purpose.PREDICT_PERSONAL, *where)
    return partial(algorithm.personal_predictive, key, state.server, personal)
