"""The day's script: short, and every line of it works."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "one_day.py"


def test_it_is_short():
    assert len(SCRIPT.read_text("utf-8").splitlines()) < 60


@pytest.mark.long
def test_it_sweeps_loads_asks_and_draws(tmp_path):
    found = subprocess.run(
        [sys.executable, SCRIPT], cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    for said in (
        "4 runs, one compiled program",
        "chosen of 4 cells by personal_nll on held-out training data",
        "a draw of client 3's posterior",
        "personal: NLL before",
        "sets cover",
    ):
        assert said in found.stdout
    where = tmp_path / "runs" / "one_day"
    assert (where / "cells.svg").read_text("utf-8").startswith("<?xml")
    for name in ("summary.json", "conformal.png", "per_client.png", "clients.csv"):
        assert (where / "winner" / name).exists()
    assert not (where / "zeta=0.03,learning_rate=0.003" / "per_client.png").exists()
