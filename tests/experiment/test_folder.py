"""The run folder through starts, kills and resumes."""

import csv
import json

import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.experiment.folder import RUN_FILES, STORE, CsvFile, prepare, write_json


def row(round_index, seed=0, **values):
    return {
        "round": round_index,
        "seed": seed,
        "global_accuracy": 80.0 + round_index,
        **values,
    }


def metrics(folder):
    return CsvFile(folder / "metrics.csv")


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
    ours = [name for name in RUN_FILES if name != STORE]
    fill(run_dir, [*ours, "checkpoint.npz.tmp.42", "notes.txt", "my.csv"])
    fill(run_dir / STORE, ["index.npz"])
    assert prepare(run_dir, overwrite=True) is False
    assert {path.name for path in run_dir.iterdir()} == {"notes.txt", "my.csv"}


def test_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        prepare(tmp_path / "file")


def test_rows_are_on_disk_at_once_and_read_back_typed(tmp_path):
    recorder = metrics(tmp_path)
    assert recorder.rows() == []
    first = row(0, nll=jnp.float32(0.5), note=None, method="FedAvg, plain")
    second = row(5, nll=np.float64("nan"), note="late", method="FedHB")
    recorder.append(first)
    recorder.append(dict(reversed(second.items())))
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert [r["round"] for r in csv.DictReader(file)] == ["0", "5"]
    got = recorder.rows()
    assert list(got[0]) == ["round", "seed", "global_accuracy", "nll", "note", "method"]
    assert got[0] == first | {"nll": 0.5}
    assert got[1] == second | {"nll": got[1]["nll"]}
    assert np.isnan(got[1]["nll"])
    assert [type(got[0][k]) for k in ("round", "nll")] == [int, float]


def test_columns_are_fixed_by_the_first_row(tmp_path):
    recorder = metrics(tmp_path)
    with pytest.raises(ValueError, match="round"):
        recorder.append({"seed": 0})
    recorder.append(row(0))
    for again in (recorder, metrics(tmp_path)):
        with pytest.raises(ValueError, match=r"nll.*does not fit metrics\.csv"):
            again.append(row(1, nll=0.5))
    assert len(recorder.rows()) == 1


def test_resumed_run_has_the_rows_of_a_straight_one(tmp_path):
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    straight, killed = metrics(tmp_path / "straight"), metrics(tmp_path / "killed")
    for number in range(0, 20, 5):
        for seed in (0, 1):
            straight.append(row(number, seed))
            killed.append(row(number, seed))
    with open(tmp_path / "killed" / "metrics.csv", "a") as file:
        file.write("20,0")  # a row that the kill cut short
    resumed = metrics(tmp_path / "killed")
    resumed.drop_after(5)
    assert [r["round"] for r in resumed.rows()] == [0, 0, 5, 5]
    for number in (10, 15):
        for seed in (0, 1):
            resumed.append(row(number, seed))
    files = [tmp_path / name / "metrics.csv" for name in ("straight", "killed")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_several_rows_at_once_and_none(tmp_path):
    file = metrics(tmp_path)
    file.append()
    assert list(tmp_path.iterdir()) == []
    file.append(row(1), row(2))
    file.append(row(3))
    assert [one["round"] for one in file.rows()] == [1, 2, 3]
    metrics(tmp_path).drop_after(-1)
    assert list(tmp_path.iterdir()) == []


def test_drop_all_rows_frees_the_columns(tmp_path):
    recorder = metrics(tmp_path)
    recorder.drop_after(-1)
    recorder.append(row(0))
    recorder.drop_after(-1)
    recorder.append({"round": 0, "other": 1})
    assert recorder.rows() == [{"round": 0, "other": 1}]


def test_foreign_metrics_are_left_alone(tmp_path):
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'round'"):
        metrics(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == "a,b\n1,2\n"


def test_json_is_plain_and_strict(tmp_path):
    path = tmp_path / "summary.json"
    write_json(
        path,
        {
            "global": {"accuracy": np.float32(81.5), "nll": float("inf")},
            "bins": np.array([0.5, np.nan]),
            "rounds": jnp.int32(3),
            "run_dir": tmp_path,
            "widths": (2, 3),
        },
    )

    def strict(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(path.read_text(), parse_constant=strict) == {
        "global": {"accuracy": 81.5, "nll": None},
        "bins": [0.5, None],
        "rounds": 3,
        "run_dir": str(tmp_path),
        "widths": [2, 3],
    }
