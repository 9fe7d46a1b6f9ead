"""The layers' forms for TPUs, run on CPU, against plain definitions in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedvi.nn import BatchNorm, Conv, DepthwiseConv, build

CLIENTS, BATCH = 2, 3
# Few channels lie narrow, many wide.
NARROW, WIDE = 4, 64

# kernel, strides, padding, images of odd and even size, some with rows left over
GEOMETRIES = [
    ((3, 3), 1, "SAME", (5, 6)),
    ((3, 3), 2, "SAME", (6, 7)),
    ((3, 3), 2, "VALID", (7, 8)),
    ((2, 3), 1, "VALID", (5, 6)),
    ((1, 1), 2, "SAME", (5, 6)),
]


@pytest.fixture(autouse=True)
def on_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def plain_conv(kernel, x, strides, padding, groups=1):
    return lax.conv_general_dilated(
        x,
        kernel,
        (strides,) * 2,
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def plain_batch_norm(params, x, mask, relu):
    """By the definition, of the examples that count."""
    real = mask.reshape(-1, *[1] * (x.ndim - 1))
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes, where=real, keepdims=True)
    variance = x.var(axes, where=real, keepdims=True)
    scale, bias = (
        params[name].reshape(*[1] * (x.ndim - 1), -1) for name in ("scale", "bias")
    )
    y = (x - mean) / jnp.sqrt(variance + 1e-5) * scale + bias
    return jnp.where(y > 0, y, 0) if relu else y


def with_gradients(function):
    """(params, x) -> output and the gradients of a curved function of it."""

    def run(params, x):
        def curved(params, x):
            y = function(params, x)
            return jnp.sin(y).sum(), y

        return jax.grad(curved, argnums=(0, 1), has_aux=True)(params, x)

    return run


def assert_same(ours, theirs, tolerance=1e-11):
    """Largest difference within `tolerance` of the largest entry, leaf by leaf."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype == jnp.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("channels", [NARROW, WIDE], ids=["narrow", "wide"])
def test_convolutions_equal_their_definition_alone_and_per_client(channels):
    pairs, inputs = [], []
    for seed, (kernel, strides, padding, image) in enumerate(GEOMETRIES):
        x = normal(seed, CLIENTS, BATCH, *image, channels)
        depthwise = DepthwiseConv(kernel, strides, padding, False)
        one = partial(plain_conv, strides=strides, padding=padding, groups=channels)
        pairs.append((depthwise, one))
        inputs.append((normal(seed, CLIENTS, *kernel, 1, channels), x))
        few = x[..., :2]  # no patches of a few channels
        for given, features in ((few, 5), (x, channels)):
            layer = Conv(features, kernel, strides, padding, False)
            shape = (CLIENTS, *kernel, given.shape[-1], features)
            one = partial(plain_conv, strides=strides, padding=padding)
            pairs.append((layer, one))
            inputs.append((normal(seed, *shape), given))

    def of(layer):
        return lambda kernel, x: layer.apply({"params": {"kernel": kernel}}, x)

    @jax.jit
    def run(inputs):
        first = jax.tree.map(lambda v: v[0], inputs)
        alone = [with_gradients(of(a))(*i) for (a, _), i in zip(pairs, first)]
        ours = [jax.vmap(with_gradients(of(a)))(*i) for (a, _), i in zip(pairs, inputs)]
        theirs = [jax.vmap(with_gradients(b))(*i) for (_, b), i in zip(pairs, inputs)]
        return alone, ours, theirs

    alone, ours, theirs = run(inputs)
    assert_same(ours, theirs)
    assert_same(alone, jax.tree.map(lambda v: v[0], theirs))


@pytest.mark.parametrize(
    "shape",
    [(6, 4, 5, NARROW), (6, 3, 2, WIDE), (6, 3), (6, 5, 3)],
    ids=["narrow", "wide", "vectors", "sequences"],
)
def test_batch_norm_equals_its_definition_and_ignores_masked_examples(shape):
    x = 3 * normal(0, CLIENTS, *shape) + 2
    scale, bias = normal(1, 2, CLIENTS, shape[-1])
    params = {"scale": scale, "bias": bias}
    some = np.array([0, 1, 1, 0, 1, 1], bool)
    x[:, ~some] = 1e4
    every = np.ones(6, bool)

    def ours(mask, relu, params, x):
        return BatchNorm(relu=relu).apply({"params": params}, x, mask)

    def theirs(mask, relu, params, x):
        mask = every if mask is None else mask
        return plain_batch_norm(params, x, mask, relu)

    @jax.jit
    def run(params, x):
        found = []
        for function in (ours, theirs):
            each = [(some, True), (some, False), (None, True)]
            each = [with_gradients(partial(function, *settings)) for settings in each]
            found.append([jax.vmap(one)(params, x) for one in each])
        return found

    assert_same(*run(params, x), 1e-9)


def test_batch_norm_keeps_precision_far_from_zero_in_float32():
    x = (1e3 + normal(0, 16, 4, 4, 2)).astype(np.float32)
    params = {"scale": jnp.ones(2, jnp.float32), "bias": jnp.zeros(2, jnp.float32)}
    exact = x.astype(np.float64)
    exact = (exact - exact.mean((0, 1, 2))) / np.sqrt(exact.var((0, 1, 2)) + 1e-5)
    actual = BatchNorm().apply({"params": params}, x)
    np.testing.assert_allclose(actual, exact, atol=1e-3)


def test_batch_norm_without_any_real_example_stays_finite():
    x = jnp.full((2, 2, 2, 3), 5.0)
    params = {"scale": jnp.ones(3), "bias": jnp.zeros(3)}

    def total(params, x):
        return BatchNorm().apply({"params": params}, x, jnp.zeros(2, bool)).sum()

    tree = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(params, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("channels", [NARROW, WIDE], ids=["narrow", "wide"])
def test_gradients_can_be_differentiated_again(channels):
    x = normal(0, BATCH, 4, 4, 2)
    kernels = [(3, 3, 2, channels), (3, 3, 1, channels), (1, 1, channels, channels)]
    params = {
        "kernels": [normal(i, *shape) for i, shape in enumerate(kernels)],
        "norm": {"scale": normal(4, channels), "bias": normal(5, channels)},
    }
    mask = np.array([1, 0, 1], bool)

    def ours(params, x):
        first, second, third = params["kernels"]
        x = Conv(channels, (3, 3), 1, "SAME", False).apply(
            {"params": {"kernel": first}}, x
        )
        x = BatchNorm(relu=True).apply({"params": params["norm"]}, x, mask)
        x = DepthwiseConv((3, 3), 2, "SAME", False).apply(
            {"params": {"kernel": second}}, x
        )
        return Conv(channels, (1, 1), 1, "SAME", False).apply(
            {"params": {"kernel": third}}, x
        )

    def theirs(params, x):
        first, second, third = params["kernels"]
        x = plain_conv(first, x, 1, "SAME")
        x = plain_batch_norm(params["norm"], x, mask, True)
        x = plain_conv(second, x, 2, "SAME", channels)
        return plain_conv(third, x, 1, "SAME")

    def twice(function):
        def slope(params):
            gradient = jax.grad(lambda p: jnp.sin(function(p, x)).sum())(params)
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))

        return jax.grad(slope)

    assert_same(*jax.jit(lambda p: (twice(ours)(p), twice(theirs)(p)))(params), 1e-9)


def test_a_small_image_is_refused_here_too():
    with pytest.raises(ValueError, match=r"kernel_size=\(5, 5\).*4x4"):
        Conv(2, (5, 5), padding="VALID").init(
            jax.random.key(0), jnp.zeros((1, 4, 4, 3))
        )


def test_networks_take_these_forms_on_a_tpu_alone(monkeypatch):
    x = normal(0, BATCH, 32, 32, 3).astype(np.float32)
    with jax.enable_x64(False):
        model = build("vgg", classes=3, input_shape=(32, 32, 3))
        params = jax.eval_shape(model.init, jax.random.key(0))
        here = jax.make_jaxpr(lambda p: model.apply(p, x))(params)
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
        there = jax.make_jaxpr(lambda p: model.apply(p, x))(params)
    assert "_normalise" in str(here) and "_normalise" not in str(there)
    assert here.out_avals == there.out_avals
