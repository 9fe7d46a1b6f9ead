"""Runs with all that is measured at the end: curves, novel clients, clusters, OOD."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedvi import experiment
from fedvi.algorithms import fedavg
from fedvi.experiment import folder, load_data, npz_tree, setup
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


def run(run_dir, config, **options):
    return experiment.run(config, RunOptions(str(run_dir), **options), noisy)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, ood_file):
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    before = jax.config.jax_compilation_cache_dir
    if before is None:
        cache = str(tmp_path_factory.mktemp("cache"))
        jax.config.update("jax_compilation_cache_dir", cache)
    run(run_dir, change(ood_data_file=ood_file))
    yield run_dir
    jax.config.update("jax_compilation_cache_dir", before)


def summary_of(run_dir):
    return json.loads((run_dir / folder.SUMMARY).read_text())


def rows_of(run_dir):
    with open(run_dir / folder.METRICS, newline="") as file:
        return list(csv.DictReader(file))


def test_the_folder_holds_every_file(straight):
    asked_for = {folder.SELECTION, folder.STORE}
    files = {path.name for path in straight.iterdir()}
    assert files == set(folder.RUN_FILES) - asked_for


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


def test_uncertainty_tells_the_other_data_apart(straight, ood_file):
    """Against a federation built by hand from the checkpoint, and scikit-learn."""
    found = summary_of(straight)["ood"]
    assert found["dataset"] == "noise"
    assert 0.5 < found["auroc_entropy"] <= 1
    assert found["entropy_out"] > found["entropy_in"]
    built = setup.experiment(change(ood_data_file=ood_file), noisy)
    federation = Federation(
        built.algorithm,
        built.data.train,
        built.data.test,
        selection=built.selection,
    )
    path = straight / folder.CHECKPOINT
    states, _ = npz_tree.restore(path, federation.shapes(2))
    state = take(states, 1)
    pair = federation.predictions_personal(state, built.data.test, built.ood)
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


@pytest.mark.parametrize("evaluations", [2, 3])
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
    for key in ("finetune_curve", "ood", "mean_of_last_rounds", "novel", "personal"):
        assert one[key] == other[key]


def test_the_table_shows_the_mean_of_the_last_rounds(
    straight, tmp_path, capsys, ood_file
):
    """The run is finished, by forging: nothing is trained here."""
    config = change(ood_data_file=ood_file)
    summary = summary_of(straight) | {"config": setup.resolve(config).to_dict()}
    (tmp_path / folder.SUMMARY).write_text(json.dumps(summary))
    experiment.run_all([(config, RunOptions(str(tmp_path), resume=True))])
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
        clients=6,
        novel_clients=0,
        finetune_curve=(),
        ood_dataset=None,
        final_rounds=0,
        rounds=4,
        eval_every=4,
        seeds=1,
    )
    summary = experiment.run(config, RunOptions(str(tmp_path)), two_models)
    [own], rows = summary["per_seed"], rows_of(tmp_path)
    assert summary["true_clusters"] == [0, 0, 0, 1, 1, 1]
    assert own["clusters"] in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
    assert float(rows[-1]["adjusted_rand"]) == summary["adjusted_rand"] == 1.0
    assert summary["global"]["accuracy"] > 80  # each half has its own global model


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
