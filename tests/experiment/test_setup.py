import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import algorithms, data
from fedvi.algorithm import Algorithm, Importance
from fedvi.data import ClientData
from fedvi.experiment import load_data, setup
from fedvi.experiment.config import ExperimentConfig

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
    experiment = setup.experiment(CONFIG)
    assert experiment.data.train.x.shape == (6, 240, 8, 8, 1)
    assert experiment.data.train.x.dtype == np.uint8
    assert (experiment.task.clients, experiment.task.samples) == (6, 1437)
    assert experiment.selection.size == 3
    training, finetuning = experiment.task.training, experiment.task.finetuning
    assert (training.epochs, training.batch_size, training.momentum) == (1, 50, 0.9)
    assert (finetuning.epochs, finetuning.learning_rate) == (5, 1e-3)
    assert experiment.selection.clients == 6


def test_pixels_are_standardised_by_the_training_split():
    loaded = load_data(CONFIG)
    x, size = loaded.federated.train.x, loaded.federated.train.size
    pixels = np.concatenate([x[i, :n] for i, n in enumerate(size)]) / 255
    np.testing.assert_allclose(loaded.mean, pixels.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(loaded.std, pixels.std((0, 1, 2)), rtol=1e-5)


def test_augmentation_serves_training_and_fine_tuning():
    task = setup.experiment(change(augment=True)).task
    x = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8, 1)
    for training in (task.training, task.finetuning):
        augmented = training.augment(jax.random.key(0), x)
        assert augmented.shape == x.shape and not np.array_equal(augmented, x)


def test_options_reach_the_algorithm():
    with pytest.raises(ValueError, match="mu=-1 must be"):
        setup.experiment(change(algorithm="fedprox", options={"mu": -1}))


def test_a_validation_part_comes_from_the_training_data():
    plain = load_data(CONFIG).federated
    held = load_data(change(validation_fraction=0.25)).federated
    total = held.train.size + held.test.size
    np.testing.assert_array_equal(total, plain.train.size)
    np.testing.assert_allclose(held.test.size, plain.train.size / 4, atol=1)
    test_images = {image.tobytes() for image in plain.test.x.reshape(-1, 64)}
    held_images = {image.tobytes() for image in held.test.x.reshape(-1, 64)}
    assert len(test_images & held_images) <= 1  # the empty image of padded slots


def test_calibration_data_are_trained_and_evaluated_on_by_nobody():
    plain = setup.experiment(CONFIG)
    both = {"validation_fraction": 0.25, "calibration_fraction": 0.25}
    built = setup.experiment(change(**both))
    held = load_data(change(validation_fraction=0.25)).federated
    parts = built.data.train, built.data.test, built.calibration
    np.testing.assert_array_equal(sum(p.size for p in parts), plain.data.train.size)
    np.testing.assert_allclose(built.calibration.size, 60, atol=1)
    # What is evaluated on does not depend on it.
    np.testing.assert_array_equal(built.data.test.x, held.test.x)
    images = [
        {image.tobytes() for i, n in enumerate(p.size) for image in p.x[i, :n]}
        for p in parts
    ]
    total = len(set.union(*images))
    assert total == sum(map(len, images))
    assert built.task.samples == built.data.train.size.sum()
    assert built.data_sha256 != plain.data_sha256


def test_own_calibration_data_are_checked():
    config = change(calibration_fraction=0.25)
    loaded = load_data(config)
    labels = loaded.calibration._replace(y=loaded.calibration.y + 9)
    nothing = loaded.calibration._replace(size=0 * loaded.calibration.size)
    few = jax.tree.map(lambda leaf: leaf[:2], loaded.calibration)
    for calibration, message in (
        (None, "calibration_fraction=0.25, but loaded.calibration is None: make it"),
        (labels, r"calibration.y\[.*\] = .* is outside 0..9"),
        (nothing, "no training client has calibration data"),
        (few, "calibration holds 2 clients and train 6"),
    ):
        with pytest.raises(ValueError, match=message):
            setup.experiment(config, loaded=loaded._replace(calibration=calibration))


def test_by_group_takes_every_group(tmp_path):
    path = tmp_path / "groups.npz"
    x, y = np.zeros((6, 4, 4, 1), np.uint8), np.zeros(6, int)
    group = np.array([0, 0, 1, 1, 2, 2])
    split = dict(train_x=x, train_y=y, train_group=group)
    np.savez(path, **split, test_x=x, test_y=y, test_group=group + 10)
    config = change(dataset="mine", data_file=str(path), clients=0)
    config = dataclasses.replace(config, partition="by_group", fraction=1.0)
    with pytest.raises(ValueError, match="has test data: give validation_fraction"):
        setup.experiment(config)
    held = setup.experiment(dataclasses.replace(config, validation_fraction=0.5))
    assert held.selection.size == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "fedfoo"}, "algorithm='fedfoo' must be one of"),
        ({"options": {"mu": 1.0}}, "mu=1.0 is no option of fedavg, which takes serv"),
    ],
)
def test_an_algorithm_is_checked_before_the_data_are_loaded(changes, message):
    with pytest.raises(ValueError, match=message):
        setup.resolve(change(**changes))


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
        setup.experiment(change(**changes))


def test_options_of_other_partitions_are_ignored():
    """They may come from a flag file whose partition the command line changes."""
    plain, other = setup.experiment(CONFIG), setup.experiment(change(shards=2))
    assert plain.data_sha256 == other.data_sha256


def test_every_option_of_a_partition_is_a_setting():
    for name in data.PARTITIONS:
        dataclasses.replace(CONFIG, partition=name).partition_options()


def test_the_digest_follows_every_clients_examples(tmp_path):
    def digest(labels):
        path = features_file(tmp_path, labels)
        config = change(dataset="mine", data_file=path, clients=2)
        return setup.experiment(config).data_sha256

    assert digest((0, 1, 2, 1)) == digest((0, 1, 2, 1)) != digest((0, 1, 2, 2))


def test_defaults_of_the_algorithm_are_resolved():
    config = setup.resolve(change(options={"server_momentum": 0.5}))
    defaults = dataclasses.asdict(algorithms.options_of("fedavg")())
    assert config.options == defaults | {"server_momentum": 0.5}

    def mine(task, *, steps: int = 3):
        """No builder of ours: its options are what is given."""

    assert setup.resolve(change(options={"loss": 1}), mine).options == {"loss": 1}


def test_features_cannot_be_augmented(tmp_path):
    config = change(dataset="mine", data_file=features_file(tmp_path), clients=2)
    setup.experiment(config)
    with pytest.raises(ValueError, match="augment=True needs images"):
        setup.experiment(dataclasses.replace(config, augment=True))


def test_a_label_outside_the_classes_is_named(tmp_path):
    path = features_file(tmp_path, labels=(0, 1, -1, 10))
    with pytest.raises(ValueError, match=r"train_y\[2\] = -1"):
        setup.experiment(change(dataset="mine", data_file=path, clients=2))


def test_novel_clients_are_no_part_of_training():
    plain = setup.experiment(CONFIG)
    kept_out = setup.experiment(change(novel_clients=2))
    assert plain.novel.tolist() == []
    novel, size = kept_out.novel, kept_out.data.train.size
    assert len(novel) == 2 and novel[0] < novel[1]
    assert (kept_out.task.clients, kept_out.selection.size) == (4, 2)
    assert kept_out.task.samples == 1437 - size[novel].sum()
    assert kept_out.data_sha256 == plain.data_sha256
    chosen = drawn_in(kept_out.selection, rounds=200)
    assert set(chosen.tolist()) == set(range(6)) - set(novel.tolist())
    assert set(drawn_in(plain.selection, rounds=200).tolist()) == set(range(6))


def drawn_in(selection, rounds):
    keys = jax.random.split(jax.random.key(1), rounds)
    return np.ravel(jax.vmap(lambda key: selection.select(key, 0, None, None)[0])(keys))


def test_who_is_novel_depends_on_the_seed_of_the_partition():
    config = change(clients=40, novel_clients=10)
    novel = [setup.experiment(config).novel.tolist() for _ in range(2)]
    assert novel[0] == novel[1] and len(set(novel[0])) == 10
    others = [dataclasses.replace(config, partition_seed=seed) for seed in range(30)]
    # Each client is novel with probability 1/4; 4.5 standard errors.
    counts = np.bincount(np.ravel([setup._novel(c, 40) for c in others]), minlength=40)
    assert np.abs(counts / 30 - 1 / 4).max() < 4.5 * np.sqrt(3 / 16 / 30)
    again = setup.experiment(dataclasses.replace(config, seed=5))
    assert again.novel.tolist() == novel[0]


def test_by_group_counts_novel_clients_among_its_groups(tmp_path):
    path = tmp_path / "groups.npz"
    x, y, group = np.zeros((6, 4, 4, 1), np.uint8), np.zeros(6, int), np.arange(6) // 2
    split = dict(train_x=x, train_y=y, train_group=group)
    np.savez(path, **split, test_x=x, test_y=y, test_group=group)
    config = change(dataset="mine", data_file=str(path), clients=0, fraction=1.0)
    config = dataclasses.replace(config, partition="by_group", novel_clients=1)
    config.validate()
    assert setup.experiment(config).selection.size == 2
    with pytest.raises(ValueError, match="novel_clients=3 of clients=3 leaves nobody"):
        setup.experiment(dataclasses.replace(config, novel_clients=3))


@pytest.mark.parametrize("transform", data.CLUSTER_TRANSFORMS)
def test_a_transform_makes_two_clusters(transform):
    plain = load_data(CONFIG)
    loaded = load_data(change(cluster_transform=transform))
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
    loaded = load_data(config)
    plain = load_data(change(validation_fraction=0.2))
    # The same labels, hence the same partition: the clients differ in the pixels only.
    for part in ("train", "test"):
        ours, theirs = getattr(loaded.federated, part), getattr(plain.federated, part)
        np.testing.assert_array_equal(ours.y, theirs.y)
        np.testing.assert_array_equal(ours.x[:3], theirs.x[:3])
        np.testing.assert_array_equal(ours.x[3:], theirs.x[3:, :, ::-1])
    assert loaded.federated.clusters.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(loaded.mean, plain.mean)
    assert setup.experiment(config).data.name == "digits+upside"


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
        setup.experiment(change(**changes))


PATHS = ("data_file", "second_data_file", "ood_data_file", "data_dir")


def test_the_identity_holds_every_setting_but_paths():
    before = setup.identity(CONFIG.to_dict(), "sha")
    left_out = set(PATHS)
    assert before.keys() == CONFIG.to_dict().keys() - left_out | {"data_sha256"}
    elsewhere = change(**dict.fromkeys(PATHS, "there"))
    assert setup.identity(elsewhere.to_dict(), "sha") == before


# Who takes part.

TRAINED = np.array([0, 1, 2, 3, 5, 6])  # client 4 is novel
PLAIN = Algorithm("mine", *(None,) * 6)  # nothing of it is called
MINE = PLAIN._replace(importance={"mass": Importance(None, None)})


@pytest.fixture
def train():
    """Most frequent classes 2, 1, 0 (of two, the lower), 0, 9, none, 1."""
    y = [[2, 2, 0], [1, 0, 1], [1, 0, 5], [0, 0, 1], [9, 9, 9], [9, 9, 9], [1, 1, 9]]
    size = np.array([3, 3, 2, 3, 3, 0, 3], np.int32)
    return ClientData(np.zeros((7, 3, 1), np.float32), np.array(y, np.int32), size)


def turns_of(selection, rounds):
    key = jax.random.key(0)
    return [
        np.asarray(selection.select(key, round_index, None, None)[0]).tolist()
        for round_index in range(rounds)
    ]


def test_the_algorithm_says_how_many_take_part_or_else_the_fraction():
    config = change(fraction=0.5, novel_clients=1)
    assert setup._cohort_size(config, PLAIN, 9) == 4
    assert setup._cohort_size(config, PLAIN._replace(cohort=3), 9) == 3
    with pytest.raises(ValueError, match="clients=3 less novel_clients=1 are fewer th"):
        setup._cohort_size(config, PLAIN._replace(cohort=3), 3)
    with pytest.raises(ValueError, match="fraction=0.1 of clients=5 is less than one"):
        setup._cohort_size(change(fraction=0.1), PLAIN, 5)


@pytest.mark.parametrize(
    ("order", "turns"), [("id", [0, 1, 2, 3, 5, 6]), ("sorted", [5, 2, 3, 1, 6, 0])]
)
def test_round_robin_goes_by_id_or_by_the_most_frequent_class(train, order, turns):
    config = change(
        selection="round_robin", selection_order=order, fraction=0.4, clients=7
    )
    chosen = setup._selection(config, MINE, train, TRAINED)
    assert np.ravel(turns_of(chosen, 6)).tolist() == turns * 2


def test_shuffled_turns_depend_on_the_seed_of_the_partition(train):
    config = change(
        selection="round_robin", selection_order="shuffled", fraction=0.15, clients=7
    )

    def turns(config):
        return np.ravel(turns_of(setup._selection(config, MINE, train, TRAINED), 6))

    drawn = [turns(dataclasses.replace(config, partition_seed=s)) for s in range(8)]
    assert all(sorted(one) == TRAINED.tolist() for one in drawn)
    assert len({tuple(one) for one in drawn}) > 4
    again = dataclasses.replace(config, seed=3)
    assert turns(again).tolist() == drawn[0].tolist()


def test_a_measure_goes_with_its_temperature_and_floor(train):
    scores = jnp.array([1.0, 3.0, 0.0, 0.0, 9.0, 9.0, 4.0])
    counts = jnp.asarray(train.size > 0)

    def probabilities(**changes):
        config = change(selection="mass", **changes)
        chosen = setup._selection(config, MINE, train, TRAINED)
        assert chosen.measure == "mass"
        _, choice = chosen.select(jax.random.key(0), 0, scores, counts)
        return choice.probabilities

    # Client 4 is novel and client 5 holds nothing.
    share = np.array([1, 3, 0, 0, 0, 0, 4]) / 8
    np.testing.assert_allclose(probabilities(), share, atol=1e-6)
    assert probabilities()[2] > 0  # the floor
    root = np.sqrt(share * 8)
    np.testing.assert_allclose(
        probabilities(selection_temperature=2.0), root / root.sum(), atol=1e-6
    )
    np.testing.assert_allclose(
        probabilities(selection_floor=0.5),
        share / 2 + np.array([1, 1, 1, 1, 0, 0, 1]) / 10,
        atol=1e-6,
    )


def test_methods_of_all_clients_do_not_look_at_the_selection(train):
    everyone = PLAIN._replace(cohort="all")
    config = change(selection="nonsense")
    chosen = setup._selection(config, everyone, train, TRAINED)
    assert turns_of(chosen, 2) == [TRAINED.tolist()] * 2


def test_a_method_takes_as_many_clients_as_it_says(train):
    serial = MINE._replace(cohort=1)
    chosen = setup._selection(change(selection="mass"), serial, train, TRAINED)
    assert (chosen.size, chosen.measure) == (1, "mass")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            MINE,
            "'kds' must be one of uniform, round_robin, stratified, mass for mine",
        ),
        (
            PLAIN,
            "'kds' must be one of uniform, round_robin, stratified for mine",
        ),
    ],
)
def test_an_unknown_selection_is_named(train, algorithm, message):
    with pytest.raises(ValueError, match=message):
        setup._selection(change(selection="kds"), algorithm, train, TRAINED)
