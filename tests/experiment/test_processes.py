"""What processes tell each other, with the others' words put in their mouths."""

import pytest

from fedvi.experiment import processes


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
