"""Every FedAvg peer does what fedvi does: same weights, losses and test scores.

A peer's tests run where its package is installed, or in the interpreter that
TORCH_PYTHON, FEDJAX_PYTHON, FLOWER_PYTHON or PFL_PYTHON names.
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import fedvi
from fedvi import nn, selection
from fedvi.algorithms import fedavg
from fedvi.data import ClientData, standardise

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CLIENTS, SIZE, CLASSES, HIDDEN, ROUNDS = 3, 4, 3, 5, 2
MEAN, STD = np.array([0.5, 0.4], np.float32), np.array([0.25, 0.3], np.float32)
TRAINING = {"batch_size": SIZE, "epochs": 1, "learning_rate": 0.05, "momentum": 0.5}

# How near a model comes after its first step, if not to rounding: a weight's last bit
# changes the next loss of MobileNet, 27 normalisations over four images, by 2 %.
LATER = {"mobilenet": 0.1}

# By script: the variable that names an interpreter, the package, further arguments.
PEERS = {
    "torch_loop": ("TORCH_PYTHON", "torch", {"threads": 1}),
    "torch_vmap": ("TORCH_PYTHON", "torch", {"threads": 1}),
    "fedjax_rounds": ("FEDJAX_PYTHON", "fedjax", {"backend": "jit"}),
    "flower_rounds": ("FLOWER_PYTHON", "flwr", {"workers": 1, "threads": 1}),
    "pfl_rounds": ("PFL_PYTHON", "pfl", {"threads": 1}),
}


def module(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def start():
    """Starts the worker of a script, or skips if its package is missing."""
    workers = []

    def start(script):
        variable, package, _ = PEERS[script]
        python = os.environ.get(variable)
        if python is None and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: install it, or set {variable}")
        environment = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}
        worker = module("worker").Worker(python, f"peers/{script}.py", environment)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.close()


def make_clients(image, sizes, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (CLIENTS, SIZE, *image)).astype(np.uint8)
    y = rng.integers(0, CLASSES, (CLIENTS, SIZE)).astype(np.int32)
    return ClientData(x, y, np.array(sizes, np.int32))


def write_data(folder, train, test):
    arrays = {
        f"{split}_{key}": value
        for split, part in {"train": train, "test": test}.items()
        for key, value in part._asdict().items()
    }
    np.savez(folder / "data.npz", mean=MEAN, std=STD, **arrays)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What fedvi does with a model, by model: a folder, losses, cohorts, scores."""
    sys.path.insert(0, str(BENCHMARKS))
    import fedvi_rounds

    def run(model):
        folder = tmp_path_factory.mktemp(model)
        image = (2, 3, 2) if model == "mlp" else (32, 32, 2)
        # torch_vmap needs equal clients; the test clients may differ.
        train = make_clients(image, [SIZE] * CLIENTS, 0)
        test = make_clients(image, [SIZE, 3, 2], 1)
        write_data(folder, train, test)
        network = nn.build(
            "pfl_network:TwoConvolutions" if model == "pfl_cnn" else model,
            classes=CLASSES,
            input_shape=image,
            preprocess=standardise(MEAN, STD),
            **({"hidden": (HIDDEN,)} if model == "mlp" else {}),
        )
        local = fedvi.LocalTraining(**TRAINING)
        task = fedvi.Task(network, local, local, CLIENTS, CLIENTS * SIZE)
        federation = fedvi.Federation(
            fedavg(task), train, test, selection=selection.uniform(CLIENTS, 2)
        )
        rounds = fedvi_rounds.FedviRounds()
        rounds._algorithm = "fedavg"
        rounds._state = federation.init(jax.random.key(0))
        rounds.save_params(folder / "params.npz")
        state, metrics = federation.rounds(rounds._state, ROUNDS)
        scores = federation.evaluate(state)
        return {
            "folder": folder,
            "cohorts": metrics.client_ids.tolist(),
            "losses": metrics.metrics["loss"].tolist(),
            "scores": fedvi_rounds.pooled(scores),
        }

    # Networks are looked for there too.
    yield functools.cache(run)
    sys.path.remove(str(BENCHMARKS))


def arguments(folder, script, model):
    return {
        "data_file": str(folder / "data.npz"),
        "params_file": str(folder / "params.npz"),
        "model": model,
        "hidden": HIDDEN,
        "classes": CLASSES,
        "seed": 0,
        **TRAINING,
        **PEERS[script][2],
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "script, model",
    [
        *((script, "mlp") for script in PEERS),
        ("torch_loop", "lenet"),
        ("torch_loop", "vgg"),
        ("torch_loop", "mobilenet"),
        ("torch_loop", "pfl_cnn"),
        ("torch_vmap", "vgg"),
    ],
)
def test_follows_fedvi(start, reference, script, model):
    worker = start(script)
    expected = reference(model)
    # With one batch a client nothing is random.
    worker("load", **arguments(expected["folder"], script, model))
    turns = [worker("round", cohort=cohort) for cohort in expected["cohorts"]]
    losses = [turn["loss"] for turn in turns]
    assert losses[0] == pytest.approx(expected["losses"][0], rel=1e-4)
    assert losses == pytest.approx(expected["losses"], rel=LATER.get(model, 1e-4))
    assert losses[0] != pytest.approx(losses[1], rel=1e-2)
    assert all(turn["seconds"] > 0 for turn in turns)
    accuracy, nll = expected["scores"]
    found = worker("finish")
    assert found["test_nll"] == pytest.approx(nll, rel=LATER.get(model, 1e-3))
    if model not in LATER:
        assert found["test_accuracy"] == pytest.approx(accuracy)


@pytest.mark.long
@pytest.mark.parametrize(
    "script, sizes, message",
    [
        ("torch_vmap", [4, 3, 4], "3 to 4 examples"),
        ("fedjax_rounds", [4, 3, 4], "--batch_size=4 must divide a client's 3"),
    ],
)
def test_work_that_a_peer_cannot_do_is_refused(start, tmp_path, script, sizes, message):
    worker = start(script)
    train = make_clients((2, 3, 2), sizes, 0)
    write_data(tmp_path, train, train)
    with pytest.raises(RuntimeError, match=message):
        worker("load", **arguments(tmp_path, script, "mlp"))
