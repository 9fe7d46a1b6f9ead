"""Weights that no client changes have no clients axis under `vmap`: all clients' images
take one product with them, not one each."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from fedvi import algorithms

KEY = jax.random.key(0)


def products(function, *arguments) -> tuple[int, int]:
    """(of a matrix for all clients, of one for each) in a program of many clients."""
    found = Counter()

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found[equation.params["dimension_numbers"][1][1] != ()] += 1
            for inner in jax.tree.leaves(
                list(equation.params.values()),
                is_leaf=lambda value: hasattr(value, "eqns"),
            ):
                if hasattr(inner, "eqns"):
                    look(getattr(inner, "jaxpr", inner))

    look(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found[False], found[True]


@pytest.mark.parametrize(
    ("name", "what", "expected"),
    [
        # Hidden layer and head.
        ("fedavg", "global_predictive", (2, 0)),
        # Forward and backward through the frozen head; the hidden layer and its
        # gradient.
        ("fedbabu", "client_update", (2, 2)),
        ("fedavg", "client_update", (0, 5)),
        # The frozen body; the head, its gradient.
        ("fedper", "personalise", (1, 2)),
        ("fedrep", "personalise", (1, 2)),
    ],
)
def test_what_no_client_changes_is_one_matrix(name, what, expected, task, train):
    algorithm = algorithms.build(name, task)
    server = algorithm.init(KEY)
    client = algorithm.init_client(KEY, server)
    data = jax.tree.map(jnp.asarray, train)
    calls = {
        "global_predictive": lambda d: algorithm.global_predictive(
            KEY, server, d.x, jnp.arange(len(d.y)) < d.size
        ),
        "client_update": lambda d: algorithm.client_update(
            KEY, jnp.int32(0), server, client, d
        ),
        "personalise": lambda d: algorithm.personalise(KEY, server, client, d),
    }
    assert products(jax.vmap(calls[what]), data) == expected
