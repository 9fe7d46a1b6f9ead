"""Scaling and server updates are measured, and tell what they measured."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from fedvi import nn

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script, *flags):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *flags],
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_a_point_has_its_own_devices_and_tells_its_memory(tmp_path):
    out = tmp_path / "tiny"
    axes = ["--clients=", "--devices=2", "--parameters=", "--compile_clients="]
    sizes = ["--examples=2", "--batch_size=2", "--features=3", "--rounds=1"]
    process = run("scaling.py", *axes, *sizes, f"--out={out}")
    assert process.returncode == 0, process.stderr
    report = json.loads(out.with_suffix(".json").read_text())
    ((point,),) = report["axes"].values()
    assert (point["devices"], point["clients"]) == (2, 32)
    assert 0 < point["seconds"]["min"] <= point["seconds"]["median"]
    assert point["compile_seconds"]["median"] > 0
    assert point["parameters"] == pytest.approx(1e6, rel=0.01)
    # A client's own weights, at least, lie beside the state.
    assert point["xla_temporary_bytes"] > 4e6
    assert point["above_before_data_bytes"] > 0
    assert out.with_suffix(".md").read_text() in process.stdout


def test_compilation_is_compared_by_chunk():
    rows = [
        {
            "chunk_size": chunk,
            "trace_seconds": {"median": trace},
            "compile_seconds": {"median": compilation},
        }
        for chunk, trace, compilation in [(1, 1, 2), (0, 2, 2), (1, 1, 3), (0, 2, 6)]
    ]
    # In a process of its own: its flags are those of other scripts too.
    code = f"import json, scaling; print(json.dumps(scaling.compile_ratios({rows})))"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True
    )
    assert json.loads(process.stdout) == {"1": 4 / 3, "0": 2.0}


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--devices=1.5", "--clients=0", "--parameters=no"])
def test_a_value_that_is_no_whole_number_is_refused(flag):
    process = run("scaling.py", flag)
    assert process.returncode != 0
    assert f"{flag} must be a whole number" in process.stdout + process.stderr


@pytest.mark.parametrize("parameters", [10_000, 10_000_000])
def test_the_network_has_about_as_many_parameters_as_asked_for(parameters, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    width = importlib.import_module("scaling_rounds").hidden_width(parameters, 64)
    model = nn.build("mlp", classes=10, input_shape=(64,), hidden=(width, width))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert nn.parameter_count(shapes) == pytest.approx(parameters, rel=0.02)


@pytest.mark.long
def test_rounds_are_timed_with_chunks_by_id_and_by_size(tmp_path):
    out = tmp_path / "tiny"
    work = ["--dataset=digits", "--clients=6", "--alpha=0.5", "--hidden=2"]
    calls = ["--share_of=1", "--share_of=2", "--chunk_size=2", "--seeds=2", "--turns=1"]
    process = run("chunk_padding.py", *work, *calls, f"--out={out}")
    assert process.returncode == 0, process.stderr
    found = json.loads(out.with_suffix(".json").read_text())["results"]
    single, pairs = found["shares"]
    assert single["by_id"]["max"] == 0
    assert 0 < pairs["by_size"]["median"] <= pairs["by_id"]["median"] < 1
    (times,) = found["rounds"]
    assert 0 < times["cpu_seconds"]["by_size"]["median"]
    assert times["ratio"]["min"] <= times["ratio"]["median"] <= times["ratio"]["max"]
    assert out.with_suffix(".md").read_text() in process.stdout


@pytest.mark.long
def test_shared_weights_are_timed_both_ways(tmp_path):
    out = tmp_path / "tiny"
    work = ["--case=vgg fedavg evaluate", "--clients=1", "--examples=2", "--turns=1"]
    process = run("shared_weights.py", *work, f"--out={out}")
    assert process.returncode == 0, process.stderr
    (row,) = json.loads(out.with_suffix(".json").read_text())["rows"]
    seconds = row["cpu_seconds"]
    ratio = seconds["native"]["median"] / seconds["patches"]["median"]
    assert row["ratio"]["median"] == pytest.approx(ratio)
    assert out.with_suffix(".md").read_text() in process.stdout
    assert run("shared_weights.py", "--case=vgg fedavg").returncode == 1


@pytest.mark.long
def test_server_updates_move_what_their_closed_forms_read_and_write(tmp_path):
    out = tmp_path / "tiny"
    sizes = ["--size=4000", "--calls=1", "--clients=2", "--participants=1"]
    rounds = ["--method=fedavg", "--rounds=1", "--examples=2", "--hidden=2"]
    process = run("server_update.py", *sizes, *rounds, "--nopeak", f"--out={out}")
    assert process.returncode == 0, process.stderr
    report = json.loads(out.with_suffix(".json").read_text())
    moved = {row["method"]: row["bytes"] for row in report["updates"]}
    body, head, gate = 785 * 5, 6 * 10, 6 * 2
    scalars = 3 * 4
    arrays = {
        # θ and Σ n Δ read, θ written.
        "fedavg": 3 * (body + head),
        # m_0, Σ δ, Σ δ² read, m_0 and V_0 written; the head is frozen.
        "fedhb_niw": 5 * body,
        # Two prototypes and their sums read, prototypes written; and the same of the
        # gate's body, which moves by the mean difference.
        "fedhb_mixture": 3 * 2 * body + 3 * body,
        # μ, ρ and both moments read, μ and ρ written.
        "pfedbayes": 6 * (body + head),
    }
    for method, values in arrays.items():
        assert 0 <= moved[method] - 4 * values <= scalars + 4 * gate, method
    assert set(report["rounds"]) == {"fedavg"}
    assert report["rounds"]["fedavg"]["seconds_over_fedavg"]["median"] == 1.0
    assert out.with_suffix(".md").read_text() in process.stdout
