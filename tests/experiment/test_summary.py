import numpy as np
import pytest

from fedvi.evaluation import Scores
from fedvi.experiment import build
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.summary import bytes_per_round, evaluation_rows, table_rows
from fedvi.federation import RoundMetrics

MODEL = 4 * ((64 * 5 + 5) + (5 * 10 + 10))  # bytes of the MLP below
BODY = 4 * (64 * 5 + 5)


@pytest.mark.parametrize(
    ("algorithm", "options", "up", "down"),
    [
        ("fedavg", {}, MODEL, MODEL),
        # The moments of the server's optimiser stay at home.
        ("fedavg", {"server_optimizer": "adam"}, MODEL, MODEL),
        ("fedbabu", {}, BODY, MODEL),
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
    assert bytes_per_round(build.experiment(config)) == (3 * (up + 4), 3 * down)


def scores(correct):
    """`[seeds, clients]` scores of 10 examples each."""
    correct = np.asarray(correct, np.float32)
    bins = np.zeros((*correct.shape, 15), np.float32)
    count = np.full_like(correct, 10)
    return Scores(count, correct, count, count, bins, bins, bins)


def test_rows_hold_each_seeds_own_figures():
    nothing = np.zeros((2, 3, 2), bool)
    empty = nothing.copy()
    empty[0, 1] = empty[1] = True  # seed 0 lost its second round, seed 1 all
    loss = np.array([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    first, second = evaluation_rows(
        round=3,
        split="test",
        seeds=[4, 5],
        metrics=RoundMetrics(nothing.astype(int), empty, nothing, {"loss": loss}),
        global_scores=scores([[5, 7], [9, 9]]),
        personal_scores=None,
        seconds=0.25,
    )
    assert (first["round"], first["seed"], first["split"]) == (3, 4, "test")
    assert (first["global_accuracy"], second["global_accuracy"]) == (60.0, 90.0)
    assert first["loss"] == 2.0 and np.isnan(second["loss"])
    assert first["personal_accuracy"] is None
    assert first.keys() == second.keys()


def test_the_table_has_a_row_per_seed():
    figures = {"accuracy": 80.0, "ece": 0.1, "nll": 0.5}
    one = {"global": figures, "personal": figures | {"accuracy": 90.0}}
    summary = {"algorithm": "a", "failed": False, "round_seconds": 0.2}
    summary["per_seed"] = [one, one]
    rows = table_rows(summary)
    assert [row["round_seconds"] for row in rows] == [0.2, None]
    assert rows[0] == {
        "method": "a",
        "global_accuracy": 80.0,
        "personal_accuracy": 90.0,
        "ece": 0.1,
        "nll": 0.5,
        "round_seconds": 0.2,
    }
    failed = table_rows(summary | {"failed": True})
    assert [row["method"] for row in failed] == ["a (failed)"] * 2
