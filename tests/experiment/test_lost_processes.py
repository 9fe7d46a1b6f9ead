"""Lost processes: signs of life through a store in memory, and what is told."""

import json
import threading
import time

import pytest

from fedvi.experiment import npz_tree
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.experiment.lost_processes import Watchdog, lost_line

TIMEOUT = 0.4  # seconds; a sign of life comes every tenth of it


class Store(dict):
    """The calls of JAX's coordination service that are used."""

    broken = False

    def key_value_set(self, key, value, *, allow_overwrite):
        assert allow_overwrite
        self[key] = value

    def key_value_dir_get(self, prefix):
        if self.broken:
            raise RuntimeError("the coordinator is gone")
        return [(k, v) for k, v in self.copy().items() if k.startswith(prefix)]


@pytest.fixture
def watch():
    """Three watchdogs; each notes whom it misses."""
    store, lost, heard = Store(), {}, threading.Event()

    def note(process):
        def call(missing):
            lost[process] = missing
            heard.set()

        return call

    dogs = [Watchdog(store, p, 3, TIMEOUT, note(p)) for p in range(3)]
    for dog in dogs:
        dog.start()
    yield store, dogs, lost, heard
    for dog in dogs:
        dog.stop()


def test_living_processes_are_not_missed(watch):
    _, dogs, lost, heard = watch
    assert not heard.wait(3 * TIMEOUT)
    assert dogs[0].missing(wait=0) == [] and lost == {}


def test_a_silent_process_is_missed(watch):
    _, dogs, lost, heard = watch
    dogs[2]._stopped.set()  # as if killed: it says no word of farewell
    assert dogs[0].missing() == [2]  # well before the timeout
    assert lost == {}
    assert heard.wait(5)
    time.sleep(TIMEOUT)
    assert lost == {0: [2], 1: [2]}


def test_a_process_that_is_done_is_not_missed(watch):
    _, dogs, lost, heard = watch
    dogs[2].stop()
    assert not heard.wait(3 * TIMEOUT)
    assert lost == {}


def test_without_the_store_process_0_is_lost(watch):
    store, _, lost, heard = watch
    store.broken = True
    assert heard.wait(5)
    time.sleep(TIMEOUT)
    assert lost == {1: [0], 2: [0]}


@pytest.fixture
def runs(tmp_path):
    """A finished run, and one that was interrupted."""
    folders = [tmp_path / "done", tmp_path / "stopped"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "summary.json").write_text(json.dumps({}))
    return [
        (ExperimentConfig(rounds=9), RunOptions(run_dir=str(folder)))
        for folder in folders
    ]


def test_a_loss_is_told_with_the_place_to_go_on(runs, tmp_path):
    stopped = tmp_path / "stopped"
    line = lost_line([1], 2, runs)
    assert line == (
        f"process 1 of 2 was lost; {stopped} holds no checkpoint: start all 2 again"
    )
    path = stopped / "checkpoint.npz"
    notes = {"config": {}, "round": 4, "problems": {}, "extended_from": []}
    npz_tree.save(path, {"a": 1.0}, notes)
    line = lost_line([1, 3], 4, runs)
    assert line == (
        f"processes 1, 3 of 4 were lost; {path} holds round 4 of 9: start all 4 again "
        "with --resume"
    )
    path.write_bytes(b"half")
    assert "cannot read checkpoint" in lost_line([], 4, runs)
    assert lost_line([], 4, runs[:1]) == ("one of the other 3 processes was lost")
