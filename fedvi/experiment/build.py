"""From a configuration to data, model, algorithm and federation."""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedvi import algorithms, checks, data, nn, selection
from fedvi.algorithm import Algorithm, Task
from fedvi.cohort import clients_mesh
from fedvi.data import FederatedData
from fedvi.experiment.config import ExperimentConfig, participants
from fedvi.federation import Federation
from fedvi.local import LocalTraining

__all__ = [
    "Experiment",
    "LoadedData",
    "check_algorithm",
    "experiment",
    "federation",
    "identity",
    "load_data",
    "mesh",
    "on_devices",
    "resolve",
]


class LoadedData(NamedTuple):
    """Every client's data, and what is needed to standardise it.

    Attributes:
      federated: the clients' data; `test` holds what is evaluated on, which with
        `validation_fraction` is a part of the training data.
      mean: pixel mean of the training split, `[channels]`.
      std: its standard deviation.
    """

    federated: FederatedData
    mean: jax.typing.ArrayLike
    std: jax.typing.ArrayLike


class Experiment(NamedTuple):
    """All that a configuration stands for, but for the way it is run.

    `data_sha256` is that of all clients' examples (hex).
    """

    config: ExperimentConfig
    data: FederatedData
    data_sha256: str
    task: Task
    algorithm: Algorithm
    participants: int


def resolve(
    config: ExperimentConfig, builder: Callable[..., Algorithm] | None = None
) -> ExperimentConfig:
    """The configuration with every option of its algorithm, defaults included.

    Args:
      config: the configuration.
      builder: as in `experiment`.

    Raises:
      ValueError: an unknown algorithm, or an option that it does not take.
    """
    if builder is None:
        check_algorithm(config)
        builder = algorithms.ALGORITHMS[config.algorithm]
    defaults = {
        option: parameter.default
        for option, parameter in inspect.signature(builder).parameters.items()
        # A user's own builder may have others, which JSON cannot hold.
        if isinstance(parameter.default, (bool, int, float, str, type(None)))
    }
    return dataclasses.replace(config, options=defaults | config.options)


def identity(config: Mapping[str, Any], data_sha256: str | None) -> dict[str, Any]:
    """What two stretches of one run must agree on: settings and data, not paths.

    Args:
      config: of `ExperimentConfig.to_dict`.
      data_sha256: of the clients' examples.
    """
    settings = {k: v for k, v in config.items() if k not in ("data_file", "data_dir")}
    return settings | {"data_sha256": data_sha256}


def load_data(config: ExperimentConfig) -> LoadedData:
    """Loads, checks and partitions the data.

    Options of other partitions than the chosen one are ignored.

    Raises:
      ValueError: missing or invalid data, a partition that they do not allow, or
        nothing to evaluate on.
    """
    dataset = data.load(
        config.dataset, data_file=config.data_file, data_dir=config.data_dir
    )
    if config.augment and dataset.train_x.ndim != 4:
        raise ValueError(
            f"augment=True needs images, but {config.dataset!r} holds features of "
            f"shape {dataset.train_x.shape[1:]}: give --noaugment"
        )
    checks.one_of("partition", config.partition, data.PARTITIONS)
    taken = inspect.signature(data.PARTITIONS[config.partition]).parameters
    given = config.partition_options()
    partition = data.partition(
        config.partition,
        dataset,
        clients=config.clients or None,
        seed=config.partition_seed,
        **{option: value for option, value in given.items() if option in taken},
    )
    federated = data.federate(dataset, partition)
    if config.validation_fraction:
        federated = data.hold_out(
            federated, config.validation_fraction, config.partition_seed
        )
    if not federated.test.size.any():
        raise ValueError(
            f"no client of partition={config.partition!r} has {config.evaluated_on} "
            "data: give validation_fraction, the part of the training data to hold out"
        )
    return LoadedData(federated, *data.pixel_statistics(dataset.train_x))


def check_algorithm(config: ExperimentConfig) -> None:
    """Checks name and options against the registered algorithms.

    Raises:
      ValueError: an unknown algorithm, or an option that it does not take.
    """
    known = algorithms.options_of(config.algorithm)
    for option, value in config.options.items():
        if option not in known:
            raise ValueError(
                f"{option}={value!r} is no option of {config.algorithm}, which takes "
                f"{', '.join(known) or 'none'}"
            )


def experiment(
    config: ExperimentConfig,
    builder: Callable[..., Algorithm] | None = None,
    loaded: LoadedData | None = None,
) -> Experiment:
    """Builds data, model, task and algorithm.

    Args:
      config: the configuration.
      builder: a user's own `(task, **options) -> Algorithm`; default: the registered
        one that `config.algorithm` names.
      loaded: what `load_data` gave for this configuration; default: loads it.

    Raises:
      ValueError: what the configuration asks for does not exist or does not fit.
    """
    federated, mean, std = loaded or load_data(config)
    clients, sizes = len(federated.train.size), federated.train.size
    model = nn.build(
        config.model,
        classes=federated.classes,
        input_shape=federated.train.x.shape[2:],
        preprocess=data.standardise(mean, std),
        **({"hidden": config.hidden} if config.model == "mlp" else {}),
    )
    augment = data.crop_and_flip() if config.augment else None
    task = Task(
        model=model,
        training=LocalTraining(
            config.epochs,
            config.batch_size,
            config.learning_rate_schedule(),
            config.momentum,
            augment,
        ),
        finetuning=LocalTraining(
            config.finetune_epochs,
            config.batch_size,
            config.finetune_learning_rate,
            config.momentum,
            augment,
        ),
        clients=int((sizes > 0).sum()),
        samples=int(sizes.sum()),
    )
    if builder is None:
        algorithm = algorithms.build(config.algorithm, task, **config.options)
    else:
        algorithm = builder(task, **config.options)
    cohort = participants(clients, config.fraction)
    return Experiment(config, federated, _sha256(federated), task, algorithm, cohort)


def _sha256(federated: FederatedData) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((federated.train, federated.test)):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def mesh(devices: int | None) -> Mesh:
    """The devices of a run; None: every accelerator, or one CPU.

    Raises:
      ValueError: more devices than there are.
    """
    if devices is None and jax.default_backend() == "cpu":
        devices = 1
    return clients_mesh(devices)


def federation(experiment: Experiment, chunk_size: int, mesh: Mesh) -> Federation:
    """The federation of an experiment, with uniform selection."""
    return Federation(
        experiment.algorithm,
        experiment.data.train,
        experiment.data.test,
        selection=selection.uniform(
            len(experiment.data.train.size), experiment.participants
        ),
        chunk_size=chunk_size,
        mesh=mesh,
        eval_batch_size=experiment.config.eval_batch_size,
    )


def on_devices(experiment: Experiment, mesh: Mesh) -> Experiment:
    """The experiment with its data replicated on every device of the mesh."""
    train, test = jax.device_put(
        (experiment.data.train, experiment.data.test),
        NamedSharding(mesh, PartitionSpec()),
    )
    return experiment._replace(
        data=dataclasses.replace(experiment.data, train=train, test=test)
    )
