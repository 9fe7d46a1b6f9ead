"""Every shipped flag file can start: built and traced on data of its shapes.

The stand-ins have the official numbers of examples of every class, and no pixels; no
program is compiled.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import flags as absl_flags

from fedvi import contract_checks, data, nn
from fedvi.algorithms import options_of
from fedvi.data import ClientData, client_data
from fedvi.data.sources import KNOWN_CLASSES, Dataset
from fedvi.experiment import command_line, load_data, setup

FLAGFILES = Path(__file__).parents[2] / "examples" / "flagfiles"
FILES = sorted(FLAGFILES.rglob("*.flags"))

# Examples of each class in the official test split of EMNIST ByClass; the training
# split has six times as many.
EMNIST = (
    *(5778, 6330, 5869, 5969, 5619, 5190, 5705, 6139, 5633, 5686, 1062, 648, 1739, 779),
    *(851, 1440, 447, 521, 2048, 626, 382, 810, 1485, 1351, 4156, 1397, 413, 809, 3508),
    *(1576, 2002, 796, 806, 432, 798, 464, 1644, 853, 432, 1683, 4092, 400, 589, 1479),
    *(427, 317, 466, 2535, 464, 1898, 466, 368, 505, 2320, 437, 2965, 482, 468, 467),
    *(470, 381, 451),
)
# Of all 581,012 rows; fedvi's split is 80/20 at random.
COVERTYPE = (211840, 283301, 35754, 2747, 9493, 17367, 20510)
MNIST_TRAIN = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST_TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
# Shape and type of an example, examples of each class in the two splits.
OFFICIAL = {
    "digits": ((8, 8, 1), np.uint8, [144] * 7 + [143] * 3, [36] * 10),
    "mnist": ((28, 28, 1), np.uint8, MNIST_TRAIN, MNIST_TEST),
    "fashion_mnist": ((28, 28, 1), np.uint8, [6000] * 10, [1000] * 10),
    "emnist": ((28, 28, 1), np.uint8, 6 * np.array(EMNIST), EMNIST),
    "cifar10": ((32, 32, 3), np.uint8, [5000] * 10, [1000] * 10),
    "cifar100": ((32, 32, 3), np.uint8, [500] * 100, [100] * 100),
    "covertype": (
        (54,),
        np.float32,
        np.multiply(COVERTYPE, 0.8).astype(int),
        np.multiply(COVERTYPE, 0.2).astype(int),
    ),
    "covertype_standin": (
        (54,),
        np.float32,
        np.multiply(COVERTYPE, 10_000 / 581_012).astype(int),
        np.multiply(COVERTYPE, 2_500 / 581_012).astype(int),
    ),
}
DATA_FIELDS = (
    *("dataset", "second_dataset", "cluster_transform", "keep_classes"),
    *("one_against_rest", "partition", "clients", "partition_seed", "augment"),
    *("shards", "alpha", "min_size", "classes_per_client", "train_per_class"),
    *("test_per_class", "pool", "retries", "majority", "validation_fraction"),
    "calibration_fraction",
)


def stand_in(name, *, data_file=None, data_dir=None):
    """A data set of the official sizes; data sets differ by one constant."""
    shape, dtype, *counts = OFFICIAL[name]
    pixel = np.array(1 + list(OFFICIAL).index(name), dtype)
    splits = {}
    for split, count in zip(("train", "test"), counts):
        y = np.repeat(np.arange(len(count), dtype=np.int32), count)
        splits[f"{split}_x"] = np.broadcast_to(pixel, (len(y), *shape))
        splits[f"{split}_y"] = y
    return Dataset(**splits, classes=KNOWN_CLASSES[name], name=name, fidelity="no data")


def stack_sizes(x, y, parts):
    """`client_data._stack`, but the inputs take no memory and all labels are 0."""
    size = np.array([len(part) for part in parts], np.int32)
    shape = (len(parts), max(1, int(size.max())))
    pixel = x.reshape(-1)[0]
    return ClientData(
        np.broadcast_to(pixel, (*shape, *x.shape[1:])), np.zeros(shape, np.int32), size
    )


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cached():
    """What was loaded, built and traced already."""
    return {"data": {}, "model": {}, "trace": set()}


@pytest.fixture
def standing_in(monkeypatch, cached):
    """Data without pixels, loaded once for all flag files that share them."""
    constants = (np.zeros(1, np.float32), np.ones(1, np.float32))
    monkeypatch.setattr(data, "load", stand_in)
    monkeypatch.setattr(data, "normalisation", lambda name, x: constants)
    monkeypatch.setattr(client_data, "_stack", stack_sizes)
    monkeypatch.setattr(setup, "_sha256", lambda tree: "")
    build = nn.build

    def build_once(name, *, preprocess, **options):
        key = (name, repr(options))
        if key not in cached["model"]:
            cached["model"][key] = build(name, preprocess=preprocess, **options)
        return cached["model"][key]

    monkeypatch.setattr(nn, "build", build_once)

    def load(config):
        key = repr([getattr(config, field) for field in DATA_FIELDS])
        if key not in cached["data"]:
            cached["data"][key] = load_data(config)
        return cached["data"][key]

    return load


def read(file):
    values = absl_flags.FlagValues()
    command_line.define(values)
    command_line.parse(["program", f"--flagfile={file}"], values)
    return command_line.read(values)


@pytest.mark.parametrize(
    "file",
    FILES,
    ids=lambda file: file.relative_to(FLAGFILES).with_suffix("").as_posix(),
)
def test_every_flag_file_is_built_and_traced(file, standing_in, cached):
    for config, run_options in read(file):
        config.validate()
        run_options.validate()
        built = setup.experiment(config, loaded=standing_in(config))
        # Numbers of examples and of epochs decide no more than lengths of loops, and
        # what may be traced no more than a factor.
        options = [
            (field.name, built.config.options[field.name])
            for field in dataclasses.fields(options_of(config.algorithm))
            if not field.metadata["traced"]
        ]
        key = repr(
            (
                *(config.algorithm, options),
                *(built.config.model, config.hidden, config.augment, config.optimizer),
                *(config.local_steps, built.data.classes, config.dataset),
            )
        )
        if key in cached["trace"]:
            continue
        cached["trace"].add(key)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            (built.data.train, built.data.test),
        )
        contract_checks.check(built.algorithm, *shapes, built.task.clients)
        contract_checks.check_selection(built.algorithm, built.selection)
