"""What a data file alone decides, and how its clients are named afterwards."""

import csv
import dataclasses

import numpy as np
import pytest
from absl import flags as absl_flags

from fedvi import data
from fedvi.experiment import command_line, folder, load_data, rows, setup
from fedvi.experiment.config import ExperimentConfig

SITES = [f"hospital_{site}" for site in (10, 2, 1, 3)]


@pytest.fixture
def three(tmp_path):
    """Three classes of 8x8 images at four hospitals."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 48), ("test", 24)):
        arrays[f"{split}_x"] = rng.integers(0, 256, (n, 8, 8), dtype=np.uint8)
        arrays[f"{split}_y"] = np.array(["ant", "bee", "cat"])[np.arange(n) % 3]
        arrays[f"{split}_group"] = np.array(SITES)[np.arange(n) % 4]
    np.savez(tmp_path / "three.npz", **arrays)
    return str(tmp_path / "three.npz")


def config(data_file, **changes):
    return ExperimentConfig(
        **{"algorithm": "fedavg", "data_file": data_file, "hidden": (4,), "rounds": 1}
        | {"partition": "by_group", "fraction": 1.0, "finetune_epochs": 0}
        | changes
    )


def read(*arguments):
    values = absl_flags.FlagValues()
    command_line.define(values)
    command_line.parse(["program", *arguments], values)
    return command_line.read(values)


def test_a_file_without_a_name_decides_what_was_made_for_one_data_set(three):
    given = config(three)
    built = setup.experiment(given)
    found = built.config
    assert (found.dataset, found.model, found.augment) == ("three", "mlp", False)
    assert built.data.classes == 3 and built.task.training.augment is None
    assert setup.applied(given, built) == (
        "dataset=three, 3 classes, clients=4, inputs uint8[8, 8, 1], "
        "normalise=standardise, model=mlp, augment=False (decided by the data: "
        "dataset, clients, model, augment)"
    )
    assert found.clients == 4 and config(None, partition="iid").parts == 100
    [(_, options)] = read("--algorithm=fedavg", f"--data_file={three}")
    assert options.run_dir == "runs/fedavg_three"
    # What was decided, given, is the same run.
    again = setup.experiment(found)
    assert again.config == found and "decided" not in setup.applied(found, again)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("cifar100", "mobilenet", True)),
        ({"dataset": "cifar10", "augment": False}, ("cifar10", "mobilenet", False)),
        ({"dataset": "svhn"}, ("svhn", "mobilenet", False)),
        ({"dataset": "cifar10", "model": "vgg"}, ("cifar10", "vgg", True)),
        ({"data_file": "a/faces.npz"}, ("faces", "mobilenet", False)),
        ({"data_file": "cifar100.npz"}, ("cifar100_file", "mobilenet", False)),
    ],
)
def test_what_is_given_wins(three, changes, expected):
    small = load_data(config(three)).federated
    wide = np.zeros((4, 1, 32, 32, 3), np.uint8)
    images = dataclasses.replace(
        small, name="cifar100", train=small.train._replace(x=wide)
    )
    found = ExperimentConfig(**changes).for_data(images)
    assert (found.dataset, found.model, found.augment) == expected


def test_options_of_another_partition_are_said_to_be_idle(three):
    given = config(three, shards=2, alpha=0.1, min_size=3, partition="dirichlet")
    assert given.idle_options() == ["shards"]
    given = config(three, alpha=0.1)
    line = setup.applied(given, setup.experiment(given))
    assert line.endswith(" (not looked at with partition=by_group: alpha)")


def test_a_users_own_data_keep_their_name(three):
    loaded = load_data(config(three))
    own = loaded._replace(federated=dataclasses.replace(loaded.federated, name="own"))
    built = setup.experiment(config(None), loaded=own)
    assert (built.config.dataset, built.config.augment) == ("own", False)


def test_a_folder_needs_a_name():
    with pytest.raises(ValueError, match="data_dir='x' needs a name .* give dataset"):
        ExperimentConfig(data_dir="x").validate()
    ExperimentConfig(data_dir="x", dataset="mnist").validate()
    ExperimentConfig(data_dir="x", data_file="mine.npz").validate()


def test_pixels_are_normalised_as_asked(three):
    """The mean-field methods' noise counts in these units."""
    x = np.array([[0], [255]], np.uint8).repeat(64, 1).reshape(2, 8, 8, 1)
    for name, low, high in (("half", -1, 1), ("unit", 0, 1)):
        built = setup.experiment(config(three, normalise=name))
        loaded = load_data(built.config)
        inputs = data.standardise(loaded.mean, loaded.std)(x)
        np.testing.assert_allclose(inputs[0], low, atol=1e-6)
        np.testing.assert_allclose(inputs[1], high, atol=1e-6)
        assert f"normalise={name}" in setup.applied(config(three), built)
    for low, high in ((-0.1, 1), (0, 1.1)):
        with pytest.raises(
            ValueError, match=f"float64 and lies in {low}..{high}: give"
        ):
            data.normalisation("half", np.array([[low], [high]]))
    data.normalisation("half", np.array([[0.0], [1.0]]))
    with pytest.raises(ValueError, match="normalise='z' must be one of standardise, h"):
        config(three, normalise="z").validate()


def test_clients_keep_their_natural_ids(three, tmp_path):
    """C25, issue 13.12: hospital_10 is not client 2, and the run folder says who is."""
    built = setup.experiment(config(three))
    expected = [f"hospital_{site}" for site in (1, 2, 3, 10)]
    found = rows.client_rows(built, [0])
    assert [row["id"] for row in found] == expected
    assert found[3] == {
        "seed": 0,
        "client": 3,
        "id": "hospital_10",
        "novel": 0,
        "train_size": 12,
        "test_size": 6,
        "train_class_ant": 4,
        "train_class_bee": 4,
        "train_class_cat": 4,
    }
    plain = setup.experiment(config(three, partition="iid", clients=2))
    assert [row["id"] for row in rows.client_rows(plain, [0])] == [0, 1]

    path = tmp_path / folder.CLIENTS
    folder.write_csv(path, found)
    with open(path, newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == expected
    assert "labels 'ant', 'bee', 'cat' are classes 0..2" in built.data.fidelity


def test_a_linear_classifier_of_two_classes_refuses_three_in_one_line(three):
    with pytest.raises(
        ValueError, match="'binary_logistic' has two classes, not 3"
    ) as e:
        setup.experiment(config(three, model="binary_logistic"))
    assert not hasattr(e.value, "__notes__")
