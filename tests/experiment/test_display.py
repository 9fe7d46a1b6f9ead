"""What is seen while a run goes on: a bar or lines, and event files."""

import importlib.util
import io

import pytest
from rich.console import Console

from fedvi import experiment
from fedvi.experiment import ExperimentConfig, RunOptions, processes
from fedvi.experiment.display import RunProgress, event_files


def show(terminal):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200)
    with RunProgress("fedavg", 20, done=10, console=console) as progress:
        progress.print("WARNING: [3] clients")
        progress.advance(5, "round 15/20  loss 0.5")
    return output.getvalue()


def test_elsewhere_than_on_a_terminal_there_is_a_line_per_evaluation():
    assert show(False) == "WARNING: [3] clients\nround 15/20  loss 0.5\n"


def test_on_a_terminal_there_is_a_bar():
    text = show(True)
    assert "fedavg" in text and "15/20" in text and "WARNING: [3] clients" in text


def test_a_bar_is_drawn_in_any_encoding():
    """C29."""
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as output:
        with processes.any_letter(output):
            console = Console(file=output, force_terminal=True, width=200)
            with RunProgress("σ", 20, done=10, console=console) as progress:
                progress.print("WARNING: ± [3] clients")
                progress.advance(5, "round 15/20  loss 0.5 ±")
        output.flush()
        text = output.buffer.getvalue().decode("ascii")
    assert "15/20" in text and "WARNING: ? [3] clients" in text


ROW = {"round": 2, "seed": 5, "split": "test", "loss": 0.5, "personal_nll": None}


def test_without_the_flag_nothing_is_written(tmp_path):
    options = RunOptions(str(tmp_path))
    with event_files(options, 0) as write:
        write([ROW])
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'fedvi\[tensorboard\]'"):
        experiment.run(
            ExperimentConfig(algorithm="fedavg"), RunOptions("runs/x", tensorboard=True)
        )


def test_a_row_becomes_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    options = RunOptions(str(tmp_path), tensorboard=True)
    with event_files(options, 0) as write:
        write([ROW])
    [events] = tmp_path.glob("events.out.tfevents.*")
    assert b"loss/seed_5" in events.read_bytes()
    assert b"personal_nll" not in events.read_bytes()
