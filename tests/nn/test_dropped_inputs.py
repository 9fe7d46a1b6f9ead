"""Masks on a layer's inputs against masks on its weights."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fedvi.algorithms.common import classification_loss
from fedvi.distributions import dropout
from fedvi.flat import trees
from fedvi.local import Batch
from fedvi.nn import Conv, DepthwiseConv, from_flax, masks_on_inputs

KEY = jax.random.key(5)


class Net(nn.Module):
    """A grey image's convolution, a small image's, a depthwise, and dense layers."""

    classes: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.relu(Conv(4, (3, 3), 2)(x))
        x = nn.relu(Conv(5, (3, 3), 2)(x))
        x = nn.relu(DepthwiseConv((3, 3))(x))
        x = nn.relu(nn.Dense(11)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.classes, name="head")(x)


def leaves_of(params, kept):
    """(dropped layers, what `masks_on_inputs` takes)."""
    layers = trees(params)
    dropped = dropout.drop(layers, kept)
    return dropped, zip(*map(jax.tree.leaves, (dropped, layers)), kept, strict=True)


def test_loss_and_gradient_are_those_of_masked_weights():
    model = from_flax(Net(), (7, 7, 1), head="head")
    params = trees(model.init(KEY))
    x = jax.random.normal(jax.random.key(1), (4, 7, 7, 1))
    batch = Batch(x, jnp.array([0, 2, 1, 1]), jnp.array([True, True, True, False]))
    kept = dropout.kept_columns(jax.random.key(2), params, 0.6)

    def on_weights(params):
        dropped, _ = leaves_of(params, kept)
        return classification_loss(model, dropped, batch)

    def on_inputs(params):
        dropped, kernels = leaves_of(params, kept)
        with masks_on_inputs(kernels):
            return classification_loss(model, dropped, batch)

    both = jax.jit(
        lambda params: [jax.value_and_grad(f)(params) for f in (on_weights, on_inputs)]
    )
    expected, found = both(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        found,
        expected,
    )
    assert expected[0] > 0


def test_only_layers_that_hold_more_weights_than_inputs_are_masked_there():
    """Masked weights of NaN reach the output of whoever still reads them."""
    dense, thin = nn.Dense(20), nn.Dense(3)
    x, kept = jnp.ones((4, 6)), jnp.arange(6) != 2
    whole = jnp.ones((6, 20))
    for layer, kernel, masked in ((dense, whole, True), (thin, whole[:, :3], False)):
        dropped = jnp.full_like(kernel, jnp.nan)
        params = {"kernel": dropped, "bias": jnp.zeros(kernel.shape[1])}
        with masks_on_inputs([(dropped, kernel, kept)]):
            y = layer.apply({"params": params}, x)
        assert np.all(np.asarray(y) == 5) == masked
        assert np.isnan(y).all() != masked
    # Weights made of others, such as rounded ones, are not known.
    params = {"kernel": whole * 1, "bias": jnp.zeros(20)}
    with masks_on_inputs([(whole, whole, kept)]):
        assert np.all(np.asarray(dense.apply({"params": params}, x)) == 6)


def test_masked_weights_live_as_long_as_they_are_looked_for():
    """Else another array could get the place, and the name, of one that is gone."""
    dropped, whole = jnp.zeros((6, 20)), jnp.ones((6, 20))
    alive = weakref.ref(dropped)
    with masks_on_inputs([(dropped, whole, jnp.ones(6, bool))]):
        del dropped
        assert alive() is not None
