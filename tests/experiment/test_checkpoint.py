"""A run's checkpoint comes back for the same settings and data, and for no others."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedvi.experiment.checkpoint import Kept, restore_run, save_run
from fedvi.experiment.problems import Problems

CONFIG = {"lr": 0.1, "model": {"name": "mlp", "width": 256}, "clients": 100}
STATES = {"weights": jax.numpy.arange(3.0)}


def experiment_of(config):
    return SimpleNamespace(
        config=SimpleNamespace(
            to_dict=lambda: config, rounds=9, final_rounds=0, window=0
        ),
        evaluation_settings=dict,
        data_sha256="0123",
    )


@pytest.fixture
def run_dir(tmp_path):
    kept = Kept(STATES, 7, Problems())
    federation = SimpleNamespace(
        commit=lambda states, save: save(), portable=lambda states: states
    )
    save_run(experiment_of(CONFIG), tmp_path, federation, kept)
    return tmp_path


def test_it_comes_back_whatever_the_order_of_the_settings(run_dir):
    turned = dict(reversed(CONFIG.items()))
    kept = restore_run(experiment_of(turned), run_dir, STATES)
    np.testing.assert_array_equal(kept.states["weights"], STATES["weights"])
    assert kept.round == 7 and kept.problems.to_dict() == Problems().to_dict()


def test_another_configuration_names_the_settings_that_differ(run_dir):
    other = CONFIG | {"model": {"name": "mlp", "width": 128}, "seed": 1, "lr": 0.1}
    with pytest.raises(ValueError, match="another configuration") as error:
        restore_run(experiment_of(other), run_dir, STATES)
    message = str(error.value)
    assert str(run_dir / "checkpoint.npz") in message and "\n" not in message
    assert "model.width is 256 there and 128 here" in message
    assert "seed is 'absent' there and 1 here" in message
    assert "lr" not in message and "Resume with the saved configuration" in message


def test_only_json_is_a_configuration(run_dir):
    with pytest.raises(ValueError, match="JSON-like"):
        restore_run(experiment_of({"optimizer": object()}), run_dir, STATES)
