"""A run's problems in words, and counted through a resume."""

import numpy as np

from fedvi.experiment.problems import Problems
from fedvi.federation import RoundMetrics
from fedvi.selection import Choice


def block(ids, empty=(), failed=()):
    """Metrics `[seeds, rounds, cohort]` where those ids were empty or failed."""
    ids = np.asarray(ids)
    return RoundMetrics(ids, np.isin(ids, empty), np.isin(ids, failed), {})


def test_nothing_is_said_when_nothing_happened():
    problems = Problems()
    assert problems.add(1, [0], block([[[0, 1], [2, 3]]])) == []
    names = ("empty", "failed", "lost_rounds", "invalid", "equal_chances")
    assert problems.to_dict() == {name: {} for name in names}


def test_failed_clients_are_named_with_seed_and_rounds():
    problems = Problems()
    [line] = problems.add(5, [3], block([[[0, 7], [7, 2]]], failed=[7]))
    assert line.startswith("WARNING: seed 3, rounds 5 to 6: left out client 7:")
    assert problems.to_dict()["failed"] == {"7": 2}


def test_an_empty_client_is_named_once():
    problems = Problems()
    lines = problems.add(1, [0], block([[[0, 4]]], empty=[4]))
    assert lines == ["without training data, skipped: client 4"]
    assert problems.add(2, [0], block([[[1, 4]]], empty=[4])) == []
    assert problems.to_dict()["empty"] == {"4": 2}


def test_a_round_without_any_upload_is_reported():
    problems = Problems()
    ids = [[[0, 1], [2, 3]], [[0, 1], [0, 2]]]
    lines = problems.add(11, [0, 1], block(ids, empty=[0], failed=[1]))
    lost = [line for line in lines if "no participant's upload" in line]
    assert [line[:16] for line in lost] == ["WARNING: seed 0:", "WARNING: seed 1:"]
    assert all("round 11;" in line for line in lost)
    assert problems.to_dict()["lost_rounds"] == {"0": 1, "1": 1}


def chosen_block(invalid, uniform):
    """A block of two seeds and two rounds, chosen by importance among three clients."""
    metrics = block(np.zeros((2, 2, 1), int))
    probabilities = np.full((2, 2, 3), 1 / 3, np.float32)
    clipped = np.zeros((2, 2), np.float32)
    choice = Choice(probabilities, np.asarray(invalid), clipped, np.asarray(uniform))
    return metrics._replace(choice=choice)


def test_clients_that_cannot_be_chosen_are_named_with_seed_and_rounds():
    invalid = np.zeros((2, 2, 3), bool)
    invalid[1, :, 2] = invalid[1, 1, 0] = True
    problems = Problems()
    [line] = problems.add(5, [3, 4], chosen_block(invalid, np.zeros((2, 2), bool)))
    assert line == (
        "WARNING: seed 4, rounds 5, 6, clients 0, 2: report or score not finite: not "
        "selectable"
    )
    assert problems.to_dict()["invalid"] == {"0": 1, "2": 2}
    resumed = Problems(problems.to_dict())
    resumed.add(7, [3, 4], chosen_block(invalid, np.zeros((2, 2), bool)))
    assert resumed.to_dict()["invalid"] == {"0": 2, "2": 4}


def test_rounds_without_a_positive_score_are_named():
    uniform = [[False, True], [False, False]]
    problems = Problems()
    nobody = np.zeros((2, 2, 3), bool)
    [line] = problems.add(5, [3, 4], chosen_block(nobody, uniform))
    assert line == (
        "seed 3: no score was positive in round 6: all clients had the same chance"
    )
    resumed = Problems(problems.to_dict())
    resumed.add(7, [3, 4], chosen_block(nobody, uniform))
    assert resumed.to_dict()["equal_chances"] == {"3": 2}


def test_a_checkpoint_from_before_there_were_choices_is_restored():
    problems = Problems({"empty": {}, "failed": {"1": 2}, "lost_rounds": {}})
    assert problems.to_dict()["failed"] == {"1": 2}
    assert problems.to_dict()["invalid"] == problems.to_dict()["equal_chances"] == {}


def test_counts_go_on_after_a_resume():
    problems = Problems()
    problems.add(1, [0], block([[[0, 1]]], failed=[1]))
    resumed = Problems(problems.to_dict())
    resumed.add(2, [0], block([[[1, 2]]], failed=[1]))
    assert resumed.to_dict()["failed"] == {"1": 2}
    resumed = Problems(resumed.to_dict())
    resumed.add(3, [0], block([[[1]]], failed=[1]))
    resumed = Problems(resumed.to_dict())
    resumed.add(4, [0], block([[[1]]], failed=[1]))
    assert resumed.to_dict()["lost_rounds"] == {"0": 2}
