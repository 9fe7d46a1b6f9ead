from itertools import accumulate

import pytest

from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.schedule import blocks, in_window, is_final, personal_too


def rounds_of(config, done=0):
    """Rounds after which the run is evaluated."""
    return [done + total for total in accumulate(blocks(config, done))]


@pytest.mark.parametrize(
    ("rounds", "every", "final", "expected"),
    [
        (10, 5, 0, [5, 10]),
        (7, 5, 0, [5, 7]),
        (3, 5, 0, [3]),
        (12, 5, 3, [5, 10, 11, 12]),
        (13, 5, 5, [5, 9, 10, 11, 12, 13]),
        (6, 10, 2, [5, 6]),
        (3, 5, 3, [1, 2, 3]),
        (3, 1, 1, [1, 2, 3]),
    ],
)
def test_evaluations_are_regular_and_then_after_every_round(
    rounds, every, final, expected
):
    config = ExperimentConfig(rounds=rounds, eval_every=every, final_rounds=final)
    assert rounds_of(config) == expected
    for place, done in enumerate(expected):
        assert rounds_of(config, done) == expected[place + 1 :]


@pytest.mark.parametrize("final", range(0, 24))
def test_few_blocks_have_to_be_compiled(final):
    config = ExperimentConfig(rounds=23, eval_every=5, final_rounds=final)
    assert sum(blocks(config)) == 23
    assert len(set(blocks(config))) <= 3
    lasts = [round for round in rounds_of(config) if is_final(config, round)]
    assert len(lasts) == final


def test_personal_models_are_evaluated_in_the_last_rounds_too():
    config = ExperimentConfig(rounds=10, eval_every=2, personal_every=4, final_rounds=2)
    chosen = [round for round in rounds_of(config) if personal_too(config, round)]
    assert rounds_of(config) == [2, 4, 6, 8, 9, 10] and chosen == [4, 8, 9, 10]
    plain = ExperimentConfig(rounds=4, eval_every=2)
    assert [personal_too(plain, round) for round in (2, 4)] == [False, True]


def test_the_window_is_the_last_rounds():
    config = ExperimentConfig(rounds=6, window=2)
    assert [in_window(config, round) for round in range(1, 7)] == [False] * 4 + [
        True
    ] * 2
    assert not in_window(ExperimentConfig(rounds=6), 6)
