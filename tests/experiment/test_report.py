"""What a finished run says: its figures, the table, the bytes."""

import numpy as np
import pytest

from fedvi.experiment.communication import RoundBytes
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.report import (
    _mean_bytes_up,
    differences,
    over_seeds,
    seed_figures,
    table,
    table_rows,
    table_title,
)


def row(round_index, accuracy, personal=None, **more):
    return {
        "round": round_index,
        "global_accuracy": accuracy,
        "global_nll": accuracy / 10,
        "personal_accuracy": personal,
        "personal_nll": None if personal is None else personal / 10,
        **more,
    }


def test_the_last_row_and_the_mean_of_the_last_rounds():
    config = ExperimentConfig(rounds=9, eval_every=5, final_rounds=3)
    rows = [row(5, 90.0), row(7, 40.0, 50.0), row(8, 50.0, 70.0), row(9, 60.0, 60.0)]
    figures = seed_figures(config, rows)
    assert figures["global"] == {"accuracy": 60.0, "nll": 6.0}
    assert figures["personal"] == {"accuracy": 60.0, "nll": 6.0}
    assert figures["mean_of_last_rounds"] == {
        "global": {"accuracy": 50.0, "nll": pytest.approx(5.0)},
        "personal": {"accuracy": 60.0, "nll": pytest.approx(6.0)},
        "novel": None,
    }
    assert figures["novel"] is None and figures["adjusted_rand"] is None
    assert figures["best_on_test_global_accuracy"] == 90.0
    plain = seed_figures(ExperimentConfig(rounds=9), rows)
    assert plain["mean_of_last_rounds"] is plain["window"] is None


def test_the_window_holds_the_evaluations_of_its_rounds():
    rows = [row(4, 90.0), row(6, 40.0, 50.0), row(8, 50.0), row(9, 66.0, 60.0)]
    window = seed_figures(ExperimentConfig(rounds=9, window=4), rows)["window"]
    assert window == {
        "global": {"accuracy": 52.0, "nll": pytest.approx(5.2)},
        "accuracy_std_between_rounds": pytest.approx(np.std([40.0, 50.0, 66.0])),
    }
    last = seed_figures(ExperimentConfig(rounds=9, window=1), rows)["window"]
    assert last["global"]["accuracy"] == 66.0
    assert last["accuracy_std_between_rounds"] == 0.0


def test_the_best_of_the_last_hundred_rounds_is_named_after_its_split():
    config = ExperimentConfig(rounds=300, validation_fraction=0.5)
    rows = [row(200, 90.0, 95.0), row(201, 70.0, 60.0), row(300, 60.0, 65.0)]
    figures = seed_figures(config, rows)
    assert figures["best_on_validation_global_accuracy"] == 90.0
    assert figures["best_of_last_100_on_validation"] == {
        "global_accuracy": 70.0,
        "personal_accuracy": 65.0,
    }


def test_novel_clients_and_clusters_are_kept_apart():
    more = {"novel_global_accuracy": 20.0, "novel_personal_accuracy": 30.0}
    config = ExperimentConfig(rounds=1, final_rounds=1)
    figures = seed_figures(config, [row(1, 60.0, 70.0, adjusted_rand=0.5, **more)])
    novel = {"global": {"accuracy": 20.0}, "personal": {"accuracy": 30.0}}
    assert figures["novel"] == figures["mean_of_last_rounds"]["novel"] == novel
    assert figures["global"] == {"accuracy": 60.0, "nll": 6.0}
    assert figures["adjusted_rand"] == 0.5


def test_figures_are_reduced_one_by_one():
    figures = [{"a": {"b": value, "c": None}, "d": 2 * value} for value in (1, 4)]
    assert over_seeds(figures, np.mean) == {"a": {"b": 2.5, "c": None}, "d": 5.0}


def test_withheld_values_are_not_counted():
    per_round = RoundBytes(up=1000, up_as_sums=900, down=500, withheld=10)
    assert per_round.sent_up({}) == 1000
    assert per_round.sent_up({"withheld": 25.0}) == 750
    assert per_round.sent_up({"withheld": None}) == 1000  # nobody took part
    # Rounds 1 and 2 with 30 withheld, 3 to 6 with 60; another seed with none.
    rows = [
        {"seed": 0, "round": 2, "withheld": 30.0},
        {"seed": 1, "round": 2, "withheld": 0.0},
        {"seed": 0, "round": 6, "withheld": 60.0},
        {"seed": 1, "round": 6, "withheld": 0.0},
    ]
    assert _mean_bytes_up(per_round, rows) == 1000 - (2 * 300 + 4 * 600) / 12
    assert _mean_bytes_up(per_round, [{"seed": 0, "round": 9}]) == 1000


def summary_of_two_seeds():
    figures = {"accuracy": 80.0, "ece": 0.1, "nll": 0.5, "mutual_information": 0.0}
    personal = figures | {"accuracy": 90.0, "mutual_information": 0.02}
    one = {"global": figures, "personal": personal}
    summary = {"method": "a", "failed": False, "global_model": True}
    return summary | {"round_seconds": 0.2, "per_seed": [one, one], "seeds": [0, 1]}


def test_the_table_has_a_row_per_seed_and_model():
    summary = summary_of_two_seeds()
    [one, _] = summary["per_seed"]
    rows = table_rows(summary)
    assert [row["model"] for row in rows] == ["global", "personal"] * 2
    assert [row.get("round_seconds") for row in rows] == [0.2, None, None, None]
    assert rows[1] == {
        "method": "a",
        "seed": 0,
        "failed": False,
        "model": "personal",
        "accuracy": 90.0,
        "ece": 0.1,
        "nll": 0.5,
        "mutual_information": 0.02,
    }
    failed = table_rows(summary | {"failed": True}, "b")
    assert {(row["method"], row["failed"]) for row in failed} == {("b", True)}
    last = {"rounds": 3, **{model: one[model] | {"accuracy": 1.0} for model in one}}
    averaged = table_rows(summary | {"per_seed": [one | {"mean_of_last_rounds": last}]})
    assert averaged[0]["accuracy"] == averaged[1]["accuracy"] == 1.0
    assert averaged[0]["ece"] == 0.1
    window = {"global": one["global"] | {"nll": 0.25}}
    window["accuracy_std_between_rounds"] = 2.0
    windowed = table_rows(summary | {"per_seed": [one | {"window": window}]})
    assert windowed[0]["nll"] == 0.25 and windowed[1]["accuracy"] is None
    assert windowed[0]["accuracy_std_between_rounds"] == 2.0


def test_what_was_not_measured_is_no_figure():
    """A point estimate is one sample, which has nothing to disagree with; what
    local_only and BPFed call a global model is nobody's; no other data, no AUROC."""
    summary = summary_of_two_seeds()
    rows = table_rows(summary)
    assert rows[0]["mutual_information"] is None  # exactly 0
    assert "auroc_entropy" not in rows[1]
    ood = {"per_seed": [{"auroc_entropy": 0.7}, {"auroc_entropy": 0.8}]}
    rows = table_rows(summary | {"global_model": False, "ood": ood})
    assert [row.get("auroc_entropy") for row in rows] == [None, 0.7, None, 0.8]
    assert rows[0]["accuracy"] is None and rows[0]["round_seconds"] == 0.2
    lines = table(rows).splitlines()
    assert cells(lines[0]) == ["method (global)", "s/round"]
    assert cells(lines[4])[-1] == "OOD AUROC"
    assert cells(lines[6])[-1].startswith("0.750 ± 0.07")


def test_differences_are_taken_seed_by_seed():
    def run(method, accuracies, global_model=True):
        seeds = [
            {
                "personal": {"accuracy": accuracy, "nll": accuracy / 100},
                "global": {"accuracy": 10.0, "nll": accuracy},
            }
            for accuracy in accuracies
        ]
        return {
            "method": method,
            "seeds": [0, 1],
            "per_seed": seeds,
            "global_model": global_model,
            "dataset": "digits",
            "evaluated_on": "test",
        }

    def of(*summaries):
        return differences(summaries, [summary["method"] for summary in summaries])

    first, other = run("a", [50.0, 70.0]), run("b", [53.0, 72.0])
    third = run("c", [50.0, 60.0], global_model=False)
    title, *lines = of(first, other, third).splitlines()
    assert title.startswith("minus a, seed by seed: mean ± standard error of 2")
    assert title.endswith("beyond 12.7 errors:")  # Student's t, one degree of freedom
    # 3 and 2; 0 and -10: their spread, not that of the seeds.
    assert [cells(line) for line in lines if "---" not in line] == [
        ["method (global)", "accuracy %", "NLL"],
        ["b", "+0.00 ± 0.00", "+2.500 ± 0.500"],
        [],
        ["method (personal)", "accuracy %", "NLL"],
        ["b", "+2.50 ± 0.50", "+0.025 ± 0.005"],
        ["c", "-5.00 ± 5.00", "-0.050 ± 0.050"],
    ]
    assert of(third, other).count("method (") == 1
    assert of(first) == of(first, other | {"seeds": [1, 2]}) == ""
    assert of(first, other | {"window": {"rounds": 4}}) == ""
    assert of(first, other | {"evaluated_on": "validation"}) == ""
    alone = [
        one | {"seeds": [0], "per_seed": one["per_seed"][:1]} for one in (first, other)
    ]
    assert of(*alone) == ""


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


def cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_table_is_aligned_with_mean_and_std_over_seeds():
    first = {"method": "FedAvg", "model": "global"}
    rows = [
        first | {"accuracy": 80.0, "nll": 0.51234, "ece": 0.034},
        first | {"accuracy": 83.0, "nll": 0.6, "ece": None},
        {"method": "FedAvg", "model": "personal"},
        {"method": "FedHB NIW", "model": "global", "round_seconds": 0.1},
        {"method": "FedHB NIW", "model": "personal", "accuracy": 93.456},
    ]
    above, below = (part.splitlines() for part in table(rows).split("\n\n"))
    for lines in (above, below):
        assert len({len(line) for line in lines}) == 1 and len(lines) == 4
    names = "method (global)|accuracy %|ECE %|NLL|s/round"
    assert cells(above[0]) == names.split("|")
    accuracy = f"81.50 ± {np.std([80.0, 83.0], ddof=1):.2f}"
    nll = f"0.556 ± {np.std([0.51234, 0.6], ddof=1):.3f}"
    assert cells(above[2]) == ["FedAvg", accuracy, "3.40", nll, "-"]
    assert cells(above[3]) == ["FedHB NIW", "-", "-", "-", "0.100"]
    assert [cells(line) for line in below[2:]] == [
        ["FedAvg", "-"],
        ["FedHB NIW", "93.46"],
    ]


def test_the_widest_table_fits_a_terminal():
    figures = dict.fromkeys(
        ("accuracy", "ece", "nll", "mutual_information", "auroc_entropy"), 0.75
    )
    row = {"method": "parallel_dsvgd", "model": "personal"} | figures
    assert max(map(len, table([row | {"accuracy": 85.0}] * 3).splitlines())) <= 100


def test_table_shows_the_std_between_rounds_where_there_is_one():
    rows = [
        {"method": "a", "accuracy": 80.0, "accuracy_std_between_rounds": 1.25},
        {"method": "b", "accuracy": 70.0},
    ]
    lines = table([row | {"model": "global"} for row in rows]).splitlines()
    names = ["method (global)", "accuracy %", "std between rounds"]
    assert [cells(lines[0]), cells(lines[2]), cells(lines[3])] == [
        names,
        ["a", "80.00", "1.25"],
        ["b", "70.00", "-"],
    ]


def test_the_table_counts_the_seeds_that_failed():
    rows = [{"method": "m", "failed": seed == 1, "nll": 1.0} for seed in range(3)]
    rows += [{"method": "n", "failed": True}, {"method": "o", "nll": 1.0}]
    lines = table([row | {"model": "global"} for row in rows]).splitlines()
    methods = [cells(line)[0] for line in lines[2:]]
    assert methods == ["m (1 of 3 seeds failed)", "n (failed)", "o"]


def test_two_rows_of_one_seed_are_no_seeds():
    row = {"method": "m", "model": "global", "seed": 3}
    rows = [row | {"nll": nll} for nll in (1.0, 2.0)]
    with pytest.raises(ValueError, match="method='m' has two rows of seed 3"):
        table(rows)


def test_table_survives_a_diverged_seed():
    rows = [{"method": "m", "model": "global", "nll": nll} for nll in (0.5, np.inf)]
    assert "inf ± nan" in table(rows)
