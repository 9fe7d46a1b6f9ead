"""From a configuration to data, model, algorithm and federation."""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedvi import algorithms, checks, data, nn, selection
from fedvi.algorithm import Algorithm, Task
from fedvi.cohort import clients_mesh
from fedvi.data import ClientData, FederatedData
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
    "with_finetuning",
]


class LoadedData(NamedTuple):
    """Every client's data, and what is needed to standardise it.

    Attributes:
      federated: the clients' data; `test` holds what is evaluated on, which with
        `validation_fraction` is a part of the training data.
      mean: pixel mean of the training split of `dataset`, `[channels]`; with
        `second_dataset` and `cluster_transform` too it serves every client.
      std: its standard deviation.
      ood: the evaluated part of `ood_dataset`, if one is given.
    """

    federated: FederatedData
    mean: jax.typing.ArrayLike
    std: jax.typing.ArrayLike
    ood: ClientData | None = None


class Experiment(NamedTuple):
    """All that a configuration stands for, but for the way it is run.

    Attributes:
      config: what it is made from.
      data: every client's.
      data_sha256: of all clients' examples (hex).
      task: counts the clients that may take part in training.
      algorithm: `build_algorithm(task)`.
      participants: clients in a round.
      novel: ids in order of the clients that never take part in training.
      build_algorithm: makes the algorithm for a task, its options filled in.
      ood: out-of-distribution inputs of the same clients, if asked for.
    """

    config: ExperimentConfig
    data: FederatedData
    data_sha256: str
    task: Task
    algorithm: Algorithm
    participants: int
    novel: np.ndarray
    build_algorithm: Callable[[Task], Algorithm]
    ood: ClientData | None = None

    @property
    def trained(self) -> np.ndarray:
        """Ids in order of the clients that may take part in training."""
        return np.delete(np.arange(len(self.data.train.size)), self.novel)


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
    left_out = ("data_file", "second_data_file", "ood_data_file", "data_dir")
    defaults = ExperimentConfig().to_dict()
    added = {
        field.name: defaults[field.name]
        for field in dataclasses.fields(ExperimentConfig)
        if field.metadata.get("added")
    }
    settings = {
        key: value
        for key, value in config.items()
        # A run from before a setting was added has none: it goes on with the default.
        if key not in left_out and not (key in added and value == added[key])
    }
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
    federated = _clustered(config, dataset, _federated(config, dataset))
    if config.validation_fraction:
        federated = data.hold_out(
            federated, config.validation_fraction, config.partition_seed
        )
    if not federated.test.size.any():
        raise ValueError(
            f"no client of partition={config.partition!r} has {config.evaluated_on} "
            "data: give validation_fraction, the part of the training data to hold out"
        )
    mean, std = data.pixel_statistics(dataset.train_x)
    return LoadedData(federated, mean, std, _out_of_distribution(config, federated))


def _federated(config: ExperimentConfig, dataset: data.Dataset) -> FederatedData:
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
    return data.federate(dataset, partition)


def _clustered(
    config: ExperimentConfig, dataset: data.Dataset, federated: FederatedData
) -> FederatedData:
    """The data of one or two clusters; `dataset` is that of the first."""
    if config.second_dataset is None:
        if config.cluster_transform == "none":
            return federated
        return data.transform_half(federated, config.cluster_transform)
    second = data.load(
        config.second_dataset,
        data_file=config.second_data_file,
        data_dir=config.data_dir,
    )
    # One folder of idx files holds one data set, whatever its name.
    if np.array_equal(second.train_x, dataset.train_x):
        raise ValueError(
            f"second_dataset={config.second_dataset!r} has the same training inputs as "
            f"dataset={config.dataset!r}: give its own second_data_file"
        )
    return data.join_halves(federated, _federated(config, second))


def _out_of_distribution(
    config: ExperimentConfig, federated: FederatedData
) -> ClientData | None:
    """What takes the place of `federated.test`, checked to fit the same model."""
    name = config.ood_dataset
    if name is None:
        return None
    ood = load_data(
        dataclasses.replace(
            config,
            dataset=name,
            data_file=config.ood_data_file,
            augment=False,
            cluster_transform="none",
            second_dataset=None,
            ood_dataset=None,
        )
    ).federated.test
    test = federated.test
    for what, here, there in (
        ("clients", len(test.size), len(ood.size)),
        ("examples of shape", test.x.shape[2:], ood.x.shape[2:]),
        ("examples of type", test.x.dtype, ood.x.dtype),
    ):
        if here != there:
            raise ValueError(
                f"ood_dataset={name!r} has {what} {there} and dataset="
                f"{config.dataset!r} {here}: one model must serve both; give a data "
                "set that agrees"
            )
    # One folder of idx files holds one data set, whatever its name.
    if np.array_equal(ood.x, test.x):
        raise ValueError(
            f"ood_dataset={name!r} has the same inputs as dataset={config.dataset!r}: "
            "give its own ood_data_file"
        )
    return ood


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
    federated, mean, std, ood = loaded or load_data(config)
    clients = len(federated.train.size)
    cohort = participants(clients, config.fraction, config.novel_clients)
    novel = _novel(config, clients)
    sizes = np.delete(federated.train.size, novel)
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
            config.optimizer,
            config.local_steps,
        ),
        finetuning=LocalTraining(
            config.finetune_epochs,
            config.batch_size,
            config.finetune_learning_rate,
            config.momentum,
            augment,
            config.optimizer,
        ),
        clients=int((sizes > 0).sum()),
        samples=int(sizes.sum()),
    )
    builder = builder or partial(algorithms.build, config.algorithm)
    build_algorithm = partial(builder, **config.options)
    result = Experiment(
        config=config,
        data=federated,
        data_sha256=_sha256((federated.train, federated.test, ood)),
        task=task,
        algorithm=build_algorithm(task),
        participants=cohort,
        novel=novel,
        build_algorithm=build_algorithm,
        ood=ood,
    )
    _check_end(result)
    return result


def with_finetuning(experiment: Experiment, epochs: int) -> Experiment:
    """The experiment with another number of epochs of personalisation."""
    task = experiment.task
    task = task._replace(finetuning=task.finetuning._replace(epochs=epochs))
    return experiment._replace(
        task=task, algorithm=experiment.build_algorithm(task)
    )


def _check_end(experiment: Experiment) -> None:
    """Finds mistakes that would show only after training."""
    config, size = experiment.config, experiment.data.test.size
    if len(experiment.novel):
        for which, ids in (("other", experiment.trained), ("novel", experiment.novel)):
            if not size[ids].any():
                raise ValueError(
                    f"novel_clients={config.novel_clients}: none of the {len(ids)} "
                    f"{which} clients has {config.evaluated_on} data: choose others "
                    "with partition_seed"
                )
    if experiment.ood is not None and not experiment.ood.size[experiment.trained].any():
        raise ValueError(
            f"ood_dataset={config.ood_dataset!r}: no training client has "
            f"{config.evaluated_on} data of it: choose another partition_seed"
        )
    for epochs in config.finetune_curve:
        with_finetuning(experiment, epochs)


def _novel(config: ExperimentConfig, clients: int) -> np.ndarray:
    # Neither the stream of the partition nor one of `hold_out`.
    rng = np.random.default_rng([config.partition_seed, clients, config.novel_clients])
    return np.sort(rng.choice(clients, config.novel_clients, replace=False))


def _sha256(tree: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
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
    """The federation of an experiment, with uniform selection among all but `novel`."""
    return Federation(
        experiment.algorithm,
        experiment.data.train,
        experiment.data.test,
        selection=selection.uniform(
            len(experiment.data.train.size),
            experiment.participants,
            candidates=experiment.trained,
        ),
        chunk_size=chunk_size,
        mesh=mesh,
        eval_batch_size=experiment.config.eval_batch_size,
    )


def on_devices(experiment: Experiment, mesh: Mesh) -> Experiment:
    """The experiment with its data replicated on every device of the mesh."""
    train, test, ood = jax.device_put(
        (experiment.data.train, experiment.data.test, experiment.ood),
        NamedSharding(mesh, PartitionSpec()),
    )
    return experiment._replace(
        data=dataclasses.replace(experiment.data, train=train, test=test), ood=ood
    )
