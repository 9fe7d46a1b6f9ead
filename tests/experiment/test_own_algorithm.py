"""A user's own algorithm, written from the contract alone, runs through the driver."""

import dataclasses

import numpy as np
import optax
import pytest
from absl import flags as absl_flags

from fedvi import ClientOutput, Options, algorithms, experiment, option
from fedvi.algorithms.common import point_estimate, train_from
from fedvi.experiment import ExperimentConfig, RunOptions, command_line


class FedAvgM(Options):
    beta: float = option(0.5, "Momentum of the server.", at_least=0, below=1)


@algorithms.builder(FedAvgM)
def fedavgm(task, options):
    """FedAvg with momentum on the server: v <- βv + Σ n_i Δ_i / Σ n_i."""

    def init(key):
        params = task.model.init(key)
        return {"params": params, "v": optax.tree.zeros_like(params)}

    def client_update(key, round, server, client, data):
        params, loss = train_from(task, key, round, server["params"], data)
        moved = optax.tree.sub(params, server["params"])
        return ClientOutput(moved, data.size, metrics={"loss": loss})

    def server_update(key, round, server, aggregate):
        v = optax.tree.add_scale(aggregate.mean(), options.beta, server["v"])
        return {"params": optax.tree.add(server["params"], v), "v": v}

    return point_estimate(
        "fedavgm",
        task,
        params_of=lambda server: server["params"],
        init=init,
        client_update=client_update,
        server_update=server_update,
    )


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


def test_it_runs_through_the_driver(tmp_path):
    run_dir = str(tmp_path / "run")
    summary = experiment.run(CONFIG, RunOptions(run_dir), fedavgm)
    assert summary["algorithm"] == "fedavgm"
    assert summary["config"]["options"] == {"beta": 0.3}
    assert summary["global"]["accuracy"] > 80
    assert summary["personal"]["accuracy"] > 80
    model = 4 * (64 * 10 + 10)
    assert summary["bytes_up"] == summary["bytes_up_as_sums"] == 2 * (model + 4)
    assert summary["bytes_down"] == 2 * 2 * model  # this one sends its velocity too
    with np.load(tmp_path / "run" / "checkpoint.npz") as state:
        kernel = "state.server['v']['head']['classifier']['kernel']"
        assert state[kernel].shape == (1, 64, 10) and state[kernel].any()


def test_registered_it_has_flags_like_any_other(monkeypatch):
    monkeypatch.setitem(algorithms.ALGORITHMS, "fedavgm", fedavgm)
    values = absl_flags.FlagValues()
    command_line.define(values)
    command_line.parse(["x", "--algorithm=fedavgm", "--beta=0.25"], values)
    [(config, _)] = command_line.read(values)
    assert config.options == {"beta": 0.25}


def test_its_options_are_checked_before_anything_runs(tmp_path):
    config = dataclasses.replace(CONFIG, options={"beta": 1.5})
    with pytest.raises(ValueError, match="beta=1.5 must be at least 0 and below 1"):
        experiment.run(config, RunOptions(str(tmp_path / "run")), fedavgm)
