"""Chosen classes and out-of-distribution data; the rest is in test_build."""

import dataclasses

import numpy as np
import pytest

from fedvi import data
from fedvi.experiment import load_data, setup
from fedvi.experiment.config import ExperimentConfig

CONFIG = ExperimentConfig(
    algorithm="fedavg",
    dataset="digits",
    partition="iid",
    clients=5,
    model="logistic",
    augment=False,
    fraction=1.0,
    ood_dataset="noise",
)


def change(**changes):
    return dataclasses.replace(CONFIG, **changes)


@pytest.fixture
def ood_file(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 10
    np.savez(tmp_path / "noise.npz", train_x=x, train_y=y, test_x=x, test_y=y)
    return str(tmp_path / "noise.npz")


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4, 4), np.uint8, r"shape of an example: \(4, 4, 1\), not \(8, 8, 1\)"),
        ((8, 8), np.float32, "type of an example: float32, not uint8"),
    ],
)
def test_ood_data_that_do_not_fit_are_named(tmp_path, shape, dtype, message):
    path = tmp_path / "other.npz"
    x, y = np.full((50, *shape), 0.5).astype(dtype), np.arange(50) % 10
    np.savez(path, train_x=x, train_y=y, test_x=x, test_y=y)
    with pytest.raises(ValueError, match=f"'noise' differs.*'digits' in the {message}"):
        load_data(change(ood_data_file=str(path)))


def test_the_same_data_are_not_out_of_distribution(tmp_path, ood_file):
    with pytest.raises(ValueError, match="'digits' has the same inputs as dataset="):
        load_data(change(ood_dataset="digits"))
    loaded = load_data(change(ood_data_file=ood_file))
    assert loaded.ood.x.shape == (5, 12, 8, 8, 1) and loaded.ood.size.sum() == 60
    assert load_data(change(ood_dataset=None)).ood is None


def test_classes_that_nobody_trains_on_are_out_of_distribution():
    config = change(
        keep_classes=tuple(range(8)),
        ood_dataset="digits",
        ood_classes=(9, 8),
        partition="class_subsets",  # of three classes, more than are left out
        classes_per_client=3,
        train_per_class=10,
        test_per_class=4,
    )
    loaded = load_data(config)
    digits = data.load("digits")
    expected = digits.test_x[digits.test_y >= 8]
    held = [x[:n] for x, n in zip(loaded.ood.x, loaded.ood.size)]
    found = np.concatenate(held)
    assert found.shape == expected.shape and all(map(len, held))
    assert {x.tobytes() for x in found} == {x.tobytes() for x in expected}
    assert loaded.federated.classes == 8
    # Held-out training data as well, where the settings are chosen on those.
    validation = load_data(dataclasses.replace(config, validation_fraction=0.5)).ood
    own = {x.tobytes() for x in digits.train_x[digits.train_y >= 8]}
    x = np.concatenate([x[:n] for x, n in zip(validation.x, validation.size)])
    assert len(x) and {image.tobytes() for image in x} <= own


def test_the_ood_data_have_a_digest_of_their_own(ood_file):
    plain = setup.experiment(change(ood_dataset=None))
    other = setup.experiment(change(ood_data_file=ood_file))
    assert plain.data_sha256 == other.data_sha256  # training does not look at them
    assert plain.ood_sha256 != other.ood_sha256


def test_ood_data_are_evaluated_on_the_same_split_and_never_clustered(ood_file):
    config = change(
        ood_data_file=ood_file, validation_fraction=0.5, cluster_transform="invert"
    )
    with np.load(ood_file) as file:
        held = {image.tobytes() for image in file["train_x"]}
    ood = load_data(config).ood
    assert ood.size.sum() == 30
    images = [ood.x[i, slot] for i in range(5) for slot in range(ood.size[i])]
    assert {image.tobytes() for image in images} <= held


def test_other_numbers_of_clients_are_named(tmp_path):
    def groups(name, count):
        x, y = np.ones((2 * count, 4, 4), np.uint8), np.zeros(2 * count, int)
        group = np.arange(2 * count) // 2
        split = dict(train_x=x, train_y=y, train_group=group)
        np.savez(tmp_path / name, **split, test_x=x, test_y=y, test_group=group)
        return str(tmp_path / name)

    config = change(
        dataset="mine",
        data_file=groups("mine.npz", 3),
        ood_data_file=groups("other.npz", 2),
        clients=0,
        partition="by_group",
    )
    with pytest.raises(ValueError, match="in the number of clients: 2, not 3"):
        load_data(config)


def test_training_clients_need_ood_data(ood_file):
    loaded = load_data(change(ood_data_file=ood_file))
    nothing = loaded.ood._replace(size=np.zeros_like(loaded.ood.size))
    with pytest.raises(ValueError, match="no training client has test data of it"):
        setup.experiment(CONFIG, loaded=loaded._replace(ood=nothing))


def test_classes_are_chosen_before_the_data_are_dealt_and_measured(ood_file):
    config = change(keep_classes=(3, 8, 0), ood_data_file=ood_file)
    loaded = load_data(config)
    whole = data.load("digits")
    kept = np.isin(whole.train_y, (3, 8, 0))
    assert loaded.federated.classes == 3
    assert loaded.federated.train.size.sum() == kept.sum()
    mean, std = data.pixel_statistics(whole.train_x[kept])
    np.testing.assert_array_equal(loaded.mean, mean)
    np.testing.assert_array_equal(loaded.std, std)
    # The six test images of each of the three classes.
    assert loaded.ood.size.sum() == 18 and set(loaded.ood.y.flat) == {0, 1, 2}

    binary = load_data(dataclasses.replace(config, one_against_rest=1)).federated
    eights = (whole.train_y == 8).sum()
    assert binary.classes == 2 and binary.train.y.sum() == eights
    fidelity = "only classes 3, 8, 0, as 0..2; label 1 is class 1, 0 the rest"
    assert fidelity in binary.fidelity


def test_the_second_data_set_has_the_same_classes(ood_file):
    config = change(
        one_against_rest=0,
        ood_dataset=None,
        second_dataset="noise",
        second_data_file=ood_file,
    )
    federated = load_data(config).federated
    # Clients 3 and 4 are of the second data set.
    assert federated.classes == 2 and set(federated.train.y[3:].flat) == {0, 1}


def test_c22_other_data_are_on_the_scale_of_the_first(tmp_path):
    def floats(name, factor):
        x = np.random.default_rng(len(name)).uniform(0, factor, (60, 8, 8))
        y = np.arange(60) % 10
        np.savez(tmp_path / name, train_x=x, train_y=y, test_x=x, test_y=y)
        return str(tmp_path / name)

    config = change(dataset="unit", data_file=floats("unit.npz", 1))
    wide, like = floats("wide.npz", 255), floats("alike.npz", 2)
    load_data(dataclasses.replace(config, ood_data_file=like))
    with pytest.raises(
        ValueError, match="of dataset='unit' and those of ood_dataset=.*"
    ):
        load_data(dataclasses.replace(config, ood_data_file=wide))
    second = dataclasses.replace(config, ood_dataset=None, second_dataset="wide")
    with pytest.raises(ValueError, match="of 'unit' and those of 'wide' are on differ"):
        load_data(dataclasses.replace(second, second_data_file=wide))
