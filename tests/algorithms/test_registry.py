import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest

from fedvi import nn
from fedvi.algorithm import Aggregate, Task
from fedvi.algorithms import (
    ALGORITHMS,
    build,
    builder,
    options_of,
    point_estimate,
    register,
)
from fedvi.options import Options, option

TRACED = [
    (name, field.name, 0.1 if field.default is None else field.default)
    for name in ("fedavg", "fedprox", "fedhb_niw", "fedhb_mixture")
    for field in dataclasses.fields(options_of(name))
    if field.metadata["traced"]
]


def test_unknown_names_and_options_are_named(task):
    with pytest.raises(ValueError, match=r"algorithm='fedsgd' must be one of .*fedavg"):
        options_of("fedsgd")
    with pytest.raises(ValueError, match=r"mu=1 is no option of fedbabu, .* head"):
        build("fedbabu", task, mu=1)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("fedavg", "server_momentum", 1.0),
        ("fedavg", "server_learning_rate", 0.0),
        ("fedavg", "server_optimizer", "lbfgs"),
        ("fedprox", "mu", -1.0),
        ("fedbabu", "head", "new"),
        ("fedhb_niw", "head", "none"),
        ("fedhb_niw", "covariance", "full"),
        ("fedhb_niw", "prior_mean", "one"),
        ("fedhb_niw", "prediction", "mean"),
        ("fedhb_niw", "p_drop", 1.0),
        ("fedhb_niw", "epsilon", -1.0),
        ("fedhb_niw", "penalty_scale", -1.0),
        ("fedhb_niw", "num_samples", 0),
        ("fedhb_niw", "num_samples", 5),  # without prediction="sample"
        ("fedhb_mixture", "components", 0),
        ("fedhb_mixture", "variance", 0.0),
        ("fedhb_mixture", "epsilon", 0.0),
        ("fedhb_mixture", "start", "zero"),
        ("fedhb_mixture", "prior_mean", "one"),
        ("fedhb_mixture", "init_spread", -1.0),
        ("fedhb_mixture", "penalty_scale", -1.0),
    ],
)
def test_option_values_are_checked_by_name(task, name, option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        build(name, task, **{option: value})


@pytest.mark.parametrize("name", ["fedbabu", "fedhb_niw", "fedhb_mixture"])
def test_methods_with_a_frozen_head_refuse_a_model_that_is_all_head(task, name):
    model = nn.build("logistic", classes=3, input_shape=(6,))
    with pytest.raises(ValueError, match=f"model='logistic' has no body.*{name}"):
        build(name, task._replace(model=model))


@pytest.mark.parametrize("name", ["fedbabu", "fedhb_niw", "fedhb_mixture"])
def test_a_trained_head_needs_no_body(task, train, name):
    model = nn.build("logistic", classes=3, input_shape=(6,))
    algorithm = build(name, task._replace(model=model), head="trained")
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), train)

    def run():
        key = jax.random.key(0)
        server = algorithm.init(key)
        output = algorithm.client_update(key, 0, server, (), data)
        statistics = algorithm.statistics(server, output.upload)
        aggregate = Aggregate(statistics, jnp.ones(()), jnp.ones(()), task.clients)
        new = algorithm.server_update(key, 0, server, aggregate)
        return server, new, algorithm.personalise(key, new, (), data)

    server, new, _ = jax.eval_shape(run)
    assert jax.tree.structure(server) == jax.tree.structure(new)


@pytest.mark.parametrize(("name", "option", "value"), TRACED)
def test_traced_options_may_be_traced(task, train, name, option, value):
    """A sweep over numbers is one program: built inside it, a method works."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), train)
    # Known to be 0, a momentum keeps no velocity; a traced one does.
    plain = {option: value or 0.5}
    server = jax.eval_shape(build(name, task, **plain).init, jax.random.key(0))
    fixed = {"spike_noise": True} if option == "epsilon" and "niw" in name else {}

    def run(value):
        algorithm = build(name, task, **{option: value}, **fixed)
        key = jax.random.key(0)
        first = algorithm.init(key)
        output = algorithm.client_update(key, 0, first, (), data)
        one = jnp.ones(())
        statistics = algorithm.statistics(first, output.upload)
        aggregate = Aggregate(statistics, one, one, task.clients)
        return algorithm.server_update(key, 0, first, aggregate)

    found = jax.eval_shape(run, jnp.float32(value))
    assert jax.tree.structure(found) == jax.tree.structure(server)


def test_traced_options_are_found():
    assert {("fedavg", "server_learning_rate"), ("fedprox", "mu")} <= {
        (name, option) for name, option, _ in TRACED
    }
    assert len(TRACED) >= 8


class Mine(Options):
    strength: float = option(2.0, "How much.", above=0, source="a paper, §3")


@builder(Mine)
def mine(task, options):
    """Builds mine."""
    return options.strength


def test_a_builder_says_what_it_takes(task):
    assert mine(task, strength=3) == 3 and mine.options is Mine
    text = "strength: How much. (default 2.0, above 0, a paper, §3)"
    assert mine.__doc__ == f"Builds mine.\n\nOptions:\n  {text}"
    assert list(inspect.signature(mine).parameters) == ["task", "strength"]
    with pytest.raises(ValueError, match="width=1 is no option of mine.*strength"):
        mine(task, width=1)


def test_only_builders_can_be_registered(task, monkeypatch):
    monkeypatch.setattr("fedvi.algorithms.registry.ALGORITHMS", dict(ALGORITHMS))
    with pytest.raises(ValueError, match="'plain' is no builder: decorate it"):
        register(plain)
    register(mine, "ours")
    assert options_of("ours") is Mine and build("ours", task) == 2.0


def plain(task):
    return task


def test_an_algorithm_of_another_module_is_not_replaced(monkeypatch):
    monkeypatch.setattr("fedvi.algorithms.registry.ALGORITHMS", dict(ALGORITHMS))
    with pytest.raises(ValueError, match="name='fedavg' is that of fedvi.algorithms.f"):
        register(mine, "fedavg")
    register(mine)
    register(mine)  # a cell of a notebook that runs again
    for name in ("a:b", "a,b", "", 3):
        with pytest.raises(ValueError, match=f"name={name!r} must be of letters"):
            register(mine, name)


def test_what_a_builder_is_given_is_checked(task):
    for given, message in (
        ("x", r"task='x' must be a fedvi.Task: mine\(Task.of\(model, train\)\)"),
        (task._replace(model="mlp"), "task.model='mlp' must be a fedvi.nn.Model"),
        (task._replace(training=None), "task.training=None must be a fedvi.LocalTrai"),
        (task._replace(clients=2.5), "task.clients=2.5 must be a whole number"),
        (task._replace(samples=0), "task.samples=0 must be a whole number"),
        (
            task._replace(finetuning=task.finetuning._replace(epochs=1.5)),
            "epochs=1.5 must be a whole number, at least 0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            mine(given)


def test_a_task_counts_what_the_data_hold(task, train):
    for arguments, message in (
        (("mlp", train), "model='mlp' must be a fedvi.nn.Model"),
        ((task.model, train.x), "train=ndarray must be a fedvi.ClientData"),
    ):
        with pytest.raises(ValueError, match=message):
            Task.of(*arguments)
    for candidates in ([7], [-1], [1, 1]):
        with pytest.raises(ValueError, match=r"candidates=\[.*must be different clien"):
            Task.of(task.model, train, candidates=candidates)


def test_point_estimates_tell_whom_they_are_built_for(task):
    """A writer who forgets the decorator `builder` is not left alone."""
    plain = build("fedavg", task)
    functions = plain._asdict()
    fields = ("init", "client_update", "server_update")
    made = point_estimate("own", task, len, *(functions[name] for name in fields))
    assert made.population == task.population
