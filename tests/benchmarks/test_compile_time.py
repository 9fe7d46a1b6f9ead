"""Compilation is measured beside FedAvg's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "compile_time.py"


@pytest.mark.long
def test_programs_are_compiled_beside_fedavgs(tmp_path):
    out = tmp_path / "results" / "tiny"
    sizes = ["--model=mlp", "--hidden=2", "--compiles=1", "--method=fedprox"]
    programs = ["--program=round", "--program=evaluate"]
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes, *programs, f"--out={out}"],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    rows = json.loads(out.with_suffix(".json").read_text())["programs"]
    found = {(row["program"], row["method"]): row for row in rows}
    assert len(found) == 6
    for method in ("fedavg", "fedprox"):
        parts = [found[program, method] for program in ("round", "evaluate")]
        whole = found["all", method]
        assert whole["lines"] == sum(part["lines"] for part in parts)
        assert min(part["lines"] for part in parts) > 100
        for key in ("trace_seconds", "compile_seconds"):
            sums = sum(part[key]["median"] for part in parts)
            assert whole[key]["median"] == pytest.approx(sums)
            assert sums > 0
    assert found["round", "fedavg"]["over_fedavg"]["median"] == 1
    assert found["round", "fedprox"]["lines"] > found["round", "fedavg"]["lines"]
    assert out.with_suffix(".md").read_text() in process.stdout
