"""Runs whose clients are chosen by importance: what they write, through a resume."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import experiment
from fedvi.algorithm import Importance
from fedvi.algorithms import fedavg
from fedvi.experiment import devices, folder, load_data, npz_tree
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.experiment.folder import CsvFile
from fedvi.flat import trees

CONFIG = ExperimentConfig(
    algorithm="fedavg",
    selection="place",
    selection_floor=0.0,
    dataset="digits",
    partition="iid",
    clients=4,
    model="logistic",
    augment=False,
    fraction=0.5,
    rounds=6,
    eval_every=2,
    window=3,
    lr_decay=1.0,
    finetune_epochs=0,
    seed=7,
    seeds=2,
)
FACTORS = np.array([3.0, np.nan, -1.0, 1.0], np.float32)


def graded(task):
    """FedAvg whose clients report their first pixel; all scores are 0 at first."""

    def report(key, server, client, data):
        return data.x[0, 0, 0, 0]

    def score(server, reports, counts):
        trained = sum(
            jnp.abs(layer["bias"]).sum()  # 0 at first
            for layer in trees(server.params)["head"].values()
        )
        return reports * (trained > 0)

    return fedavg(task)._replace(importance={"place": Importance(report, score)})


@pytest.fixture(scope="module")
def loaded():
    """Client k's first pixel is FACTORS[k], and not a number for client 1."""
    loaded = load_data(CONFIG)
    train, test = loaded.federated.train, loaded.federated.test
    x = train.x.astype(np.float32) / 255
    x[:, 0, 0, 0, 0] = FACTORS
    federated = dataclasses.replace(
        loaded.federated,
        train=train._replace(x=x),
        test=test._replace(x=test.x.astype(np.float32) / 255),
    )
    return loaded._replace(federated=federated)


def run(run_dir, loaded, **more):
    options = RunOptions(str(run_dir), plot_formats=(), **more)
    return experiment.run(CONFIG, options, graded, loaded=loaded)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, loaded):
    before = jax.config.jax_compilation_cache_dir
    if before is None:
        cache = str(tmp_path_factory.mktemp("cache"))
        jax.config.update("jax_compilation_cache_dir", cache)
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    run(run_dir, loaded)
    yield run_dir
    jax.config.update("jax_compilation_cache_dir", before)


def summary_of(run_dir):
    return json.loads((run_dir / folder.SUMMARY).read_text())


def rows_of(run_dir, name=folder.SELECTION):
    return CsvFile(run_dir / name).rows()


def test_every_round_tells_how_its_cohort_was_chosen(straight):
    rows = rows_of(straight)
    places = [(row["round"], row["seed"]) for row in rows]
    assert places == [
        (round_index, seed) for round_index in range(1, 7) for seed in (7, 8)
    ]
    for row in rows:
        shares = [row[f"p_{k}"] for k in range(4)]
        first = row["round"] == 1
        expected = [1 / 3, 0, 1 / 3, 1 / 3] if first else [0.75, 0, 0, 0.25]
        np.testing.assert_allclose(shares, expected, rtol=1e-6)
        assert (row["uniform"], row["invalid"]) == (int(first), 1)
        assert row["clipped"] == (0 if first else pytest.approx(0.2))
        cohort = {int(k) for k in row["client"].split()}
        assert len(cohort) == 2 and cohort <= ({0, 2, 3} if first else {0, 3})


def test_the_metrics_hold_what_was_clipped_over_the_block(straight):
    rows = rows_of(straight, folder.METRICS)
    assert [row["clipped"] for row in rows[:2]] == [None, None]
    assert [r["clipped"] for r in rows[2:]] == pytest.approx([0.1] * 2 + [0.2] * 4)


def test_problems_of_the_choice_are_counted(straight):
    summary = summary_of(straight)
    assert summary["method"] == "fedavg:place"
    assert summary["problems"]["invalid"] == {"1": 12}
    assert summary["problems"]["equal_chances"] == {"7": 1, "8": 1}
    assert not summary["failed"]
    # Two train, but all four report: as many as there are cores on each device.
    used = min(4, devices.usable_cores())
    assert f"1 of {-(-4 // used)} clients a round" in summary["plan"]


def test_the_window_is_the_mean_of_its_evaluations(straight):
    summary, rows = summary_of(straight), rows_of(straight, folder.METRICS)
    window = summary["window"]
    assert (window["rounds"], window["evaluations"]) == (3, 2)  # after rounds 4 and 6
    accuracy = np.reshape([row["global_accuracy"] for row in rows[4:]], (2, 2))
    nll = np.reshape([row["global_nll"] for row in rows[4:]], (2, 2))
    assert window["global"]["nll"] == pytest.approx(nll.mean())
    spread = summary["window_std_over_seeds"]["global"]["nll"]
    assert spread == pytest.approx(nll.mean(axis=0).std(ddof=1))
    between = accuracy.std(axis=0)
    assert window["accuracy_std_between_rounds"] == pytest.approx(between.mean())
    assert between.max() > 0
    for index, one in enumerate(summary["per_seed"]):
        own = one["window"]
        assert own["accuracy_std_between_rounds"] == pytest.approx(between[index])
        assert own["evaluations"] == 2


def test_a_stopped_run_continues_with_the_same_choices(
    straight, loaded, tmp_path, monkeypatch, capsys
):
    """It stops after the rows of rounds 3 and 4 and before their checkpoint."""
    save, saved = npz_tree.save, []

    def stop_at_the_second(*arguments):
        if saved:
            raise KeyboardInterrupt
        saved.append(save(*arguments))

    monkeypatch.setattr(npz_tree, "save", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, loaded)
    monkeypatch.undo()
    assert rows_of(tmp_path)[-1]["round"] == 4
    run(tmp_path, loaded, resume=True)
    output = capsys.readouterr().out
    assert "WARNING: seed 8, rounds 1, 2, client 1: report or score not fi" in output
    assert "seed 7: no score was positive in round 1: all clients had the" in output
    files = [run_dir / folder.SELECTION for run_dir in (straight, tmp_path)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert summary_of(tmp_path)["problems"] == summary_of(straight)["problems"]
