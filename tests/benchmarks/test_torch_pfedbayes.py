"""The PyTorch peer of pFedBayes does what fedvi does."""

import importlib.util
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import fedvi
from fedvi import nn, selection
from fedvi.algorithms import pfedbayes
from fedvi.data import ClientData, standardise

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CLIENTS, SIZE, FEATURES, CLASSES, HIDDEN = 3, 12, 5, 4, 6
ROUNDS = 5


@pytest.fixture(scope="module")
def python():
    """An interpreter with PyTorch: this one, or TORCH_PYTHON."""
    if importlib.util.find_spec("torch"):
        return sys.executable
    if "TORCH_PYTHON" in os.environ:
        return os.environ["TORCH_PYTHON"]
    pytest.skip("needs PyTorch: install it, or set TORCH_PYTHON to its interpreter")


@pytest.fixture(scope="module")
def peer(python):
    spec = importlib.util.spec_from_file_location("worker", BENCHMARKS / "worker.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    environment = {"OMP_NUM_THREADS": "1"}
    worker = module.Worker(python, "peers/torch_pfedbayes.py", environment)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)

    def split():
        x = rng.integers(0, 256, (CLIENTS, SIZE, FEATURES)).astype(np.uint8)
        y = rng.integers(0, CLASSES, (CLIENTS, SIZE)).astype(np.int32)
        return ClientData(x, y, np.full(CLIENTS, SIZE, np.int32))

    return split(), split()


def write_files(folder, data, posterior):
    """What `round_time.py` gives the peer."""
    arrays = {
        f"{split}_{key}": value
        for split, part in zip(("train", "test"), data)
        for key, value in part._asdict().items()
    }
    mean, std = np.array([0.5], np.float32), np.array([0.25], np.float32)
    np.savez(folder / "data.npz", mean=mean, std=std, **arrays)
    np.savez(folder / "params.npz", *jax.tree.leaves(posterior))
    paths = {f"{name}_file": str(folder / f"{name}.npz") for name in ("data", "params")}
    return {**paths, "hidden": HIDDEN, "classes": CLASSES, "seed": 0, "threads": 1}


@pytest.mark.long
@pytest.mark.parametrize(
    "gradients, sampling, optimizer, clients_at_once",
    [("hand", "weight", "adam", 1), ("autograd", "local", "sgd", 2)],
)
def test_follows_fedvi(
    tmp_path, data, peer, gradients, sampling, optimizer, clients_at_once
):
    # Without noise, and with one batch a client, nothing is random.
    options = {
        "zeta": 3.0,
        "personal_steps": 1,
        "global_steps": 2,
        "sampling": sampling,
        "eps_scale": 0.0,
    }
    training = {"batch_size": SIZE, "epochs": 1, "learning_rate": 0.03, "momentum": 0.5}
    model = nn.build(
        "mlp",
        classes=CLASSES,
        input_shape=(FEATURES,),
        hidden=(HIDDEN,),
        preprocess=standardise(np.array([0.5]), np.array([0.25])),
    )
    local = fedvi.LocalTraining(**training, optimizer=optimizer)
    task = fedvi.Task(model, local, local, CLIENTS, CLIENTS * SIZE)
    algorithm = pfedbayes(task, rho=-1.0, num_samples=1, **options)
    federation = fedvi.Federation(
        algorithm, *data, selection=selection.uniform(CLIENTS, 2)
    )
    state = federation.init(jax.random.key(0))
    peer(
        "load",
        **write_files(tmp_path, data, state.server.posterior),
        **training,
        **options,
        optimizer=optimizer,
        gradients=gradients,
        clients_at_once=clients_at_once,
    )
    # Clients sit out, and go on with what they and their optimisers kept.
    state, metrics = federation.rounds(state, ROUNDS)
    cohorts = metrics.client_ids.tolist()
    assert {client for cohort in cohorts for client in cohort} == set(range(CLIENTS))
    losses = [peer("round", cohort=cohort)["loss"] for cohort in cohorts]
    # In the first round q and w are the same, so that the objective is the NLL.
    assert losses[0] == pytest.approx(metrics.metrics["loss"][0].item(), rel=1e-5)
    scores = federation.evaluate(state), federation.evaluate_personal(state)
    accuracies, nlls = (
        [(getattr(s, name).sum() / s.count.sum()).item() for s in scores]
        for name in ("correct", "nll")
    )
    found = peer("finish")
    assert [found["test_accuracy"], found["personal_accuracy"]] == pytest.approx(
        accuracies
    )
    # Adam makes whole steps of gradients that are zero up to rounding.
    rel = 2e-3 if optimizer == "adam" else 1e-5
    assert [found["test_nll"], found["personal_nll"]] == pytest.approx(nlls, rel=rel)


@pytest.mark.long
@pytest.mark.parametrize("sampling", ["weight", "local"])
def test_written_out_gradients_are_autograds(tmp_path, data, peer, sampling):
    rng = np.random.default_rng(1)
    shapes = [(HIDDEN,), (FEATURES, HIDDEN), (CLASSES,), (HIDDEN, CLASSES)]
    posterior = [
        (loc + 0.5 * rng.normal(size=shape)).astype(np.float32)
        for loc in (0, -1)
        for shape in shapes
    ]
    arguments = {
        **write_files(tmp_path, data, posterior),
        **{"batch_size": 5, "epochs": 2, "learning_rate": 0.03, "momentum": 0.5},
        **{"zeta": 0.5, "personal_steps": 2, "global_steps": 2, "eps_scale": 0.7},
        **{"sampling": sampling, "optimizer": "sgd", "clients_at_once": 1},
    }
    found = []
    # Both draw the same numbers, so that even their noise is the same.
    for gradients in ("hand", "autograd"):
        peer("load", **arguments, gradients=gradients)
        losses = [peer("round", cohort=c)["loss"] for c in ([0, 1], [1, 2], [0, 1])]
        found.append([*losses, *peer("finish").values()])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len(set(found[0])) == len(found[0])
