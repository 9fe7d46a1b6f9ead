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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The flags of a tiny data set and a tiny network."""
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = (rng.integers(0, 100, (40, 2, 2, 1)) + 100 * y[:, None, None, None]).astype(
        np.uint8
    )
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, train_x=x, train_y=y, test_x=x, test_y=y)
    sizes = ["--clients=4", "--shards=2", "--participants=2", "--hidden=8"]
    return ["--dataset=tiny", f"--data_file={path}", *sizes]


def test_times_rounds_and_reports_memory(tmp_path, tiny):
    out = tmp_path / "results" / "tiny"
    process = run(
        *tiny,
        "--rounds=30",
        "--warmup=2",
        f"--out={out}",
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    fedvi = found["systems"]["fedvi"]
    assert len(fedvi["turns"]["seconds"]) == 32
    assert 0 < fedvi["seconds_min"] <= fedvi["seconds_median"]
    assert fedvi["first_call_seconds"] > fedvi["seconds_median"]
    assert fedvi["train_loss_last_tenth"] < fedvi["train_loss_first_round"]
    assert 0 < fedvi["above_before_data_bytes"] < fedvi["peak_bytes"]
    assert found["best_peer"] is None
    floor = fedvi["roofline"]
    # Two clients of ten examples, a step each: products 4-8-2 and a momentum update.
    products, parameters = 2 * (2 * 4 * 8 + 3 * 8 * 2), 5 * 8 + 9 * 2
    assert floor["flops"] == 2 * (10 * products + (4 + 2) * parameters)
    assert floor["xla_flops"] > 2 * 10 * products
    higher = max(floor["flops_seconds"], floor["bytes_seconds"])
    assert floor["over_floor"] == pytest.approx(fedvi["seconds_median"] / higher)
    assert out.with_suffix(".md").read_text() in process.stdout


@pytest.mark.long
def test_times_pfedbayes_on_two_devices(tmp_path, tiny):
    out = tmp_path / "tiny"
    process = run(
        f"--flagfile={FOLDER / 'flagfiles' / 'pfedbayes_sgd.flags'}",
        *tiny,
        "--zeta=0.1",  # of 8 examples SGD would not follow 10
        "--client_examples=8",
        "--batch_size=3",
        "--rounds=1",
        "--warmup=1",
        f"--out={out}",
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    work, fedvi = found["work"], found["systems"]["fedvi"]
    assert (work["devices"], work["client_size"]) == (2, [8])
    assert work["options"]["personal_steps"] == 1
    assert 0 <= fedvi["personal_accuracy"] <= 1
    assert fedvi["personal_nll"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--torch_python=no/such/python"], "--torch_python=no/such/python"),
        (["--algorithm=fedprox", "--torch_python=x"], "--algorithm=fedprox"),
        (["--optimizer=adam", "--torch_python=x"], "--optimizer=adam"),
        (["--model=lenet", "--fedjax_python=x"], "leave --fedjax_python out; it does"),
        (["--native_conv"], "leave --native_conv out; it does fedavg with lenet"),
        (["--torch_vmap"], "--torch_vmap needs --torch_python"),
        (["--pfl_python=false"], "--pfl_python=false has no package pfl: install"),
        (["--flower_workers=2x0"], "must look like 2x1"),
        (["--torch_threads=0"], "must be positive numbers"),
        (["--image_shape=32,32"], "must look like 32,32,3"),
        (["--image_shape=32,32,3"], "add --synthetic"),
        (["--torch_gradients=hand,no"], "--torch_gradients=['hand', 'no']"),
        (["--client_examples=601", "--synthetic"], "client_examples=601"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    process = run(*arguments)
    assert process.returncode != 0
    assert message in process.stdout + process.stderr


@pytest.mark.long
def test_native_convolutions_take_turns_on_random_images(tmp_path):
    out = tmp_path / "tiny"
    process = run(
        *["--synthetic", "--image_shape=16,16,2", "--model=lenet", "--native_conv"],
        *["--clients=2", "--participants=1", "--client_examples=10", "--batch_size=5"],
        *["--devices=2", "--rounds=2", "--warmup=1", f"--out={out}"],
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    assert found["work"]["input_shape"] == [16, 16, 2]
    ours, native = found["systems"].values()
    # Same weights, clients and shuffles: only the order of sums differs.
    assert native["turns"]["loss"] == pytest.approx(ours["turns"]["loss"], rel=1e-3)
    assert native["test_nll"] == pytest.approx(ours["test_nll"], rel=1e-3)


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
