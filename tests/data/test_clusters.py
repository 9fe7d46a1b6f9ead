"""Two clusters: a transformed second half, and halves of two federations."""

import dataclasses

import numpy as np
import pytest

from fedvi.data import (
    CLUSTER_TRANSFORMS,
    Dataset,
    Partition,
    federate,
    hold_out,
    join_halves,
    transform_half,
)

PARTS = [[3, 1, 4], [], [0, 5, 9, 2], [6], [11, 8]]
TEST_PARTS = [[0], [5], [1], [2, 4], [3]]


def as_partition(train=PARTS, test=TEST_PARTS) -> Partition:
    return Partition(*([np.array(p, int) for p in parts] for parts in (train, test)))


@pytest.fixture
def dataset(arrays) -> Dataset:
    return Dataset(**arrays(), classes=3, name="mine", fidelity="made up")


@pytest.fixture
def five(dataset):
    """Five clients of 3, 0, 4, 1 and 2 training images: the halves are three and two"""
    return federate(dataset, as_partition())


def same(ours, theirs):
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def padding_is_zero(data):
    padded = np.arange(data.y.shape[1])[None] >= data.size[:, None]
    return not data.x[padded].any() and not data.y[padded].any()


def by_hand(transform, image, label, classes=3):
    """One example with loops, as the docstring says it."""
    if transform == "relabel":
        return image, classes - 1 - label
    changed = np.empty_like(image)
    height, width = image.shape[:2]
    for row, column, channel in np.ndindex(image.shape):
        pixel = int(image[row, column, channel])
        if transform == "invert":
            changed[row, column, channel] = 255 - pixel
        else:
            changed[height - 1 - row, width - 1 - column, channel] = pixel
    return changed, label


@pytest.mark.parametrize("transform", CLUSTER_TRANSFORMS)
def test_the_second_half_is_transformed_and_the_first_is_not(five, dataset, transform):
    clustered = transform_half(five, transform)
    assert clustered.clusters.tolist() == [0, 0, 0, 1, 1]
    for ours, before, x, y, parts in (
        (clustered.train, five.train, dataset.train_x, dataset.train_y, PARTS),
        (clustered.test, five.test, dataset.test_x, dataset.test_y, TEST_PARTS),
    ):
        same((leaf[:3] for leaf in ours), (leaf[:3] for leaf in before))
        np.testing.assert_array_equal(ours.size, before.size)
        assert [leaf.dtype for leaf in ours] == [leaf.dtype for leaf in before]
        assert padding_is_zero(ours)
        for client in (3, 4):
            for slot, index in enumerate(parts[client]):
                image, label = by_hand(transform, x[index], y[index])
                np.testing.assert_array_equal(ours.x[client, slot], image)
                assert ours.y[client, slot] == label


@pytest.mark.parametrize("transform", CLUSTER_TRANSFORMS)
def test_a_transform_undoes_itself_and_leaves_its_input_alone(dataset, transform):
    federated = federate(dataset, as_partition())
    twice = transform_half(transform_half(federated, transform), transform)
    untouched = federate(dataset, as_partition())
    for part in ("train", "test"):
        same(getattr(twice, part), getattr(untouched, part))
        same(getattr(federated, part), getattr(untouched, part))
    assert federated.clusters is None


def test_the_fidelity_says_what_was_done(five):
    assert transform_half(five, "rotate").fidelity == (
        "made up; 2 training examples fit no client; second half of the clients: "
        "images rotated by 180 degrees"
    )
    notes = {transform_half(five, t).fidelity for t in CLUSTER_TRANSFORMS}
    assert len(notes) == 3


def test_a_held_out_part_keeps_the_clusters(five):
    held = hold_out(transform_half(five, "invert"), 0.5, seed=0)
    assert held.clusters.tolist() == [0, 0, 0, 1, 1]
    after = transform_half(hold_out(five, 0.5, seed=0), "invert")
    same(held.train, after.train)
    same(held.test, after.test)


@pytest.fixture
def other(dataset):
    """Other images and labels, with smaller first and larger second clients."""
    changed = dataset._replace(
        train_x=dataset.train_x[::-1],
        test_x=255 - dataset.test_x,
        train_y=2 - dataset.train_y,
        name="yours",
        fidelity="found",
    )
    parts = as_partition([[0], [1, 2], [3], [4, 5, 6, 7, 8, 9], [11]])
    return federate(changed, parts)


def test_halves_of_two_federations_are_joined(five, other):
    joined = join_halves(five, other)
    assert joined.clusters.tolist() == [0, 0, 0, 1, 1]
    assert joined.train.size.tolist() == [3, 0, 4, 6, 1]
    assert joined.train.x.shape == (5, 6, 4, 4, 3)
    assert joined.test.size.tolist() == [1, 1, 1, 2, 1]
    for ours, first, second in (
        (joined.train, five.train, other.train),
        (joined.test, five.test, other.test),
    ):
        assert padding_is_zero(ours)
        for client, size in enumerate(ours.size):
            source = first if client < 3 else second
            np.testing.assert_array_equal(
                ours.x[client, :size], source.x[client, :size]
            )
            np.testing.assert_array_equal(
                ours.y[client, :size], source.y[client, :size]
            )
    assert (joined.name, joined.classes) == ("mine+yours", 3)
    assert joined.fidelity == (
        "first half of the clients: mine, made up; 2 training examples fit no client; "
        "second half: yours, found; 1 training examples fit no client"
    )


def test_joining_takes_the_capacity_of_those_who_are_left(other, five):
    """The largest client of `other`, 3, is not in the first half."""
    assert join_halves(other, five).train.x.shape[:2] == (5, 2)


def test_what_cannot_be_joined_is_named(five, dataset):
    larger = federate(dataset, as_partition([*PARTS, [7]], [*TEST_PARTS, []]))
    floats = dataset._replace(
        train_x=dataset.train_x.astype(np.float32),
        test_x=dataset.test_x.astype(np.float32),
    )
    narrow = dataset._replace(
        train_x=dataset.train_x[:, :, :3], test_x=dataset.test_x[:, :, :3]
    )
    for second, message in (
        (larger, "'mine' and 'mine' cannot be joined: clients is 5 there and 6 here"),
        (dataclasses.replace(five, classes=4), "classes is 3 there and 4 here"),
        (federate(floats, as_partition()), "type of x is uint8 there and float32 here"),
        (federate(narrow, as_partition()), r"x is \(4, 4, 3\) there and \(4, 3"),
    ):
        with pytest.raises(ValueError, match=message):
            join_halves(five, second)


def test_a_transform_that_does_not_fit_is_named(five, dataset):
    with pytest.raises(ValueError, match="transform='mirror' must be one of"):
        transform_half(five, "mirror")
    single = federate(dataset, as_partition([[1]], [[0]]))
    for two_clusters in (
        lambda: transform_half(single, "rotate"),
        lambda: join_halves(single, single),
    ):
        with pytest.raises(ValueError, match="clients=1 cannot be halved"):
            two_clusters()
    features = dataset._replace(
        train_x=np.ones((12, 5), np.float32), test_x=np.ones((6, 5), np.float32)
    )
    features = federate(features, as_partition())
    with pytest.raises(ValueError, match="'invert' needs uint8 .* is float32"):
        transform_half(features, "invert")
    with pytest.raises(ValueError, match=r"'rotate' needs images .* shape \(5,\)"):
        transform_half(features, "rotate")
    flipped = transform_half(features, "relabel")
    np.testing.assert_array_equal(flipped.train.x, features.train.x)


def test_c22_a_second_data_set_on_another_scale_is_refused(dataset):
    parts = as_partition([[0, 1], [2], [3], [4], [5]])

    def scaled(factor):
        x = {key: getattr(dataset, key) * factor for key in ("train_x", "test_x")}
        return federate(dataset._replace(**x), parts)

    join_halves(scaled(0.5), scaled(1.0))
    with pytest.raises(ValueError, match="inputs of 'mine' and those of 'mine' are on"):
        join_halves(scaled(1.0), scaled(1 / 255))


def test_natural_ids_follow_the_halves(five, other):
    named = dataclasses.replace(five, ids=np.arange(5))
    theirs = dataclasses.replace(other, ids=np.array(["a", "b", "c", "d", "e"]))
    assert join_halves(named, theirs).ids.tolist() == ["0", "1", "2", "d", "e"]
    assert join_halves(named, other).ids is None
