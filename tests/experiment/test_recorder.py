"""The run folder through starts, kills and resumes, and the final table."""

import csv
import json

import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.experiment import Recorder, prepare, table
from fedvi.experiment.csv_file import CsvFile
from fedvi.experiment.recorder import RUN_FILES


def row(round, seed=0, **values):
    return {"round": round, "seed": seed, "global_accuracy": 80.0 + round, **values}


def fill(run_dir, names):
    run_dir.mkdir()
    for name in names:
        (run_dir / name).write_text("mine")


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True}])
def test_nothing_there_starts_fresh(tmp_path, flags):
    assert prepare(tmp_path / "new", **flags) is False
    fill(tmp_path / "notes", ["notes.txt"])
    assert prepare(tmp_path / "notes", **flags) is False


@pytest.mark.parametrize(
    ("names", "state"),
    [
        (["config.json", "metrics.csv", "summary.json"], "a finished run"),
        (["config.json"], "an unfinished run"),
        (["metrics.csv"], "an unfinished run"),
    ],
)
def test_a_run_there_needs_a_flag(tmp_path, names, state):
    run_dir = tmp_path / "run"
    fill(run_dir, names)
    with pytest.raises(ValueError, match=state) as error:
        prepare(run_dir)
    message = str(error.value)
    assert all(text in message for text in (str(run_dir), "--resume", "--overwrite"))
    assert "\n" not in message
    assert prepare(run_dir, resume=True) is True
    assert {path.name for path in run_dir.iterdir()} == set(names)


def test_overwrite_removes_only_our_files(tmp_path):
    run_dir = tmp_path / "run"
    fill(run_dir, [*RUN_FILES, "checkpoint.npz.tmp.42", "notes.txt", "my.csv"])
    assert prepare(run_dir, overwrite=True) is False
    assert {path.name for path in run_dir.iterdir()} == {"notes.txt", "my.csv"}


def test_both_flags_or_a_file_are_errors(tmp_path):
    with pytest.raises(ValueError, match="--overwrite and --resume exclude"):
        prepare(tmp_path, overwrite=True, resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        prepare(tmp_path / "file")


def test_rows_are_on_disk_at_once_and_read_back_typed(tmp_path):
    recorder = Recorder(tmp_path / "run")
    assert recorder.rows() == []
    first = row(0, nll=jnp.float32(0.5), note=None, method="FedAvg, plain")
    second = row(5, nll=np.float64("nan"), note="late", method="FedHB")
    recorder.append(first)
    recorder.append(dict(reversed(second.items())))
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        assert [r["round"] for r in csv.DictReader(file)] == ["0", "5"]
    got = recorder.rows()
    assert list(got[0]) == ["round", "seed", "global_accuracy", "nll", "note", "method"]
    assert got[0] == first | {"nll": 0.5}
    assert got[1] == second | {"nll": got[1]["nll"]}
    assert np.isnan(got[1]["nll"])
    assert [type(got[0][k]) for k in ("round", "nll")] == [int, float]


def test_columns_are_fixed_by_the_first_row(tmp_path):
    recorder = Recorder(tmp_path)
    with pytest.raises(ValueError, match="round"):
        recorder.append({"seed": 0})
    recorder.append(row(0))
    for again in (recorder, Recorder(tmp_path)):
        with pytest.raises(ValueError, match=r"nll.*does not fit metrics\.csv"):
            again.append(row(1, nll=0.5))
    assert len(recorder.rows()) == 1


def test_resumed_run_has_the_rows_of_a_straight_one(tmp_path):
    straight, killed = Recorder(tmp_path / "straight"), Recorder(tmp_path / "killed")
    for number in range(0, 20, 5):
        for seed in (0, 1):
            straight.append(row(number, seed))
            killed.append(row(number, seed))
    with open(tmp_path / "killed" / "metrics.csv", "a") as file:
        file.write("20,0")  # a row that the kill cut short
    resumed = Recorder(tmp_path / "killed")
    resumed.drop_after(5)
    assert [r["round"] for r in resumed.rows()] == [0, 0, 5, 5]
    for number in (10, 15):
        for seed in (0, 1):
            resumed.append(row(number, seed))
    files = [tmp_path / name / "metrics.csv" for name in ("straight", "killed")]
    assert files[0].read_bytes() == files[1].read_bytes()


def choice(round, seed, client="3 1"):
    return {"round": round, "seed": seed, "client": client, "invalid": "", "p_0": 0.1}


def test_choices_are_dropped_with_the_rows_of_their_rounds(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.append_choices([])
    assert not (tmp_path / "selection.csv").exists()
    for block in ((1, 2), (3, 4)):
        recorder.append_choices([choice(n, seed) for n in block for seed in (0, 1)])
        recorder.append(row(block[-1]))
    with open(tmp_path / "selection.csv", "a") as file:
        file.write("1")  # of round 10: a row that the kill cut short
    Recorder(tmp_path).drop_after(3)
    file = CsvFile(tmp_path / "selection.csv")
    assert [(r["round"], r["seed"]) for r in file.rows()] == [
        (number, seed) for number in (1, 2, 3) for seed in (0, 1)
    ]
    assert file.rows()[0] == choice(1, 0) | {"invalid": None}
    assert [r["round"] for r in recorder.rows()] == [2]
    with pytest.raises(ValueError, match=r"does not fit selection\.csv"):
        recorder.append_choices([row(5)])
    Recorder(tmp_path).drop_after(-1)
    assert list(tmp_path.iterdir()) == []


def test_drop_all_rows_frees_the_columns(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.drop_after(-1)
    recorder.append(row(0))
    recorder.drop_after(-1)
    recorder.append({"round": 0, "other": 1})
    assert recorder.rows() == [{"round": 0, "other": 1}]


def test_foreign_metrics_are_left_alone(tmp_path):
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'round'"):
        Recorder(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == "a,b\n1,2\n"


def test_json_files_are_valid_and_summary_marks_the_end(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write_config({"lr": 0.1, "run_dir": tmp_path, "widths": (2, 3)})
    assert not (tmp_path / "summary.json").exists()
    recorder.write_summary(
        {
            "global": {"accuracy": np.float32(81.5), "nll": float("inf")},
            "bins": np.array([0.5, np.nan]),
            "rounds": jnp.int32(3),
        }
    )

    def strict(name):
        raise AssertionError(f"{name} is not JSON")

    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=strict)
    assert summary == {
        "global": {"accuracy": 81.5, "nll": None},
        "bins": [0.5, None],
        "rounds": 3,
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"lr": 0.1, "run_dir": str(tmp_path), "widths": [2, 3]}
    recorder.write_config({"lr": 0.1})
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}


def cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_table_is_aligned_with_mean_and_std_over_seeds():
    rows = [
        {"method": "FedAvg", "global_accuracy": 80.0, "nll": 0.51234, "ece": 0.034},
        {"method": "FedAvg", "global_accuracy": 83.0, "nll": 0.6, "ece": None},
        {"method": "FedHB NIW", "personal_accuracy": 93.456, "round_seconds": 0.1},
    ]
    lines = table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines) == 4
    names = "method|global accuracy|personalised accuracy|global ECE %|global NLL"
    assert cells(lines[0]) == [*names.split("|"), "s/round"]
    accuracy = f"81.50 ± {np.std([80.0, 83.0], ddof=1):.2f}"
    nll = f"0.556 ± {np.std([0.51234, 0.6], ddof=1):.3f}"
    assert cells(lines[2]) == ["FedAvg", accuracy, "-", "3.40", nll, "-"]
    assert cells(lines[3]) == ["FedHB NIW", "-", "93.46", "-", "-", "0.100"]


def test_table_shows_the_std_between_rounds_where_there_is_one():
    rows = [
        {"method": "a", "global_accuracy": 80.0, "accuracy_std_between_rounds": 1.25},
        {"method": "b", "global_accuracy": 70.0},
    ]
    lines = table(rows).splitlines()
    assert cells(lines[0])[:3] == ["method", "global accuracy", "std between rounds"]
    assert cells(lines[2])[:3] == ["a", "80.00", "1.25"]
    assert cells(lines[3])[:3] == ["b", "70.00", "-"]


def test_table_survives_a_diverged_seed():
    text = table([{"method": "m", "nll": value} for value in (0.5, np.inf)])
    assert "inf ± nan" in text
