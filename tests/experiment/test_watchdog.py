"""Signs of life through a store in memory."""

import threading
import time

import pytest

from fedvi.experiment.watchdog import Watchdog

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
