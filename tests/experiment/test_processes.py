"""What processes tell each other, with the others' words put in their mouths."""

import pytest

from fedvi.experiment import processes
from fedvi.experiment.processes import HostOptions


@pytest.fixture
def others_say(monkeypatch):
    """Makes this process 0, and gives what the next ones say."""

    def say(*values):
        monkeypatch.setattr(processes, "exchange", lambda own: [own, *values])

    return say


def fail(message):
    raise ValueError(message)


def test_one_process_only_calls():
    value = object()
    assert processes.exchange(value) == [value]
    assert processes.everywhere(lambda: value) is value
    assert processes.on_first(lambda: value) is value
    with pytest.raises(ValueError, match="^wrong$"):
        processes.everywhere(lambda: fail("wrong"))
    processes.agree({"rounds": 3})
    assert processes.is_first()


def test_the_mistake_of_another_process_is_raised_here(others_say):
    others_say(None, "no such file")
    with pytest.raises(ValueError, match="^process 2: no such file$"):
        processes.everywhere(lambda: 1)
    with pytest.raises(ValueError, match="^own$"):
        processes.everywhere(lambda: fail("own"))
    others_say(None, None)
    assert processes.everywhere(lambda: 1) == 1


def test_processes_that_do_not_agree_are_named(others_say):
    own = {"rounds": 3, "seed": 0}
    others_say(dict(own), dict(own))
    processes.agree(own)
    others_say(dict(own), {"rounds": 4, "extra": 1})
    with pytest.raises(ValueError) as raised:
        processes.agree(own)
    message = str(raised.value)
    assert "rounds is 3 in process 0 and 4 in process 2" in message
    assert "seed is 0 in process 0 and None in process 2" in message
    assert "extra is None in process 0 and 1 in process 2" in message


THREE = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2}, "--num_processes without --coordinator_address, --pro"),
        ({"coordinator_address": "a:1", "process_id": 0}, "without --num_processes"),
        (THREE | {"process_id": 2}, "process_id=2 must be at most 1: the ids of num_"),
        (THREE | {"process_id": -1}, "process_id=-1 must be at least 0"),
        (THREE | {"num_processes": 0}, "num_processes=0 must be at least 1"),
        (THREE | {"coordinator_address": "host"}, "'host' must be HOST:PORT"),
        (THREE | {"coordinator_address": ":1"}, "':1' must be HOST:PORT"),
        (THREE | {"coordinator_address": "a:70000"}, "'a:70000' must be HOST:PORT"),
        (THREE | {"start_timeout": 0}, "start_timeout=0 must be at least 1"),
        (THREE | {"lost_timeout": 1}, "lost_timeout=1 must be at least 3"),
    ],
)
def test_flags_that_do_not_agree_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        HostOptions(**options).validate()


def test_devices_are_shared_equally():
    HostOptions(**THREE).validate(devices=4)
    HostOptions(distributed="auto").validate(devices=3)  # of how many, JAX finds out
    with pytest.raises(ValueError, match="devices=3 must be a multiple of num_proc"):
        HostOptions(**THREE).validate(devices=3)


def test_one_process_is_the_default():
    HostOptions().validate(devices=3)
    assert not HostOptions().several
    assert HostOptions(**THREE).several
    assert HostOptions(distributed="auto").several
