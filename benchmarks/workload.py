"""What `round_time.py` times: its flags and the clients' data."""

from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from fedvi import algorithms, nn
from fedvi.data import (
    Dataset,
    FederatedData,
    class_shards,
    federate,
    load,
    pixel_statistics,
)

__all__ = [
    "choose_data",
    "describe",
    "fedvi_only",
    "options",
    "save_data",
    "shared",
]

flags.DEFINE_enum("algorithm", "fedavg", sorted(algorithms.ALGORITHMS), "What to time.")
flags.DEFINE_enum(
    "model",
    "mlp",
    sorted([*nn.MODELS, "pfl_cnn"]),
    "The network; pfl_cnn is that of pfl_network.py.",
)
flags.DEFINE_integer("hidden", 256, "Hidden units of mlp.", lower_bound=1)
flags.DEFINE_string("dataset", "fashion_mnist", "As for fedvi.data.load.")
flags.DEFINE_string("data_file", None, "An .npz file, as for fedvi.data.load.")
flags.DEFINE_boolean(
    "synthetic",
    None,
    "Random images instead of the data set. Default: if it cannot be found.",
)
flags.DEFINE_list(
    "image_shape", ["28", "28", "1"], "Of --synthetic: height, width, channels."
)
flags.register_validator(
    "image_shape",
    lambda sizes: len(sizes) == 3 and all(s.isdecimal() and int(s) for s in sizes),
    "must look like 32,32,3",
)
flags.DEFINE_integer("clients", 100, "Number of clients.", lower_bound=1)
flags.DEFINE_integer("shards", 5, "Class shards of a client.", lower_bound=1)
flags.DEFINE_integer(
    "client_examples",
    None,
    "Training examples of a client, on average. Default: all that there are.",
    lower_bound=1,
)
flags.DEFINE_integer("participants", 10, "Clients in a round.", lower_bound=1)
flags.DEFINE_integer("batch_size", 50, "Examples a step.", lower_bound=1)
flags.DEFINE_integer("epochs", 1, "Local epochs.", lower_bound=1)
flags.DEFINE_enum("optimizer", "sgd", ["sgd", "adam"], "Of the clients.")
flags.DEFINE_float("learning_rate", 0.1, "Of the clients.", lower_bound=0)
flags.DEFINE_float("momentum", 0.9, "Of the clients' SGD.", lower_bound=0)
flags.DEFINE_integer(
    "chunk_size", 1, "Clients in one vmap; 0: all participants.", lower_bound=0
)
flags.DEFINE_integer(
    "devices", 1, "CPU devices that share fedvi's clients; 1: none.", lower_bound=1
)
flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of fedvi's and PyTorch's activations."
)
flags.DEFINE_string(
    "compilation_cache",
    "",
    "Folder where fedvi keeps and finds compiled programs. Default: none, so that the "
    "first call shows what compilation costs.",
)
flags.DEFINE_float("zeta", 10.0, "Of pfedbayes: weight of the KL term.", lower_bound=0)
flags.DEFINE_float("rho", -2.5, "Of pfedbayes: initial unconstrained scale.")
flags.DEFINE_integer(
    "personal_steps", 5, "Of pfedbayes: a minibatch's steps of q.", lower_bound=1
)
flags.DEFINE_integer(
    "global_steps", 1, "Of pfedbayes: a minibatch's steps of w.", lower_bound=0
)
flags.DEFINE_enum(
    "sampling",
    "weight",
    ["weight", "local"],
    "Of pfedbayes: what is drawn, once a step.",
)
flags.DEFINE_float(
    "eps_scale", 1.0, "Of pfedbayes: factor on the noise.", lower_bound=0
)
flags.DEFINE_integer("seed", 0, "Of data, model and training.", lower_bound=0)
FLAGS = flags.FLAGS

# Grey levels of 256 that tell a synthetic image's class; the rest is noise.
SIGNAL = 128

SHARED = (
    "model",
    "hidden",
    "batch_size",
    "epochs",
    "learning_rate",
    "momentum",
    "optimizer",
    "seed",
)
FEDVI_ONLY = (
    "algorithm",
    "participants",
    "chunk_size",
    "devices",
    "dtype",
    "compilation_cache",
)
OPTIONS = {
    "pfedbayes": (
        "zeta",
        "rho",
        "personal_steps",
        "global_steps",
        "sampling",
        "eps_scale",
    )
}


def shared() -> dict[str, Any]:
    """What every system is told of the work."""
    return {key: FLAGS[key].value for key in SHARED}


def fedvi_only() -> dict[str, Any]:
    """What fedvi alone is told."""
    return {key: FLAGS[key].value for key in FEDVI_ONLY}


def options() -> dict[str, Any]:
    """The options of the algorithm, as flags give them."""
    return {key: FLAGS[key].value for key in OPTIONS.get(FLAGS.algorithm, ())}


def describe(federated: FederatedData) -> dict[str, Any]:
    """The work, for the report."""
    return {
        **shared(),
        **fedvi_only(),
        "clients": FLAGS.clients,
        "shards": FLAGS.shards,
        "options": options(),
        "dataset": federated.name,
        "fidelity": federated.fidelity,
        "input_shape": federated.train.x.shape[2:],
        "client_size": np.unique(federated.train.size).tolist(),
        # What a round trains on, each example as often as it is seen.
        "round_examples": FLAGS.participants
        * FLAGS.epochs
        * federated.train.size.mean().item(),
    }


def synthetic(seed: int) -> Dataset:
    """Noisy copies of one random image a class, in the numbers of Fashion-MNIST."""
    rng = np.random.default_rng(seed)
    shape = tuple(map(int, FLAGS.image_shape))
    centres = rng.integers(0, SIGNAL, (10, *shape), np.uint8)
    arrays = []
    for examples in (60_000, 10_000):
        y = rng.permutation(np.arange(examples, dtype=np.int32) % 10)
        noise = rng.integers(0, 256 - SIGNAL, (examples, *shape), np.uint8)
        arrays += [centres[y] + noise, y]
    fidelity = "random images, one a class, and noise"
    return Dataset(*arrays, classes=10, name="synthetic", fidelity=fidelity)


def choose_data() -> Dataset:
    """The data set that the flags ask for, or random images where it is absent.

    Raises:
      ValueError: it cannot be read, or has images of its own shape.
    """
    if FLAGS.synthetic:
        return synthetic(FLAGS.seed)
    if FLAGS["image_shape"].present:
        raise ValueError(
            f"image_shape={','.join(FLAGS.image_shape)} is for random images: add "
            "--synthetic"
        )
    try:
        return load(FLAGS.dataset, data_file=FLAGS.data_file)
    except ValueError as error:
        if FLAGS.synthetic is False or FLAGS.data_file:
            raise
        print(f"random images instead of {FLAGS.dataset}: {error}")
        return synthetic(FLAGS.seed)


def shorten(dataset: Dataset, examples: int) -> Dataset:
    """The first training examples of each class, `examples` in all.

    Raises:
      ValueError: there are too few, or the classes cannot share them equally.
    """
    classes, counts = np.unique(dataset.train_y, return_counts=True)
    each, rest = divmod(examples, len(classes))
    if rest or counts.min() < each:
        raise ValueError(
            f"client_examples={FLAGS.client_examples} x clients={FLAGS.clients} must "
            f"be {len(classes)} times a number up to {counts.min()}"
        )
    kept = [np.flatnonzero(dataset.train_y == label)[:each] for label in classes]
    kept = np.sort(np.concatenate(kept))
    return dataset._replace(
        train_x=dataset.train_x[kept], train_y=dataset.train_y[kept]
    )


def save_data(dataset: Dataset, path: Path) -> FederatedData:
    """Deals the data to the clients and writes them where each system finds them."""
    if FLAGS.client_examples:
        dataset = shorten(dataset, FLAGS.clients * FLAGS.client_examples)
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
