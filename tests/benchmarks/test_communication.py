"""The documentation's table of bytes is what the code counts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_in_the_documentation_is_up_to_date():
    process = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "communication.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 0, process.stderr
    rows = process.stdout.strip().splitlines()
    assert len(rows) > 10
    page = (ROOT / "docs" / "communication.md").read_text().splitlines()
    start = page.index(rows[0])
    assert page[start : start + len(rows)] == rows
