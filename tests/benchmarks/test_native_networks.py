"""The networks with XLA's own convolutions are fedvi's."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import nn

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "native_networks.py"


@pytest.fixture(scope="module")
def native():
    spec = importlib.util.spec_from_file_location("native_networks", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name, shape, mask",
    [
        ("lenet", (28, 28, 1), None),
        pytest.param(
            "vgg", (32, 32, 3), np.array([1, 0, 1], bool), marks=pytest.mark.long
        ),
    ],
)
def test_logits_are_those_of_fedvis_layers(native, name, shape, mask):
    arguments = {"classes": 4, "input_shape": shape, "preprocess": lambda x: x / 2}
    ours, theirs = (b.build(name, **arguments) for b in (nn, native))
    params = jax.jit(ours.init)(jax.random.key(0))
    shapes = jax.eval_shape(theirs.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    x = jax.random.normal(jax.random.key(1), (3, *shape))
    logits = jax.jit(lambda p, x: [b.apply(p, x, mask) for b in (ours, theirs)])
    np.testing.assert_allclose(*logits(params, x), atol=1e-4)
