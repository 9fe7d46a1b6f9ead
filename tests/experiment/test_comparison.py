"""What compares several runs; the runs are forged: nothing is trained here."""

import dataclasses
import json
import sys

import pytest

from fedvi import experiment
from fedvi.experiment import folder, report, setup
from fedvi.experiment.config import ExperimentConfig, RunOptions

CONFIG = ExperimentConfig(
    algorithm="fedavg",
    dataset="digits",
    partition="iid",
    clients=5,
    model="logistic",
    augment=False,
    rounds=3,
    fraction=0.4,
)
FILES = {report.PLOT, report.TABLE}


def options(run_dir, **more):
    return RunOptions(run_dir=str(run_dir), **more)


@pytest.fixture
def runs(tmp_path):
    """Two finished runs in one folder."""
    runs = []
    for number, selection in enumerate(("uniform", "round_robin")):
        config = setup.resolve(dataclasses.replace(CONFIG, selection=selection))
        run_dir = tmp_path / config.method.replace(":", "_")
        run_dir.mkdir()
        metrics = folder.CsvFile(run_dir / folder.METRICS)
        figures = {"accuracy": 50.0 + number, "nll": 1.0, "ece": 0.1}
        row = {f"global_{key}": value for key, value in figures.items()}
        for round_index in (1, 2, 3):
            metrics.append({"round": round_index, "seed": 0, **row})
        folder.write_json(
            run_dir / folder.SUMMARY,
            {
                "method": config.method,
                "dataset": "digits",
                "rounds": 3,
                "evaluated_on": "test",
                "failed": False,
                "global_model": True,
                "round_seconds": 0.1,
                "seeds": [0],
                "per_seed": [{"global": figures, "personal": figures}],
                "config": config.to_dict(),
                "data_sha256": setup.experiment(config).data_sha256,
            },
        )
        runs.append((config, options(run_dir, resume=True)))
    return runs


def names_in(where):
    return {path.name for path in where.iterdir()}


def test_runs_of_one_folder_leave_their_plot_and_table(runs, tmp_path, capsys):
    for _ in range(2):  # the second time they are replaced
        experiment.run_all(runs)
        assert names_in(tmp_path) == {"fedavg", "fedavg_round_robin"} | FILES
    assert (tmp_path / report.PLOT).read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / report.TABLE).read_text()
    assert text in capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == "after 3 rounds, test data, mean over clients:"
    assert [line.split()[:2] for line in lines[3:5]] == [
        ["fedavg", "50.00"],
        ["fedavg:round_robin", "51.00"],
    ]


def test_the_curves_come_from_each_runs_rows(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        report.plots,
        "comparison_curves",
        lambda path, rows, title: drawn.append(rows),
    )
    summaries = experiment.run_all(runs)
    assert [(row["method"], row["round"]) for row in drawn[0]] == [
        (method, round_index)
        for method in ("fedavg", "fedavg:round_robin")
        for round_index in (1, 2, 3)
    ]
    assert drawn[0][-1]["global_accuracy"] == 51.0
    same = [summary | {"method": "fedavg"} for summary in summaries]
    report.write_comparison(tmp_path, [one for _, one in runs], same, "text")
    assert [row["method"] for row in drawn[1][::3]] == ["fedavg", "fedavg_round_robin"]


def test_data_are_loaded_once_whatever_the_learning_rates(runs, monkeypatch):
    module, loads = sys.modules["fedvi.experiment.run"], []

    def load(config):
        loads.append(config)
        return experiment.load_data(config)

    monkeypatch.setattr(module, "load_data", load)
    (first, here), (_, there) = runs
    rates = {"learning_rate": 0.5, "finetune_learning_rate": 0.5}
    module._prepared([(first, here), (dataclasses.replace(first, **rates), there)])
    assert len(loads) == 1
    other = dataclasses.replace(first, partition_seed=1)
    module._prepared([(first, here), (other, there)])
    assert len(loads) == 3


def test_one_run_or_runs_of_several_folders_are_not_compared(tmp_path):
    here, there = options(tmp_path / "a"), options(tmp_path / "deep" / "b")
    assert report.common_folder([here]) is None
    assert report.common_folder([here, here]) is None
    assert report.common_folder([here, there]) is None
    assert report.common_folder([here, options(tmp_path / "b")]) == tmp_path


def test_an_older_comparison_is_not_touched_without_a_flag(tmp_path):
    new = [options(tmp_path / name) for name in "ab"]
    report.check_comparison(tmp_path, new)
    (tmp_path / report.TABLE).write_text("mine")
    with pytest.raises(ValueError, match="already holds a comparison .*--overwrite"):
        report.check_comparison(tmp_path, new)
    runs = [(CONFIG, one) for one in new]
    with pytest.raises(ValueError, match="already holds a comparison"):
        experiment.run_all(runs)
    assert names_in(tmp_path) == {report.TABLE}
    for flag in ("overwrite", "resume"):
        report.check_comparison(tmp_path, [dataclasses.replace(new[0], **{flag: True})])


def test_overwrite_removes_it_before_the_runs_start(tmp_path, monkeypatch):
    for name in (*FILES, f"{report.PLOT}.tmp.42", "notes.txt"):
        (tmp_path / name).write_text("mine")

    def stop(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["fedvi.experiment.run"], "_carry_out", stop)
    configs = [CONFIG, dataclasses.replace(CONFIG, selection="round_robin")]
    new = [options(tmp_path / name, overwrite=True) for name in "ab"]
    with pytest.raises(ValueError, match="selection='kds'"):
        broken = dataclasses.replace(CONFIG, selection="kds")
        experiment.run_all(list(zip([CONFIG, broken], new)))
    assert FILES < names_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        experiment.run_all(list(zip(configs, new)))
    assert names_in(tmp_path) == {"notes.txt"}


def test_a_comparison_that_cannot_be_written_stops_nothing(runs, tmp_path, capsys):
    (tmp_path / "fedavg" / folder.METRICS).unlink()
    experiment.run_all(runs)
    assert FILES < names_in(tmp_path)
    (tmp_path / "fedavg" / folder.METRICS).write_text("not,ours\n1,2\n")
    summaries = experiment.run_all(runs)
    assert len(summaries) == 2
    assert "no comparison in" in capsys.readouterr().out
    assert json.loads((tmp_path / "fedavg" / folder.SUMMARY).read_text())
