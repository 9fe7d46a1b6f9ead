"""The algorithm of `docs/contract.md`, its very text, runs through the driver."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from absl import flags as absl_flags

from fedvi import algorithms, experiment
from fedvi.experiment import ExperimentConfig, RunOptions, command_line

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contract.md"
[CODE] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def fedavgm():
    names = {}
    exec(compile(CODE, PAGE, "exec"), names)
    yield names["fedavgm"]
    del algorithms.ALGORITHMS["fedavgm"]


def test_it_is_as_short_as_the_page_says():
    assert sum(bool(line.strip()) for line in CODE.splitlines()) <= 25


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
    summary = experiment.run(CONFIG, RunOptions(run_dir), fedavgm)
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
