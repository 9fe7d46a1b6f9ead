"""The network of pfl's public CIFAR-10 benchmark."""

import jax
from flax import linen as nn

from fedvi.nn import Conv, Dense, max_pool

__all__ = ["TwoConvolutions"]


class TwoConvolutions(nn.Module):
    """Two 3x3 convolutions of 32 and 64, pooled, and a hidden layer of 128.

    `simple_cnn` of pfl-research's benchmarks, without its dropout, which fedvi's
    networks do not have.
    """

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64):
            x = nn.relu(Conv(width, (3, 3), padding="VALID")(x))
        x = max_pool(x)
        x = nn.relu(Dense(128)(x.reshape(x.shape[0], -1)))
        return Dense(self.classes, name="classifier")(x)
