"""From a configuration to data, model, algorithm, selection and federation."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from fedvi import (
    algorithms,
    checks,
    codecs,
    contract_checks,
    data,
    names,
    nn,
    selection,
)
from fedvi.algorithm import Algorithm, Task, own_settings
from fedvi.data import ClientData, FederatedData
from fedvi.experiment import folder
from fedvi.experiment.config import (
    ExperimentConfig,
    RunOptions,
    check_novel,
    participants,
)
from fedvi.experiment.loading import LoadedData, load_data
from fedvi.experiment.npz_tree import canonical
from fedvi.federation import BaseFederation, Federation
from fedvi.keys import root_key
from fedvi.local import OPTIMIZERS, LocalTraining
from fedvi.options import check_names
from fedvi.placement import layered
from fedvi.selection import Selection
from fedvi.streaming import StreamedFederation

__all__ = [
    "PATHS",
    "Experiment",
    "applied",
    "check_own",
    "differing",
    "experiment",
    "federation",
    "identity",
    "program_of",
    "resolve",
    "settings",
]


PATHS = ("data_file", "second_data_file", "ood_data_file", "data_dir")
"""Settings that say where data lie, and not what they are."""


class Experiment(NamedTuple):
    """All that a configuration stands for, but for the way it is run.

    Attributes:
      config: what it is made from, with every option and every default that the data
        decide; `selection` is uniform where the algorithm takes all clients.
      data: every client's.
      data_sha256: of all clients' examples (hex).
      ood_sha256: of `ood`.
      task: counts the clients that may take part in training.
      algorithm: `build_algorithm(task)`.
      selection: who takes part in a round, of all clients but the novel ones.
      novel: ids in order of the clients that never take part in training.
      build_algorithm: makes the algorithm for a task, its options filled in.
      ood: out-of-distribution inputs of the same clients, if asked for.
      calibration: a part of their training data that nobody trains on, if asked for.
    """

    config: ExperimentConfig
    data: FederatedData
    data_sha256: str
    ood_sha256: str
    task: Task
    algorithm: Algorithm
    selection: Selection
    novel: np.ndarray
    build_algorithm: Callable[[Task], Algorithm]
    ood: ClientData | None = None
    calibration: ClientData | None = None

    @property
    def trained(self) -> np.ndarray:
        """Ids in order of the clients that may take part in training."""
        return np.delete(np.arange(len(self.data.train.size)), self.novel)

    @property
    def together(self) -> int:
        """Clients that a round trains, or asks for a report, at the same time."""
        if self.selection.measure is not None:
            return len(self.trained)
        return self.selection.size

    @property
    def _options(self) -> type | None:
        """The class of the algorithm's options; None of a plain function."""
        return getattr(self.build_algorithm.func, "options", None)

    def evaluation_settings(self) -> dict[str, str]:
        """Settings that nothing but evaluations reads, `options.name` those of the
        algorithm, and which evaluations: `fedvi.option(evaluation=)`."""
        owners = [("", self.config)]
        if self._options is not None:
            owners.append(("options.", self._options))
        return {
            f"{prefix}{field.name}": field.metadata["evaluation"]
            for prefix, owner in owners
            for field in dataclasses.fields(owner)
            if field.metadata.get("evaluation")
        }

    def numbers(self) -> dict[str, float]:
        """The settings that are numbers in formulas, by name: those of the
        configuration, and of the algorithm's options, that may be traced."""
        known = self._options
        if known is None:  # a plain function, which may ask what its numbers are
            return {}
        values = {
            field.name: getattr(owner, field.name)
            for owner in (self.config, known(**self.config.options))
            for field in dataclasses.fields(owner)
            if field.metadata.get("traced")
        }
        return {
            name: float(value) for name, value in values.items() if value is not None
        }

    def algorithm_of(self, numbers: Mapping[str, Any]) -> Algorithm:
        """The algorithm with others of its `numbers`, which may be traced."""
        fields = {field.name for field in dataclasses.fields(self.config)}
        own = {name: value for name, value in numbers.items() if name in fields}
        config = dataclasses.replace(self.config, **own)
        training, finetuning = _local_training(config)
        task = self.task._replace(training=training, finetuning=finetuning)
        options = {name: value for name, value in numbers.items() if name not in own}
        return self.build_algorithm(task, **options)

    def finetuned(self, epochs: int) -> Algorithm:
        """The algorithm with another number of epochs of personalisation."""
        finetuning = self.task.finetuning._replace(epochs=epochs)
        return self.build_algorithm(self.task._replace(finetuning=finetuning))


def resolve(
    config: ExperimentConfig, builder: Callable[..., Algorithm] | None = None
) -> ExperimentConfig:
    """The configuration with every option of its algorithm, defaults included.

    Args:
      config: the configuration.
      builder: as in `experiment`; its options are looked at if it has a class of them.

    Raises:
      ValueError: an unknown algorithm, or an option that it does not take or that is
        outside its range.
    """
    if builder is None:
        options = algorithms.options_of(config.algorithm)
    elif not (options := getattr(builder, "options", None)):
        return config
    check_names(config.options, options, config.algorithm)
    filled = dataclasses.asdict(options(**config.options))
    return dataclasses.replace(config, options=filled)


def identity(config: Mapping[str, Any], data_sha256: str | None) -> dict[str, Any]:
    """What two stretches of one run must agree on: settings and data, not paths.

    Args:
      config: of `ExperimentConfig.to_dict`.
      data_sha256: of the clients' examples.
    """
    settings = {key: value for key, value in config.items() if key not in PATHS}
    return settings | {"data_sha256": data_sha256}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is made from, but for its data's places and its seeds, flat: an option
    of the algorithm is `options.name`, a sequence text with commas.

    Args:
      config: of `ExperimentConfig.to_dict`.
    """
    plain = {k: v for k, v in config.items() if k not in (*PATHS, "seed", "seeds")}
    options = plain.pop("options")
    flat = plain | {f"options.{key}": value for key, value in options.items()}
    return {
        key: ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        for key, value in flat.items()
    }


def experiment(
    config: ExperimentConfig,
    builder: Callable[..., Algorithm] | None = None,
    loaded: LoadedData | None = None,
    model_devices: int = 1,
) -> Experiment:
    """Builds data, model, task, algorithm and selection.

    Args:
      config: the configuration.
      builder: a user's own `(task, **options) -> Algorithm`; default: the registered
        one that `config.algorithm` names.
      loaded: what `load_data` gave for this configuration; default: loads it.
      model_devices: over which a model is split.

    Raises:
      ValueError: what the configuration asks for does not exist or does not fit.
    """
    config = resolve(config, builder)
    federated, mean, std, ood, calibration = loaded or load_data(config)
    train, clients = federated.train, len(federated.train.size)
    config = config.for_data(federated)
    check_novel(clients, config.novel_clients)
    novel = _novel(config, clients)
    trained = np.delete(np.arange(clients), novel)
    takes_hidden = "hidden" in nn.options_of(config.model)
    model = nn.build(
        config.model,
        classes=federated.classes,
        input_shape=train.x.shape[2:],
        preprocess=data.standardise(mean, std),
        dtype=config.dtype,
        **({"hidden": config.hidden} if takes_hidden else {}),
    )
    model = model if model_devices == 1 else layered(model)
    local = _local_training(config)
    given = config.unlabelled
    task = Task.of(model, train, *local, candidates=trained, unlabelled=given)
    builder = builder or algorithms.find(config.algorithm)
    build_algorithm = partial(builder, **config.options)
    algorithm = build_algorithm(task)
    if algorithm.cohort == "all":
        config = dataclasses.replace(config, selection="uniform")
    result = Experiment(
        config=config,
        data=federated,
        data_sha256=_sha256((train, federated.test, calibration)),
        ood_sha256=_sha256(ood),
        task=task,
        algorithm=algorithm,
        selection=_selection(config, algorithm, train, trained),
        novel=novel,
        build_algorithm=build_algorithm,
        ood=ood,
        calibration=calibration,
    )
    _check_end(result)
    return result


def applied(given: ExperimentConfig, experiment: Experiment) -> str:
    """One line on what a run makes of its data, what they decided and what is idle.

    Args:
      given: the configuration as it was asked for.
      experiment: what was built from it.
    """
    config, x = experiment.config, experiment.data.train.x
    decided = [
        field.name
        for field in dataclasses.fields(config)
        if getattr(given, field.name) is None
        and getattr(config, field.name) is not None
    ]
    note = f" (decided by the data: {', '.join(decided)})" if decided else ""
    if idle := given.idle_options():
        note += f" (not looked at with partition={given.partition}: {', '.join(idle)})"
    return (
        f"dataset={config.dataset}, {experiment.data.classes} classes, "
        f"clients={len(experiment.data.train.size)}, inputs "
        f"{x.dtype}{list(x.shape[2:])}, normalise={config.normalise}, "
        f"model={config.model}, augment={config.augment}{note}"
    )


def _local_training(config: ExperimentConfig) -> tuple[LocalTraining, LocalTraining]:
    """Of a round, and of personalisation."""
    training = LocalTraining(
        config.epochs,
        config.batch_size,
        config.learning_rate_schedule(),
        config.momentum,
        data.crop_and_flip() if config.augment else None,
        _optimizer(config.optimizer),
        config.local_steps,
    )
    finetuning = training._replace(
        epochs=config.finetune_epochs,
        learning_rate=config.finetune_learning_rate,
        steps=None,
    )
    return training, finetuning


def _optimizer(name: str) -> str | Callable[..., optax.GradientTransformation]:
    """A name of `fedvi.local.OPTIMIZERS`, or a user's own, tried out."""
    if not names.is_path(name):
        return name
    own = names.imported("optimizer", name, OPTIMIZERS)
    with names.told("optimizer", name):
        made = own(0.1)
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"optimizer={name!r} returned {type(made).__name__}: it must be a function "
            "of the learning rate that returns an optax.GradientTransformation"
        )
    return own


def check_own(experiment: Experiment) -> None:
    """Checks that an algorithm of a user's own keeps the contract, before its turn."""
    if not experiment.build_algorithm.func.__module__.startswith("fedvi."):
        contract_checks.check(
            experiment.algorithm,
            experiment.data.train,
            experiment.data.test,
            experiment.task.clients,
            codecs.named(experiment.config.codec),
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
    _check_calibration(experiment)
    for epochs in config.finetune_curve:
        experiment.finetuned(epochs)


def _check_calibration(experiment: Experiment) -> None:
    fraction, calibration = (
        experiment.config.calibration_fraction,
        experiment.calibration,
    )
    if calibration is None:
        if fraction:
            raise ValueError(
                f"calibration_fraction={fraction}, but loaded.calibration is None: "
                "make it with fedvi.data.calibration_split"
            )
        return
    checks.client_data("calibration", calibration)
    clients = len(experiment.data.train.size)
    checks.same_clients(clients, len(calibration.size), "calibration")
    contract_checks.check_labels("calibration", calibration, experiment.data.classes)
    checks.finite_inputs("calibration", calibration)
    if not np.asarray(calibration.size)[experiment.trained].any():
        raise ValueError(
            f"calibration_fraction={fraction}: no training client has calibration "
            "data: give clients of two examples or more"
        )


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


def _cohort_size(config: ExperimentConfig, algorithm: Algorithm, clients: int) -> int:
    """Clients in a round: what the algorithm says, else ⌊N·f⌋."""
    if algorithm.cohort is None:
        return participants(clients, config.fraction, config.novel_clients)
    if algorithm.cohort > clients - config.novel_clients:
        raise ValueError(
            f"clients={clients} less novel_clients={config.novel_clients} are fewer "
            f"than the {algorithm.cohort} that {algorithm.name} takes in a round: "
            "give more clients"
        )
    return algorithm.cohort


def _selection(
    config: ExperimentConfig,
    algorithm: Algorithm,
    train: ClientData,
    trained: np.ndarray,
) -> Selection:
    """The rule that picks the cohort.

    Args:
      config: the configuration; its `selection` is not looked at where the algorithm
        takes all clients.
      algorithm: that it names.
      train: training data of all clients, leaves `[clients, ...]`.
      trained: ids in order of the clients that may take part.

    Raises:
      ValueError: an unknown selection, a measure that the algorithm does not have, or
        fewer clients to train than a round takes.
    """
    clients = len(train.size)
    if algorithm.cohort == "all":
        return selection.full(clients, trained)
    size = _cohort_size(config, algorithm, clients)
    known = (*selection.RULES, *algorithm.importance)
    if config.selection not in known:
        raise ValueError(
            f"selection={config.selection!r} must be one of {', '.join(known)} for "
            f"{algorithm.name}{names.near(config.selection, known)}"
        )
    if rule := selection.RULES.get(config.selection):
        strata = {"strata": config.selection_strata}
        own = strata if rule is selection.stratified else {}
        return rule(clients, size, _turns(config, train, trained), **own)
    return selection.proportional(
        clients,
        size,
        config.selection,
        temperature=config.selection_temperature,
        floor=config.selection_floor,
        candidates=trained,
    )


def _turns(
    config: ExperimentConfig, train: ClientData, trained: np.ndarray
) -> np.ndarray:
    """The ids of `trained` in the order of their turns."""
    if config.selection_order == "sorted":
        labels, sizes = jax.device_get((train.y, train.size))
        classes = [_most_frequent(labels[i, : sizes[i]]) for i in trained]
        return trained[np.argsort(classes, kind="stable")]
    if config.selection_order == "shuffled":
        # Longer than the seed of the partition and that of the novel clients: a stream
        # of its own.
        rng = np.random.default_rng(
            [config.partition_seed, len(train.size), config.novel_clients, 1]
        )
        return rng.permutation(trained)
    return trained


def _most_frequent(labels: np.ndarray) -> int:
    """The class of most examples, the lowest of several; -1 without examples."""
    return int(np.bincount(labels).argmax()) if labels.size else -1


def program_of(experiment: Experiment, options: RunOptions) -> str | None:
    """What runs that share a compiled program have in common; None: it can have no
    other of its kind.

    Clients on disk go one run after another, and several processes too. So does a run
    with a number of 0 that, alone, keeps less in its state than a traced one
    (momentum, where moments outlive a round): its checkpoint is to be that of a run
    alone.
    """
    if options.stream or jax.process_count() > 1 or not experiment.numbers():
        return None
    config = experiment.config.to_dict()
    config["options"] = dict(config["options"])
    for name in experiment.numbers():
        # Not None, which is what an option without a number has.
        (config if name in config else config["options"])[name] = "traced"
    config["seed"] = config["seeds"] = None
    how = dataclasses.asdict(options) | {"run_dir": None}
    return canonical([config, how, experiment.data_sha256, _own_state(experiment)])


@own_settings()
def _own_state(experiment: Experiment) -> str | None:
    """The structure of the state where a number of 0 gives it one of its own."""
    numbers = experiment.numbers()
    if all(numbers.values()):
        return None

    def structure(algorithm):
        def init(key):
            server = algorithm.init(key)
            return server, algorithm.init_client(key, server)

        return jax.tree.structure(jax.eval_shape(init, root_key(0)))

    # NumPy's numbers stand for traced ones, as in a federation.
    traced = {name: np.float32(value) for name, value in numbers.items()}
    own = structure(experiment.algorithm)
    return None if own == structure(experiment.algorithm_of(traced)) else str(own)


def differing(experiments: Sequence[Experiment]) -> list[Any]:
    """Per experiment those of its numbers, by name, that are not the same in all; ()
    where there are none."""
    numbers = [experiment.numbers() for experiment in experiments]
    names = [
        name
        for name, value in numbers[0].items()
        if any(other[name] != value for other in numbers)
    ]
    return [{name: own[name] for name in names} or () for own in numbers]


def federation(
    experiment: Experiment,
    options: RunOptions,
    mesh: Mesh | None,
    settings: Any = (),
    read_only: bool = False,
) -> BaseFederation:
    """The federation of an experiment, its clients in memory or streamed.

    Args:
      experiment: what is run.
      options: where and how.
      mesh: of the devices; None: one of them.
      settings: those of `Experiment.numbers` that its runs may differ in; () for none.
      read_only: as of `StreamedFederation`.
    """
    train, test = experiment.data.train, experiment.data.test
    common = {
        "selection": experiment.selection,
        "mesh": mesh,
        "eval_batch_size": experiment.config.eval_batch_size,
        "calibration_bins": experiment.config.calibration_bins,
        "codec": codecs.named(experiment.config.codec),
    }
    if not options.stream:
        algorithm = experiment.algorithm_of if settings else experiment.algorithm
        return Federation(algorithm, train, test, settings=settings, **common)
    return StreamedFederation(
        experiment.algorithm,
        data.ClientArrays(train),
        data.ClientArrays(test),
        store=os.path.join(options.run_dir, folder.STORE),
        read_only=read_only,
        block_size=options.block_size,
        **common,
    )
