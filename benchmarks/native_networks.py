"""LeNet and VGG of `fedvi.nn` with `flax.linen.Conv`, XLA's own convolution.

Everything but the convolutions is fedvi's, and all weights have the same names.
"""

from collections.abc import Callable

import jax
from flax import linen as nn

from fedvi.nn import BatchNorm, Dense, Model, from_flax, max_pool

__all__ = ["NATIVE", "build"]

HEAD = "classifier"


class LeNet(nn.Module):
    """As `fedvi.nn.models.LeNet`."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first = "SAME" if x.shape[1] == 28 else "VALID"
        x = max_pool(nn.relu(nn.Conv(6, (5, 5), padding=first)(x)))
        x = max_pool(nn.relu(nn.Conv(16, (5, 5), padding="VALID")(x)))
        x = x.reshape(x.shape[0], -1)
        for width in (120, 84):
            x = nn.relu(Dense(width)(x))
        return Dense(self.classes, name=HEAD)(x)


class VGG(nn.Module):
    """As `fedvi.nn.models.VGG`."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        for width in (16, 32, 64, 128, 128):
            x = max_pool(nn.relu(BatchNorm()(nn.Conv(width, (3, 3))(x), mask)))
        return Dense(self.classes, name=HEAD)(x.reshape(x.shape[0], -1))


NATIVE: dict[str, type[nn.Module]] = {"lenet": LeNet, "vgg": VGG}


def build(
    name: str,
    *,
    classes: int,
    input_shape: tuple[int, ...],
    preprocess: Callable[[jax.Array], jax.Array],
    dtype: str = "float32",
) -> Model:
    """Builds a network of `NATIVE`; arguments as for `fedvi.nn.build`."""
    return from_flax(
        NATIVE[name](classes=classes),
        input_shape,
        head=HEAD,
        preprocess=preprocess,
        name=name,
        dtype=dtype,
    )
