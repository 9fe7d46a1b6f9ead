"""What compares several runs; the runs are forged: nothing is trained here."""

import dataclasses
import io
import json
import sys

import pytest

from fedvi import experiment
from fedvi.experiment import folder, labels, report, setup
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.plots.runs import named

CONFIG = ExperimentConfig(
    algorithm="fedavg",
    dataset="digits",
    partition="iid",
    clients=5,
    model="logistic",
    augment=False,
    rounds=3,
    eval_every=1,
    fraction=0.4,
)
FILES = {report.PLOT, report.TABLE}


def options(run_dir, **more):
    return RunOptions(run_dir=str(run_dir), **more)


def finish(run_dir, config, accuracy):
    """Leaves there what a finished run leaves."""
    run_dir.mkdir()
    folder.write_json(run_dir / folder.CONFIG, config.to_dict())
    metrics = folder.CsvFile(run_dir / folder.METRICS)
    figures = {"accuracy": accuracy, "nll": 1.0, "ece": 0.1}
    row = {f"global_{key}": value for key, value in figures.items()}
    for round_index in range(config.rounds + 1):
        metrics.append({"round": round_index, "seed": config.seed, **row})
    folder.write_json(
        run_dir / folder.SUMMARY,
        {
            "method": config.method,
            "dataset": "digits",
            "rounds": config.rounds,
            "extended_from": [],
            "evaluated_on": "test",
            "failed": False,
            "global_model": True,
            "round_seconds": 0.1,
            "seeds": [config.seed],
            "per_seed": [{"seed": config.seed, "global": figures, "personal": figures}],
            "config": config.to_dict(),
            "data_sha256": setup.experiment(config).data_sha256,
        },
    )


@pytest.fixture
def runs(tmp_path):
    """Two finished runs in one folder."""
    runs = []
    for number, selection in enumerate(("uniform", "round_robin")):
        config = setup.resolve(dataclasses.replace(CONFIG, selection=selection))
        run_dir = tmp_path / config.method.replace(":", "_")
        finish(run_dir, config, 50.0 + number)
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


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn of several runs: names, each with its curve of the accuracy."""
    pictures = []

    def draw(runs, path):
        pictures.append(
            {
                name: [
                    [row["global_accuracy"] for row in run.evaluations] for run in own
                ]
                for name, own in named(runs).items()
            }
        )

    monkeypatch.setattr(report.plots, "learning_curves", draw)
    return pictures


def test_the_curves_come_from_each_runs_rows(runs, drawn):
    experiment.run_all(runs)
    assert drawn == [{"fedavg": [[50.0] * 4], "fedavg:round_robin": [[51.0] * 4]}]


def test_only_what_differs_in_nothing_but_the_seed_is_a_seed(tmp_path, drawn):
    """Three penalties of one method, one of them with a second seed in a run of its
    own: each penalty has a row and a curve."""
    runs, settings = [], [(1.0, 0), (2.0, 0), (3.0, 0), (3.0, 1)]
    for mu, seed in settings:
        config = dataclasses.replace(
            CONFIG, algorithm="fedprox", options={"mu": mu}, seed=seed
        )
        finish(tmp_path / f"{mu}_{seed}", setup.resolve(config), 50 + 10 * mu + seed)
        runs.append((config, options(tmp_path / f"{mu}_{seed}", resume=True)))
    experiment.run_all(runs)
    rows = (tmp_path / report.TABLE).read_text().splitlines()[3:6]
    assert [" ".join(row.split()[:2]) for row in rows] == [
        f"fedprox mu={mu}" for mu in (1.0, 2.0, 3.0)
    ]
    assert "60.00  " in rows[0] and "80.50 ± 0.71" in rows[2] and "±" not in rows[1]
    assert drawn == [
        {
            "fedprox mu=1.0": [[60.0] * 4],
            "fedprox mu=2.0": [[70.0] * 4],
            "fedprox mu=3.0": [[80.0] * 4, [81.0] * 4],
        }
    ]


def test_rows_are_named_after_what_differs(tmp_path):
    def label(*changes, names=("a", "b")):
        summaries = []
        for change in changes:
            sha = change.pop("sha", "0" * 64)
            config = setup.resolve(dataclasses.replace(CONFIG, **change)).to_dict()
            summaries.append(
                {
                    "method": change.get("algorithm", "fedavg"),
                    "config": config,
                    "data_sha256": sha,
                    "seeds": [config["seed"]],
                }
            )
        return labels.labels(summaries, [tmp_path / name for name in names])

    assert label({}, {"seed": 1}) == ["fedavg", "fedavg"]
    assert label({}, {"algorithm": "fedbabu", "rounds": 9}) == ["fedavg", "fedbabu"]
    assert label({}, {"hidden": (3, 4), "model": "mlp"}) == [
        "fedavg model=logistic hidden=256",
        "fedavg model=mlp hidden=3,4",
    ]
    # The same data elsewhere, other data, and twice the very same run.
    assert label({"data_file": "x"}, {"seed": 1}) == ["fedavg", "fedavg"]
    assert label({}, {"sha": "1" * 64}) == [
        "fedavg data=00000000",
        "fedavg data=11111111",
    ]
    assert label({"alpha": 1.0}, {"alpha": 2.0, "sha": "1" * 64})[1] == (
        "fedavg alpha=2.0"
    )
    assert label({}, {}) == ["fedavg (a)", "fedavg (b)"]
    assert label({}, {}, names=("1/a", "2/a")) == [
        f"fedavg ({tmp_path}/{where}/a)" for where in (1, 2)
    ]
    with pytest.raises(ValueError, match="run_dir=.*a is given twice"):
        experiment.run_all([(CONFIG, options(tmp_path / "a"))] * 2)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_letter_that_cannot_be_shown_ends_nothing(tmp_path, monkeypatch, encoding):
    """C29: two seeds of two methods."""
    runs = []
    for name in ("α", "σ"):
        for seed in range(2):
            config = dataclasses.replace(
                CONFIG, seed=seed, lr_decay=0.5 if name == "α" else 0.1
            )
            run_dir = tmp_path / f"{name}{seed}"
            finish(run_dir, setup.resolve(config), 50.0 + seed)
            runs.append((config, options(run_dir, resume=True)))
    with io.TextIOWrapper(io.BytesIO(), encoding=encoding) as output:
        monkeypatch.setattr(sys, "stdout", output)
        experiment.run_all(runs)
        output.flush()
        shown = output.buffer.getvalue().decode(encoding)
        assert output.errors == "strict"  # as it was
    assert f"50.50 {'?' if encoding == 'ascii' else '±'} 0.71" in shown
    assert "50.50 ± 0.71" in (tmp_path / report.TABLE).read_text(encoding="utf-8")


def test_each_run_is_told_of_with_its_own_rounds(tmp_path):
    runs = []
    for algorithm, rounds in (("fedavg", 3), ("local_only", 6)):
        config = dataclasses.replace(CONFIG, algorithm=algorithm, rounds=rounds)
        finish(tmp_path / algorithm, setup.resolve(config), 50.0)
        runs.append((config, options(tmp_path / algorithm, resume=True)))
    experiment.run_all(runs)
    first = (tmp_path / report.TABLE).read_text().splitlines()[0]
    assert first.startswith("fedavg after 3 rounds, test data")
    assert "; local_only after 6 rounds, test data" in first


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


def test_rows_that_were_changed_are_named_though_the_run_is_finished(runs, tmp_path):
    """C36; without any rows, which are the user's to delete, there is a table."""
    (tmp_path / "fedavg" / folder.METRICS).unlink()
    experiment.run_all(runs)
    assert FILES < names_in(tmp_path)
    path = tmp_path / "fedavg" / folder.METRICS
    for text in ("not,ours\n1,2\n", "round,global_nll\n1,2\n", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{path} ") as error:
            experiment.run_all(runs)
        assert "\n" not in str(error.value)
    assert json.loads((tmp_path / "fedavg" / folder.SUMMARY).read_text())
