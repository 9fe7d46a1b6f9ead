"""Runs with all that is measured at the end: curves, novel clients, clusters, OOD."""

import csv
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.metrics import roc_auc_score

from fedvi import experiment
from fedvi.algorithms import fedavg
from fedvi.evaluation import bootstrap_intervals, conformal, risk_coverage
from fedvi.experiment import calibration as calibrations
from fedvi.experiment import (
    devices,
    final_measurements,
    folder,
    load_data,
    npz_tree,
    setup,
)
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.federation import Federation, take

CONFIG = ExperimentConfig(
    algorithm="fedavg",
    dataset="digits",
    partition="iid",
    clients=5,
    novel_clients=1,
    model="logistic",
    augment=False,
    fraction=1.0,
    rounds=5,
    eval_every=3,
    final_rounds=2,
    finetune_epochs=1,
    finetune_learning_rate=0.1,
    finetune_curve=(0, 1),
    ood_dataset="noise",
    calibration_fraction=0.3,
    seed=7,
    seeds=2,
)


def change(**changes):
    return dataclasses.replace(CONFIG, **changes)


def noisy(task):
    """FedAvg whose personal models are three draws around the fine-tuned one."""

    def personal_predictive(key, server, params, x, mask):
        logits = task.model.apply(params, x, mask)
        noise = jax.random.normal(key, (3, *logits.shape))
        return jax.nn.log_softmax(logits[None] + noise)

    return fedavg(task)._replace(personal_predictive=personal_predictive)


@pytest.fixture(scope="module")
def ood_file(tmp_path_factory):
    """Faint noise of the digits' shape, which no model of them is sure about."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "noise.npz"
    splits = {}
    for split, n in (("train", 100), ("test", 60)):
        splits[f"{split}_x"] = rng.integers(90, 110, (n, 8, 8), dtype=np.uint8)
        splits[f"{split}_y"] = np.arange(n) % 10
    np.savez(path, **splits)
    return str(path)


def run(run_dir, config, plot_formats=(), **more):
    options = RunOptions(str(run_dir), plot_formats=plot_formats, **more)
    return experiment.run(config, options, noisy)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, ood_file):
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    before = jax.config.jax_compilation_cache_dir
    if before is None:
        cache = str(tmp_path_factory.mktemp("cache"))
        jax.config.update("jax_compilation_cache_dir", cache)
    run(run_dir, change(ood_data_file=ood_file), ["png"])
    yield run_dir
    jax.config.update("jax_compilation_cache_dir", before)


def summary_of(run_dir):
    return json.loads((run_dir / folder.SUMMARY).read_text())


def rows_of(run_dir):
    with open(run_dir / folder.METRICS, newline="") as file:
        return list(csv.DictReader(file))


def test_the_folder_holds_every_file(straight):
    files = {path.name for path in straight.iterdir()}
    assert {folder.CLIENTS, folder.EVALUATION, folder.SUMMARY} < files
    drawn = {Path(name).stem for name in files if name.endswith(".png")}
    assert drawn == {
        "learning_curves",
        "uncertainty",
        "reliability",
        "per_client",
        "conformal",
        "risk_coverage",
        "finetune_curve",
        "entropy_density",
    }


def test_the_last_rounds_are_evaluated_one_by_one_and_averaged(straight):
    rows, summary = rows_of(straight), summary_of(straight)
    assert [row["round"] for row in rows[::2]] == ["0", "3", "4", "5"]
    personal = [bool(row["personal_accuracy"]) for row in rows[::2]]
    assert personal == [False, False, True, True]
    last = summary["mean_of_last_rounds"]
    assert last["rounds"] == 2
    for model in ("global", "personal"):
        for key in ("accuracy", "nll", "entropy"):
            values = [float(row[f"{model}_{key}"]) for row in rows[4:]]
            assert last[model][key] == pytest.approx(np.mean(values))
            own = summary["per_seed"][1]["mean_of_last_rounds"][model][key]
            assert own == pytest.approx(np.mean(values[1::2]))
    accuracies = [float(row["personal_accuracy"]) for row in rows[4:]]
    assert summary["best_of_last_100_on_test"]["personal_accuracy"] == pytest.approx(
        np.reshape(accuracies, (2, 2)).max(axis=0).mean()
    )
    spread = summary["mean_of_last_rounds_std_over_seeds"]["global"]["nll"]
    values = [float(row["global_nll"]) for row in rows[4:]]
    assert spread == pytest.approx(np.reshape(values, (2, 2)).mean(axis=0).std(ddof=1))


def test_novel_clients_are_reported_apart(straight):
    summary, rows = summary_of(straight), rows_of(straight)
    assert len(summary["novel_clients"]) == 1
    assert summary["global"]["clients"] == 4
    for model in ("global", "personal"):
        assert summary["novel"][model]["clients"] == 1
        values = [float(row[f"novel_{model}_accuracy"]) for row in rows[-2:]]
        assert summary["novel"][model]["accuracy"] == pytest.approx(np.mean(values))


def test_the_fine_tuning_curve_passes_through_the_run_itself(straight):
    """One epoch is what the run personalises with."""
    summary = summary_of(straight)
    curve = summary["finetune_curve"]
    assert curve["epochs"] == [0, 1] and [one["seed"] for one in curve["per_seed"]] == [
        7,
        8,
    ]
    assert curve["training_clients"][1] == pytest.approx(
        summary["personal"]["accuracy"]
    )
    assert curve["novel_clients"][1] == pytest.approx(
        summary["novel"]["personal"]["accuracy"]
    )
    assert curve["training_clients"][0] != curve["training_clients"][1]
    each = [one["training_clients"] for one in curve["per_seed"]]
    np.testing.assert_allclose(np.mean(each, axis=0), curve["training_clients"])


@pytest.fixture(scope="module")
def by_hand(straight, ood_file):
    """The experiment, and what a federation made by hand from the checkpoint predicts
    with the second seed's personal models: on test, foreign and calibration data."""
    built = setup.experiment(change(ood_data_file=ood_file), noisy)
    federation = Federation(
        built.algorithm, built.data.train, built.data.test, selection=built.selection
    )
    states, _ = npz_tree.restore(straight / folder.CHECKPOINT, federation.shapes(2))
    data_sets = built.data.test, built.ood, built.calibration
    found = federation.predictions_personal(take(states, 1), *data_sets)
    return built, *jax.device_get(found)


def test_uncertainty_tells_the_other_data_apart(straight, by_hand):
    """Against a federation built by hand from the checkpoint, and scikit-learn."""
    found = summary_of(straight)["ood"]
    assert found["dataset"] == "noise"
    assert 0.5 < found["auroc_entropy"] <= 1
    assert found["entropy_out"] > found["entropy_in"]
    built, *pair, _ = by_hand
    for name in ("entropy", "mutual_information"):
        values = [
            np.asarray(getattr(one, name))[built.trained][
                np.asarray(one.mask)[built.trained]
            ]
            for one in pair
        ]
        labels = np.repeat([0, 1], [len(v) for v in values])
        own = found["per_seed"][1]
        assert own[f"auroc_{name}"] == pytest.approx(
            roc_auc_score(labels, np.concatenate(values)), abs=1e-4
        )
    sums = np.where(pair[0].mask, pair[0].entropy, 0).sum(axis=1)
    inside = (sums / np.asarray(pair[0].mask).sum(axis=1))[built.trained]
    assert own["entropy_in"] == pytest.approx(inside.mean(), rel=1e-5)


@pytest.fixture(scope="module")
def ending(straight, by_hand):
    """Scores, and what is measured at the end, anew from the run's checkpoint by the
    federation of the run, whose programs are compiled already."""
    built = by_hand[0]
    mesh = devices.mesh(None, 1, built.together)
    federation = setup.federation(built, RunOptions(str(straight)), mesh)
    states, _ = npz_tree.restore(straight / folder.CHECKPOINT, federation.shapes(2))
    scores = {
        "global": federation.evaluate(states),
        "personal": federation.evaluate_personal(states),
    }
    scores = jax.device_get(scores)
    built = built._replace(config=dataclasses.replace(built.config, finetune_curve=()))
    return scores, final_measurements.after_training(built, federation, states, scores)


def pooled(built, predictions, data):
    """Log-probabilities and labels of all the training clients' examples."""
    ids = built.trained
    mask = predictions.mask[ids]
    return predictions.log_probs[ids][mask].astype(float), data.y[ids][mask]


def nll_of(log_p, y, temperature=1.0):
    log_p = log_softmax(log_p / temperature, axis=-1)
    return -log_p[np.arange(len(y)), y].mean()


def test_a_run_is_recalibrated_on_data_that_nobody_trained_on(
    straight, by_hand, ending
):
    (built, test, _, calibration), (_, found) = by_hand, ending
    summary = summary_of(straight)["recalibration"]
    own = summary["per_seed"][1]["personal"]
    for_fit = pooled(built, calibration, built.calibration)
    assert summary["examples"] == len(for_fit[1]) > 100
    best = minimize_scalar(
        lambda theta: nll_of(*for_fit, np.exp(theta)), bounds=(-3, 3), method="bounded"
    )
    assert own["temperature"] == pytest.approx(np.exp(best.x), rel=5e-3)
    on = pooled(built, test, built.data.test)
    for rule, temperature in (("before", 1.0), ("global", own["temperature"])):
        expected = nll_of(*on, temperature)
        assert own[rule]["nll_micro"] == pytest.approx(expected, rel=1e-4)
    assert own["global"]["nll_micro"] < own["before"]["nll_micro"]  # three noisy draws
    assert own["novel"]["global"]["nll"] != own["global"]["nll"]
    temperatures = found.per_client["personal_temperature"]
    assert temperatures.shape == (2, 5)
    if own["log_temperature_std"] == 0:
        np.testing.assert_allclose(temperatures[1], own["temperature"])


def test_prediction_sets_of_a_run_are_those_of_the_definitions(
    straight, by_hand, ending
):
    (built, test, _, calibration), (_, found) = by_hand, ending
    summary = summary_of(straight)["conformal"]
    assert summary["level"] == 0.1 and summary["clients_with_too_few"] == []
    own = summary["per_seed"][1]["personal"]["lac"]
    log_p, y = pooled(built, calibration, built.calibration)
    scores = np.sort(1 - np.exp(log_p)[np.arange(len(y)), y])
    exact = scores[int(np.ceil((len(y) + 1) * 0.9)) - 1]
    threshold = own["global"]["threshold"]
    assert exact <= threshold < exact + 0.01
    log_p, y = pooled(built, test, built.data.test)
    sets = 1 - np.exp(log_p) <= threshold
    covered = sets[np.arange(len(y)), y]
    assert own["global"]["coverage_micro"] == pytest.approx(covered.mean())
    held = np.repeat(np.arange(4), test.mask[built.trained].sum(1))
    by_client = [covered[held == i].mean() for i in range(4)]
    assert own["global"]["coverage"] == pytest.approx(np.mean(by_client))
    assert own["global"]["worst_client"] == pytest.approx(min(by_client))
    columns = found.per_client
    np.testing.assert_allclose(
        columns["personal_coverage"][1, built.trained], by_client
    )
    assert columns["global_own_set_size"].shape == (2, 5)
    assert summary["global"]["aps"].keys() >= {"client", "quantile_of_quantiles"}
    curves = found.arrays["conformal"]
    curve = curves["personal"]["lac"]["global"]
    at = list(curves["levels"]).index(0.1)
    assert curve["coverage"][1, at] == own["global"]["coverage"]
    assert (np.diff(curve["set_size"][1]) <= 0).all()
    assert curve["coverage"].shape == (2, len(calibrations.LEVELS))


def test_risk_coverage_and_intervals_of_a_run(straight, by_hand, ending):
    (built, test, *_), (scores, found) = by_hand, ending
    summary = summary_of(straight)
    own = summary["risk_coverage"]["per_seed"][1]["personal"]
    log_p, y = pooled(built, test, built.data.test)
    right = log_p.argmax(1) == y
    expected = risk_coverage(log_p.max(1), right)
    assert own["aurc"] == pytest.approx(expected.aurc)
    curve = found.arrays["risk_coverage"]["personal"]
    assert curve["risk"].shape == (2, 100)
    assert curve["risk"][1, -1] == pytest.approx(np.mean(~right))
    ours = bootstrap_intervals(
        jax.tree.map(lambda leaf: leaf[:, built.trained], scores["global"])
    )
    for name, ends in summary["intervals"]["global"].items():
        assert ends == pytest.approx(ours[name])
    low, high = summary["intervals"]["personal"]["accuracy"]
    assert low <= summary["personal"]["accuracy"] <= high
    novel = summary["intervals"]["novel"]["global"]["accuracy"]
    assert novel == pytest.approx(2 * [summary["novel"]["global"]["accuracy"]])


def test_the_run_measures_what_its_checkpoint_does(straight, ending):
    _, found = ending
    summary = summary_of(straight)
    for key in found.figures.keys() - {"finetune_curve"}:
        figures = found.figures[key]
        ours, theirs = (
            [x for x in jax.tree.leaves(f) if isinstance(x, float)]
            for f in (figures, summary[key])
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, err_msg=key)


def test_clients_with_too_few_examples_are_reported(capsys):
    """And models that have diverged stop nothing."""
    rng = np.random.default_rng(0)
    labels, mask = rng.integers(0, 3, (3, 20)), np.ones((3, 20), bool)
    log_p = log_softmax(rng.normal(size=(3, 20, 3)), axis=-1).astype(np.float32)
    test = calibrations.Examples(log_p, labels, mask, rng.random((3, 20)))
    few = test._replace(mask=np.arange(20) < np.array([[20], [8], [0]]))
    groups = {"": np.arange(3)}
    assert calibrations.too_few(few.mask.sum(1), 0.1).tolist() == [1, 2]
    found = calibrations.measure(test, few, groups, level=0.1, bins=15)
    own = found["conformal"].per_client
    assert own["own_threshold"][1:].tolist() == [np.inf, np.inf]
    assert own["own_coverage"][1:].tolist() == [1, 1]
    assert own["own_set_size"][1:].tolist() == [3, 3]
    undefined = test._replace(log_probs=log_p * np.nan)
    found = calibrations.measure(undefined, undefined, groups, level=0.1, bins=15)
    figures = found["conformal"].figures["lac"]["global"]
    assert figures["coverage"] == 0 and figures["threshold"] == np.inf
    assert np.isnan(found["recalibration"].figures["temperature"])
    assert found["risk_coverage"].figures["aurc"] == 1
    # Nobody's scores are needed for the bins of their histogram.
    sure = test._replace(log_probs=np.log(np.eye(12)[labels] + 1e-9))
    thresholds = calibrations._thresholds(conformal.raps, sure, np.arange(3))
    assert thresholds(0.1)["global"][0] < 1.001
    wrong = sure._replace(labels=np.full((3, 20), 11))
    thresholds = calibrations._thresholds(conformal.raps, wrong, np.arange(3))
    assert thresholds(0.1)["global"][0] == pytest.approx(1.07)


@pytest.mark.parametrize("evaluations", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_stopped_run_continues_bit_for_bit(
    straight, tmp_path, monkeypatch, ood_file, evaluations
):
    """Within the last rounds, and after them."""
    save, saved = npz_tree.save, []

    def save_and_stop(*arguments):
        save(*arguments)
        saved.append(1)
        if len(saved) == evaluations:
            raise KeyboardInterrupt

    monkeypatch.setattr(npz_tree, "save", save_and_stop)
    config = change(ood_data_file=ood_file)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, config)
    monkeypatch.undo()
    run(tmp_path, config, resume=True)
    with (
        np.load(straight / folder.CHECKPOINT) as expected,
        np.load(tmp_path / folder.CHECKPOINT) as found,
    ):
        assert expected.files == found.files
        for name in expected.files:
            assert expected[name].tobytes() == found[name].tobytes(), name
    for left, right in zip(rows_of(straight), rows_of(tmp_path), strict=True):
        assert left | {"seconds": ""} == right | {"seconds": ""}
    one, other = summary_of(straight), summary_of(tmp_path)
    measured = ("finetune_curve", "ood", "intervals", "recalibration", "conformal")
    for key in (*measured, "mean_of_last_rounds", "novel", "personal"):
        assert one[key] == other[key]


def test_the_table_shows_the_mean_of_the_last_rounds(
    straight, tmp_path, capsys, ood_file
):
    """The run is finished, by forging: nothing is trained here."""
    config = change(ood_data_file=ood_file)
    summary = summary_of(straight) | {"config": setup.resolve(config).to_dict()}
    (tmp_path / folder.SUMMARY).write_text(json.dumps(summary))
    experiment.run_all(
        [(config, RunOptions(str(tmp_path), resume=True, plot_formats=()))]
    )
    output = capsys.readouterr().out
    assert "\nmean of the last 2 of 5 rounds, test data, mean over the clie" in output
    mean = summary["mean_of_last_rounds"]["global"]["accuracy"]
    table = output[output.index("method ") :].splitlines()
    assert table[2].split()[1] == f"{mean:.2f}"


def two_models(task):
    """FedAvg with a second global model, which knows the labels in reverse."""
    plain, model = fedavg(task), task.model

    def log_probs(server, x, mask):
        straight = jax.nn.log_softmax(model.apply(server["a"].params, x, mask))
        return jnp.where(server["reverse"] > 0, straight[:, ::-1], straight)

    def assign(key, server, client, data):
        mask = jnp.arange(data.y.shape[0]) < data.size
        fits = [
            jnp.where(
                mask,
                jnp.take_along_axis(
                    log_probs({**server, "reverse": cluster}, data.x, mask),
                    data.y[:, None],
                    axis=1,
                )[:, 0],
                0.0,
            ).sum()
            for cluster in (0, 1)
        ]
        cluster = jnp.argmax(jnp.array(fits)).astype(jnp.int32)
        return cluster, {**server, "reverse": cluster}

    def client_update(key, round_index, server, client, data):
        cluster, _ = assign(key, server, client, data)
        y = jnp.where(cluster > 0, 9 - data.y, data.y)
        return plain.client_update(
            key, round_index, server["a"], (), data._replace(y=y)
        )

    return plain._replace(
        init=lambda key: {"a": plain.init(key), "reverse": jnp.int32(0)},
        broadcast=lambda server: server,
        client_update=client_update,
        server_update=lambda key, round_index, server, aggregate: {
            **server,
            "a": plain.server_update(key, round_index, server["a"], aggregate),
        },
        global_predictive=lambda key, server, x, mask: log_probs(server, x, mask)[None],
        personalise=lambda key, server, client, data: server["a"].params,
        assign=assign,
    )


def test_a_clustered_method_reports_what_it_recovers(tmp_path):
    config = change(
        cluster_transform="relabel",
        calibration_fraction=0.0,
        risk_coverage=True,
        clients=6,
        novel_clients=0,
        finetune_curve=(),
        ood_dataset=None,
        final_rounds=0,
        rounds=4,
        eval_every=4,
        seeds=1,
    )
    options = RunOptions(str(tmp_path), plot_formats=())
    summary = experiment.run(config, options, two_models)
    [own], rows = summary["per_seed"], rows_of(tmp_path)
    assert summary["true_clusters"] == [0, 0, 0, 1, 1, 1]
    assert own["clusters"] in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
    assert float(rows[-1]["adjusted_rand"]) == summary["adjusted_rand"] == 1.0
    assert summary["global"]["accuracy"] > 80  # each half has its own global model
    # Its predictions are those of its own clients' global models.
    assert 0 < summary["risk_coverage"]["global"]["aurc"] < 0.1
    assert summary["recalibration"] is None and summary["conformal"] is None


def test_novel_clients_without_test_data_are_named(tmp_path):
    loaded = load_data(change(ood_dataset=None))
    test = loaded.federated.test
    novel = setup.experiment(change(ood_dataset=None), loaded=loaded).novel
    size = np.where(np.isin(np.arange(5), novel), 0, test.size)
    federated = dataclasses.replace(loaded.federated, test=test._replace(size=size))
    with pytest.raises(ValueError, match="none of the 1 novel clients has test data"):
        setup.experiment(
            change(ood_dataset=None), loaded=loaded._replace(federated=federated)
        )


def test_a_mistake_in_the_curve_is_found_before_training(ood_file):
    def needs_epochs(task):
        if task.finetuning.epochs == 0:
            raise ValueError("epochs=0 must be at least 1")
        return fedavg(task)

    with pytest.raises(ValueError, match="epochs=0 must be at least 1"):
        setup.experiment(change(ood_dataset=None), needs_epochs)
