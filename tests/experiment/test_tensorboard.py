import importlib.util

import pytest

from fedvi.experiment import tensorboard
from fedvi.experiment.run_options import RunOptions

ROW = {"round": 2, "seed": 5, "split": "test", "loss": 0.5, "personal_nll": None}


def test_without_the_flag_nothing_is_written(tmp_path):
    options = RunOptions(str(tmp_path))
    tensorboard.check(options)
    with tensorboard.writer(options, 0) as write:
        write(ROW)
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'fedvi\[tensorboard\]'"):
        tensorboard.check(RunOptions("runs/x", tensorboard=True))


def test_a_row_becomes_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    options = RunOptions(str(tmp_path), tensorboard=True)
    tensorboard.check(options)
    with tensorboard.writer(options, 0) as write:
        write(ROW)
    [events] = tmp_path.glob("events.out.tfevents.*")
    assert b"loss/seed_5" in events.read_bytes()
    assert b"personal_nll" not in events.read_bytes()
