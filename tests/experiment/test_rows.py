"""Rows of the CSV files that a run writes as it goes."""

import dataclasses

import numpy as np
import pytest

from fedvi.evaluation import Scores
from fedvi.experiment import setup
from fedvi.experiment.communication import RoundBytes
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.rows import choice_rows, evaluation_rows, trouble
from fedvi.federation import RoundMetrics
from fedvi.selection import Choice

CONFIG = ExperimentConfig(
    algorithm="fedavg",
    dataset="digits",
    partition="iid",
    clients=4,
    model="logistic",
    augment=False,
    fraction=0.5,
)


def scores(correct):
    """`[seeds, clients]` scores of 10 examples each."""
    correct = np.asarray(correct, np.float32)
    bins = np.zeros((*correct.shape, 15), np.float32)
    count = np.full_like(correct, 10)
    return Scores(count, correct, *(count,) * 4, *(bins,) * 3, 0 * count)


def nothing_happened(seeds, rounds=3, loss=None):
    nothing = np.zeros((seeds, rounds, 2), bool)
    return RoundMetrics(
        nothing.astype(int), nothing, nothing, {} if loss is None else {"loss": loss}
    )


def rows_of(experiment, correct, metrics, clusters=None, **more):
    return evaluation_rows(
        experiment,
        round_index=3,
        seeds=[4, 5],
        measured=["loss"],
        metrics=metrics,
        scores={"global": scores(correct)} | more,
        clusters=clusters,
        seconds=0.25,
        per_round=RoundBytes(1000, None, 500, 10),
    )


def test_rows_hold_each_seeds_own_figures():
    loss = np.array([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    metrics = nothing_happened(2, loss=loss)
    empty = metrics.empty.copy()
    empty[0, 1] = empty[1] = True  # seed 0 lost its second round, seed 1 all
    experiment = setup.experiment(CONFIG)
    correct = [[5, 7, 6, 6], [9, 9, 9, 9]]
    first, second = rows_of(experiment, correct, metrics._replace(empty=empty))
    assert (first["round"], first["seed"], first["split"]) == (3, 4, "test")
    assert (first["global_accuracy"], second["global_accuracy"]) == (60.0, 90.0)
    assert first["global_entropy"] == 1.0
    assert first["loss"] == 2.0 and second["loss"] is None
    assert first["personal_accuracy"] is None
    assert first.keys() == second.keys()
    assert not any("novel" in key or "rand" in key for key in first)


def test_choices_by_importance_have_a_row_per_round_and_seed():
    metrics = nothing_happened(2)._replace(
        client_ids=np.arange(12).reshape(2, 3, 2) % 4,
        choice=Choice(
            probabilities=np.full((2, 3, 4), [0.1, 0.2, 0.0, 0.7], np.float32),
            invalid=np.zeros((2, 3, 4), bool),
            clipped=np.array([[0.5, 0.25, 0.0], [0, 0, 0]], np.float32),
            uniform=np.zeros((2, 3), bool),
        ),
    )
    metrics.choice.invalid[0, 1, [1, 2]] = True
    metrics.choice.uniform[1, 2] = True
    rows = choice_rows(7, [4, 5], metrics)
    assert [(row["round"], row["seed"]) for row in rows] == [
        (round_index, seed) for round_index in (7, 8, 9) for seed in (4, 5)
    ]
    assert rows[2] == {
        "round": 8,
        "seed": 4,
        "client": "2 3",
        "clipped": 0.25,
        "uniform": 0,
        "invalid": "1 2",
        "p_0": 0.1,
        "p_1": 0.2,
        "p_2": 0.0,
        "p_3": 0.7,
    }
    assert [row["uniform"] for row in rows] == [0, 0, 0, 0, 0, 1]
    assert choice_rows(7, [4, 5], nothing_happened(2)) == []
    experiment = setup.experiment(CONFIG)
    plain = rows_of(experiment, np.full((2, 4), 6), nothing_happened(2))
    assert "clipped" not in plain[0]
    by_importance = experiment.selection._replace(measure="place")
    experiment = experiment._replace(selection=by_importance)
    first, second = rows_of(experiment, np.full((2, 4), 6), metrics)
    assert (first["clipped"], second["clipped"]) == (0.25, 0.0)
    before = rows_of(experiment, np.full((2, 4), 6), None)[0]
    assert before.keys() == first.keys()
    assert before["clipped"] is before["loss"] is None


def test_novel_clients_have_figures_of_their_own():
    experiment = setup.experiment(dataclasses.replace(CONFIG, novel_clients=1))
    correct = np.full((2, 4), 6)
    correct[:, experiment.novel] = 2
    rows = rows_of(experiment, correct, nothing_happened(2), personal=scores(correct))
    for model in ("global", "personal"):
        assert rows[0][f"{model}_accuracy"] == 60.0
        assert rows[0][f"{model}_clients"] == 3
        assert rows[0][f"novel_{model}_accuracy"] == 20.0
    early = rows_of(experiment, correct, nothing_happened(2))[0]
    assert early["novel_global_accuracy"] == 20.0
    assert early["novel_personal_accuracy"] is None
    assert early.keys() == rows[0].keys()


@pytest.mark.parametrize("cut_out", ["novel", "empty"])
def test_recovered_clusters_are_compared_over_those_that_train(cut_out):
    config = dataclasses.replace(
        CONFIG,
        cluster_transform="relabel",
        clients=5,
        novel_clients=int(cut_out == "novel"),
    )
    experiment = setup.experiment(config)
    found = 1 - experiment.data.clusters[None].repeat(2, axis=0)  # other names
    wrong = experiment.novel
    if cut_out == "empty":
        wrong = [3]
        size = experiment.data.train.size.copy()
        size[3] = 0
        federated = dataclasses.replace(
            experiment.data, train=experiment.data.train._replace(size=size)
        )
        experiment = experiment._replace(data=federated)
    found[:, wrong] = 1 - found[:, wrong]
    found[1, np.delete(np.arange(5), wrong)[0]] ^= 1
    correct = np.full((2, 5), 6)
    rows = rows_of(experiment, correct, nothing_happened(2), found)
    assert rows[0]["adjusted_rand"] == 1.0 > rows[1]["adjusted_rand"]
    assert "adjusted_rand" not in rows_of(experiment, correct, nothing_happened(2))[0]


def test_what_says_that_a_seed_has_diverged():
    """C21: what is finite can be absurd; what only guesses, or is only unsure, is no
    failure."""

    def said(global_nll, personal_nll=None, accuracy=(10.0, 10.0), **more):
        row = {"global_nll": global_nll, "personal_nll": personal_nll, **more}
        row |= {"global_accuracy": accuracy[0], "personal_accuracy": accuracy[1]}
        return trouble(row, 10)

    assert trouble({}, 10, finite=False) == "the server's state is not finite"
    for loss in (np.nan, np.inf):
        assert said(1.0, loss=loss) == f"the loss is {loss}"
    assert said(1.0, loss=None) is None  # nobody took part
    for nll in (np.nan, np.inf, 1e14, 104.0):
        assert "the NLL of the global model is" in said(nll)
        assert "the NLL of the personal model is" in said(1.0, nll)
        assert "novel personal model" in said(1.0, 1.0, novel_personal_nll=nll)
    assert said(102.0) is None
    # Guessing: alone, unsure, or with one model that knows more (BPFed, local_only).
    assert said(2.3, 2.3) is None and said(47.0) is None
    assert said(22.9, 47.0) is None and said(47.0, 0.2, (10.0, 93.0)) is None
    assert "both models guess, and the global one's NLL is 47 nats" in said(47.0, 47.0)
    assert said(47.0, 47.0, (30.0, 30.0)) is None
