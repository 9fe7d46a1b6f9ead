"""The documentation's table of bytes is what the code counts."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_table_in_the_documentation_is_up_to_date():
    path = ROOT / "benchmarks" / "communication.py"
    spec = importlib.util.spec_from_file_location("communication", path)
    communication = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(communication)
    rows = communication.table().splitlines()
    assert len(rows) > 10
    page = (ROOT / "docs" / "communication.md").read_text().splitlines()
    start = page.index(rows[0])
    assert page[start : start + len(rows)] == rows
