"""A run from configuration to run folder; the runs are shared by the assertions."""

import csv
import dataclasses
import errno
import json
import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import __version__, algorithms, data, experiment
from fedvi.experiment import (
    checkpoint,
    folder,
    load_data,
    load_run,
    npz_tree,
    recorder,
    report,
    setup,
)
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.federation import Federation
from fedvi.folder_lock import FolderLock

CONFIG = ExperimentConfig(
    algorithm="fedavg",
    dataset="digits",
    partition="iid",
    clients=5,
    model="logistic",
    augment=False,
    fraction=0.6,
    rounds=4,
    eval_every=2,
    finetune_epochs=1,
    seed=7,
    seeds=2,
)


RESOLVED = setup.resolve(CONFIG).to_dict()


def change(config=CONFIG, **changes):
    return dataclasses.replace(config, **changes)


def options(run_dir, plot_formats=(), **more):
    """Pictures, which take longer than such a run, only where they are asked for."""
    return RunOptions(run_dir=str(run_dir), plot_formats=plot_formats, **more)


def rows_of(run_dir):
    with open(run_dir / folder.METRICS, newline="") as file:
        return list(csv.DictReader(file))


def arrays_of(run_dir):
    with np.load(run_dir / folder.CHECKPOINT) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Runs of one configuration compile once."""
    before = jax.config.jax_compilation_cache_dir
    if before is None:
        cache = str(tmp_path_factory.mktemp("cache"))
        jax.config.update("jax_compilation_cache_dir", cache)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, compiled):
    """The folder of a finished run of `CONFIG`."""
    path = tmp_path_factory.mktemp("runs") / "straight"
    returned = experiment.run(CONFIG, options(path, ["png"]))
    assert summary_of(path) == json.loads(json.dumps(returned))
    return path


def summary_of(run_dir):
    return json.loads((run_dir / folder.SUMMARY).read_text())


def test_the_folder_holds_every_file(run_dir):
    pictures = "learning_curves", "uncertainty", "reliability", "per_client"
    kept = {
        name
        for name in folder.RUN_FILES
        if not name.endswith(tuple(f".{kind}" for kind in folder.FORMATS))
    } - {folder.SELECTION, folder.STORE}
    drawn = {f"{name}.png" for name in pictures}
    assert {path.name for path in run_dir.iterdir()} == kept | drawn
    config = json.loads((run_dir / folder.CONFIG).read_text())
    assert config == {"fedvi": __version__} | RESOLVED
    for name in drawn:
        assert (run_dir / name).read_bytes()[:4] == b"\x89PNG"


def test_there_is_a_row_per_evaluation_and_seed(run_dir):
    rows = rows_of(run_dir)
    places = [(int(row["round"]), int(row["seed"])) for row in rows]
    assert places == [(0, 7), (0, 8), (2, 7), (2, 8), (4, 7), (4, 8)]
    assert all(row["split"] == "test" for row in rows)
    first, rest = rows[:2], rows[2:]
    assert all(row["seconds"] == row["loss"] == "" for row in first)
    assert all(float(row["seconds"]) > 0 and float(row["loss"]) > 0 for row in rest)
    assert all(float(row["global_accuracy"]) < 50 for row in first)  # untrained
    assert [row["personal_accuracy"] != "" for row in rows] == [False] * 4 + [True] * 2


def test_the_summary_holds_what_is_promised(run_dir):
    summary = summary_of(run_dir)
    assert (summary["algorithm"], summary["dataset"]) == ("fedavg", "digits")
    assert summary["method"] == "fedavg"
    assert (summary["rounds"], summary["seeds"]) == (4, [7, 8])
    assert summary["evaluated_on"] == "test"
    for model in ("global", "personal"):
        assert {"accuracy", "nll", "ece", "mce", "brier"} <= summary[model].keys()
        assert 0 < summary[model]["entropy"] < np.log(10)
        assert summary[model]["mutual_information"] == 0  # one sample
        assert 70 < summary[model]["accuracy"] <= 100
        assert summary[model]["examples"] == 360
    assert summary["config"] == RESOLVED
    assert summary["config"]["options"]["server_optimizer"] == "sgd"
    assert len(summary["data_sha256"]) == 64
    assert not summary["failed"]
    assert summary["compile_seconds"] > 0
    assert not any(summary["problems"].values())
    assert (summary["participants"], summary["clients"]) == (3, 5)
    not_asked = ("mean_of_last_rounds", "window", "finetune_curve", "ood", "novel")
    assert all(summary[key] is None for key in not_asked)
    assert "digits" in summary["data"] and "cpu" in summary["device"]
    assert summary["class_names"] is None  # they are 0, 1, ...


def test_the_summary_agrees_with_the_rows(run_dir):
    summary, rows = summary_of(run_dir), rows_of(run_dir)
    accuracies = np.array([float(row["global_accuracy"]) for row in rows])
    assert summary["global"]["accuracy"] == pytest.approx(accuracies[4:].mean())
    assert summary["global_std_over_seeds"]["accuracy"] == pytest.approx(
        accuracies[4:].std(ddof=1)
    )
    best = accuracies.reshape(3, 2).max(axis=0)
    assert summary["best_on_test_global_accuracy"] == pytest.approx(best.mean())
    assert summary["round_seconds"] == pytest.approx(
        np.median([float(row["seconds"]) for row in rows[2:]])
    )


def test_bytes_are_those_of_the_model_and_the_weight(run_dir):
    summary, model = summary_of(run_dir), 4 * (64 * 10 + 10)
    assert summary["bytes_down"] == 3 * model
    assert summary["bytes_up"] == 3 * (model + 4)


def test_a_finished_run_is_not_touched(run_dir, capsys):
    before = {p.name: p.read_bytes() for p in run_dir.iterdir()}
    with pytest.raises(ValueError, match="already holds a finished run"):
        experiment.run(CONFIG, options(run_dir))
    with pytest.raises(ValueError, match="epochs is 1 there and 2 here"):
        experiment.run(change(epochs=2), options(run_dir, resume=True))
    with pytest.raises(ValueError, match="missing.npz"):
        experiment.run(
            change(data_file="missing.npz"), options(run_dir, overwrite=True)
        )
    with pytest.raises(ValueError, match="exclude each other"):
        experiment.run(CONFIG, options(run_dir, overwrite=True, resume=True))
    capsys.readouterr()
    experiment.run_all([(CONFIG, options(run_dir, resume=True))])
    output = capsys.readouterr().out
    assert "finished: nothing to do" in output
    assert "method (personal)" in output and str(run_dir) in output
    assert {p.name: p.read_bytes() for p in run_dir.iterdir()} == before


def test_a_stopped_run_continues_bit_for_bit(run_dir, tmp_path, monkeypatch, capsys):
    save = npz_tree.save

    def save_and_stop(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(npz_tree, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(CONFIG, options(tmp_path))
    assert not (tmp_path / folder.SUMMARY).exists()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="already holds an unfinished run"):
        experiment.run(CONFIG, options(tmp_path))
    experiment.run(CONFIG, options(tmp_path, resume=True))
    assert "resumed after round 2 of 4" in capsys.readouterr().out

    straight, resumed = arrays_of(run_dir), arrays_of(tmp_path)
    assert straight.keys() == resumed.keys()
    for name in straight:
        np.testing.assert_array_equal(straight[name], resumed[name], err_msg=name)
    for left, right in zip(rows_of(run_dir), rows_of(tmp_path), strict=True):
        assert left | {"seconds": ""} == right | {"seconds": ""}


def copied(run_dir, where, names=None):
    where.mkdir(exist_ok=True)
    for name in names or [file.name for file in run_dir.iterdir()]:
        (where / name).write_bytes((run_dir / name).read_bytes())
    return where


def contents(where):
    return {path.name: path.read_bytes() for path in where.iterdir()}


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_live_run_is_left_alone(run_dir, tmp_path, flags):
    """C34: a start, a resume, an overwrite, alone and as the second of two methods."""
    one = copied(run_dir, tmp_path / "a")
    other = options(tmp_path / "b", **flags)
    with FolderLock(one):
        before = contents(one)
        with pytest.raises(ValueError, match=f"run_dir={one} is in use: process"):
            experiment.run(CONFIG, options(one, **flags))
        runs = [
            (change(algorithm="local_only"), other),
            (CONFIG, options(one, **flags)),
        ]
        with pytest.raises(ValueError, match=f"run_dir={one} is in use: process"):
            experiment.run_all(runs)
        assert contents(one) == before
    with FolderLock(tmp_path):  # the folder of their comparison
        with pytest.raises(ValueError, match=f"run_dir={tmp_path} is in use"):
            experiment.run_all(runs)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "name", [folder.CHECKPOINT, folder.METRICS, "reliability.png", folder.SUMMARY]
)
def test_a_full_disk_ends_in_one_line_and_can_be_resumed(
    run_dir, tmp_path, monkeypatch, name
):
    """C31: at the second time that a file is written, of those written but once at the
    first."""
    fsync, seen = os.fsync, []

    def full(file):
        path = os.readlink(f"/proc/self/fd/{file}")
        if os.path.basename(path).startswith(name):
            seen.append(path)
            if len(seen) == (2 if name in (folder.CHECKPOINT, folder.METRICS) else 1):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError) as error:
        experiment.run(CONFIG, options(tmp_path, ["png"] * (name == "reliability.png")))
    monkeypatch.undo()
    message = str(error.value)
    assert f"run_dir={tmp_path} cannot be written to ({name}" in message
    assert "No space left" in message and "\n" not in message
    # Pictures come last, and are drawn again by themselves.
    finished = name == "reliability.png"
    assert ("--resume", "`fedvi report`")[finished] in message
    assert (tmp_path / folder.SUMMARY).exists() == finished
    experiment.run(CONFIG, options(tmp_path, resume=True))
    straight, resumed = arrays_of(run_dir), arrays_of(tmp_path)
    for name in straight:
        np.testing.assert_array_equal(straight[name], resumed[name], err_msg=name)
    for left, right in zip(rows_of(run_dir), rows_of(tmp_path), strict=True):
        assert left | {"seconds": ""} == right | {"seconds": ""}


def test_a_folder_that_is_gone_does_not_come_back(tmp_path, monkeypatch, compiled):
    """C31: a network drive. What is written where it was would hide it."""
    save = npz_tree.save

    def save_and_lose(*arguments):
        save(*arguments)
        os.rename(tmp_path / "run", tmp_path / "gone")

    monkeypatch.setattr(npz_tree, "save", save_and_lose)
    with pytest.raises(ValueError, match="cannot be written to .metrics.csv: No such"):
        experiment.run(CONFIG, options(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


METRICS_EDITS = {
    "cut": lambda text: text[: text.index("\n") + 1],
    "a round less": lambda text: "".join(
        line for line in text.splitlines(True) if not line.startswith("2,8")
    ),
    "a word": lambda text: text.replace(",test,", ",test,fast", 1),
    "no round": lambda text: text.replace("\n2,", "\ntwo,", 1),
    "a cell more": lambda text: text.replace("\n2,", "\n2,2,", 1),
    "another file": lambda text: "{}",
    "binary": lambda text: "\0" * 99,
}


@pytest.mark.parametrize("edit", METRICS_EDITS)
def test_metrics_that_were_changed_are_named(run_dir, tmp_path, edit):
    """C36, before anything is compiled or written."""
    names = (folder.CONFIG, folder.METRICS, folder.CHECKPOINT)
    copied(run_dir, tmp_path, names)
    path = tmp_path / folder.METRICS
    path.write_text(METRICS_EDITS[edit](path.read_text()))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="metrics.csv") as error:
        experiment.run(CONFIG, options(tmp_path, resume=True))
    assert "\n" not in str(error.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"config": 3}', None, "\0"])
def test_a_summary_that_was_changed_is_named(run_dir, tmp_path, text):
    """C36."""
    copied(run_dir, tmp_path)
    path = tmp_path / folder.SUMMARY
    if text is None:  # of this very run, without its figures
        text = json.dumps(summary_of(run_dir) | {"per_seed": [{}]})
    path.write_text(text)
    with pytest.raises(ValueError, match="summary.json was changed or cut short .*put"):
        experiment.run(CONFIG, options(tmp_path, resume=True))
    path.unlink()  # as the line says
    summary = experiment.run(CONFIG, options(tmp_path, resume=True))
    assert summary["global"] == summary_of(run_dir)["global"]


@pytest.mark.parametrize("notes", [{}, {"config": 3, "round": 1, "problems": {}}])
def test_a_checkpoint_without_notes_is_named(run_dir, tmp_path, notes):
    """C36; `config.json` is only written: what a run is, its checkpoint says."""
    copied(run_dir, tmp_path, (folder.CONFIG, folder.METRICS))
    (tmp_path / folder.CONFIG).write_text("{")
    npz_tree.save(tmp_path / folder.CHECKPOINT, {"a": 1.0}, notes)
    with pytest.raises(ValueError, match=r"checkpoint.npz holds no notes of a run"):
        experiment.run(CONFIG, options(tmp_path, resume=True))


def test_eight_devices_give_the_result_of_one(run_dir, tmp_path):
    """In rows of two, which hold a model's layers together."""
    devices = options(tmp_path, devices=8, model_devices=2)
    summary = experiment.run(CONFIG, devices)
    assert summary["device"].startswith("8 x cpu")
    straight, spread = arrays_of(run_dir), arrays_of(tmp_path)
    assert straight.keys() == spread.keys()
    for name in straight.keys() - {"metadata"}:
        np.testing.assert_allclose(
            straight[name], spread[name], rtol=1e-6, atol=1e-6, err_msg=name
        )


def test_a_resume_needs_the_same_data_at_any_place(run_dir, tmp_path, capsys):
    def config_of(name, change_one=0):
        dataset = data.load("digits")
        split = {key: getattr(dataset, key) for key in ("train_x", "test_x", "test_y")}
        train_y = dataset.train_y.copy()
        train_y[0] = (train_y[0] + change_one) % 10
        np.savez(tmp_path / name, **split, train_y=train_y)
        return change(data_file=str(tmp_path / name))

    copied(run_dir, tmp_path)
    again = options(tmp_path, resume=True)
    with pytest.raises(ValueError, match="data_sha256 is '.* there and '.* here"):
        experiment.run(config_of("other.npz", change_one=1), again)
    capsys.readouterr()
    experiment.run(config_of("moved.npz"), again)
    assert "finished: nothing to do" in capsys.readouterr().out


def test_a_resume_needs_the_same_settings(run_dir):
    message = "cluster_transform is .* and 'rotate' here; .*novel_clients is 0 there"
    config = change(novel_clients=1, cluster_transform="rotate")
    with pytest.raises(ValueError, match=message):
        experiment.run(config, options(run_dir, resume=True))


def test_a_run_stopped_after_its_last_checkpoint_only_finishes(run_dir, tmp_path):
    copied(run_dir, tmp_path, (folder.CONFIG, folder.METRICS, folder.CHECKPOINT))
    summary = experiment.run(CONFIG, options(tmp_path, resume=True))
    assert summary["personal"] == summary_of(run_dir)["personal"]
    assert len(rows_of(tmp_path)) == 6


def test_an_extended_run_is_a_straight_one(tmp_path, compiled, capsys):
    """Bit for bit, where nothing depends on the number of rounds."""
    config = change(lr_decay_at=(), rounds=2)
    folders = [tmp_path / "extended", tmp_path / "straight"]
    experiment.run(config, options(folders[0]))
    with pytest.raises(ValueError, match="epochs is 1 there and 2 here"):
        longer = change(config, rounds=4, epochs=2)
        experiment.run(longer, options(folders[0], resume=True))
    capsys.readouterr()
    for path in folders:
        experiment.run(change(config, rounds=4), options(path, resume=True))
    output = capsys.readouterr().out
    assert "4 rounds in place of 2, of which 2 are done: nothing else depends" in output
    first, second = map(arrays_of, folders)
    for name in second.keys() - {"metadata"}:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    rows = [rows_of(path) for path in folders]
    for left, right in zip(*rows, strict=True):
        kept = {k: v for k, v in right.items() if v and k != "seconds"}
        assert kept == {k: left[k] for k in kept}
    measured = [row["personal_nll"] != "" for row in rows[0]]
    assert measured == [False, False, True, True, True, True]
    first, second = map(summary_of, folders)
    assert first["extended_from"] == [{"rounds": 2, "done": 2}]
    assert second["extended_from"] == []
    assert first["per_seed"] == second["per_seed"]
    experiment.run(change(config, rounds=4), options(folders[0], resume=True))
    assert "finished: nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match="rounds=3 is fewer than the 4 that the run"):
        experiment.run(change(config, rounds=3), options(folders[0], resume=True))
    run = load_run(folders[0])
    assert run.states.round.tolist() == [4, 4] and run.config.rounds == 4


def test_a_finished_run_is_measured_anew(run_dir, tmp_path, monkeypatch, capsys):
    """By other settings of evaluation: nothing is trained, and a kill loses nothing."""
    copied(run_dir, tmp_path)
    again = options(tmp_path, resume=True)
    config = change(finetune_epochs=0, finetune_curve=(0,))
    old, before = summary_of(tmp_path), rows_of(tmp_path)
    monkeypatch.setattr(Federation, "rounds", None)

    def stop(*arguments, **keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recorder.report, "summary", stop)
        with pytest.raises(KeyboardInterrupt):
            experiment.run(config, again)
    assert summary_of(tmp_path) == old
    capsys.readouterr()
    experiment.run(CONFIG, again)  # what was half measured does not stay
    assert "nothing to do" not in capsys.readouterr().out
    assert summary_of(tmp_path)["per_seed"] == old["per_seed"]
    assert rows_of(tmp_path) == before

    found = experiment.run(config, again)
    assert "finetune_epochs is 1 there and 0 here" in capsys.readouterr().out
    assert found["personal"] == found["global"] == old["global"] != old["personal"]
    assert found["finetune_curve"]["epochs"] == [0]
    rows = rows_of(tmp_path)
    assert rows[:4] == before[:4]
    for left, right in zip(rows[4:], before[4:]):
        assert left["personal_nll"] == left["global_nll"] == right["global_nll"]
        assert [left[k] for k in ("seconds", "loss")] == [
            right[k] for k in ("seconds", "loss")
        ]
    run = load_run(tmp_path)
    assert run.config.finetune_epochs == 0
    personal = np.array([row["personal_nll"] for row in run.per_client()])
    measured = run.scores["global"].nll / run.scores["global"].count
    np.testing.assert_allclose(personal, measured.ravel(), rtol=1e-6)
    experiment.run(config, again)
    assert "finished: nothing to do" in capsys.readouterr().out


def test_what_training_depends_on_stays(tmp_path):
    """And figures of two kinds do not meet in one mean."""
    path = tmp_path / folder.CHECKPOINT

    def error_of(there, done, **here):
        built = setup.experiment(change(there, **here), loaded=load_data(CONFIG))
        config = setup.identity(setup.resolve(there).to_dict(), built.data_sha256)
        notes = {"config": config, "round": done, "problems": {}, "extended_from": []}
        npz_tree.save(path, {}, notes)
        try:
            checkpoint.restore_run(built, tmp_path, {})
        except ValueError as error:
            return str(error)

    assert error_of(CONFIG, 4, finetune_epochs=3) is None
    assert error_of(CONFIG, 2, finetune_curve=(1,), rounds=8) is None
    for there, done, here in (
        (CONFIG, 2, {"finetune_epochs": 3}),  # in the middle
        (change(window=2), 4, {"finetune_epochs": 3}),
        (change(final_rounds=2), 4, {"eval_batch_size": 3}),
        (CONFIG, 4, {"momentum": 0.5}),
        (CONFIG, 4, {"eval_every": 1}),
    ):
        [name] = here
        assert f"{name} is " in error_of(there, done, **here)


def test_an_extended_run_says_what_becomes_of_the_learning_rate(tmp_path):
    """And its rows are those of each of its stretches."""
    config = change(rounds=8, final_rounds=2, seeds=1, seed=0)
    extended = [{"rounds": 5, "done": 5}, {"rounds": 9, "done": 6}]
    line = checkpoint._extension(config, 5, 5)
    assert line == (
        "8 rounds in place of 5, of which 5 are done with the learning rates of a run "
        "of 5: from now on those of a run of 8, which decay after rounds 4, 6"
    )
    file = folder.CsvFile(tmp_path / folder.METRICS)
    file.append(*({"round": r, "seed": 0} for r in (0, 2, 4, 5, 6, 7, 8)))
    checkpoint.check_rows(config, tmp_path, 8, extended)
    with pytest.raises(ValueError, match="an unexpected row of round 5, seed 0"):
        checkpoint.check_rows(config, tmp_path, 8)


@pytest.mark.parametrize("name", ["pfedbayes", "fedabml", "fedhb_niw"])
def test_settings_of_evaluation_change_nothing_in_training(name):
    network = {"model": "mlp", "hidden": (4,), "optimizer": "adam"}
    built = setup.experiment(change(algorithm=name, **network))
    other = {"num_samples": 3, "prediction": "sample", "finetune_steps": 2}
    names = built.evaluation_settings()
    changed = {k: v for k, v in other.items() if names.get(f"options.{k}") == "rows"}
    assert changed
    tuning = built.task.finetuning._replace(epochs=3, learning_rate=1e-5)
    algorithms_ = [
        built.algorithm,
        built.build_algorithm(built.task._replace(finetuning=tuning), **changed),
    ]

    def update(algorithm, key, data):
        server = algorithm.init(key)
        client = algorithm.init_client(key, server)
        return algorithm.client_update(key, jnp.int32(0), server, client, data)

    train = jax.tree.map(lambda leaf: leaf[0], built.data.train)
    texts = [
        str(jax.make_jaxpr(partial(update, one))(jax.random.key(0), train))
        for one in algorithms_
    ]
    assert re.sub("0x[0-9a-f]+", "", texts[0]) == re.sub("0x[0-9a-f]+", "", texts[1])


def test_validation_is_named_everywhere(tmp_path, compiled, capsys):
    config = change(
        validation_fraction=0.2,
        rounds=3,
        eval_every=2,
        personal_every=2,
        seeds=1,
        finetune_epochs=0,
    )
    experiment.run_all([(config, options(tmp_path, checkpoint_every=5))])
    output = capsys.readouterr().out
    assert "validation accuracy" in output and "validation data" in output
    summary = summary_of(tmp_path)
    assert summary["evaluated_on"] == "validation"
    assert "best_on_validation_global_accuracy" in summary
    assert summary["global_std_over_seeds"] is None
    assert summary["global"]["examples"] == pytest.approx(0.2 * 1437, abs=5)
    rows = rows_of(tmp_path)
    assert [row["round"] for row in rows] == ["0", "2", "3"]
    assert all(row["split"] == "validation" for row in rows)
    assert all(row["personal_accuracy"] for row in rows)
    assert (tmp_path / folder.CHECKPOINT).exists()


def diverges(task, factor=jnp.nan):
    """FedAvg whose server breaks in the second round."""
    fedavg = algorithms.fedavg(task)

    def server_update(key, round_index, server, aggregate):
        server = fedavg.server_update(key, round_index, server, aggregate)
        return jax.tree.map(
            lambda p: jnp.where(round_index == 1, factor * p, p), server
        )

    return fedavg._replace(server_update=server_update)


def test_what_is_finite_can_be_absurd(tmp_path, compiled, capsys):
    """C21: finite to the end, and yet failed, in all that tells of the run."""
    config = change(seeds=1, rounds=2, finetune_epochs=0)
    summary = experiment.run(config, options(tmp_path), partial(diverges, factor=1e14))
    [seed] = summary["per_seed"]
    assert seed["finite"] and seed["failed"] and summary["failed"]
    assert "NLL of the global model is" in seed["failure"]
    assert report.failures(summary) == {7: seed["failure"]}
    assert "fedavg (failed)" in report.comparison([summary], [options(tmp_path)])
    assert "WARNING: seed 7: the NLL of the global model" in capsys.readouterr().out


def test_neither_clients_nor_server_can_stop_a_run(tmp_path, compiled, capsys):
    """Client 1 returns NaN, client 2 is empty, and at last the server breaks."""
    config = change(fraction=1.0, seeds=1, clients=4, rounds=2, finetune_epochs=0)
    loaded = load_data(config)
    train = loaded.federated.train
    x, size = train.x.astype(np.float32), train.size.copy()
    x[1, 0], size[2] = np.nan, 0
    federated = dataclasses.replace(
        loaded.federated,
        train=train._replace(x=x, size=size),
        test=loaded.federated.test._replace(
            x=loaded.federated.test.x.astype(np.float32)
        ),
    )
    loaded = loaded._replace(federated=federated)
    summary = experiment.run(config, options(tmp_path), diverges, loaded=loaded)
    assert summary["problems"] == {
        "empty": {"2": 2},
        "failed": {"1": 2},
        "lost_rounds": {},
        "invalid": {},
        "equal_chances": {},
    }
    assert not summary["per_seed"][0]["finite"]
    assert summary["per_seed"][0]["failed"] and summary["failed"]
    assert summary_of(tmp_path)["global"]["nll"] is None
    assert summary["clients_with_data"] == 3
    output = capsys.readouterr().out
    assert "without training data, skipped: client 2" in output
    assert "left out client 1: NaN, infinity or an absurd number returned" in output
    assert "WARNING: seed 7: the server's state is not finite after round 2" in output


def test_a_run_whose_rounds_are_all_lost_has_failed(tmp_path, compiled, capsys):
    """The server stays finite: it stays as it was."""
    config = change(seeds=1, rounds=1, learning_rate=1e38, finetune_epochs=0)
    runs = [(config, options(tmp_path, ["png"]))]
    [summary] = experiment.run_all(runs)
    assert summary["problems"]["lost_rounds"] == {"7": 1}
    assert summary["per_seed"][0]["finite"] and summary["failed"]
    assert "\nfedavg (failed) " in capsys.readouterr().out
    assert (tmp_path / "reliability.png").exists()


@pytest.mark.parametrize(
    "second",
    [
        change(algorithm="fedbabu"),
        change(algorithm="fedprox", options={"mu": -1}),
    ],
)
def test_every_algorithm_is_built_before_the_first_one_trains(tmp_path, second):
    runs = [(CONFIG, options(tmp_path / "1")), (second, options(tmp_path / "2"))]
    with pytest.raises(ValueError, match="fedbabu|mu=-1"):
        experiment.run_all(runs)
    assert list(tmp_path.iterdir()) == []


def test_a_resume_without_a_checkpoint_says_so(tmp_path, compiled, capsys):
    config = change(seeds=1, rounds=1, finetune_epochs=0)
    experiment.run(config, options(tmp_path / "new", resume=True))
    assert "new holds no checkpoint: starting with the" in capsys.readouterr().out


def test_an_unusable_run_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="run_dir=.*file is a file"):
        experiment.run(CONFIG, options(tmp_path / "file"))
    for run_dir in (tmp_path / "file" / "below", tmp_path / ("long" * 100)):
        with pytest.raises(ValueError, match="run_dir=.* cannot be made"):
            experiment.run(CONFIG, options(run_dir))
    with pytest.raises(ValueError, match="run_dir=.*file is a file"):
        experiment.run(CONFIG, options(tmp_path / "file", overwrite=True))


def test_several_algorithms_end_in_one_table(run_dir, tmp_path, capsys):
    """Both are finished, the second by forging: nothing is trained here."""
    config = change(algorithm="local_only")
    summary = summary_of(run_dir) | {
        "algorithm": "local_only",
        "method": "local_only",
        "config": setup.resolve(config).to_dict(),
    }
    (tmp_path / folder.SUMMARY).write_text(json.dumps(summary))
    runs = [
        (CONFIG, options(run_dir, resume=True)),
        (config, options(tmp_path, resume=True)),
    ]
    assert experiment.run_all(runs) == [summary_of(run_dir), summary]
    output = capsys.readouterr().out
    table = output[output.index("method ") :].splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["fedavg", "local_only"]
    assert table[-2:] == [f"  {run_dir}", f"  {tmp_path}"]
    with pytest.raises(ValueError, match="algorithm='fedfoo'"):
        experiment.run_all([*runs, (change(algorithm="fedfoo"), options(tmp_path))])
