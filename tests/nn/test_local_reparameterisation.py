"""Drawing activations against drawing weights: moments, gradients, what falls back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedvi.distributions.draws import standard_normal_like
from fedvi.flat import trees
from fedvi.nn import BatchNorm, Conv, DepthwiseConv, Model, build, from_flax
from fedvi.nn.local_reparameterisation import VARIANCE_FLOOR, apply_local

KEY = jax.random.key(0)


def random_params(module, x, seed=0):
    """Parameters of mean about 0, and standard deviations from 0.1 to 0.5."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(module.init, KEY, x)["params"]
    draw = [
        jax.tree.map(lambda s: distribution(size=s.shape).astype(np.float32), shapes)
        for distribution in (rng.normal, lambda size: rng.uniform(0.1, 0.5, size))
    ]
    return tuple(draw)


def draw_weights(key, mean, scale):
    noise = standard_normal_like(key, mean)
    return jax.tree.map(lambda m, s, z: m + s * z, mean, scale, noise)


class Calls(nn.Module):
    """One layer called twice, beside another of the same shape."""

    @nn.compact
    def __call__(self, x):
        twice = nn.Dense(2)
        return jnp.concatenate([twice(x), twice(x), nn.Dense(2)(x)], axis=-1)


def test_moments_and_independence_of_many_draws():
    """Between examples, units, layers and calls of one layer."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4)).astype(np.float32)
    mean, scale = random_params(Calls(), x)
    draws = 8_000

    @jax.jit
    def sample(keys):
        return jax.vmap(lambda key: apply_local(key, Calls(), mean, scale, x))(keys)

    y = np.float64(sample(jax.random.split(KEY, draws))).reshape(draws, -1)

    def layers(f):
        first, second = (f(n) for n in ("Dense_0", "Dense_1"))
        return np.concatenate([first, first, second], axis=-1).ravel()

    expected = layers(lambda n: x @ mean[n]["kernel"] + mean[n]["bias"][None])
    variance = layers(
        lambda n: x**2 @ scale[n]["kernel"] ** 2 + scale[n]["bias"][None] ** 2
    )
    z = (y - expected[None]) / np.sqrt(variance)[None]
    assert np.abs(z.mean(0)).max() < 4.5 / np.sqrt(draws)
    covariance = z.T @ z / draws
    error = np.abs(covariance - np.eye(len(expected)))
    assert np.diag(error).max() < 4.5 * np.sqrt(2 / draws)
    assert error[~np.eye(len(expected), dtype=bool)].max() < 4.5 / np.sqrt(draws)
    # Normal: a third moment of 0 and a fourth of 3, over all activations.
    assert abs((z**3).mean()) < 4.5 * np.sqrt(15 / z.size)
    assert abs((z**4).mean() - 3) < 4.5 * np.sqrt(96 / z.size)


IMAGES = np.random.default_rng(1).normal(size=(2, 5, 6, 4)).astype(np.float32)
ROWS = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Dense(3), ROWS),
        (nn.Dense(3, use_bias=False), np.full((1, 4), 200, np.uint8)),
        (nn.DenseGeneral((2, 3), axis=(-2, -1)), IMAGES),
        (nn.Conv(4, (3, 2), (2, 1), feature_group_count=2), IMAGES),
        (nn.Conv(2, (3, 3), padding="CIRCULAR", kernel_dilation=2), IMAGES),
        (Conv(3, (3, 3), 2), IMAGES),
        (Conv(3, (2, 3), padding="VALID", use_bias=False), IMAGES),
        (DepthwiseConv((3, 3), 2), IMAGES),
    ],
)
def test_each_activation_has_the_variance_of_weight_draws(layer, x):
    """Exactly: a linear layer's variance is Σ (∂y/∂w)² s² over its weights w."""
    mean, scale = random_params(layer, x)

    @jax.jit
    def run(mean, scale):
        def apply(params):
            return layer.apply({"params": params}, x)

        zero = jax.tree.map(jnp.zeros_like, mean)
        return (
            apply(mean),
            jax.jacobian(apply)(mean),
            apply_local(KEY, layer, mean, scale, x),
            # The noise itself, times the least deviation.
            apply_local(KEY, layer, zero, zero, x),
        )

    y, jacobian, drawn, noise = jax.tree.map(np.float64, run(mean, scale))
    variance = 0
    for j, s in zip(jax.tree.leaves(jacobian), jax.tree.leaves(scale)):
        j = j.reshape(*y.shape, -1)
        variance = variance + j**2 @ np.float64(s).ravel() ** 2
    expected = np.sqrt(variance) * noise / np.sqrt(VARIANCE_FLOOR)
    np.testing.assert_allclose(drawn - y, expected, rtol=1e-4, atol=1e-4)
    assert len(np.unique(noise)) == noise.size


def test_gradients_equal_those_of_weight_draws_and_vary_less():
    """Summed over a batch, through two layers; means by z-scores."""
    model = build("mlp", classes=3, input_shape=(4,), hidden=(5,))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4)).astype(np.float32)
    labels = rng.integers(0, 3, 8)
    shapes = jax.eval_shape(model.init, KEY)
    mean = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)
    scale = jax.tree.map(
        lambda s: rng.uniform(0.3, 0.8, s.shape).astype(np.float32), shapes
    )
    draws = 10_000

    def by_weight(key, mean, scale):
        return model.apply(draw_weights(key, mean, scale), x)

    def by_activation(key, mean, scale):
        return model.apply_local(key, mean, scale, x)

    def gradients(logits):
        def loss(parameters, key):
            log_probability = jax.nn.log_softmax(logits(key, *parameters))
            return -log_probability[np.arange(8), labels].sum()

        def flat(key):
            leaves = jax.tree.leaves(jax.grad(loss)((mean, scale), key))
            return jnp.concatenate([leaf.ravel() for leaf in leaves])

        return jax.vmap(flat)

    @jax.jit
    def run(keys):
        return gradients(by_weight)(keys[0]), gradients(by_activation)(keys[1])

    weight, local = map(np.float64, run(jax.random.split(KEY, (2, draws))))
    error = np.sqrt((weight.var(0) + local.var(0)) / draws)
    z = (weight.mean(0) - local.mean(0)) / error
    assert np.abs(z).max() < 4.5
    assert np.sqrt((z**2).mean()) < 1.4
    # Not vacuous: the gradients are large beside what the test can see.
    assert np.median(np.abs(local.mean(0)) / error) > 10
    assert local.var(0).sum() < 0.5 * weight.var(0).sum()


class Net(nn.Module):
    """A user's network of flax's layers, one with a parameter beside its layers."""

    classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(3, (3, 3))(x)).mean((1, 2))
        x = x * self.param("gain", nn.initializers.ones, (1, 3))
        return nn.Dense(self.classes)(x)


def own_model():
    return from_flax(
        Net(3),
        (4, 4, 2),
        head="Dense_0",
        preprocess=lambda x: (x.astype(jnp.float32) - 100) / 50,
    )


@pytest.mark.parametrize("source", ["flax", "build"])
def test_zero_scale_is_apply_alone_per_client_and_scanned(source):
    if source == "flax":
        model = own_model().with_classes(5)
    else:
        model = build("mlp", classes=2, input_shape=(4, 4, 2)).with_classes(5)
    mean = jax.vmap(model.init)(jax.random.split(KEY, 2))
    zero = jax.tree.map(jnp.zeros_like, mean)
    x = np.random.default_rng(0).integers(0, 256, (2, 6, 4, 4, 2)).astype(np.uint8)
    mask = np.arange(6) < np.array([[6], [4]])

    @jax.jit
    def run(mean, zero):
        keys = jax.random.split(KEY, 2)
        return (
            jax.vmap(model.apply)(mean, x, mask),
            jax.vmap(model.apply_local)(keys, mean, zero, x, mask),
            jax.lax.map(lambda a: model.apply_local(*a), (keys, mean, zero, x, mask)),
        )

    exact, local, scanned = run(mean, zero)
    assert exact.shape == (2, 6, 5)
    tolerance = 1e-4 * np.abs(exact).max()
    np.testing.assert_allclose(local, exact, atol=tolerance)
    np.testing.assert_allclose(scanned, exact, atol=tolerance)


def test_a_parameter_beside_layers_is_drawn_once_for_the_batch():
    model = own_model()
    params = trees(model.init(KEY))
    scale = jax.tree.map(jnp.zeros_like, params)
    scale["body"]["gain"] = np.full((1, 3), 0.5, np.float32)
    x = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 2)).astype(np.uint8)

    @jax.jit
    def run(keys):
        def gain(key):
            """The gain that explains the logits, and what it leaves unexplained."""
            y = model.apply_local(key, params, scale, x)
            slopes = jax.jacobian(lambda p: model.apply(p, x))(params)
            slopes = slopes["body"]["gain"].reshape(-1, 3)
            found, *_ = jnp.linalg.lstsq(slopes, y.ravel())
            return found, jnp.abs(slopes @ found - y.ravel()).max()

        return jax.vmap(gain)(keys)

    gains, residual = run(jax.random.split(KEY, 2_000))
    assert residual.max() < 1e-3
    np.testing.assert_allclose(gains.mean(0), 1, atol=4.5 * 0.5 / np.sqrt(2_000))
    np.testing.assert_allclose(gains.std(0), 0.5, rtol=4.5 / np.sqrt(4_000))


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        return nn.Dense(2, name="last")(BatchNorm()(nn.Dense(3)(x), mask))


def test_masked_examples_do_not_reach_the_others():
    model = from_flax(Masked(), (4,), head="last")
    params = model.init(KEY)
    scale = jax.tree.map(lambda p: jnp.full_like(p, 0.2), params)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    mask = np.array([True, True, False, True, False])
    other = np.where(mask[:, None], x, 7).astype(np.float32)
    apply = jax.jit(model.apply_local)
    y, same, again = (
        apply(KEY, params, scale, x, mask),
        apply(KEY, params, scale, other, mask),
        apply(jax.random.key(1), params, scale, x, mask),
    )
    np.testing.assert_allclose(same[mask], y[mask], atol=1e-5)
    assert np.abs(same[~mask] - y[~mask]).max() > 0.1
    assert np.abs(again - y).max() > 0.1
    zero = jax.tree.map(jnp.zeros_like, params)
    exact = model.apply(params, other, mask)
    np.testing.assert_allclose(apply(KEY, params, zero, other, mask), exact, atol=1e-5)


class Doubled(nn.Dense):
    """A layer that is not linear in its weights as its parent is."""

    @nn.compact
    def __call__(self, x):
        return 2 * super().__call__(x)


class Lifted(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        if self.kind == "remat":
            return nn.remat(nn.Dense)(3)(x)
        if self.kind == "weight_norm":
            return nn.WeightNorm(nn.Dense(3))(x)
        if self.kind == "subclass":
            return Doubled(3)(x)
        layers = nn.scan(
            lambda layer, carry, _: (layer(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return layers(nn.Dense(4), x, None)[0]


@pytest.mark.parametrize("kind", ["remat", "weight_norm", "subclass", "scan"])
def test_layers_that_are_not_plainly_linear_are_drawn_by_weight(kind):
    """One draw for all examples is an affine function of the input."""
    module = Lifted(kind)
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    x[2], x[3] = x[0] + x[1], 0
    mean, scale = random_params(module, x)

    @jax.jit
    def run(key):
        return apply_local(key, module, mean, scale, x)

    y, other = run(KEY), run(jax.random.key(1))
    np.testing.assert_allclose(y[0] + y[1], y[2] + y[3], atol=1e-4)
    assert np.abs(y - other).max() > 0.1


@pytest.mark.parametrize("deviation", [0.0, 1e-8, 1e4])
def test_gradients_are_finite_at_the_edges(deviation):
    """First and second derivatives, with an all-zero example."""
    model = build("mlp", classes=2, input_shape=(3,), hidden=(4,))
    mean = trees(model.init(KEY))
    scale = jax.tree.map(lambda p: jnp.full_like(p, deviation), mean)
    for part in scale.values():
        for layer in part.values():
            layer["bias"] = jnp.zeros_like(layer["bias"])
    x = np.zeros((2, 3), np.float32)
    x[1] = 1

    @jax.jit
    def derivatives(*arguments):
        def loss(mean, scale, x):
            return jax.nn.log_softmax(model.apply_local(KEY, mean, scale, x))[
                :, 0
            ].sum()

        gradient = jax.grad(loss, (0, 1, 2))

        def length(*arguments):
            return sum(jnp.sin(g).sum() for g in jax.tree.leaves(gradient(*arguments)))

        return gradient(*arguments), jax.grad(length, (0, 1, 2))(*arguments)

    first, second = derivatives(mean, scale, x)
    for leaf in jax.tree.leaves((first, second)):
        assert np.isfinite(leaf).all()
    if deviation == 1e-8:
        # What is summed over inputs, |∂y/∂s| = |x² s z / √(x² s²)|, is not small.
        assert np.abs(first[1]["head"]["classifier"]["kernel"]).max() > 1e-3


def test_a_model_made_by_hand_needs_no_local_draws():
    whole = build("logistic", classes=2, input_shape=(3,))
    model = Model(whole.init, whole.apply, whole.with_classes, "mine", 2)
    params, x = model.init(KEY), np.ones((1, 3), np.float32)
    assert model.apply(params, x).shape == (1, 2)
    with pytest.raises(ValueError, match=r"apply_local is not given.*from_flax"):
        model.apply_local(KEY, params, params, x, mask=np.array([True]))
