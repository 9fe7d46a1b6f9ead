"""Times a federated round of fedvi, in turn with the same work in plain PyTorch.

    python benchmarks/round_time.py --torch_python=/path/to/python/with/torch

Every system has a process and an interpreter of its own. In every turn each does one
round, so what slows the machine down slows all of them, and the ratio of a turn means
more than any time. All start from the same weights and train the same participants;
only their shuffles differ. Without --torch_python only fedvi is timed. The defaults are
FedHB's Fashion-MNIST (appendix H) without its learning-rate decay; --synthetic takes
random images of that shape.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import app, flags
from report import describe_machine, summarise, write
from worker import Worker

from fedvi import algorithms, nn
from fedvi.data import (
    Dataset,
    FederatedData,
    class_shards,
    federate,
    load,
    pixel_statistics,
)

# Lets the threads of one system go to sleep before the next one's turn.
PAUSE_SECONDS = 0.02

flags.DEFINE_enum("algorithm", "fedavg", sorted(algorithms.ALGORITHMS), "What to time.")
flags.DEFINE_enum("model", "mlp", sorted(nn.MODELS), "The network.")
flags.DEFINE_integer("hidden", 256, "Hidden units of mlp.", lower_bound=1)
flags.DEFINE_string("dataset", "fashion_mnist", "As for fedvi.data.load.")
flags.DEFINE_string("data_file", None, "An .npz file, as for fedvi.data.load.")
flags.DEFINE_boolean(
    "synthetic",
    None,
    "Random 28x28 images instead of the data set. Default: if it cannot be found.",
)
flags.DEFINE_integer("clients", 100, "Number of clients.", lower_bound=1)
flags.DEFINE_integer("shards", 5, "Class shards of a client.", lower_bound=1)
flags.DEFINE_integer("participants", 10, "Clients in a round.", lower_bound=1)
flags.DEFINE_integer("batch_size", 50, "Examples a step.", lower_bound=1)
flags.DEFINE_integer("epochs", 1, "Local epochs.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.1, "Of the clients' SGD.", lower_bound=0)
flags.DEFINE_float("momentum", 0.9, "Of the clients' SGD.", lower_bound=0)
flags.DEFINE_integer(
    "chunk_size", 1, "Clients in one vmap; 0: all participants.", lower_bound=0
)
flags.DEFINE_integer("rounds", 30, "Turns that are timed.", lower_bound=1)
flags.DEFINE_integer(
    "warmup", 3, "Turns before them; the first one compiles.", lower_bound=1
)
flags.DEFINE_integer("seed", 0, "Of data, model and training.", lower_bound=0)
flags.DEFINE_string("torch_python", None, "Interpreter that has PyTorch.")
flags.DEFINE_list(
    "torch_threads",
    ["1", "2"],
    "PyTorch's thread counts to try. On a busy machine more than 1 may never end.",
)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

WORK = (
    "algorithm",
    "model",
    "hidden",
    "clients",
    "shards",
    "participants",
    "batch_size",
    "epochs",
    "learning_rate",
    "momentum",
    "chunk_size",
    "warmup",
    "rounds",
    "seed",
)


def synthetic(seed: int) -> Dataset:
    """Random images with random labels, in the shape of Fashion-MNIST."""
    rng = np.random.default_rng(seed)
    arrays = []
    for examples in (60_000, 10_000):
        arrays.append(rng.integers(0, 256, (examples, 28, 28, 1), np.uint8))
        arrays.append(rng.permutation(np.arange(examples, dtype=np.int32) % 10))
    return Dataset(*arrays, classes=10, name="synthetic", fidelity="random pixels")


def choose_data() -> Dataset:
    """The data set that the flags ask for, or random images where it is absent."""
    if FLAGS.synthetic:
        return synthetic(FLAGS.seed)
    try:
        return load(FLAGS.dataset, data_file=FLAGS.data_file)
    except ValueError as error:
        if FLAGS.synthetic is False or FLAGS.data_file:
            raise
        print(f"random images instead of {FLAGS.dataset}: {error}")
        return synthetic(FLAGS.seed)


def save_data(dataset: Dataset, path: Path) -> FederatedData:
    """Deals the data to the clients and writes them where each system finds them."""
    partition = class_shards(
        dataset.train_y,
        dataset.test_y,
        clients=FLAGS.clients,
        shards=FLAGS.shards,
        seed=FLAGS.seed,
    )
    federated = federate(dataset, partition)
    mean, std = pixel_statistics(dataset.train_x)
    arrays = {
        f"{split}_{key}": value
        for split in ("train", "test")
        for key, value in getattr(federated, split)._asdict().items()
    }
    np.savez(path, mean=mean, std=std, **arrays)
    return federated


def start_workers(data_file: Path, classes: int) -> tuple[dict, dict]:
    """The systems by name, fedvi first, and the versions that each runs on."""
    keys = ("hidden", "batch_size", "epochs", "learning_rate", "momentum", "seed")
    work = {key: FLAGS[key].value for key in keys}
    work.update(data_file=str(data_file), classes=classes)
    own = ("algorithm", "model", "participants", "chunk_size")
    fedvi = Worker(None, "fedvi_rounds.py", {})
    workers = {"fedvi": fedvi}
    versions = {"fedvi": fedvi("load", **work, **{k: FLAGS[k].value for k in own})}
    if not FLAGS.torch_python:
        return workers, versions
    work["params_file"] = str(data_file.with_name("params.npz"))
    fedvi("save_params", params_file=work["params_file"])
    for threads in map(int, FLAGS.torch_threads):
        name = f"PyTorch, {threads} thread{'s' if threads > 1 else ''}"
        environment = {"OMP_NUM_THREADS": str(threads)}
        workers[name] = Worker(FLAGS.torch_python, "peers/torch_loop.py", environment)
        versions[name] = workers[name]("load", **work, threads=threads)
    return workers, versions


def take_turns(workers: dict[str, Worker]) -> dict[str, list[dict]]:
    """What every system reports of every turn, warm-up first."""
    turns = {name: [] for name in workers}
    for _ in range(FLAGS.warmup + FLAGS.rounds):
        for name, worker in workers.items():
            time.sleep(PAUSE_SECONDS)
            if name == "fedvi":
                result = worker("round")
                cohort = result.pop("cohort")
            else:
                result = worker("round", cohort=cohort)
            turns[name].append(result)
    return turns


def measure() -> dict:
    """The whole run, as `report.summarise` tells it."""
    dataset = choose_data()
    with tempfile.TemporaryDirectory() as folder:
        data_file = Path(folder) / "data.npz"
        federated = save_data(dataset, data_file)
        workers, versions = start_workers(data_file, federated.classes)
    machine = {**describe_machine(), "load_before": os.getloadavg()[0]}
    turns = take_turns(workers)
    machine["load_after"] = os.getloadavg()[0]
    endings = {name: worker("finish") for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    work = {
        **{key: FLAGS[key].value for key in WORK},
        "dataset": federated.name,
        "fidelity": federated.fidelity,
        "input_shape": federated.train.x.shape[2:],
        "client_size": np.unique(federated.train.size).tolist(),
    }
    return summarise(machine, versions, work, turns, endings)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag")
    if FLAGS.torch_python:
        if (FLAGS.algorithm, FLAGS.model) != ("fedavg", "mlp"):
            raise app.UsageError(
                f"--algorithm={FLAGS.algorithm} --model={FLAGS.model} has no PyTorch "
                "peer: leave --torch_python out, or take fedavg and mlp"
            )
        if shutil.which(FLAGS.torch_python) is None:
            raise app.UsageError(
                f"--torch_python={FLAGS.torch_python} is no program: give the path of "
                "a Python interpreter that has PyTorch"
            )
    try:
        write(measure(), FLAGS.out)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
