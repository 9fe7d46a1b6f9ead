"""Sweeps: one program for numbers, a choice on held-out data only."""

import dataclasses
import importlib
import re
import shutil
from pathlib import Path

import chex
import numpy as np
import pytest

import fedvi
from fedvi import algorithms, experiment
from fedvi.experiment import ExperimentConfig, RunOptions, folder
from fedvi.experiment.folder import CsvFile

CONFIG = ExperimentConfig(
    algorithm="fedprox",
    dataset="digits",
    partition="iid",
    clients=4,
    model="logistic",
    augment=False,
    fraction=0.5,
    rounds=2,
    eval_every=2,
    finetune_epochs=1,
    seeds=2,
    validation_fraction=0.5,
)
GRID = {"mu": [0.01, 10.0], "learning_rate": [0.1, 0.001]}


@pytest.fixture(scope="module")
def traces():
    """Counts how often a client's update is traced, of `fedprox` by another name."""
    counted = []

    @algorithms.builder(algorithms.options_of("fedprox"))
    def counting(task, options):
        algorithm = algorithms.build("fedprox", task, **dataclasses.asdict(options))

        def client_update(*arguments):
            counted.append(1)
            return algorithm.client_update(*arguments)

        return algorithm._replace(client_update=client_update)

    counting.counted = counted
    return counting


@pytest.fixture(scope="module")
def found(tmp_path_factory, traces):
    where = str(tmp_path_factory.mktemp("sweep") / "s")
    options = RunOptions(where, devices=1, plot_formats=())
    one = experiment.run(
        dataclasses.replace(CONFIG, options={"mu": 10.0}, learning_rate=0.001),
        dataclasses.replace(options, run_dir=f"{where}_alone"),
        traces,
    )
    alone = len(traces.counted)
    traces.counted.clear()
    swept = experiment.sweep(CONFIG, GRID, options, builder=traces)
    return {
        "sweep": swept,
        "where": options.run_dir,
        "alone": one,
        "traces": (alone, len(traces.counted)),
    }


def test_all_cells_share_one_program(found):
    """Four cells and the winner: the contract is looked at in each, and only the
    program of the four and that of the winner are traced."""
    alone, all_of_it = found["traces"]
    # A run alone: shapes for the federation and its plan, and the program's.
    assert all_of_it <= 2 * alone


def test_a_cell_is_as_the_run_alone(found):
    cell = found["sweep"].cells[3]
    assert cell.settings == {"mu": 10.0, "learning_rate": 0.001}
    for model in ("global", "personal"):
        for key in ("accuracy", "nll", "ece"):
            expected = found["alone"][model][key]
            assert cell.summary[model][key] == pytest.approx(expected, rel=1e-4)
    one, other = found["sweep"].cells[0].summary, cell.summary
    assert one["global"]["nll"] < 0.8 * other["global"]["nll"]
    with np.load(f"{cell.run_dir}/checkpoint.npz") as state:  # as if alone
        assert not [name for name in state.files if "settings" in name]
        assert (2, 64, 10) in [state[name].shape for name in state.files]


def test_it_chooses_on_held_out_data_and_trains_on_all(found):
    swept = found["sweep"]
    figures = [cell.summary["personal"]["nll"] for cell in swept.cells]
    assert [cell.figure for cell in swept.cells] == pytest.approx(figures)
    assert swept.chosen is swept.cells[int(np.argmin(figures))]
    assert {cell.summary["evaluated_on"] for cell in swept.cells} == {"validation"}
    assert swept.winner["evaluated_on"] == "test"
    assert swept.winner["train_examples"] > swept.cells[0].summary["train_examples"]
    options = swept.winner["config"]["options"]
    assert options["mu"] == swept.chosen.settings["mu"]
    kept = folder.read_json(Path(found["where"]) / "sweep.json")
    assert kept["chosen"]["settings"] == swept.chosen.settings
    assert [one["folder"] for one in kept["cells"]] == [
        "mu=0.01,learning_rate=0.1",
        "mu=0.01,learning_rate=0.001",
        "mu=10.0,learning_rate=0.1",
        "mu=10.0,learning_rate=0.001",
    ]


def test_what_is_finished_is_not_run_again(found, traces, capsys):
    """One cell lost its folder and one was stopped before its end: each goes on alone,
    with settings of its own. A larger grid has another winner."""
    lost, stopped = found["sweep"].cells[1:3]
    before = {}
    for cell in (lost, stopped):
        rows = CsvFile(f"{cell.run_dir}/{folder.METRICS}").rows()
        before[cell.run_dir] = [row | {"seconds": None} for row in rows]
    shutil.rmtree(lost.run_dir)
    (Path(stopped.run_dir) / folder.SUMMARY).unlink()
    options = RunOptions(found["where"], devices=1, resume=True, plot_formats=())
    again = experiment.sweep(CONFIG, GRID, options, builder=traces)
    assert capsys.readouterr().out.count("finished: nothing to do") == 3
    for cell in again.cells[1:3]:
        rows = CsvFile(f"{cell.run_dir}/{folder.METRICS}").rows()
        assert [row | {"seconds": None} for row in rows] == before[cell.run_dir]
    assert again.chosen.settings == found["sweep"].chosen.settings
    smaller = {name: values[-1:] for name, values in GRID.items()}
    other = experiment.sweep(CONFIG, smaller, options, builder=traces)
    assert other.winner["config"]["options"]["mu"] == 10.0
    winner = Path(found["where"]) / "winner"
    kept = folder.read_json(winner / folder.SUMMARY)
    assert kept["config"]["options"]["mu"] == 10.0
    # Settings alone, without a run of the winner.
    shutil.rmtree(winner)
    runs = [(CONFIG, options)]
    [chosen] = experiment.sweep_all(runs, GRID, builder=traces, retrain=False)
    assert chosen.chosen.settings == found["sweep"].chosen.settings
    assert chosen.winner is None and not winner.exists()


def test_nothing_is_chosen_by_test_data(tmp_path, monkeypatch, capsys):
    def finished(runs, builder=None):
        figures = {"accuracy": 50.0, "nll": 1.0}
        seed = {"personal": figures, "global": figures, "mean_of_last_rounds": None}
        return [
            {
                "failed": config.learning_rate > 1,
                "global_model": False,
                "method": "fedprox",
                "evaluated_on": config.evaluated_on,
                "per_seed": [seed],
            }
            for config, _ in runs
        ]

    module = importlib.import_module("fedvi.experiment.sweep")
    monkeypatch.setattr(module, "run_all", finished)
    options = RunOptions(str(tmp_path))
    config = dataclasses.replace(CONFIG, validation_fraction=0.0)
    swept = experiment.sweep(config, {"mu": [1.0, 2.0]}, options)
    assert swept.chosen is swept.winner is None
    assert "give validation_fraction" in capsys.readouterr().out
    rates = {"learning_rate": [0.1, 3.0]}
    swept = experiment.sweep(CONFIG, rates, options)
    assert swept.chosen.settings == {"learning_rate": 0.1}  # the other one failed
    assert "is an end of its values" in capsys.readouterr().out
    assert swept.outcome == [swept.winner]
    swept = experiment.sweep(CONFIG, {"learning_rate": [2.0, 3.0]}, options)
    assert swept.chosen is None and len(swept.outcome) == 2
    with pytest.raises(ValueError, match="fedprox has no global model"):
        experiment.sweep(CONFIG, rates, options, choose_by="global_nll")


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "grid is empty"),
        ({"penality": [1.0]}, "'penality', which is no setting"),
        ({"seeds": [1, 2]}, "one for all cells"),
        ({"validation_fraction": [0.1, 0.2]}, "one for all cells"),
        ({"mu": 1.0}, "must be a list of at least one value"),
        ({"mu": []}, "must be a list of at least one value"),
        ({"mu": [1.0, 1.0]}, "has a value twice"),
        ({"mu": [0.1, -1.0]}, "mu=-1.0 must be at least 0"),
        ({"epochs": [1, 0]}, "epochs=0 must be"),
    ],
)
def test_a_mistake_in_the_grid_is_one_line(grid, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        experiment.sweep(CONFIG, grid, RunOptions(str(tmp_path / "s")))
    assert not (tmp_path / "s").exists()


def test_a_criterion_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="choose_by='ece' must be one of"):
        fedvi.sweep(CONFIG, GRID, RunOptions(str(tmp_path / "s")), choose_by="ece")


# What is traced computes what the plain number does.

SMALL = dataclasses.replace(
    CONFIG, algorithm="fedavg", seeds=1, validation_fraction=0.0, fraction=1.0
)


def together_and_alone(configs, tmp_path):
    """(summaries of `run_all`, those of each run alone)."""

    def options(place, number):
        return RunOptions(f"{tmp_path}/{place}/{number}", devices=1, plot_formats=())

    together = experiment.run_all(
        [(config, options("s", i)) for i, config in enumerate(configs)]
    )
    alone = [
        experiment.run(config, options("alone", i)) for i, config in enumerate(configs)
    ]
    return together, alone


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        # Checked where the client's update is traced.
        (
            "fedavg",
            [
                {"momentum": 0.0, "finetune_learning_rate": 0.1},
                {"momentum": 0.9, "finetune_learning_rate": 0.01},
            ],
        ),
        # 0 keeps no velocity, in a run alone.
        ("fedavg", [{"server_momentum": 0.0}, {"server_momentum": 0.5}]),
        ("fedavg", [{"server_momentum": 0.5}, {"server_momentum": 0.0}]),
        # None is no number: it has a program of its own.
        ("fedabml", [{"global_learning_rate": None}, {"global_learning_rate": 0.5}]),
        ("fedabml", [{"global_learning_rate": 0.5}, {"global_learning_rate": None}]),
        # Whole numbers are numbers.
        ("fedprox", [{"mu": 1}, {"mu": 0.5}]),
    ],
    ids=str,
)
def test_runs_together_are_as_each_alone(method, settings, tmp_path):
    fields = {field.name for field in dataclasses.fields(SMALL)}
    configs = [
        dataclasses.replace(
            SMALL,
            algorithm=method,
            learning_rate=0.01,
            **{k: v for k, v in own.items() if k in fields},
            options={k: v for k, v in own.items() if k not in fields},
        )
        for own in settings
    ]
    together, alone = together_and_alone(configs, tmp_path)
    for one, other in zip(together, alone, strict=True):
        for model in ("global", "personal"):
            expected = pytest.approx(other[model]["nll"], rel=1e-5)
            assert one[model]["nll"] == expected
    for i in range(len(configs)):  # the checkpoint too
        states = [
            fedvi.load_run(f"{tmp_path}/{name}/{i}").states for name in ("s", "alone")
        ]
        chex.assert_trees_all_equal_shapes(*(one.server for one in states))
