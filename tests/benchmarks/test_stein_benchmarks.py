"""The benchmarks of SVGD and of client selection run and write what they measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script, *flags):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *flags],
        capture_output=True,
        text=True,
    )


def test_times_a_step_and_counts_its_memory(tmp_path):
    out = tmp_path / "results" / "tiny"
    process = run("svgd_step.py", "--size=3x4", "--calls=2", f"--out={out}")
    assert process.returncode == 0, process.stderr
    report = json.loads(out.with_suffix(".json").read_text())
    (size,) = report["sizes"]
    assert (size["particles"], size["dimension"], size["flops"]) == (3, 4, 144)
    higher = max(size["floor_seconds"].values())
    measured = size["systems"]["fedvi"]["median"] / 1e3
    assert size["over_floor"] == pytest.approx(measured / higher)
    for system in size["systems"].values():
        assert 0 < system["min"] <= system["median"] <= system["max"]
    if "blackjax" in report["versions"]:
        assert size["ratio"] > 0 and report["disagreement"] < 1e-4
    else:
        assert size["ratio"] is None
    assert out.with_suffix(".md").read_text() in process.stdout


@pytest.mark.long
def test_a_step_that_does_not_fit_is_compiled_and_not_run(tmp_path):
    out = tmp_path / "tiny"
    process = run(
        "svgd_step.py", "--size=3x4", "--nopeak", "--memory_gib=1e-12", f"--out={out}"
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(out.with_suffix(".json").read_text())
    assert "median" not in report["sizes"][0]["systems"]["fedvi"]
    assert "does not fit" in out.with_suffix(".md").read_text()


@pytest.mark.long
def test_a_size_that_is_none_is_refused():
    process = run("svgd_step.py", "--size=0x4")
    assert process.returncode != 0
    assert "--size=0x4 must look like 200x7850" in process.stdout + process.stderr


@pytest.mark.long
def test_times_the_rounds_of_a_selection(tmp_path):
    out = tmp_path / "tiny"
    sizes = ["--clients=4", "--particles=2", "--steps=1", "--calls=2", "--rounds=1"]
    process = run("selection_time.py", "--selection=ksd", *sizes, f"--out={out}")
    assert process.returncode == 0, process.stderr
    (result,) = json.loads(out.with_suffix(".json").read_text())["results"]
    assert set(result["milliseconds"]) == {"uniform", "ksd"}
    for times in result["milliseconds"].values():
        assert 0 < times["min"] <= times["median"] <= times["max"]
        assert times["share"] < 1
    assert result["milliseconds"]["uniform"]["share"] == 0
    assert out.with_suffix(".md").read_text() in process.stdout


@pytest.mark.long
def test_times_the_draw_of_a_cohort(tmp_path):
    out = tmp_path / "tiny"
    sizes = ["--draw_from=50", "--draw_from=100000", "--cohort=60", "--calls=2"]
    process = run("selection_time.py", *sizes, f"--out={out}")
    assert process.returncode == 0, process.stderr
    results = json.loads(out.with_suffix(".json").read_text())["results"]
    assert [result["clients"] for result in results] == [50, 100_000]
    for result in results:
        for name in ("draw", "permutation"):
            assert 0 < result[name]["min"] <= result[name]["median"]
    assert out.with_suffix(".md").read_text() in process.stdout
