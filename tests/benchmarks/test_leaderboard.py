"""The table is cut from what was measured, and the README from the table."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from fedvi import algorithms


@pytest.fixture
def leaderboard(monkeypatch):
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    before = set(flags.FLAGS)
    module = importlib.import_module("leaderboard")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["leaderboard"])
    yield module
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
    sys.modules.pop("leaderboard")


def summary(accuracy, nll, global_model=True):
    def model(a, n):
        return {"accuracy": a, "nll": n, "ece": 0.01}

    seeds = [
        {"global": model(a - 10, n), "personal": model(a, n)}
        for a, n in zip(accuracy, nll)
    ]
    return {
        "per_seed": seeds,
        "seeds": list(range(len(seeds))),
        "global_model": global_model,
        "failed": False,
        "bytes_up": 10,
        "bytes_down": 20,
        "round_seconds": 0.5,
        "compile_seconds": 4.0,
    }


def test_differences_are_paired_by_seed(leaderboard):
    found = {
        "fedavg": summary([80, 90, 70], [0.5, 0.4, 0.6]),
        "other": summary([82, 92, 72.3], [0.5, 0.5, 0.5], global_model=False),
    }
    cells = leaderboard.row("other", found, {"mu": 0.1})
    assert cells["accuracy_minus_fedavg"] == pytest.approx(2.1)
    assert cells["accuracy_minus_fedavg_error"] == pytest.approx(0.1)
    assert cells["personal_accuracy_std"] == pytest.approx(
        np.std([82, 92, 72.3], ddof=1)
    )
    assert cells["global_accuracy"] == ""
    rows = [leaderboard.row("fedavg", found, {}), cells]
    first, second = leaderboard.pages.lines_of(rows)[2:]
    assert first.startswith("| other | - |") and "**+2.10 ± 0.10**" in first
    assert "+0.000 ± 0.058 |" in first and "| 1.00 ± 0.00 |" in first
    assert second.startswith("| fedavg | 70.00 ± 10.00 | 80.00 ± 10.00 | - |")


def test_every_method_has_six_cells_of_settings_that_it_takes(leaderboard):
    known = algorithms.ALGORITHMS
    own = {name for name in known if known[name].__module__.startswith("fedvi.")}
    for protocol in leaderboard.PROTOCOLS.values():
        assert set(protocol.unsuited) <= own
    for name in own & set(leaderboard.methods()):
        grid = leaderboard.grid_of(name)
        assert np.prod([len(values) for values in grid.values()]) == 6, name
        for setting, values in grid.items():
            leaderboard.config_of(name, **{setting: values[0]})
            options = algorithms.options_of(name).__dataclass_fields__
            fields = leaderboard.ExperimentConfig.__dataclass_fields__
            assert setting in options or setting in fields, (name, setting)


def test_the_readme_has_the_table_that_was_measured(leaderboard):
    rows = leaderboard.pages.read(leaderboard.tables().with_suffix(".csv"))
    begin, end = leaderboard.pages.MARKS
    block = begin + "\n".join(leaderboard.pages.lines_of(rows)) + "\n" + end
    assert block in leaderboard.pages.README.read_text()


def test_flag_files_are_cut_from_the_tables(leaderboard):
    tables = sorted((leaderboard.HERE / "results").glob("leaderboard_*.csv"))
    assert tables
    for table in tables:
        protocol = max(
            (name for name in leaderboard.PROTOCOLS if f"_{name}_" in table.stem),
            key=len,
        )
        leaderboard.FLAGS.protocol = protocol
        leaderboard.FLAGS.dataset = table.stem.removeprefix(f"leaderboard_{protocol}_")
        for cells in leaderboard.pages.read(table):
            if cells["paper"]:
                text = leaderboard.flag_file(cells["method"]).read_text()
                if leaderboard.SIGNATURE in text:
                    assert text == leaderboard.flag_text(cells), cells["method"]
