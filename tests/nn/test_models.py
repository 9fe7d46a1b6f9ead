"""The papers' networks: sizes, split, and what does not fit; a user's own."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedvi.flat import trees
from fedvi.nn import (
    BatchNorm,
    Conv,
    DepthwiseConv,
    build,
    from_flax,
    options_of,
    parameter_count,
    regroup,
)
from fedvi.nn.models import ResNetBlock

COLOUR, GREY = (32, 32, 3), (28, 28, 1)


@pytest.mark.parametrize(
    ("name", "classes", "input_shape", "body", "head"),
    [
        ("logistic", 10, GREY, 0, 7_850),
        ("mlp", 10, GREY, 784 * 256 + 256, 2_570),
        ("lenet", 10, COLOUR, 62_006 - 850, 850),
        ("lenet", 10, GREY, 62_006 - 850 - 25 * 2 * 6, 850),
        ("fedrep_cnn", 10, COLOUR, 307_842 - 650, 650),
        ("vgg", 10, COLOUR, 245_760, 1_290),
        ("mobilenet", 100, COLOUR, 3_206_976, 102_500),
        ("resnet18", 100, COLOUR, 11_168_832, 51_300),
    ],
)
def test_parameter_counts_and_logits(name, classes, input_shape, body, head):
    model = build(name, classes=classes, input_shape=input_shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert parameter_count(params["body"]) == body
    assert parameter_count(params["head"]) == head
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    x = jax.ShapeDtypeStruct((2, *input_shape), jnp.uint8)
    mask = jax.ShapeDtypeStruct((2,), bool)
    logits = jax.eval_shape(model.apply, params, x, mask)
    assert (logits.shape, logits.dtype) == ((2, classes), jnp.float32)
    assert (model.name, model.classes) == (name, classes)


def test_mlp_is_a_relu_network():
    model = build("mlp", classes=3, input_shape=(2, 2), hidden=(5, 4))
    params = trees(model.init(jax.random.key(0)))
    x = np.random.default_rng(0).normal(size=(6, 2, 2))
    h = x.reshape(6, 4)
    for layer in (params["body"]["Dense_0"], params["body"]["Dense_1"]):
        h = np.maximum(h @ np.float64(layer["kernel"]) + np.float64(layer["bias"]), 0)
    expected = h @ np.float64(params["head"]["classifier"]["kernel"])
    np.testing.assert_allclose(model.apply(params, x), expected, atol=1e-6)


def test_another_number_of_classes_keeps_body_options_and_preprocessing():
    model = build(
        "mlp", classes=3, input_shape=(4,), preprocess=lambda x: 2.0 * x, hidden=(5,)
    )
    wide = model.with_classes(8)
    params = trees(wide.init(jax.random.key(1)))
    assert (wide.name, wide.classes) == ("mlp", 8)
    assert params["body"]["Dense_0"]["kernel"].shape == (4, 5)
    x = np.ones((2, 4), np.float32)
    plain = build("mlp", classes=8, input_shape=(4,), hidden=(5,))
    np.testing.assert_allclose(wide.apply(params, x), plain.apply(params, 2 * x))


class FlaxLeNet(nn.Module):
    """An independent LeNet from flax's own layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(6, (5, 5), padding="VALID", name="Conv_0")(x)
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.Conv(16, (5, 5), padding="VALID", name="Conv_1")(x)
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2)).reshape(-1, 400)
        x = nn.relu(nn.Dense(120, name="Dense_0")(x))
        x = nn.relu(nn.Dense(84, name="Dense_1")(x))
        return nn.Dense(10, name="classifier")(x)


def test_lenet_equals_a_network_of_flax_layers():
    model = build("lenet", classes=10, input_shape=COLOUR)
    params = trees(model.init(jax.random.key(0)))
    x = np.random.default_rng(0).normal(size=(2, *COLOUR)).astype(np.float32)
    merged = {**params["body"], **params["head"]}
    expected = jax.jit(FlaxLeNet().apply)({"params": merged}, x)
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), expected, atol=1e-5)


class OurBlocks(nn.Module):
    """A block of MobileNet, then one of ResNet."""

    @nn.compact
    def __call__(self, x, mask=None):
        y = DepthwiseConv((3, 3), 2, use_bias=False)(x)
        y = nn.relu(BatchNorm()(y, mask))
        y = nn.relu(BatchNorm()(Conv(6, (1, 1), use_bias=False)(y), mask))
        return ResNetBlock(8, 2)(y, mask)


class FlaxBlocks(nn.Module):
    """The same from flax's layers, without a mask."""

    @nn.compact
    def __call__(self, x):
        def conv(width, kernel, strides, name, groups=1):
            return nn.Conv(
                width,
                (kernel, kernel),
                (strides, strides),
                use_bias=False,
                feature_group_count=groups,
                name=name,
            )

        def norm(name):
            return nn.BatchNorm(use_running_average=False, name=name)

        channels = x.shape[-1]
        y = conv(channels, 3, 2, "DepthwiseConv_0", channels)(x)
        y = nn.relu(norm("BatchNorm_0")(y))
        y = nn.relu(norm("BatchNorm_1")(conv(6, 1, 1, "Conv_0")(y)))
        z = nn.relu(norm("block_BatchNorm_0")(conv(8, 3, 2, "block_Conv_0")(y)))
        z = norm("block_BatchNorm_1")(conv(8, 3, 1, "block_Conv_1")(z))
        y = norm("block_BatchNorm_2")(conv(8, 1, 2, "block_Conv_2")(y))
        return nn.relu(y + z)


def test_blocks_equal_flax_and_ignore_padded_examples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 9, 10, 4)).astype(np.float32)
    real = np.array([True, False, True, True, False, True])
    shapes = jax.eval_shape(OurBlocks().init, jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)

    def ours(params):
        y = OurBlocks().apply({"params": params}, x, real)
        return jnp.where(real[:, None, None, None], jnp.sin(y), 0).sum()

    def theirs(params):
        params = dict(params)
        block = params.pop("ResNetBlock_0")
        params |= {f"block_{name}": value for name, value in block.items()}
        y, _ = FlaxBlocks().apply({"params": params}, x[real], mutable=["batch_stats"])
        return jnp.sin(y).sum()

    @jax.jit
    def run(params):
        return [jax.value_and_grad(f)(params) for f in (ours, theirs)]

    ours_tree, theirs_tree = run(params)
    for a, b in zip(jax.tree.leaves(ours_tree), jax.tree.leaves(theirs_tree)):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "alexnet"}, "model='alexnet' must be one of .*lenet.*vgg"),
        ({"name": "mlp", "classes": 0}, "classes=0"),
        ({"name": "mlp", "depth": 3}, r"depth=3 is no option of mlp.*\['hidden'\]"),
        ({"name": "resnet18", "input_shape": (40, 32, 3)}, "40, 32, 3.*of 32"),
        ({"name": "mobilenet", "input_shape": GREY}, "28, 28, 1.*of 32"),
        ({"name": "lenet", "input_shape": (8, 8, 1)}, "8, 8, 1.*at least 16"),
        ({"name": "vgg", "input_shape": (64,)}, "64.*height, width, channels"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**{"classes": 10, "input_shape": COLOUR, **arguments})


def test_preprocessing_may_make_images_fit():
    def pad(x):
        return jnp.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0))).astype(jnp.float32)

    model = build("vgg", classes=10, input_shape=GREY, preprocess=pad)
    assert model.classes == 10


def test_sizes_that_are_no_whole_numbers_are_named():
    for options, message in (
        ({"hidden": 16}, "hidden=16 must be a tuple of whole numbers"),
        ({"hidden": (16, 2.5)}, r"hidden\[1\]=2.5 must be a whole number, at least 1"),
        ({"input_shape": 64}, "input_shape=64 must be a tuple of whole numbers"),
        ({"input_shape": (8, -1)}, r"input_shape\[1\]=-1 must be a whole number"),
        ({"classes": "ten"}, "classes='ten' must be a whole number"),
        ({"classes": 2.0}, "classes=2.0 must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            build("mlp", **{"classes": 3, "input_shape": (6,)} | options)


def test_binary_logistic_of_other_classes_is_refused_when_it_is_made():
    """Not while JAX traces it, where the line would be lost in a traceback."""
    with pytest.raises(ValueError, match="has two classes, not 10: use") as error:
        build("binary_logistic", classes=10, input_shape=(4,))
    assert not getattr(error.value, "__notes__", None)


def _standardised(x):
    return (jnp.float32(x) - 100.0) / 50.0


@pytest.mark.parametrize(
    ("name", "preprocess", "options"),
    [
        ("net", _standardised, {}),
        ("scaled", lambda x: _standardised(x) * 2, {}),
        ("Net", _standardised, {"hidden": (5, 4)}),
    ],
)
def test_an_own_network_sees_what_ours_would(own_module, name, preprocess, options):
    """A function that returns a Model, one that preprocesses itself, a module class."""
    model = build(
        f"own_parts:{name}",
        classes=3,
        input_shape=(4,),
        preprocess=_standardised,
        **options,
    )
    net = importlib.import_module("own_parts").Net
    reference = from_flax(
        net(3, **options), (4,), head="classifier", preprocess=preprocess
    )
    x = jax.ShapeDtypeStruct((6, 4), jnp.uint8)
    mask, key = jax.ShapeDtypeStruct((6,), bool), jax.random.key(0)
    for change in (
        lambda model: model,
        lambda model: model.with_classes(7),
        lambda model: regroup(model, lambda path: path.split("/")[1]),
    ):
        ours, theirs = change(model), change(reference)
        params = jax.eval_shape(theirs.init, key)
        assert jax.eval_shape(ours.init, key) == params
        for one, other, arguments in (
            (ours.apply, theirs.apply, (params, x, mask)),
            (ours.apply_local, theirs.apply_local, (key, params, params, x, mask)),
        ):
            program = jax.make_jaxpr(one)(*arguments)
            assert str(program) == str(jax.make_jaxpr(other)(*arguments))
            assert " sub " in str(program)  # the mean of what it sees


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "ten",
            "model='own_parts:ten' has 10 outputs, and the data 3 classes: make it",
        ),
        ("raises", r"own_parts:raises': it raised KeyError: .*own_parts.py, line \d+"),
        ("rate", "own_parts:rate': it raised TypeError: rate.. missing 1 required"),
        (
            "headless",
            "head='classifier' is not a part of Sequential.*return fedvi.nn.fr",
        ),
        ("number", "model='own_parts:number' is no function that builds a network"),
        ("Nets", "own_parts has no Nets: did you mean [nN]et?"),
    ],
)
def test_a_mistake_in_an_own_network_is_one_line(own_module, name, message):
    with pytest.raises(ValueError, match=message) as raised:
        build(f"own_parts:{name}", classes=3, input_shape=(4,))
    assert "\n" not in str(raised.value)


def test_what_an_own_network_takes_is_asked_for(own_module):
    assert options_of("own_parts:net") == options_of("own_parts:scaled") == []
    assert options_of("own_parts:Net") == options_of("mlp") == ["hidden"]
    assert options_of("lenet") == []
    with pytest.raises(
        ValueError, match="hiden=3 is no option of own_parts:Net.*mean h"
    ):
        build("own_parts:Net", classes=3, input_shape=(4,), hiden=3)
    with pytest.raises(ValueError, match="own_parts:net' takes no dtype='bfloat16'"):
        build("own_parts:net", classes=3, input_shape=(4,), dtype="bfloat16")
    for name in ("scaled", "Net"):
        build(
            f"own_parts:{name}",
            classes=3,
            input_shape=(4,),
            preprocess=_standardised,
            dtype="bfloat16",
        )
