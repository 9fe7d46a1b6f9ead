"""One long draw has the distribution of flax's initialisers."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from scipy import stats

from fedvi.nn import BatchNorm
from fedvi.nn.initialise import TRUNCATED_STD, one_draw


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = BatchNorm()(nn.Conv(40, (3, 3))(x))
        return nn.Dense(30)(x.mean((1, 2)))


def test_kernels_are_lecun_normal_and_the_rest_constant():
    init = one_draw(lambda key: Net().init(key, jnp.zeros((1, 4, 4, 8)))["params"])
    keys = jax.random.split(jax.random.key(0), 2)
    many = jax.vmap(init)(keys)
    params = jax.tree.map(lambda leaf: leaf[0], many)
    jax.tree.map(np.testing.assert_array_equal, init(keys[0]), params)
    kernels = {"Conv_0": 3 * 3 * 8, "Dense_0": 40}
    for name, fan_in in kernels.items():
        standard = params[name]["kernel"] * np.sqrt(fan_in) * TRUNCATED_STD
        law = stats.truncnorm(-2, 2)
        assert stats.kstest(np.ravel(standard), law.cdf).pvalue > 1e-3
        assert np.abs(many[name]["kernel"][0] - many[name]["kernel"][1]).max() > 0
        np.testing.assert_array_equal(params[name]["bias"], 0)
    assert np.unique(params["Conv_0"]["kernel"]).size > 0.99 * 72 * 40
    np.testing.assert_array_equal(params["BatchNorm_0"]["scale"], 1)
    np.testing.assert_array_equal(params["BatchNorm_0"]["bias"], 0)
    np.testing.assert_allclose(stats.truncnorm(-2, 2).std(), TRUNCATED_STD)
