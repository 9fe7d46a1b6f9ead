"""Every layer against `flax.linen` on the same weights, alone and with its own weights
for every client."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedvi.nn import (
    BatchNorm,
    Conv,
    DepthwiseConv,
    avg_pool,
    global_avg_pool,
    layers,
    max_pool,
)

CLIENTS, BATCH, CHANNELS = 2, 3, 4

# kernel, strides, padding, bias; images of odd and even size, some with rows left over
GEOMETRIES = [
    ((3, 3), 1, "SAME", True, (5, 6)),
    ((3, 3), 2, "SAME", False, (6, 7)),
    ((2, 3), 2, "VALID", True, (7, 8)),
    ((1, 1), 2, "SAME", True, (5, 6)),
    ((2, 5), 1, "VALID", False, (6, 7)),
]


def flax_conv(features, kernel_size, strides, padding, use_bias, groups=1):
    return nn.Conv(
        features,
        kernel_size,
        (strides, strides),
        padding,
        use_bias=use_bias,
        feature_group_count=groups,
    )


def flax_depthwise(*geometry):
    return flax_conv(CHANNELS, *geometry, groups=CHANNELS)


def random_like(shapes, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


def value_and_gradients(module):
    """(params, x) -> output and the gradients of a curved function of it."""

    def run(params, x):
        def curved(params, x):
            y = module.apply({"params": params}, x)
            return jnp.sin(y).sum(), y

        return jax.grad(curved, argnums=(0, 1), has_aux=True)(params, x)

    return run


def assert_trees_close(actual, expected, tolerance=1e-5):
    """Largest difference within `tolerance` of the largest entry, leaf by leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        scale = max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("depthwise", "channels"),
    # Few input channels and many take two ways through a convolution on CPU.
    [(False, CHANNELS), (False, layers.FEW_CHANNELS), (True, CHANNELS)],
    ids=["conv", "conv of many channels", "depthwise"],
)
def test_convolutions_equal_flax_alone_and_per_client(depthwise, channels):
    pairs, inputs = [], []
    for seed, (*geometry, image) in enumerate(GEOMETRIES):
        if depthwise:
            ours, theirs = DepthwiseConv(*geometry), flax_depthwise(*geometry)
        else:
            ours, theirs = Conv(5, *geometry), flax_conv(5, *geometry)
        pairs.append((ours, theirs))
        x = np.random.default_rng(seed).normal(size=(CLIENTS, BATCH, *image, channels))
        x = x.astype(np.float32)
        shapes = jax.eval_shape(theirs.init, jax.random.key(0), x[0])["params"]
        assert shapes == jax.eval_shape(ours.init, jax.random.key(0), x[0])["params"]
        many = jax.tree.map(lambda s: jnp.zeros((CLIENTS, *s.shape)), shapes)
        inputs.append((random_like(many, seed), x))

    @jax.jit
    def run(inputs):
        first = jax.tree.map(lambda v: v[0], inputs)
        pick = [(value_and_gradients(a), value_and_gradients(b)) for a, b in pairs]
        alone = [ours(*one) for (ours, _), one in zip(pick, first)]
        ours = [jax.vmap(f)(*many) for (f, _), many in zip(pick, inputs)]
        theirs = [jax.vmap(f)(*many) for (_, f), many in zip(pick, inputs)]
        return alone, ours, theirs

    alone, ours, theirs = run(inputs)
    assert_trees_close(ours, theirs)
    assert_trees_close(alone, jax.tree.map(lambda v: v[0], theirs))


def test_a_kernel_that_clients_share_convolves_all_their_images_at_once():
    layer, theirs = Conv(5, (3, 3), 2), flax_conv(5, (3, 3), 2, "SAME", True)
    shape = (CLIENTS, BATCH, 6, 7, layers.FEW_CHANNELS)
    x, moved = random_like([jax.ShapeDtypeStruct(shape, np.float32)] * 2, 0)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x[0])["params"]
    params = random_like(shapes, 1)
    own = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)

    def forward(params, x):
        return layer.apply({"params": params}, x)

    def slope(params, x):  # of what follows the layer too
        return jax.jvp(lambda x: jnp.sin(forward(params, x)), (x,), (moved[0],))[1]

    shared = jax.vmap(forward, (None, 0))
    gradient = jax.grad(lambda params, x: jnp.sin(shared(params, x)).sum())

    of_each = jax.vmap(forward)
    native = "conv_general_dilated["
    for function, given, times in [
        (shared, params, 1),
        (of_each, own, 0),
        (gradient, params, 0),
    ]:
        assert str(jax.make_jaxpr(function)(given, x)).count(native) == times
    expected = partial(theirs.apply, {"params": params})
    assert_trees_close(shared(params, x), jax.vmap(expected)(x))
    reverse = jax.vjp(lambda x: jnp.sin(expected(x)), x[0])[1]
    forwards = slope(params, x[0])
    np.testing.assert_allclose(
        jnp.vdot(forwards, forwards),
        jnp.vdot(reverse(forwards)[0], moved[0]),
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    "layer",
    [Conv(5, (3, 3)), Conv(5, (1, 1)), DepthwiseConv((3, 3))],
    ids=["conv", "pixels", "depthwise"],
)
@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_images_of_another_type_are_promoted_to_the_kernels(
    layer, backend, monkeypatch
):
    """Such as a head's in float32 behind a body in bfloat16."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x = jnp.arange(128, dtype=jnp.uint8).reshape(1, 4, 4, layers.FEW_CHANNELS)
    params = layer.init(jax.random.key(0), jnp.float32(x))
    expected = layer.apply(params, jnp.float32(x))
    for given in (x, x.astype(jnp.bfloat16)):
        y = layer.apply(params, given)
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-3)


def test_initialisers_are_those_of_flax():
    x = jnp.zeros((1, 2, 2, CHANNELS))
    pairs = [
        (Conv(6, (1, 1)), nn.Conv(6, (1, 1))),
        (DepthwiseConv((2, 2)), flax_depthwise((2, 2), 1, "SAME", True)),
    ]
    initialise = jax.jit(lambda key: [[m.init(key, x) for m in p] for p in pairs])
    for ours, theirs in initialise(jax.random.key(1)):
        assert_trees_close(ours, theirs, 1e-6)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Conv(2, (3, 3), padding="CIRCULAR"), "padding='CIRCULAR'"),
        (Conv(2, (3, 3), strides=0), "strides=0"),
        (Conv(2, 3), "kernel_size=3"),
        (DepthwiseConv((3, 3), strides=(2, 2)), r"strides=\(2, 2\)"),
        (Conv(2, (5, 5), padding="VALID"), r"kernel_size=\(5, 5\).*4x4"),
    ],
)
def test_wrong_settings_are_named(layer, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 4, 4, 3)))


class FlaxBatchNorm(nn.Module):
    """flax's layer with the running statistics out of sight."""

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, name="norm")(x)


def flax_batch_norm(params, x):
    zeros = jnp.zeros(x.shape[-1])
    statistics = {"norm": {"mean": zeros, "var": zeros}}
    y, _ = FlaxBatchNorm().apply(
        {"params": {"norm": params}, "batch_stats": statistics},
        x,
        mutable=["batch_stats"],
    )
    return y


@pytest.mark.parametrize("shape", [(6, 4, 5, 3), (6, 3)], ids=["images", "vectors"])
def test_batch_norm_equals_flax_and_ignores_masked_examples(shape):
    rng = np.random.default_rng(0)
    x = (3 * rng.normal(size=(CLIENTS, *shape)) + 2).astype(np.float32)
    scale, bias = rng.normal(size=(2, CLIENTS, shape[-1])).astype(np.float32)
    params = {"scale": scale, "bias": bias}
    real = np.array([1, 0, 1, 1, 0, 1], bool)
    x[:, ~real] = 1e4

    def ours(params, x, mask):
        return BatchNorm().apply({"params": params}, x, mask)

    def curved(layer):
        def run(params, x, *mask):
            def value(params, x):
                y = layer(params, x, *mask)
                if mask:
                    weight = mask[0].reshape(-1, *[1] * (x.ndim - 1))
                    return jnp.where(weight, jnp.sin(y), 0).sum(), y
                return jnp.sin(y).sum(), y

            return jax.grad(value, argnums=(0, 1), has_aux=True)(params, x)

        return run

    @jax.jit
    def run(params, x, subset):
        plain = jax.vmap(curved(lambda p, x: ours(p, x, None)))(params, subset)
        masked = jax.vmap(curved(ours), in_axes=(0, 0, None))(params, x, real)
        return plain, masked, jax.vmap(curved(flax_batch_norm))(params, subset)

    plain, ((by_params, by_x), y), expected = run(params, x, x[:, real])
    assert_trees_close(plain, expected)
    assert_trees_close(((by_params, by_x[:, real]), y[:, real]), expected)
    np.testing.assert_array_equal(by_x[:, ~real], 0)


def test_batch_norm_without_any_real_example_stays_finite():
    x = jnp.full((2, 2, 2, 3), 5.0)
    params = {"scale": jnp.ones(3), "bias": jnp.zeros(3)}

    def total(params, x):
        return BatchNorm().apply({"params": params}, x, jnp.zeros(2, bool)).sum()

    tree = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(params, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def test_batch_norm_keeps_precision_far_from_zero():
    x = (1e3 + np.random.default_rng(0).normal(size=(64, 2))).astype(np.float32)
    params = {"scale": jnp.ones(2), "bias": jnp.zeros(2)}
    exact = x.astype(np.float64)
    exact = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-5)
    actual = BatchNorm().apply({"params": params}, x)
    np.testing.assert_allclose(actual, exact, atol=1e-3)


def test_pools_equal_flax_with_gradient():
    images = {2: (6, 7), 3: (7, 9)}
    rng = np.random.default_rng(0)
    inputs = {
        window: rng.normal(size=(BATCH, *size, CHANNELS)).astype(np.float32)
        for window, size in images.items()
    }

    def with_gradient(pool, x):
        return jax.value_and_grad(lambda x: jnp.sin(pool(x)).sum())(x), pool(x)

    @jax.jit
    def run(inputs):
        ours, theirs = [], []
        for window, x in inputs.items():
            shape = (window, window)
            for mine, flax in [(max_pool, nn.max_pool), (avg_pool, nn.avg_pool)]:
                ours.append(with_gradient(lambda x: mine(x, window), x))
                theirs.append(with_gradient(lambda x: flax(x, shape, shape), x))
        return ours, theirs, global_avg_pool(x)

    ours, theirs, mean = run(inputs)
    assert_trees_close(ours, theirs, 1e-6)
    np.testing.assert_allclose(mean, inputs[3].mean((1, 2)), atol=1e-6)


def test_max_pool_sends_the_gradient_to_one_pixel_of_a_tie_and_passes_nan_on():
    @jax.jit
    def run(x):
        return max_pool(x), jax.grad(lambda x: max_pool(x).sum())(x)

    x = np.zeros((1, 2, 2, 1), np.float32)
    np.testing.assert_array_equal(run(x)[1].ravel(), [1, 0, 0, 0])
    x[0, 0, 1] = np.nan
    assert np.isnan(run(x)[0]).all()


def test_max_pool_loses_no_gradient_when_compiled_after_batch_norm():
    # `pixels.max(3)` gives quite another gradient here: see the comment in `max_pool`.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 4, 8, 8, 4)).astype(np.float32)
    weights = (rng.normal(size=(4, 4, 4)) / 4).astype(np.float32)
    scales = jnp.tile(jnp.linspace(0.5, 1.7, 4), (4, 1))

    def total(pool, x, weights, scale):
        params = {"scale": scale, "bias": 0.3 * scale}
        y = BatchNorm().apply({"params": params}, x @ weights)
        return (pool(nn.relu(y)) ** 2).sum()

    def flax_pool(x):
        return nn.max_pool(x, (2, 2), (2, 2))

    def gradients(pool):
        gradient = jax.grad(partial(total, pool), argnums=(0, 1))
        run = jax.jit(lambda *clients: jax.lax.map(lambda one: gradient(*one), clients))
        return run(x, weights, scales)

    assert_trees_close(gradients(max_pool), gradients(flax_pool))


def test_pool_larger_than_the_image_is_named():
    with pytest.raises(ValueError, match="window=2 is larger than the 1x4 image"):
        max_pool(jnp.zeros((1, 1, 4, 1)))
