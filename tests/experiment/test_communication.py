"""The bytes of a round, by hand for every kind of upload."""

import pytest

from fedvi.experiment import build
from fedvi.experiment.communication import RoundBytes, bytes_per_round, mean_bytes_up
from fedvi.experiment.config import ExperimentConfig

MODEL = 4 * ((64 * 5 + 5) + (5 * 10 + 10))  # bytes of the MLP below
BODY = 4 * (64 * 5 + 5)
HEAD = MODEL - BODY
LEAVES = 4


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
    )
    found = bytes_per_round(build.experiment(config))
    assert found == (3 * (up + 4), 3 * down, 3 * 4)


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
    )
    up, down, _ = bytes_per_round(build.experiment(config))
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
    )
    found = bytes_per_round(build.experiment(config))
    up = 2 * (MODEL // part + LEAVES * scales)
    assert found == (3 * (up + 4), 3 * 2 * MODEL, 3 * 4 // part)


def test_withheld_values_are_not_counted():
    per_round = RoundBytes(up=1000, down=500, withheld=10)
    assert per_round.sent_up({}) == 1000
    assert per_round.sent_up({"withheld": 25.0}) == 750
    assert per_round.sent_up({"withheld": float("nan")}) == 1000  # nobody took part
    # Rounds 1 and 2 with 30 withheld, 3 to 6 with 60; another seed with none.
    rows = [
        {"seed": 0, "round": 2, "withheld": 30.0},
        {"seed": 1, "round": 2, "withheld": 0.0},
        {"seed": 0, "round": 6, "withheld": 60.0},
        {"seed": 1, "round": 6, "withheld": 0.0},
    ]
    assert mean_bytes_up(per_round, rows) == 1000 - (2 * 300 + 4 * 600) / 12
    assert mean_bytes_up(per_round, [{"seed": 0, "round": 9}]) == 1000
