"""A run folder, loaded: one small run, shared by the assertions."""

import contextlib
import gc
import importlib.machinery
import json
import re
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedvi
from fedvi import experiment
from fedvi.algorithms import builder, fedavg
from fedvi.client_store import ClientStore
from fedvi.distributions import mean_field
from fedvi.experiment import folder, load_data, npz_tree
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.federation import take
from fedvi.options import Options, option

SITES = [f"hospital_{site}" for site in (10, 2, 1, 3)]


class Keeper(Options):
    """Options of `keeper`."""

    width: float = option(0.1, "σ of every posterior.", above=0)
    unused: int = option(1, "Nothing.")


@builder(Keeper)
def keeper(task, options):
    """FedAvg whose clients keep what they trained last, and predict with it."""
    base = fedavg(task)

    def distribution(params):
        return mean_field.distribution(mean_field.init(params, options.width))

    def init_client(key, server):
        return {"params": server.params, "visits": jnp.int32(0)}

    def client_update(key, round_index, server, client, data):
        output = base.client_update(key, round_index, server, (), data)
        params = jax.tree.map(jnp.add, server.params, output.upload)
        return output._replace(
            client={"params": params, "visits": client["visits"] + 1}
        )

    return base._replace(
        name="keeper",
        init_client=init_client,
        client_update=client_update,
        kept=lambda server, client: (client["visits"] > 0, client["params"]),
        posterior=lambda server: distribution(server.params),
        personal_posterior=lambda server, params: distribution(params),
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Three classes of six features at four hospitals, of which one never trains."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 46), ("test", 24)):
        y = np.arange(n) % 3
        arrays[f"{split}_x"] = (rng.normal(size=(n, 6)) + y[:, None]).astype(np.float32)
        arrays[f"{split}_y"] = np.array(["ant", "bee", "cat"])[y]
        arrays[f"{split}_group"] = np.array(SITES)[np.arange(n) // 3 % 4]
    path = tmp_path_factory.mktemp("data") / "three.npz"
    np.savez(path, **arrays)
    return ExperimentConfig(
        algorithm="keeper",
        options={"width": 0.2},
        data_file=str(path),
        partition="by_group",
        novel_clients=1,
        model="logistic",
        fraction=1.0,
        rounds=2,
        eval_every=1,
        personal_every=1,
        finetune_epochs=1,
        seed=5,
        seeds=2,
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("runs") / "kept"
    options = RunOptions(run_dir=str(path), devices=1, plot_formats=())
    experiment.run(config, options, keeper)
    return path


@pytest.fixture(scope="module")
def run(run_dir):
    return fedvi.load_run(run_dir, builder=keeper)


def copied(run_dir, path, *left_out):
    shutil.copytree(run_dir, path, ignore=shutil.ignore_patterns(*left_out))
    return path


def files_of(path):
    """Every file below a folder, with its bytes and the time of its last change."""
    return {
        p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None)
        for p in path.rglob("*")
    }


def test_a_kept_posterior_needs_three_lines_and_no_program(run_dir, capsys):
    run = fedvi.load_run(run_dir, builder=keeper)
    client = int(run.experiment.trained[-1])
    posterior = run.posterior(client=client, seed=6)
    assert run.federation.compile_seconds == 0
    own = jax.tree.map(lambda leaf: leaf[1, client], run.states.clients["params"])
    jax.tree.map(np.testing.assert_array_equal, posterior.mean(), fedvi.trees(own))
    for leaf in jax.tree.leaves(posterior.stddev()):
        np.testing.assert_allclose(leaf, 0.2, rtol=1e-6)
    assert not capsys.readouterr().out
    by_id = run.posterior(client=run.data.ids[client], seed=6)
    jax.tree.map(np.testing.assert_array_equal, by_id.mean(), posterior.mean())


def test_a_client_that_kept_nothing_adapts_and_says_so(run, capsys):
    novel = int(run.experiment.novel[0])
    own = run.posterior(client=novel)
    line = f"client {novel} keeps no model of its own: it adapts"
    assert line in capsys.readouterr().out and run.federation.compile_seconds > 0
    start = run.posterior()
    gaps = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), own.mean(), start.mean())
    assert 0 < max(jax.tree.leaves(gaps)) < 0.1
    assert not capsys.readouterr().out


def test_predictions_are_those_of_the_evaluation(run):
    novel = int(run.experiment.novel[0])
    test = run.data.test
    for client in (int(run.experiment.trained[0]), novel, None):
        k = client or 0
        x, y = (np.asarray(a[k, : test.size[k]]) for a in (test.x, test.y))
        found = run.predict(x, client=client, seed=6)
        scores = run.scores["global" if client is None else "personal"]
        p = found.probabilities
        nll = -np.log(p[np.arange(len(y)), y]).sum()
        np.testing.assert_allclose(nll, scores.nll[1, k], rtol=1e-5)
        assert (p.argmax(-1) == y).sum() == scores.correct[1, k]
        np.testing.assert_allclose(found.entropy, -(p * np.log(p)).sum(-1), rtol=1e-4)
        assert (found.mutual_information < 1e-6).all()  # one sample
    many = np.repeat(x, 5, axis=0)
    again = run.predict(many.astype(np.float64), client=None, seed=6)
    np.testing.assert_allclose(again.probabilities, np.repeat(p, 5, 0), rtol=1e-5)
    assert run.predict(x[:0]).probabilities.shape == (0, 3)
    assert run.predict(x[:1]).entropy.shape == (1,)


@pytest.mark.parametrize(
    "x, error",
    [
        (np.zeros((2, 5), np.float32), r"x has shape \(2, 5\): it must be \(n, 6\)"),
        (np.zeros((2, 6), np.uint8), "x is uint8 and the training inputs float32"),
        (np.full((2, 6), np.nan), "x is not finite"),
        (np.full((40, 6), 1e3), "the training inputs and x are on different scales"),
    ],
)
def test_what_no_model_was_trained_for_is_refused(run, x, error):
    with pytest.raises(ValueError, match=error):
        run.predict(x)


def test_metrics_are_tidy(run):
    rows = run.metrics
    assert set(rows[0]) == {
        *("method", "width", "seed", "round", "split", "model", "metric", "value")
    }
    assert {row["width"] for row in rows} == {0.2}  # changed, and `unused` is not
    models = {"training", "global", "personal", "novel_global", "novel_personal"}
    assert {row["model"] for row in rows} == models
    found = {
        (row["seed"], row["round"], f"{row['model']}_{row['metric']}"): row["value"]
        for row in rows
    }
    assert len(found) == len(rows)
    for row in run.evaluations:
        place = row.pop("seed"), row.pop("round")
        assert row.pop("split") == "test"
        for key, value in row.items():
            own = key.startswith(("global_", "personal_", "novel_"))
            name = key if own else f"training_{key}"
            assert found.pop((*place, name), None) == value
    assert not found


def test_clients_are_described_one_by_one(run):
    rows, data = run.per_client(), run.data
    assert [row["seed"] for row in rows] == [5] * 4 + [6] * 4
    assert [row["id"] for row in rows[:4]] == sorted(
        SITES, key=lambda s: int(s.split("_")[1])
    )
    for row in rows:
        seed, k = row["seed"] - 5, row["client"]
        size = data.train.size[k]
        labels = data.train.y[k, :size]
        for label, name in enumerate(("ant", "bee", "cat")):
            assert row[f"train_class_{name}"] == (labels == label).sum()
        assert (row["train_size"], row["test_size"]) == (size, data.test.size[k])
        assert row["novel"] == (k in run.experiment.novel)
        for model, scores in run.scores.items():
            own = jax.tree.map(lambda leaf, seed=seed, k=k: leaf[seed, k], scores)
            assert row[f"{model}_nll"] == pytest.approx(own.nll / own.count)
            accuracy = 100 * own.correct / own.count
            assert row[f"{model}_accuracy"] == pytest.approx(accuracy)
            gaps = np.abs(own.bin_correct - own.bin_confidence).sum()
            assert row[f"{model}_ece"] == pytest.approx(gaps / own.count)


def test_a_run_is_only_read(run_dir, tmp_path, config):
    before = files_of(run_dir)
    run = fedvi.load_run(run_dir, builder=keeper)
    run.posterior(client=0)
    assert run.per_client() and run.metrics and run.scores
    assert files_of(run_dir) == before
    assert run.state(6).key == run.states.key[1]


@pytest.fixture
def streamed_dir(run, run_dir, tmp_path):
    """The same run as `--stream` leaves it: clients that took part are in stores."""
    path = copied(run_dir, tmp_path / "streamed")
    states = run.states
    for i in range(2):
        own = take(states, i)
        store = ClientStore(
            take(own.clients, 0), 4, path / folder.STORE / f"run_{i:03d}"
        )
        met = run.experiment.trained
        store.write(met, own.clients, met)
        key = np.asarray(jax.random.key_data(own.key)).tobytes().hex()
        store.commit({"key": key, "round": 2})
        store.settle()
        del store
    metadata = npz_tree.read_metadata(path / folder.CHECKPOINT)
    npz_tree.save(path / folder.CHECKPOINT, states._replace(clients=()), metadata)
    gc.collect()  # with the stores go their locks
    return path


def test_a_streamed_run_is_only_read_too(run, streamed_dir):
    before = files_of(streamed_dir)
    streamed = fedvi.load_run(streamed_dir, builder=keeper)
    for seed in run.seeds:
        for client in run.experiment.trained.tolist():
            found = [a.posterior(client, seed).mean() for a in (run, streamed)]
            jax.tree.map(np.testing.assert_array_equal, *found)
        novel = int(run.experiment.novel[0])
        assert not streamed.federation.kept(streamed.state(seed), novel)[0]
    assert streamed.federation.compile_seconds == 0
    with pytest.raises(ValueError, match="opened to be read only"):
        streamed.federation.store.write(
            np.array([0]), take(run.states.clients, (0, [0]))
        )
    assert files_of(streamed_dir) == before


def test_an_unfinished_run_has_what_there_is(run_dir, tmp_path):
    path = copied(run_dir, tmp_path / "run", folder.SUMMARY, folder.EVALUATION)
    run = fedvi.load_run(path, builder=keeper)
    assert not run.finished and run.summary == {} and len(run.metrics) > 0
    assert run.posterior().mean() is not None
    with pytest.raises(ValueError, match="has no evaluation.npz: the run is not fini"):
        assert run.scores
    (path / folder.CHECKPOINT).unlink()
    with pytest.raises(ValueError, match="holds no checkpoint: the run was stopped"):
        assert fedvi.load_run(path, builder=keeper).states


@contextlib.contextmanager
def refused(error):
    """In one line."""
    with pytest.raises(ValueError, match=error) as caught:
        yield
    assert "\n" not in str(caught.value)


def test_mistakes_are_named(run, run_dir, tmp_path, config):
    with refused("is no run folder: it has no config.json"):
        fedvi.load_run(tmp_path)
    with refused("holds no run folder"):
        fedvi.load_runs(tmp_path)
    with refused("algorithm='keeper', which is not registered here: import the module"):
        fedvi.load_run(run_dir).posterior()
    with refused(r"client=4 is none of .*: give 0 to 3, or an id such as hospital_1, "):
        run.posterior(client=4)
    with refused("client='hospital_4' is none of"):
        run.predict(np.zeros((1, 6), np.float32), client="hospital_4")
    with refused(r"seed=0 is none of .*: it has 5, 6"):
        run.posterior(client=0, seed=0)
    older = copied(run_dir, tmp_path / "older")
    fields = json.loads((older / folder.CONFIG).read_text())
    fields["rounds_x"] = fields.pop("rounds")
    fields["fedvi"] = "0.0.9"
    (older / folder.CONFIG).write_text(json.dumps(fields))
    with refused("written by fedvi 0.0.9, and this is .*: its config.json has the unk"):
        fedvi.load_run(older)


def test_data_that_moved_and_other_data(run_dir, tmp_path, config):
    here = tmp_path / "moved.npz"
    shutil.copy(config.data_file, here)
    moved = fedvi.load_run(run_dir, builder=keeper, data_file=str(here))
    assert (
        moved.data.ids.tolist()
        == fedvi.load_run(
            run_dir, builder=keeper, loaded=load_data(config)
        ).data.ids.tolist()
    )
    with refused("the data of .* cannot be loaded .* by data_file="):
        assert fedvi.load_run(run_dir, builder=keeper, data_file="gone.npz").data
    with np.load(here) as arrays:
        changed = dict(arrays)
    changed["train_x"] = changed["train_x"] + 1
    np.savez(here, **changed)
    with refused("was run on other data: their data_sha256 is"):
        assert fedvi.load_run(run_dir, builder=keeper, data_file=str(here)).data


def test_several_runs_are_stacked(run_dir, tmp_path, monkeypatch):
    copied(run_dir, tmp_path / "first")
    other = copied(run_dir, tmp_path / "deep" / "second")
    fields = json.loads((other / folder.CONFIG).read_text())
    fields["options"]["width"] = 0.4
    (other / folder.CONFIG).write_text(json.dumps(fields))
    summary = json.loads((other / folder.SUMMARY).read_text())
    summary["config"] = {k: v for k, v in fields.items() if k != "fedvi"}
    (other / folder.SUMMARY).write_text(json.dumps(summary))
    runs = fedvi.load_runs(tmp_path, builder=keeper)
    assert [run.folder.name for run in runs] == ["second", "first"]
    for rows in (runs.metrics, runs.per_client()):
        assert [row["width"] for row in (rows[0], rows[-1])] == [0.4, 0.2]
        assert "learning_rate" not in rows[0]  # the same in both
    assert len(runs.per_client()) == 16
    for width in (0.2, 0.4):
        assert re.search(f"^keeper width={width} .*[0-9]", runs.comparison(), re.M)
    (other / folder.SUMMARY).unlink()
    assert "0.4" not in fedvi.load_runs(tmp_path).comparison()

    pandas = types.ModuleType("pandas")
    pandas.__spec__ = importlib.machinery.ModuleSpec("pandas", None)
    pandas.DataFrame = lambda rows: ("frame", len(rows))
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert runs.per_client() == ("frame", 16)
