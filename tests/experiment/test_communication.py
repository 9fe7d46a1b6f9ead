"""The bytes of a round, by hand for every kind of upload."""

import dataclasses

import pytest

from fedvi import contract_checks
from fedvi.experiment import setup
from fedvi.experiment.communication import bytes_per_round
from fedvi.experiment.config import ExperimentConfig

MODEL = 4 * ((64 * 5 + 5) + (5 * 10 + 10))  # bytes of the MLP below
BODY = 4 * (64 * 5 + 5)
HEAD = MODEL - BODY
LEAVES = 4


def bytes_of(config):
    built = setup.experiment(config)
    train, test = built.data.train, built.data.test
    messages = contract_checks.check(built.algorithm, train, test, built.task.clients)
    return bytes_per_round(built, messages)


@pytest.mark.parametrize(
    ("algorithm", "options", "up", "down"),
    [
        ("fedavg", {}, MODEL, MODEL),
        # The moments of the server's optimiser stay at home.
        ("fedavg", {"server_optimizer": "adam"}, MODEL, MODEL),
        ("fedbabu", {}, BODY, MODEL),
        # The clients' m; the server squares it. Down: m_0, V_0 and the head.
        ("fedhb_niw", {}, BODY, BODY + MODEL),
        # m, two responsibilities and the gate's body; down: two prototypes, the head,
        # and a gate with two outputs.
        ("fedhb_mixture", {}, 2 * BODY + 12, 2 * BODY + HEAD + BODY + 4 * (5 * 2 + 2)),
        ("pfedbayes", {}, 2 * MODEL, 2 * MODEL),
        ("pfedbayes", {"average": "moments"}, 2 * MODEL, 2 * MODEL),
        ("sfedbayes", {"threshold": 0.5}, 3 * MODEL, 3 * MODEL),
        ("sfedbayes", {"average": "moments"}, 3 * MODEL, 3 * MODEL),
        # One posterior and its cluster's number.
        ("cfedbayes", {"clusters": 3}, 2 * MODEL + 4, 3 * 2 * MODEL),
        ("bpfed", {}, 2 * BODY, 2 * BODY),
        ("local_only", {}, 0, 0),
        ("centralised", {}, 240 * (64 + 4) + 4, 0),
    ],
)
def test_bytes_are_those_of_what_is_sent(algorithm, options, up, down):
    config = ExperimentConfig(
        algorithm=algorithm,
        options=options,
        dataset="digits",
        partition="iid",
        clients=6,
        fraction=0.5,
        model="mlp",
        hidden=(5,),
        augment=False,
        momentum=0.0,  # SGD with 0.9 is not stable on pFedBayes' KL term
    )
    found = bytes_of(config)
    assert (found.up, found.down) == (3 * (up + 4), 3 * down)
    assert found.withheld == 3 * 4


@pytest.mark.parametrize(
    ("algorithm", "sums"),
    [
        ("fedavg", MODEL),
        ("fedbabu", BODY),
        ("fedhb_niw", 2 * BODY),  # δ and δ²
        ("local_only", 0),
        ("centralised", None),  # its server needs every upload
    ],
)
def test_if_only_sums_left_the_clients_the_summands_would_go_up(algorithm, sums):
    config = ExperimentConfig(
        algorithm=algorithm,
        dataset="digits",
        partition="iid",
        clients=6,
        fraction=0.5,
        model="mlp",
        hidden=(5,),
        augment=False,
        momentum=0.0,  # SGD with 0.9 is not stable on pFedBayes' KL term
    )
    assert bytes_of(config).up_as_sums == (None if sums is None else 3 * (sums + 4))


@pytest.mark.parametrize(
    ("selection", "report"),
    [("ksd", 4), ("hip", 3 * MODEL)],  # a number; the scores at all particles
)
def test_bytes_of_a_choice_by_importance_are_those_of_all_candidates(selection, report):
    config = ExperimentConfig(
        algorithm="dsvgd",
        options={"particles": 3},
        selection=selection,
        dataset="digits",
        partition="iid",
        clients=6,
        novel_clients=1,
        model="mlp",
        hidden=(5,),
        augment=False,
        momentum=0.0,  # SGD with 0.9 is not stable on pFedBayes' KL term
    )
    up, _, down, _ = bytes_of(config)
    assert up == 3 * MODEL + 4 + 5 * report
    assert down == 5 * 3 * MODEL


@pytest.mark.parametrize(
    ("codec", "part", "scales"), [("bfloat16", 2, 0), ("int8", 4, 4)]
)
def test_a_codec_cuts_the_bytes_up_alone(codec, part, scales):
    """int8: a byte a value, and 4 a leaf; nothing else changes, the weight included."""
    config = ExperimentConfig(
        algorithm="pfedbayes",
        codec=codec,
        dataset="digits",
        partition="iid",
        clients=6,
        fraction=0.5,
        model="mlp",
        hidden=(5,),
        augment=False,
        momentum=0.0,  # SGD with 0.9 is not stable on pFedBayes' KL term
    )
    found = bytes_of(config)
    plain = bytes_of(dataclasses.replace(config, codec="identity"))
    up = 2 * (MODEL // part + LEAVES * scales)
    assert (found.up, found.down) == (3 * (up + 4), 3 * 2 * MODEL)
    assert found.withheld == 3 * 4 // part
    assert found.up_as_sums == plain.up_as_sums == 3 * (2 * MODEL + 4)
