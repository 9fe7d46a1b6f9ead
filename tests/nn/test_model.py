"""A user's flax module as a `Model`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from fedvi.flat import trees
from fedvi.nn import (
    BatchNorm,
    Conv,
    DepthwiseConv,
    Model,
    build,
    from_flax,
    global_avg_pool,
    max_pool,
    parameter_count,
    regroup,
    weight_paths,
)


class Net(nn.Module):
    """A user's own network with flax's convolution and without a mask."""

    classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x)).mean((1, 2))
        x = nn.relu(nn.Dense(5)(x))
        return nn.Dense(self.classes)(x)


class MaskedNet(nn.Module):
    outputs: int = 3

    @nn.compact
    def __call__(self, x, mask=None):
        return nn.Dense(self.outputs, name="last")(BatchNorm()(x, mask))


class RunningStatistics(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(x))


class NotLogits(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x[:, None])


def normalise(x):
    return (x.astype(jnp.float32) - 100) / 50


def test_body_head_and_preprocessing():
    model = from_flax(Net(3), (6, 6, 2), head="Dense_1", preprocess=normalise)
    assert (model.name, model.classes) == ("Net", 3)
    params = model.init(jax.random.key(0))
    assert set(params) == {"body", "head"}
    layers = trees(params)
    assert set(layers["body"]) == {"Conv_0", "Dense_0"}
    assert set(layers["head"]) == {"Dense_1"}
    assert parameter_count(params) == (9 * 2 * 4 + 4) + (4 * 5 + 5) + (5 * 3 + 3)
    x = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 2)).astype(np.uint8)
    direct = Net(3).apply(
        {"params": {**layers["body"], **layers["head"]}}, (x - np.float32(100)) / 50
    )
    np.testing.assert_allclose(model.apply(params, x), direct, atol=1e-6)
    np.testing.assert_array_equal(model.apply(layers, x), model.apply(params, x))
    masked = model.apply(params, x, np.array([True, False, True, True]))
    np.testing.assert_allclose(masked, direct, atol=1e-6)


def test_another_number_of_classes_keeps_the_body():
    model = from_flax(Net(3), (6, 6, 2), head=("Dense_0", "Dense_1"), name="mine")
    wide = model.with_classes(7)
    assert (wide.name, wide.classes) == ("mine", 7)
    shapes, wider = (
        jax.eval_shape(lambda key, m=m: trees(m.init(key)), jax.random.key(0))
        for m in (model, wide)
    )
    assert shapes["body"] == wider["body"]
    assert set(wider["head"]) == {"Dense_0", "Dense_1"}
    assert wider["head"]["Dense_1"]["kernel"].shape == (5, 7)
    per_client = jax.eval_shape(
        lambda keys: trees(jax.vmap(wide.init)(keys)),
        jax.random.split(jax.random.key(0)),
    )
    assert per_client["head"]["Dense_1"]["kernel"].shape == (2, 5, 7)


def group(path):
    return "norms" if "bias" in path else path.split("/")[0] + "s"


def test_other_groups_of_weights_are_the_same_model():
    model = from_flax(Net(3), (6, 6, 2), head="Dense_1", preprocess=normalise)
    paths = weight_paths(model)
    assert "body/Conv_0/kernel" in paths and "head/Dense_1/bias" in paths
    other = regroup(model._replace(loss=len), group)
    assert (other.name, other.classes, other.loss) == ("Net", 3, len)
    params, grouped = (m.init(jax.random.key(0)) for m in (model, other))
    assert set(grouped) == {"bodys", "heads", "norms"}
    assert grouped["norms"].vector.shape == (4 + 5 + 3,)
    x = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 2)).astype(np.uint8)
    np.testing.assert_allclose(
        other.apply(grouped, x), model.apply(params, x), atol=1e-6
    )
    bare = Model(model.init, model.apply, model.with_classes, "mine", 3)
    with pytest.raises(ValueError, match=r"regrouped is not given.*from_flax"):
        regroup(bare, group)


def test_the_mask_reaches_batch_statistics():
    model = from_flax(
        MaskedNet(), (4,), head="last", with_classes=lambda n: MaskedNet(outputs=n)
    )
    assert model.with_classes(5).with_classes(6).classes == 6
    params = model.init(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    mask = np.array([True, True, False, True, False])
    full, some = model.apply(params, x, mask)[mask], model.apply(params, x[mask])
    np.testing.assert_allclose(full, some, atol=1e-5)
    assert np.abs(model.apply(params, x)[mask] - some).max() > 1e-2


@pytest.mark.parametrize(
    ("module", "head", "message"),
    [
        (
            Net(3),
            "classifier",
            r"head='classifier'.*\['Conv_0', 'Dense_0', 'Dense_1'\]",
        ),
        (RunningStatistics(), "Dense_0", r"\['batch_stats'\].*fedvi.nn.BatchNorm"),
        (NotLogits(), "Dense_0", r"shape \(1, 1, 6, 6, 2\)"),
    ],
)
def test_unsuitable_modules_are_explained(module, head, message):
    with pytest.raises(ValueError, match=message):
        from_flax(module, (6, 6, 2), head=head)


def test_a_module_of_fixed_width_asks_for_with_classes():
    with pytest.raises(ValueError, match="no field 'classes'"):
        from_flax(MaskedNet(), (4,), head="last").with_classes(2)


class Deep(nn.Module):
    """Every kind of layer whose sums could be too short in bfloat16."""

    classes: int

    @nn.compact
    def __call__(self, x, mask=None):
        x = nn.relu(Conv(8, (3, 3))(x))
        x = nn.relu(BatchNorm()(DepthwiseConv((3, 3), use_bias=False)(x), mask))
        x = global_avg_pool(max_pool(x))
        return nn.Dense(self.classes, name="last")(nn.relu(nn.Dense(16)(x)))


def test_bfloat16_rounds_activations_only():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (32, 8, 8, 3)).astype(np.uint8)
    y = rng.integers(0, 4, 32)

    def build(dtype):
        return from_flax(
            Deep(4), (8, 8, 3), head="last", preprocess=normalise, dtype=dtype
        )

    exact, rounded = build("float32"), build(jnp.bfloat16)
    assert rounded.with_classes(4).apply is not exact.apply
    params = exact.init(jax.random.key(0))
    chex.assert_trees_all_equal(params, rounded.init(jax.random.key(0)))
    scale = jax.tree.map(lambda p: jnp.full_like(p, 0.01), params)
    key, mask = jax.random.key(1), jnp.ones(32, bool)

    @jax.jit
    def run(params):
        results = []
        for model in (exact, rounded, rounded.with_classes(4)):
            loss, gradient = jax.value_and_grad(
                lambda p, model=model: model.loss(model.apply(p, x), y, mask)
            )(params)
            drawn = model.apply_local(key, params, scale, x)
            results.append((model.apply(params, x), drawn, loss, gradient))
        return results

    full, half, rebuilt = run(params)
    for leaf in jax.tree.leaves(half):
        assert leaf.dtype == jnp.float32
    chex.assert_trees_all_equal(half, rebuilt)
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(half)):
        # bfloat16 has 8 bits: more than float32's rounding, within some of its own.
        error = np.linalg.norm(a - b) / np.linalg.norm(a)
        assert 1e-5 < error < 0.1


@pytest.mark.parametrize("layer", ["conv", "depthwise"])
def test_a_biass_gradient_is_summed_in_float32(layer):
    """Over the 39,200 pixels of a batch; in bfloat16 the sum stops at 256 of equals."""
    module = Conv(4, (1, 1)) if layer == "conv" else DepthwiseConv((1, 1))
    x = jnp.ones((50, 28, 28, 4), jnp.bfloat16)
    params = module.init(jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def total(params):
        return module.apply({"params": params}, x).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(total))(params)
    np.testing.assert_allclose(np.float32(gradient["bias"]), 39_200, rtol=2**-8)


class Tokens(nn.Module):
    """Looks integers up, which no dtype may make floats of."""

    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes, name="last")(nn.Embed(9, 4)(x).mean(1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_that_are_no_floats_stay(dtype):
    model = from_flax(
        Tokens(2), (5,), head="last", preprocess=lambda x: x.astype(int), dtype=dtype
    )
    params = model.init(jax.random.key(0))
    logits = model.apply(params, np.zeros((3, 5), np.int32))
    assert logits.shape == (3, 2) and logits.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float16", "int8", jnp.float16])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"dtype='(float16|int8)' must be one of"):
        from_flax(Net(3), (6, 6, 2), head="Dense_1", dtype=dtype)


class NnxNet(nnx.Module):
    def __init__(self, width, rngs):
        self.hidden = nnx.Linear(3, width, rngs=rngs)
        self.last = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.hidden(x)))


class Dropped(nn.Module):
    """With the flag that a user's own loop would set."""

    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(self.rate, deterministic=not train)(nn.Dense(4)(x))
        return nn.Dense(2, name="last")(x)


class Flagged(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(2, name="last")(x)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        noise = jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(2, name="last")(x + noise)


class Halves(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="last", param_dtype=jnp.bfloat16)(x)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (NnxNet, r"is of flax.nnx: give what flax.nnx.bridge.to_linen\(NnxNet, ...\)"),
        (NnxNet(4, nnx.Rngs(0)), "module=NnxNet is of flax.nnx: give"),
        (Net, r"module=Net is a class: give an instance, Net\(...\)"),
        (
            lambda x: x,
            "module=<function .* must be a flax.linen.Module: put a function",
        ),
        (None, "module=None must be a flax.linen.Module"),
        (Dropped(), "module=Dropped has Dropout, which would never be active"),
        (Flagged(), "module=Flagged takes 'train', which it is not called with"),
        (Noisy(), r"module=Noisy draws random numbers \(make_rng\), for which it gets"),
        (Halves(), "module=Halves has parameters of bfloat16 at last/bias: keep"),
    ],
)
def test_modules_that_cannot_be_used_are_named(module, message):
    """C32, C33."""
    with pytest.raises(ValueError, match=message) as found:
        from_flax(module, (3,), head="last")
    assert "\n" not in str(found.value)


def test_a_bridged_nnx_module_works():  # C32
    model = from_flax(nnx.bridge.to_linen(NnxNet, 4), (3,), head="last")
    params = model.init(jax.random.key(0))
    assert model.apply(params, jnp.ones((5, 3))).shape == (5, 2)
    assert set(trees(params)["body"]) == {"hidden"}


def test_dropout_of_rate_0_is_none():  # C33
    assert from_flax(Dropped(rate=0.0), (3,), head="last").classes == 2


def test_inputs_of_another_shape_are_named():
    model = from_flax(Net(3), (6, 6, 2), head="Dense_1")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    for x in (jnp.zeros((4, 6, 6)), jnp.zeros((4, 6, 6, 3)), jnp.zeros((6, 6, 2))):
        with pytest.raises(
            ValueError, match=r"Net was built for input_shape=\(6, 6, 2"
        ):
            jax.eval_shape(model.apply, shapes, x)


def test_float64_does_not_change_the_parameters():  # C24
    model = build("mlp", classes=3, input_shape=(4,), hidden=(5,))
    plain = model.init(jax.random.key(0))
    with jax.enable_x64(True):
        chex.assert_trees_all_equal(model.init(jax.random.key(0)), plain)
