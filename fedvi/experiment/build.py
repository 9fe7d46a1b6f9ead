"""From a configuration to data, model, algorithm and federation."""

import dataclasses
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedvi import algorithms, codecs, data, nn
from fedvi.algorithm import Algorithm, Task
from fedvi.cohort import clients_mesh
from fedvi.data import ClientData, FederatedData
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.loading import LoadedData, load_data
from fedvi.experiment.selecting import cohort_size, selection_of
from fedvi.experiment.validation import check_novel
from fedvi.federation import Federation
from fedvi.local import LocalTraining
from fedvi.placement import replicate
from fedvi.selection import Selection

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
    "selection",
    "together",
    "usable_cores",
    "with_finetuning",
]


class Experiment(NamedTuple):
    """All that a configuration stands for, but for the way it is run.

    Attributes:
      config: what it is made from; `selection` is uniform where the algorithm takes
        all clients.
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
    paths = ("data_file", "second_data_file", "ood_data_file", "data_dir")
    settings = {key: value for key, value in config.items() if key not in paths}
    # Checkpoints of before a setting existed lack it: its default is left out.
    for setting, default in (("codec", "identity"), ("dtype", "float32")):
        if settings.get(setting) == default:
            del settings[setting]
    options = settings.get("options", {})
    if settings.get("algorithm") == "sfedbayes" and options.get("keep") == 1.0:
        rest = {key: value for key, value in options.items() if key != "keep"}
        settings["options"] = rest
    return settings | {"data_sha256": data_sha256}


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
    check_novel(clients, config.novel_clients)
    novel = _novel(config, clients)
    sizes = np.delete(federated.train.size, novel)
    model = nn.build(
        config.model,
        classes=federated.classes,
        input_shape=federated.train.x.shape[2:],
        preprocess=data.standardise(mean, std),
        dtype=config.dtype,
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
    algorithm = build_algorithm(task)
    if algorithm.cohort == "all":
        config = dataclasses.replace(config, selection="uniform")
    result = Experiment(
        config=config,
        data=federated,
        data_sha256=_sha256((federated.train, federated.test, ood)),
        task=task,
        algorithm=algorithm,
        participants=cohort_size(config, algorithm, clients),
        novel=novel,
        build_algorithm=build_algorithm,
        ood=ood,
    )
    selection(result)
    _check_end(result)
    return result


def with_finetuning(experiment: Experiment, epochs: int) -> Experiment:
    """The experiment with another number of epochs of personalisation."""
    task = experiment.task
    task = task._replace(finetuning=task.finetuning._replace(epochs=epochs))
    return experiment._replace(task=task, algorithm=experiment.build_algorithm(task))


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


def mesh(devices: int | None, model_devices: int = 1, together: int = 1) -> Mesh:
    """The devices of a run.

    Args:
      devices: how many; None: every accelerator. Of a CPU: of one process as many as
        there are cores for the clients that train together, since a client alone
        keeps little more than one core busy; of several processes one each.
      model_devices: as of `clients_mesh`.
      together: clients that train together.

    Raises:
      ValueError: as `clients_mesh`.
    """
    if devices is None and jax.default_backend() == "cpu":
        devices = max(jax.process_count(), model_devices)
        if devices == 1:
            devices = min(together, usable_cores(), len(jax.devices()))
    return clients_mesh(devices, model_devices)


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def together(experiment: Experiment) -> int:
    """Clients that a round trains, or asks for a report, at the same time."""
    if selection(experiment).measure is not None:
        return len(experiment.trained)
    return experiment.participants


def selection(experiment: Experiment) -> Selection:
    """The rule that picks the cohort, of all clients but the novel ones.

    Raises:
      ValueError: as `selecting.selection_of`.
    """
    return selection_of(
        experiment.config,
        experiment.algorithm,
        experiment.data.train,
        experiment.trained,
        experiment.participants,
    )


def federation(experiment: Experiment, chunk_size: int, mesh: Mesh) -> Federation:
    """The federation of an experiment."""
    return Federation(
        experiment.algorithm,
        experiment.data.train,
        experiment.data.test,
        selection=selection(experiment),
        chunk_size=chunk_size,
        mesh=mesh,
        eval_batch_size=experiment.config.eval_batch_size,
        codec=codecs.named(experiment.config.codec),
    )


def on_devices(experiment: Experiment, mesh: Mesh) -> Experiment:
    """The experiment with its data replicated on every device of the mesh."""
    train, test, ood = replicate(
        mesh, (experiment.data.train, experiment.data.test, experiment.ood)
    )
    return experiment._replace(
        data=dataclasses.replace(experiment.data, train=train, test=test), ood=ood
    )
