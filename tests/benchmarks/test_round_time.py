"""The benchmark runs, and its ratios are taken turn by turn."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = str(FOLDER / "round_time.py")


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("report", FOLDER / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True
    )


def test_times_rounds_and_reports_memory(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = (rng.integers(0, 100, (40, 2, 2, 1)) + 100 * y[:, None, None, None]).astype(
        np.uint8
    )
    np.savez(tmp_path / "data.npz", train_x=x, train_y=y, test_x=x, test_y=y)
    out = tmp_path / "results" / "tiny"
    sizes = ["--clients=4", "--shards=2", "--participants=2", "--hidden=8"]
    process = run(
        "--dataset=tiny",
        f"--data_file={tmp_path / 'data.npz'}",
        *sizes,
        "--rounds=30",
        "--warmup=2",
        f"--out={out}",
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    fedvi = found["systems"]["fedvi"]
    assert len(fedvi["turns"]["seconds"]) == 32
    assert 0 < fedvi["seconds_min"] <= fedvi["seconds_median"] < 1
    assert fedvi["first_call_seconds"] > fedvi["seconds_median"]
    assert fedvi["train_loss_last_tenth"] < fedvi["train_loss_first_round"]
    assert 0 < fedvi["above_before_data_bytes"] < fedvi["peak_bytes"]
    assert found["best_peer"] is None
    assert out.with_suffix(".md").read_text() in process.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--torch_python=no/such/python"], "--torch_python=no/such/python"),
        (["--algorithm=fedprox", "--torch_python=x"], "--algorithm=fedprox"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    process = run(*arguments)
    assert process.returncode != 0
    assert message in process.stdout + process.stderr


def test_ratios_are_taken_turn_by_turn(report):
    def turns(*seconds):
        return [{"seconds": s, "cpu_seconds": 2 * s, "loss": s} for s in seconds]

    # The machine is ten times slower in the last two turns, for both systems.
    systems = {"fedvi": turns(99, 1, 2, 10, 30), "peer": turns(5, 2, 2, 20, 20)}
    found = report.summarise(
        {}, {"fedvi": {}, "peer": {}}, {"warmup": 1}, systems, {"fedvi": {}, "peer": {}}
    )
    assert found["systems"]["fedvi"]["first_call_seconds"] == 99
    assert found["ratios"]["peer"]["seconds"] == {
        "ratio_median": pytest.approx(0.75),
        "ratio_min": pytest.approx(0.5),
        "ratio_max": pytest.approx(1.5),
    }
    assert found["best_peer"] == "peer"
