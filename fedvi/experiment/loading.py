"""From a configuration to every client's data."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from fedvi import data
from fedvi.data import ClientData, FederatedData
from fedvi.experiment.config import ExperimentConfig

__all__ = ["LoadedData", "load_data"]


class LoadedData(NamedTuple):
    """Every client's data, and what is needed to normalise it.

    Attributes:
      federated: the clients' data; `test` holds what is evaluated on, which with
        `validation_fraction` is a part of the training data.
      mean: what is taken off the inputs, `[channels]`: the mean of the training split
        of `dataset`, of the classes that are kept, or as `normalise` says. With
        `second_dataset` and `cluster_transform` too it serves every client.
      std: what they are then divided by.
      ood: the evaluated part of `ood_dataset`, if one is given.
      calibration: with `calibration_fraction`, what nobody trains on or is evaluated
        on.
    """

    federated: FederatedData
    mean: jax.typing.ArrayLike
    std: jax.typing.ArrayLike
    ood: ClientData | None = None
    calibration: ClientData | None = None


def load_data(config: ExperimentConfig) -> LoadedData:
    """Loads, checks and partitions the data.

    Options of other partitions than the chosen one are ignored.

    Raises:
      ValueError: missing or invalid data, a partition that they do not allow, or
        nothing to evaluate on.
    """
    dataset = _dataset(config, config.dataset, config.data_file)
    if config.augment and dataset.train_x.ndim != 4:
        raise ValueError(
            f"augment=True needs images, but {config.data_name!r} holds features of "
            f"shape {dataset.train_x.shape[1:]}: give --noaugment"
        )
    federated = _clustered(config, dataset, _federated(config, dataset))
    if config.validation_fraction:
        federated = data.hold_out(
            federated, config.validation_fraction, config.partition_seed
        )
    calibration = None
    if config.calibration_fraction:
        # A part of all training data: what is held out for validation counts too.
        fraction = config.calibration_fraction / (1 - config.validation_fraction)
        federated, calibration = data.calibration_split(
            federated, fraction, config.partition_seed
        )
    if not federated.test.size.any():
        raise ValueError(
            f"no client of partition={config.partition!r} has {config.evaluated_on} "
            "data: give validation_fraction, the part of the training data to hold out"
        )
    mean, std = data.normalisation(config.normalise, dataset.train_x)
    ood = _out_of_distribution(config, federated)
    return LoadedData(federated, mean, std, ood, calibration)


def _dataset(
    config: ExperimentConfig, name: str | None, data_file: str | None
) -> data.Dataset:
    """A data set with the classes that the configuration asks for."""
    if data_file is None:
        name = name or config.data_name
    dataset = data.load(name, data_file=data_file, data_dir=config.data_dir)
    if config.keep_classes:
        dataset = data.keep_classes(dataset, config.keep_classes)
    if config.one_against_rest is not None:
        dataset = data.one_against_rest(dataset, config.one_against_rest)
    return dataset


def _federated(config: ExperimentConfig, dataset: data.Dataset) -> FederatedData:
    partition = data.partition(
        config.partition,
        dataset,
        clients=config.parts,
        seed=config.partition_seed,
        **config.partition_options(),
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
    second = _dataset(config, config.second_dataset, config.second_data_file)
    # One folder of idx files holds one data set, whatever its name.
    if np.array_equal(second.train_x, dataset.train_x):
        raise ValueError(
            f"second_dataset={config.second_dataset!r} has the same training inputs as "
            f"dataset={config.data_name!r}: give its own second_data_file"
        )
    return data.join_halves(federated, _federated(config, second))


def _out_of_distribution(
    config: ExperimentConfig, federated: FederatedData
) -> ClientData | None:
    """What takes the place of `federated.test`, checked to fit the same model."""
    name, here = config.ood_dataset, f"dataset={config.data_name!r}"
    if name is None:
        return None
    other = dataclasses.replace(
        config,
        dataset=name,
        data_file=config.ood_data_file,
        augment=False,
        cluster_transform="none",
        second_dataset=None,
        ood_dataset=None,
        calibration_fraction=0.0,
    )
    if config.ood_classes:  # too few for the clients' own subsets of classes
        other = dataclasses.replace(
            other,
            keep_classes=config.ood_classes,
            partition="iid",
            clients=len(federated.test.size),
        )
    ood = load_data(other).federated.test
    test = federated.test
    for what, ours, theirs in (
        ("number of clients", len(test.size), len(ood.size)),
        ("shape of an example", test.x.shape[2:], ood.x.shape[2:]),
        ("type of an example", test.x.dtype, ood.x.dtype),
    ):
        if ours != theirs:
            raise ValueError(
                f"ood_dataset={name!r} differs from {here} in the "
                f"{what}: {theirs}, not {ours}; one model must serve both: give a data "
                "set that agrees"
            )
    # One folder of idx files holds one data set, whatever its name.
    if np.array_equal(ood.x, test.x):
        raise ValueError(
            f"ood_dataset={name!r} has the same inputs as {here}: "
            "give its own ood_data_file"
        )
    data.check_scale(
        f"inputs of {here}",
        data.some_examples(test),
        f"those of ood_dataset={name!r}",
        data.some_examples(ood),
    )
    return ood
