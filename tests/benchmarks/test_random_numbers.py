"""The benchmark of random numbers runs and sees which of them depend on a vmap."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "random_numbers.py"


@pytest.mark.long
def test_times_draws_and_steps(tmp_path):
    sizes = ["--hidden=2", "--batch_size=3", "--steps=2", "--calls=2"]
    generators = ["--generator=threefry2x32", "--generator=rbg"]
    out = tmp_path / "results" / "tiny"
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes, *generators, f"--out={out}"],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    for rows in found["microseconds"].values():
        for cells in rows.values():
            for cell in cells.values():
                assert 0 < cell["min"] <= cell["median"] <= cell["max"]
    # What jax documents: rbg's numbers differ under vmap, threefry's do not.
    assert found["depends_on_chunks"] == {"threefry2x32": False, "rbg": True}
    assert out.with_suffix(".md").read_text() in process.stdout
