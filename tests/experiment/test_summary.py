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
    up, down = bytes_per_round(build.experiment(config))
    assert up == 3 * MODEL + 4 + 5 * report
    assert down == 5 * 3 * MODEL


def test_the_table_has_a_row_per_seed():
    figures = {"accuracy": 80.0, "ece": 0.1, "nll": 0.5}
    one = {"global": figures, "personal": figures | {"accuracy": 90.0}}
    summary = {"method": "a", "failed": False, "round_seconds": 0.2}
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
    window = {"global": figures | {"nll": 0.25}, "accuracy_std_between_rounds": 2.0}
    windowed = table_rows(summary | {"per_seed": [one | {"window": window}]})
    assert windowed[0]["nll"] == 0.25 and windowed[0]["personal_accuracy"] is None
    assert windowed[0]["accuracy_std_between_rounds"] == 2.0


def test_the_title_says_what_the_table_shows():
    summary = {"rounds": 9, "evaluated_on": "test", "mean_of_last_rounds": None}
    assert table_title(summary) == "after 9 rounds, test data, mean over clients"
    summary |= {"mean_of_last_rounds": {"rounds": 4}, "novel_clients": [2]}
    assert table_title(summary) == (
        "mean of the last 4 of 9 rounds, test data, mean over the clients that took "
        "part in training"
    )
    summary = {"rounds": 9, "evaluated_on": "test", "window": {"rounds": 4}}
    assert table_title(summary) == (
        "mean of the evaluations in the last 4 of 9 rounds, test data, mean over "
        "clients"
    )
