import pytest

from fedvi.experiment import build
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.summary import bytes_per_round, table_rows, table_title

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
    last = {"rounds": 3, **{model: one[model] | {"accuracy": 1.0} for model in one}}
    averaged = table_rows(summary | {"per_seed": [one | {"mean_of_last_rounds": last}]})
    assert averaged[0]["global_accuracy"] == averaged[0]["personal_accuracy"] == 1.0
    assert averaged[0]["ece"] == 0.1


def test_the_title_says_what_the_table_shows():
    summary = {"rounds": 9, "evaluated_on": "test", "mean_of_last_rounds": None}
    assert table_title(summary) == "after 9 rounds, test data, mean over clients"
    summary |= {"mean_of_last_rounds": {"rounds": 4}, "novel_clients": [2]}
    assert table_title(summary) == (
        "mean of the last 4 of 9 rounds, test data, mean over the clients that took "
        "part in training"
    )
