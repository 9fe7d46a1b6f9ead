"""C19: a number in a formula may be traced, so that one call runs many values of it."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from fedvi.algorithms import ALGORITHMS, build, options_of
from fedvi.federation import Federation
from fedvi.local import LocalTraining
from fedvi.selection import full, uniform


@pytest.fixture
def run(task, train, test):
    """A whole run of two rounds and the evaluation after it."""

    def run(name, rate, momentum, options):
        local = LocalTraining(1, 8, rate, momentum)
        own = task._replace(training=local, finetuning=local)
        algorithm = build(name, own, **options)
        selection = uniform(7, 1) if algorithm.cohort == 1 else full(7)
        federation = Federation(algorithm, train, test, selection=selection)
        state = federation.pure_init(jax.random.key(0))
        state, metrics, scores = federation.pure_run(
            state, train, test, evaluations=1, eval_every=2, personal=True
        )
        return state.server, metrics.metrics, scores.nll

    return run


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_number_of_every_method_may_be_traced(run, name):
    """Rate, momentum and all that is said to be a number in a formula, at once."""
    options = {
        field.name: jnp.array([0.1, 0.2] if field.default is None else [field.default])
        for field in dataclasses.fields(options_of(name))
        if field.metadata["traced"]
    }
    options = {key: jnp.resize(values, 2) for key, values in options.items()}
    several = jnp.array([0.05, 0.02]), jnp.array([0.5, 0.3]), options
    _, metrics, nll = jax.eval_shape(jax.vmap(lambda *v: run(name, *v)), *several)
    assert nll.shape == (2, 1, 7)
    assert all(leaf.shape == (2, 2) for leaf in jax.tree.leaves(metrics))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_number_of_every_method_may_be_a_setting(name, task, train, test):
    """A federation looks at its settings' own values, and at shapes: what it checks
    inside a trace must not become a part of that."""
    fields = [f for f in dataclasses.fields(options_of(name)) if f.metadata["traced"]]
    numbers = {f.name: 0.001 if f.default is None else f.default for f in fields}
    needed = [f.metadata["only_with"] for f in fields if f.default is None]
    static = {other: value for one in needed for other, value in one.items()}

    def made(settings):
        settings = dict(settings)
        local = LocalTraining(1, 8, settings.pop("rate"), settings.pop("momentum"))
        own = task._replace(training=local, finetuning=local)
        return build(name, own, **static, **settings)

    settings = {"rate": 0.001, "momentum": 0.0} | numbers
    size = made(settings).cohort
    federation = Federation(
        made,
        train,
        test,
        selection=uniform(7, 1) if size == 1 else full(7),
        settings=settings,
    )
    states = federation.shapes(2)
    expected = federation.messages.server
    chex.assert_trees_all_equal_structs(states.server, expected)
    after, _ = jax.eval_shape(
        lambda *a: federation._over_runs("rounds")(*a, n=1), states, train
    )
    chex.assert_trees_all_equal_shapes(after.clients, states.clients)


# What a method adds to a client's rate and momentum.
CASES = {
    "fedavg": {"server_learning_rate": (1.0, 0.7), "server_momentum": (0.2, 0.4)},
    "fedprox": {"mu": (0.01, 2.0)},
    "sfedbayes": {"zeta": (0.05, 0.2), "rho": (-3.0, -2.5), "inclusion": (0.9, 0.6)},
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_one_call_of_several_values_is_as_the_runs_alone(run, name):
    values = {"rate": (0.05, 0.02), "momentum": (0.5, 0.3)} | CASES[name]

    def split(values):
        values = dict(values)
        return run(name, values.pop("rate"), values.pop("momentum"), values)

    together = jax.jit(jax.vmap(split))({k: jnp.array(v) for k, v in values.items()})
    for i in range(2):
        own = {key: value[i] for key, value in values.items()}
        alone = jax.jit(lambda own=own: split(own))()  # Python's numbers
        own = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        chex.assert_trees_all_close(own, alone, rtol=1e-5, atol=1e-6)
