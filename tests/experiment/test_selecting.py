"""The selection that a configuration asks for; nothing is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithm import Algorithm, Importance
from fedvi.data import ClientData
from fedvi.experiment import build
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.selecting import cohort_size, selection_of

CONFIG = ExperimentConfig(
    algorithm="dsvgd",
    options={"particles": 2},
    dataset="digits",
    partition="iid",
    clients=5,
    model="logistic",
    augment=False,
)
TRAINED = np.array([0, 1, 2, 3, 5, 6])  # client 4 is novel
PLAIN = Algorithm("mine", *(None,) * 6)  # nothing of it is called
MINE = PLAIN._replace(importance={"mass": Importance(None, None)})


def change(**changes):
    return dataclasses.replace(CONFIG, **changes)


@pytest.fixture
def train():
    """Most frequent classes 2, 1, 0 (of two, the lower), 0, 9, none, 1."""
    y = [[2, 2, 0], [1, 0, 1], [1, 0, 5], [0, 0, 1], [9, 9, 9], [9, 9, 9], [1, 1, 9]]
    size = np.array([3, 3, 2, 3, 3, 0, 3], np.int32)
    return ClientData(np.zeros((7, 3, 1), np.float32), np.array(y, np.int32), size)


def turns_of(selection, rounds):
    key = jax.random.key(0)
    return [
        np.asarray(selection.select(key, round, None, None)[0]).tolist()
        for round in range(rounds)
    ]


def test_the_algorithm_says_how_many_take_part_or_else_the_fraction():
    config = change(fraction=0.5, novel_clients=1)
    assert cohort_size(config, PLAIN, 9) == 4
    assert cohort_size(config, PLAIN._replace(cohort="all"), 9) == 8
    assert cohort_size(config, PLAIN._replace(cohort=3), 9) == 3
    with pytest.raises(ValueError, match="clients=3 less novel_clients=1 are fewer th"):
        cohort_size(config, PLAIN._replace(cohort=3), 3)
    with pytest.raises(ValueError, match="fraction=0.1 of clients=5 is less than one"):
        cohort_size(change(fraction=0.1), PLAIN, 5)


@pytest.mark.parametrize(
    ("order", "turns"), [("id", [0, 1, 2, 3, 5, 6]), ("sorted", [5, 2, 3, 1, 6, 0])]
)
def test_round_robin_goes_by_id_or_by_the_most_frequent_class(train, order, turns):
    config = change(selection="round_robin", selection_order=order)
    chosen = selection_of(config, MINE, train, TRAINED, 2)
    assert np.ravel(turns_of(chosen, 6)).tolist() == turns * 2


def test_shuffled_turns_depend_on_the_seed_of_the_partition(train):
    config = change(selection="round_robin", selection_order="shuffled")

    def turns(config):
        return np.ravel(turns_of(selection_of(config, MINE, train, TRAINED, 1), 6))

    drawn = [turns(dataclasses.replace(config, partition_seed=s)) for s in range(8)]
    assert all(sorted(one) == TRAINED.tolist() for one in drawn)
    assert len({tuple(one) for one in drawn}) > 4
    again = dataclasses.replace(config, seed=3)
    assert turns(again).tolist() == drawn[0].tolist()


def test_a_measure_goes_with_its_temperature_and_floor(train):
    scores = jnp.array([1.0, 3.0, 0.0, 0.0, 9.0, 9.0, 4.0])
    counts = jnp.asarray(train.size > 0)

    def probabilities(**changes):
        config = change(selection="mass", **changes)
        chosen = selection_of(config, MINE, train, TRAINED, 1)
        assert chosen.measure == "mass"
        _, choice = chosen.select(jax.random.key(0), 0, scores, counts)
        return choice.probabilities

    # Client 4 is novel and client 5 holds nothing.
    share = np.array([1, 3, 0, 0, 0, 0, 4]) / 8
    np.testing.assert_allclose(probabilities(), share, atol=1e-6)
    assert probabilities()[2] > 0  # the floor
    root = np.sqrt(share * 8)
    np.testing.assert_allclose(
        probabilities(selection_temperature=2.0), root / root.sum(), atol=1e-6
    )
    np.testing.assert_allclose(
        probabilities(selection_floor=0.5),
        share / 2 + np.array([1, 1, 1, 1, 0, 0, 1]) / 10,
        atol=1e-6,
    )


def test_methods_of_all_clients_do_not_look_at_the_selection(train):
    everyone = PLAIN._replace(cohort="all")
    chosen = selection_of(change(selection="nonsense"), everyone, train, TRAINED, 6)
    assert turns_of(chosen, 2) == [TRAINED.tolist()] * 2
    config = change(algorithm="parallel_dsvgd", selection="ksd", fraction=0.1)
    config.validate()
    experiment = build.experiment(config)
    assert (experiment.participants, experiment.config.method) == (5, "parallel_dsvgd")
    assert build.selection(experiment).measure is None


def test_dsvgd_takes_one_client_whatever_the_fraction():
    experiment = build.experiment(change(selection="hip", fraction=0.1))
    assert (experiment.participants, experiment.config.method) == (1, "dsvgd:hip")
    federation = build.federation(experiment, 1, build.mesh(None))
    assert (federation.selection.size, federation.selection.measure) == (1, "hip")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"selection": "kds"},
            "selection='kds' must be one of uniform, round_robin, ksd, hip for dsvgd",
        ),
        (
            {"algorithm": "fedavg", "options": {}, "fraction": 1.0, "selection": "ksd"},
            "selection='ksd' must be one of uniform, round_robin for fedavg",
        ),
        (
            {"selection": "round_robin", "selection_order": "sideways"},
            "selection_order='sideways' must be one of",
        ),
    ],
)
def test_an_unknown_selection_is_named_before_anything_is_compiled(changes, message):
    with pytest.raises(ValueError, match=message):
        build.experiment(change(**changes))
