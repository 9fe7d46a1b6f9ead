"""The algorithm of `docs/contract.md`, its very text, runs through the driver."""

import dataclasses
import re
from pathlib import Path

import chex
import jax
import numpy as np
import optax
import pytest
from absl import flags as absl_flags

from fedvi import algorithms, experiment
from fedvi.evaluation import summarise
from fedvi.experiment import ExperimentConfig, RunOptions, command_line
from fedvi.federation import Federation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contract.md"
CODE, LAPLACE = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def fedavgm():
    names = {}
    exec(compile(CODE, PAGE, "exec"), names)
    yield names["fedavgm"]
    del algorithms.ALGORITHMS["fedavgm"]


@pytest.fixture(scope="module")
def laplace():
    names = {}
    exec(compile(LAPLACE, PAGE, "exec"), names)
    yield names["laplace"]
    del algorithms.ALGORITHMS["laplace"]


@pytest.mark.parametrize(("code", "most"), [(CODE, 25), (LAPLACE, 40)])
def test_it_is_as_short_as_the_page_says(code, most):
    assert sum(bool(line.strip()) for line in code.splitlines()) <= most


CONFIG = ExperimentConfig(
    algorithm="fedavgm",
    options={"beta": 0.3},
    dataset="digits",
    partition="iid",
    clients=4,
    model="logistic",
    augment=False,
    fraction=0.5,
    rounds=4,
    eval_every=2,
)


def test_it_runs_through_the_driver(tmp_path, fedavgm):
    run_dir = str(tmp_path / "run")
    summary = experiment.run(CONFIG, RunOptions(run_dir, plot_formats=()), fedavgm)
    assert summary["algorithm"] == "fedavgm"
    assert summary["config"]["options"] == {"beta": 0.3}
    assert summary["global"]["accuracy"] > 80
    assert summary["personal"]["accuracy"] > 80
    model = 4 * (64 * 10 + 10)
    assert summary["bytes_up"] == summary["bytes_up_as_sums"] == 2 * (model + 4)
    assert summary["bytes_down"] == 2 * model  # the velocity stays at the server
    with np.load(tmp_path / "run" / "checkpoint.npz") as state:
        kernel = "state.server['v']['head']['classifier']['kernel']"
        assert state[kernel].shape == (1, 64, 10) and state[kernel].any()


def test_registered_it_has_flags_like_any_other(fedavgm):
    values = absl_flags.FlagValues()
    command_line.define(values)
    command_line.parse(["x", "--algorithm=fedavgm", "--beta=0.25"], values)
    [(config, _)] = command_line.read(values)
    assert config.options == {"beta": 0.25}


def test_its_options_are_checked_before_anything_runs(tmp_path, fedavgm):
    config = dataclasses.replace(CONFIG, options={"beta": 1.5})
    with pytest.raises(ValueError, match="beta=1.5 must be at least 0 and below 1"):
        experiment.run(config, RunOptions(str(tmp_path / "run")), fedavgm)


def test_the_laplace_method_is_a_posterior_like_any_other(laplace, task, train, test):
    """On the page's text: its precision is the prior's and the mean Fisher
    information, and a client's posterior comes from its own data."""
    algorithm = laplace(task, precision=7.0, num_samples=2)
    federation = Federation(algorithm, train, test)
    start = federation.init(jax.random.key(0))
    first = federation.posterior(start).stddev()
    chex.assert_trees_all_close(first, optax.tree.full_like(first, 7**-0.5), rtol=1e-5)
    state, _ = federation.rounds(start, 3)
    after = federation.posterior(state).stddev()
    sizes = jax.tree.map(lambda s: bool((s <= 7**-0.5 + 1e-6).all()), after)
    assert all(jax.tree.leaves(sizes))
    assert min(leaf.min() for leaf in jax.tree.leaves(after)) < 0.95 * 7**-0.5
    own = [federation.posterior(state, client).mean() for client in (0, 5)]
    assert optax.tree.norm(optax.tree.sub(*own)) > 1e-3
    loss = summarise(federation.evaluate(state))["nll"]
    assert loss < np.log(3)
