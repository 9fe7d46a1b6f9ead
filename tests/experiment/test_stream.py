"""A run with `--stream`: the figures of one in memory, and resumed bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest

from fedvi import experiment
from fedvi.algorithm import Importance
from fedvi.algorithms import local_only
from fedvi.client_store import ClientStore
from fedvi.experiment import ExperimentConfig, RunOptions, folder, npz_tree, setup
from fedvi.experiment.folder import CsvFile

CONFIG = ExperimentConfig(
    algorithm="local_only",  # clients keep something
    dataset="digits",
    partition="iid",
    clients=5,
    model="logistic",
    augment=False,
    fraction=0.6,
    calibration_fraction=0.3,
    rounds=4,
    eval_every=2,
    finetune_epochs=0,
    seed=7,
    seeds=2,
)


def run(run_dir, **options):
    options = {"devices": 1, "block_size": 2, "plot_formats": ()} | options
    return experiment.run(CONFIG, RunOptions(str(run_dir), **options))


def rows_of(run_dir):
    return CsvFile(run_dir / folder.METRICS).rows()


def kept_by(run_dir):
    """Every client's state, of both seeds."""
    task = setup.experiment(CONFIG).task
    like = jax.eval_shape(task.model.init, jax.random.key(0))
    stores = [run_dir / folder.STORE / f"run_00{seed}" for seed in (0, 1)]
    found = [ClientStore(like, 5, store).read(np.arange(5)) for store in stores]
    return [[*jax.tree.leaves(states), known] for states, known in found]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    return run_dir, run(run_dir, stream=True)


def test_it_gives_the_figures_of_a_run_in_memory(straight, tmp_path):
    run_dir, streamed = straight
    memory = run(tmp_path)
    assert "streamed in blocks of 2" in streamed["plan"]
    for key in ("global", "personal"):
        assert streamed[key] == pytest.approx(memory[key], rel=1e-4)
    for ours, theirs in zip(rows_of(run_dir), rows_of(tmp_path), strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"seconds", "split"}:
            assert (ours[key] is None) == (theirs[key] is None)
            assert ours[key] is None or ours[key] == pytest.approx(theirs[key], 1e-4)
    for key in ("intervals", "risk_coverage", "recalibration", "conformal"):
        ours, theirs = (jax.tree.leaves(one[key]) for one in (streamed, memory))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, err_msg=key)
    assert all(known.any() for *_, known in kept_by(run_dir))


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("after a checkpoint", marks=pytest.mark.long),
        "before its rename",
    ],
)
def test_a_stopped_run_continues_bit_for_bit(straight, tmp_path, monkeypatch, moment):
    """In the second case clients' states are committed, and the checkpoint is not."""
    save, saved = npz_tree.save, []

    def save_or_stop(*arguments):
        if saved and moment == "before its rename":
            raise KeyboardInterrupt
        saved.append(save(*arguments))
        if moment == "after a checkpoint":
            raise KeyboardInterrupt

    monkeypatch.setattr(npz_tree, "save", save_or_stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stream=True)
    monkeypatch.undo()
    run(tmp_path, stream=True, resume=True)
    files = [path / folder.CHECKPOINT for path in (straight[0], tmp_path)]
    with np.load(files[0]) as expected, np.load(files[1]) as found:
        assert expected.files == found.files
        for name in expected.files:
            assert expected[name].tobytes() == found[name].tobytes(), name
    for ours, theirs in zip(kept_by(straight[0]), kept_by(tmp_path)):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    for ours, theirs in zip(rows_of(straight[0]), rows_of(tmp_path), strict=True):
        assert ours | {"seconds": 0} == theirs | {"seconds": 0}


def test_a_run_stopped_before_its_first_checkpoint_starts_anew(tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(npz_tree, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stream=True)
    monkeypatch.undo()
    assert (tmp_path / folder.STORE / "run_000").exists()
    summary = run(tmp_path, stream=True, resume=True)
    assert not summary["failed"]


def test_a_selection_by_importance_cannot_be_streamed(tmp_path):
    def measured(task):
        importance = {"mine": Importance(lambda *a: np.float32(1), lambda s, r, c: r)}
        return local_only(task)._replace(importance=importance)

    config = dataclasses.replace(CONFIG, selection="mine", options={})
    with pytest.raises(ValueError, match="selection by measure='mine' needs a report"):
        experiment.run(config, RunOptions(str(tmp_path), stream=True), measured)
