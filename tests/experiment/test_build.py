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


def test_devices_by_default_and_more_than_there_are(monkeypatch):
    assert build.mesh(None).size == 1
    monkeypatch.setattr(build, "usable_cores", lambda: 3)
    assert [build.mesh(None, together=n).size for n in (1, 2, 9)] == [1, 2, 3]
    monkeypatch.setattr(build, "usable_cores", lambda: 99)
    assert build.mesh(None, together=99).size == 8  # all that JAX shows
    assert build.mesh(4).size == 4
    with pytest.raises(ValueError, match="devices=99"):
        build.mesh(99)


def test_novel_clients_are_no_part_of_training():
    plain = build.experiment(CONFIG)
    kept_out = build.experiment(change(novel_clients=2))
    assert plain.novel.tolist() == []
    novel, size = kept_out.novel, kept_out.data.train.size
    assert len(novel) == 2 and novel[0] < novel[1]
    assert (kept_out.task.clients, kept_out.participants) == (4, 2)
    assert kept_out.task.samples == 1437 - size[novel].sum()
    assert kept_out.data_sha256 == plain.data_sha256
    federation = build.federation(kept_out, 1, build.mesh(None))
    assert (federation.clients, federation.population) == (6, 4)
    chosen = drawn_in(federation.selection, rounds=200)
    assert set(chosen.tolist()) == set(range(6)) - set(novel.tolist())
    everyone = build.federation(plain, 1, build.mesh(None)).selection
    assert set(drawn_in(everyone, rounds=200).tolist()) == set(range(6))


def drawn_in(selection, rounds):
    keys = jax.random.split(jax.random.key(1), rounds)
    return np.ravel(jax.vmap(lambda key: selection.select(key, 0, None, None)[0])(keys))


def test_who_is_novel_depends_on_the_seed_of_the_partition():
    config = change(clients=40, novel_clients=10)
    novel = [build.experiment(config).novel.tolist() for _ in range(2)]
    assert novel[0] == novel[1] and len(set(novel[0])) == 10
    others = [dataclasses.replace(config, partition_seed=seed) for seed in range(30)]
    # Each client is novel with probability 1/4; 4.5 standard errors.
    counts = np.bincount(np.ravel([build._novel(c, 40) for c in others]), minlength=40)
    assert np.abs(counts / 30 - 1 / 4).max() < 4.5 * np.sqrt(3 / 16 / 30)
    again = build.experiment(dataclasses.replace(config, seed=5))
    assert again.novel.tolist() == novel[0]


def test_by_group_counts_novel_clients_among_its_groups(tmp_path):
    path = tmp_path / "groups.npz"
    x, y, group = np.zeros((6, 4, 4, 1), np.uint8), np.zeros(6, int), np.arange(6) // 2
    split = dict(train_x=x, train_y=y, train_group=group)
    np.savez(path, **split, test_x=x, test_y=y, test_group=group)
    config = change(dataset="mine", data_file=str(path), clients=0, fraction=1.0)
    config = dataclasses.replace(config, partition="by_group", novel_clients=1)
    config.validate()
    assert build.experiment(config).participants == 2
    with pytest.raises(ValueError, match="novel_clients=3 of clients=3 leaves nobody"):
        build.experiment(dataclasses.replace(config, novel_clients=3))


@pytest.mark.parametrize("transform", data.CLUSTER_TRANSFORMS)
def test_a_transform_makes_two_clusters(transform):
    plain = build.load_data(CONFIG)
    loaded = build.load_data(change(cluster_transform=transform))
    clustered = data.transform_half(plain.federated, transform)
    np.testing.assert_array_equal(loaded.federated.train.x, clustered.train.x)
    np.testing.assert_array_equal(loaded.federated.test.y, clustered.test.y)
    assert loaded.federated.clusters.tolist() == [0, 0, 0, 1, 1, 1]
    assert plain.federated.clusters is None
    # Both halves are standardised like the data as they come.
    np.testing.assert_array_equal(loaded.mean, plain.mean)
    np.testing.assert_array_equal(loaded.std, plain.std)


def second_file(path):
    """Digits upside down, as a data set of its own."""
    dataset = data.load("digits")
    split = {f"{s}_x": getattr(dataset, f"{s}_x")[:, ::-1] for s in ("train", "test")}
    np.savez(path, **split, train_y=dataset.train_y, test_y=dataset.test_y)
    return str(path)


def test_the_second_half_can_come_from_another_data_set(tmp_path):
    path = second_file(tmp_path / "second.npz")
    config = change(second_dataset="upside", second_data_file=path)
    config = dataclasses.replace(config, validation_fraction=0.2)
    config.validate()
    loaded = build.load_data(config)
    plain = build.load_data(change(validation_fraction=0.2))
    # The same labels, hence the same partition: the clients differ in the pixels only.
    for part in ("train", "test"):
        ours, theirs = getattr(loaded.federated, part), getattr(plain.federated, part)
        np.testing.assert_array_equal(ours.y, theirs.y)
        np.testing.assert_array_equal(ours.x[:3], theirs.x[:3])
        np.testing.assert_array_equal(ours.x[3:], theirs.x[3:, :, ::-1])
    assert loaded.federated.clusters.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(loaded.mean, plain.mean)
    assert build.experiment(config).data.name == "digits+upside"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"second_dataset": "digits"}, "second_dataset='digits' has the same training"),
        ({"second_dataset": "x", "second_data_file": "no.npz"}, "'no.npz' for 'x' is"),
        ({"cluster_transform": "mirror"}, "transform='mirror' must be one of"),
        ({"cluster_transform": "rotate", "clients": 1}, "clients=1 cannot be halved"),
        ({"novel_clients": 6}, "novel_clients=6 of clients=6 leaves nobody to train"),
        ({"novel_clients": 5}, "of clients=6 less novel_clients=5 is less than one"),
    ],
)
def test_clusters_and_novel_clients_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build.experiment(change(**changes))


PATHS = ("data_file", "second_data_file", "ood_data_file", "data_dir")


def test_the_identity_holds_every_setting_but_paths():
    before = build.identity(CONFIG.to_dict(), "sha")
    left_out = {*PATHS, "codec", "dtype"}
    assert before.keys() == CONFIG.to_dict().keys() - left_out | {"data_sha256"}
    elsewhere = change(**dict.fromkeys(PATHS, "there"))
    assert build.identity(elsewhere.to_dict(), "sha") == before


def test_checkpoints_of_before_a_setting_existed_are_still_known():
    """`codec`, `dtype` and sFedBayes' `keep`, while they are at their defaults."""
    now = build.resolve(change(algorithm="sfedbayes", options={})).to_dict()
    old = now | {"options": {k: v for k, v in now["options"].items() if k != "keep"}}
    del old["codec"], old["dtype"]
    assert build.identity(now, "sha") == build.identity(old, "sha")
    for changed in (
        now | {"codec": "int8"},
        now | {"dtype": "bfloat16"},
        now | {"options": now["options"] | {"keep": 0.5}},
    ):
        assert build.identity(changed, "sha") != build.identity(old, "sha")
