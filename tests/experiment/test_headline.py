import numpy as np
import pytest

from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.headline import over_seeds, seed_figures


def row(round, accuracy, personal=None, **more):
    return {
        "round": round,
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
