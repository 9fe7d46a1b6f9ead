"""What processes tell each other, with the others' words put in their mouths."""

import json

import pytest

from fedvi.experiment import checkpoint, cluster, hosts
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.host_options import HostOptions
from fedvi.experiment.run_options import RunOptions


@pytest.fixture
def others_say(monkeypatch):
    """Makes this process 0, and gives what the next ones say."""

    def say(*values):
        monkeypatch.setattr(hosts, "exchange", lambda own: [own, *values])

    return say


def fail(message):
    raise ValueError(message)


def test_one_process_only_calls():
    value = object()
    assert hosts.exchange(value) == [value]
    assert hosts.everywhere(lambda: value) is value
    assert hosts.on_first(lambda: value) is value
    with pytest.raises(ValueError, match="^wrong$"):
        hosts.everywhere(lambda: fail("wrong"))
    hosts.agree({"rounds": 3})
    assert hosts.is_first()


def test_the_mistake_of_another_process_is_raised_here(others_say):
    others_say(None, "no such file")
    with pytest.raises(ValueError, match="^process 2: no such file$"):
        hosts.everywhere(lambda: 1)
    with pytest.raises(ValueError, match="^own$"):
        hosts.everywhere(lambda: fail("own"))
    others_say(None, None)
    assert hosts.everywhere(lambda: 1) == 1


def test_processes_that_do_not_agree_are_named(others_say):
    own = {"rounds": 3, "seed": 0}
    others_say(dict(own), dict(own))
    hosts.agree(own)
    others_say(dict(own), {"rounds": 4, "extra": 1})
    with pytest.raises(ValueError) as raised:
        hosts.agree(own)
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
    line = cluster.lost_line([1], 2, runs)
    assert line == (
        f"process 1 of 2 was lost; {stopped} holds no checkpoint: start all 2 again"
    )
    path = stopped / "checkpoint.npz"
    checkpoint.save(path, {"a": 1.0}, {"fingerprint": "x", "round": 4})
    line = cluster.lost_line([1, 3], 4, runs)
    assert line == (
        f"processes 1, 3 of 4 were lost; {path} holds round 4 of 9: start all 4 again "
        "with --resume"
    )
    path.write_bytes(b"half")
    assert "cannot read checkpoint" in cluster.lost_line([], 4, runs)
    assert cluster.lost_line([], 4, runs[:1]) == (
        "one of the other 3 processes was lost"
    )


def test_a_mistake_is_no_loss():
    alone = cluster.Cluster(HostOptions())
    alone.check(ValueError("Gloo all-reduce failed"))  # there is nobody to lose
    alone.done()
    with pytest.raises(SystemExit) as left:
        alone.leave(5, "two\nlines")
    assert left.value.code == 5
