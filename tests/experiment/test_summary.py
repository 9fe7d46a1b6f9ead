from fedvi.experiment.summary import table_rows, table_title


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
