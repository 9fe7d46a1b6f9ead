import dataclasses
import inspect

import jax
import numpy as np
import pytest

from fedvi import algorithms, data
from fedvi.experiment import build
from fedvi.experiment.config import PARTITION_OPTIONS, ExperimentConfig

CONFIG = ExperimentConfig(
    algorithm="fedavg",
    dataset="digits",
    clients=6,
    partition="iid",
    model="mlp",
    hidden=(5,),
    augment=False,
    fraction=0.5,
)


def change(**changes):
    return dataclasses.replace(CONFIG, **changes)


def features_file(tmp_path, labels=(0, 1, 2, 1)):
    rng = np.random.default_rng(0)
    path = tmp_path / "features.npz"
    x = rng.normal(size=(len(labels), 3)).astype(np.float32)
    y = np.asarray(labels)
    np.savez(path, train_x=x, train_y=y, test_x=x, test_y=y)
    return str(path)


def test_a_configuration_becomes_data_task_and_federation():
    experiment = build.experiment(CONFIG)
    assert experiment.data.train.x.shape == (6, 240, 8, 8, 1)
    assert experiment.data.train.x.dtype == np.uint8
    assert (experiment.task.clients, experiment.task.samples) == (6, 1437)
    assert experiment.participants == 3
    training, finetuning = experiment.task.training, experiment.task.finetuning
    assert (training.epochs, training.batch_size, training.momentum) == (1, 50, 0.9)
    assert (finetuning.epochs, finetuning.learning_rate) == (5, 1e-3)
    federation = build.federation(experiment, 1, build.mesh(None))
    assert (federation.clients, federation.selection.size) == (6, 3)


def test_pixels_are_standardised_by_the_training_split():
    loaded = build.load_data(CONFIG)
    x, size = loaded.federated.train.x, loaded.federated.train.size
    pixels = np.concatenate([x[i, :n] for i, n in enumerate(size)]) / 255
    np.testing.assert_allclose(loaded.mean, pixels.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(loaded.std, pixels.std((0, 1, 2)), rtol=1e-5)


def test_augmentation_serves_training_and_fine_tuning():
    task = build.experiment(change(augment=True)).task
    x = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8, 1)
    for training in (task.training, task.finetuning):
        augmented = training.augment(jax.random.key(0), x)
        assert augmented.shape == x.shape and not np.array_equal(augmented, x)


def test_options_reach_the_algorithm():
    with pytest.raises(ValueError, match="mu=-1 must be"):
        build.experiment(change(algorithm="fedprox", options={"mu": -1}))


def test_a_validation_part_comes_from_the_training_data():
    plain = build.load_data(CONFIG).federated
    held = build.load_data(change(validation_fraction=0.25)).federated
    total = held.train.size + held.test.size
    np.testing.assert_array_equal(total, plain.train.size)
    np.testing.assert_allclose(held.test.size, plain.train.size / 4, atol=1)
    test_images = {image.tobytes() for image in plain.test.x.reshape(-1, 64)}
    held_images = {image.tobytes() for image in held.test.x.reshape(-1, 64)}
    assert len(test_images & held_images) <= 1  # the empty image of padded slots


def test_by_group_takes_every_group(tmp_path):
    path = tmp_path / "groups.npz"
    x, y = np.zeros((6, 4, 4, 1), np.uint8), np.zeros(6, int)
    group = np.array([0, 0, 1, 1, 2, 2])
    split = dict(train_x=x, train_y=y, train_group=group)
    np.savez(path, **split, test_x=x, test_y=y, test_group=group + 10)
    config = change(dataset="mine", data_file=str(path), clients=0)
    config = dataclasses.replace(config, partition="by_group", fraction=1.0)
    with pytest.raises(ValueError, match="has test data: give validation_fraction"):
        build.experiment(config)
    held = build.experiment(dataclasses.replace(config, validation_fraction=0.5))
    assert held.participants == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "fedfoo"}, "algorithm='fedfoo' must be one of"),
        ({"options": {"mu": 1.0}}, "mu=1.0 is no option of fedavg, which takes serv"),
    ],
)
def test_an_algorithm_is_checked_before_the_data_are_loaded(changes, message):
    with pytest.raises(ValueError, match=message):
        build.check_algorithm(change(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": "class_shards"}, "missing shards"),
        ({"data_file": "no/such.npz"}, "no/such.npz"),
        ({"clients": 5000}, "clients=5000"),
        ({"model": "perceptron"}, "perceptron"),
        ({"clients": 3, "fraction": 0.1}, "fraction=0.1 of clients=3 is less than"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build.experiment(change(**changes))


def test_options_of_other_partitions_are_ignored():
    """They may come from a flag file whose partition the command line changes."""
    plain, other = build.experiment(CONFIG), build.experiment(change(shards=2))
    assert plain.data_sha256 == other.data_sha256


def test_every_option_of_a_partition_is_a_setting():
    for partition in data.PARTITIONS.values():
        options = inspect.getfullargspec(partition).kwonlyargs
        assert set(options) - {"clients", "seed"} <= set(PARTITION_OPTIONS)


def test_the_digest_follows_every_clients_examples(tmp_path):
    def digest(labels):
        path = features_file(tmp_path, labels)
        config = change(dataset="mine", data_file=path, clients=2)
        return build.experiment(config).data_sha256

    assert digest((0, 1, 2, 1)) == digest((0, 1, 2, 1)) != digest((0, 1, 2, 2))


def test_defaults_of_the_algorithm_are_resolved():
    config = build.resolve(change(algorithm="fedprox", options={"mu": 0.5}))
    assert config.options == {"mu": 0.5}
    niw = build.resolve(change(algorithm="fedhb_niw")).options
    defaults = algorithms.options_of("fedhb_niw")
    assert niw == {name: option.default for name, option in defaults.items()}

    def mine(task, *, steps: int = 3, loss=abs):
        """Builds nothing."""

    assert build.resolve(change(options={"loss": 1}), mine).options == {
        "steps": 3,
        "loss": 1,
    }


def test_features_cannot_be_augmented(tmp_path):
    config = change(dataset="mine", data_file=features_file(tmp_path), clients=2)
    build.experiment(config)
    with pytest.raises(ValueError, match="augment=True needs images"):
        build.experiment(dataclasses.replace(config, augment=True))


def test_a_label_outside_the_classes_is_named(tmp_path):
    path = features_file(tmp_path, labels=(0, 1, -1, 10))
    with pytest.raises(ValueError, match=r"train_y\[2\] = -1"):
        build.experiment(change(dataset="mine", data_file=path, clients=2))


def test_more_devices_than_there_are():
    assert build.mesh(None).size == 1
    assert build.mesh(4).size == 4
    with pytest.raises(ValueError, match="devices=99"):
        build.mesh(99)
