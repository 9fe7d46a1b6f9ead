"""The networks of the papers, by name, and a user's own."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from fedvi import checks, names
from fedvi.nn.initialise import one_draw
from fedvi.nn.layers import (
    BatchNorm,
    Conv,
    Dense,
    DepthwiseConv,
    global_avg_pool,
    max_pool,
)
from fedvi.nn.model import ANY_NUMBER, Model, from_flax, preprocessed

__all__ = ["MODELS", "build", "options_of"]

# In every network the last linear layer has this name and forms the head.
HEAD = "classifier"


class Logistic(nn.Module):
    """Multinomial logistic regression on the flattened input; the body is empty."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Dense(self.classes, name=HEAD)(_flatten(x))


class BinaryLogistic(nn.Module):
    """Logistic regression of two classes, log p(1|x)/p(0|x) = w·x, without a bias.

    The model of Bayesian logistic regression (Gershman et al. 2012; DSVGD): one weight
    per input; the body is empty.
    """

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        logit = Dense(1, use_bias=False, name=HEAD)(_flatten(x))
        return jnp.concatenate([jnp.zeros_like(logit), logit], axis=-1)


class MLP(nn.Module):
    """ReLU network on the flattened input, `hidden` units a layer (FedHB: 256)."""

    classes: int
    hidden: tuple[int, ...] = (256,)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _flatten(x)
        for width in self.hidden:
            x = nn.relu(Dense(width)(x))
        return Dense(self.classes, name=HEAD)(x)


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling: 6, 16, 120, 84 (the baselines of BPFed).

    Images of 28x28 are padded by the first convolution, as in the original.
    """

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first = "SAME" if x.shape[1] == 28 else "VALID"
        x = max_pool(nn.relu(Conv(6, (5, 5), padding=first)(x)))
        x = max_pool(nn.relu(Conv(16, (5, 5), padding="VALID")(x)))
        x = nn.relu(Dense(120)(_flatten(x)))
        x = nn.relu(Dense(84)(x))
        return Dense(self.classes, name=HEAD)(x)


class FedRepCNN(nn.Module):
    """The CIFAR-10 network of FedRep: two 5x5 convolutions of 64, then 120 and 64."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = max_pool(nn.relu(Conv(64, (5, 5), padding="VALID")(x)))
        x = nn.relu(Dense(120)(_flatten(x)))
        x = nn.relu(Dense(64)(x))
        return Dense(self.classes, name=HEAD)(x)


class VGG(nn.Module):
    """The small VGG of pFedBayes: 16, 32, 64, 128, 128, each 3x3, BN, ReLU, pool.

    The convolutions have biases: only so does the body have the 245,760 weights of
    the paper's network.
    """

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        for width in (16, 32, 64, 128, 128):
            x = max_pool(BatchNorm(relu=True)(Conv(width, (3, 3))(x), mask))
        return Dense(self.classes, name=HEAD)(_flatten(x))


class MobileNet(nn.Module):
    """MobileNet-v1 for 32x32 images (FedBABU, FedHB): 3,206,976 weights in the body."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = BatchNorm(relu=True)(Conv(32, (3, 3), use_bias=False)(x), mask)
        blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)]
        blocks += [(512, 1)] * 5 + [(1024, 2), (1024, 1)]
        for width, strides in blocks:
            x = DepthwiseConv((3, 3), strides, use_bias=False)(x)
            x = BatchNorm(relu=True)(x, mask)
            x = BatchNorm(relu=True)(Conv(width, (1, 1), use_bias=False)(x), mask)
        return Dense(self.classes, name=HEAD)(global_avg_pool(x))


class ResNetBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, projected where the shape changes."""

    width: int
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y = Conv(self.width, (3, 3), self.strides, use_bias=False)(x)
        y = BatchNorm(relu=True)(y, mask)
        y = BatchNorm()(Conv(self.width, (3, 3), use_bias=False)(y), mask)
        if x.shape != y.shape:
            x = Conv(self.width, (1, 1), self.strides, use_bias=False)(x)
            x = BatchNorm()(x, mask)
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """ResNet-18 for 32x32 images: a 3x3 stem and four stages of two blocks."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = BatchNorm(relu=True)(Conv(64, (3, 3), use_bias=False)(x), mask)
        for width, strides in [(64, 1), (128, 2), (256, 2), (512, 2)]:
            x = ResNetBlock(width, strides)(x, mask)
            x = ResNetBlock(width)(x, mask)
        return Dense(self.classes, name=HEAD)(global_avg_pool(x))


# Closed: `build` relies on flax's default initialisers and on the name of the head.
# A user's own has the name `package.module:builder`.
MODELS: dict[str, type[nn.Module]] = {
    "logistic": Logistic,
    "binary_logistic": BinaryLogistic,
    "mlp": MLP,
    "lenet": LeNet,
    "fedrep_cnn": FedRepCNN,
    "vgg": VGG,
    "mobilenet": MobileNet,
    "resnet18": ResNet18,
}


def build(
    name: str,
    *,
    classes: int,
    input_shape: tuple[int, ...],
    preprocess: Callable[[jax.Array], jax.Array] | None = None,
    dtype: jnp.dtype | str = "float32",
    **options,
) -> Model:
    """Builds a network of `MODELS`, whose head is the last linear layer, or an own one.

    An own one is made by a function or a class of `flax.linen` modules that takes
    `classes`, and gets those of `input_shape`, `preprocess`, `dtype` and `options` that
    its signature names. What it returns is a `Model`, which gets `preprocess` put
    before it unless it took that itself, or a `flax.linen` module whose head is its
    layer "classifier", which goes through `from_flax`.

    Args:
        name: a key of `MODELS`, or `package.module:builder`, which may lie in the
            current folder.
        classes: number of outputs.
        input_shape: shape of one raw example, such as `(32, 32, 3)`.
        preprocess: as for `from_flax`.
        dtype: of the activations, as for `from_flax`.
        **options: fields of the network, such as `hidden=(512, 256)` for "mlp".

    Raises:
        ValueError: unknown name or option, fewer than one class, images of a size that
            the network cannot take, or an own builder that fails or makes no network
            of `classes` outputs.
    """
    allowed = options_of(name)
    checks.whole("classes", classes)
    _check_lengths("input_shape", input_shape)
    if "hidden" in options:
        _check_lengths("hidden", options["hidden"])
    for option, value in options.items():
        if option not in allowed:
            raise ValueError(
                f"{option}={value!r} is no option of {name}: choose from {allowed}"
                f"{names.near(option, allowed)}"
            )
    if names.is_path(name):
        return _build_own(name, classes, input_shape, preprocess, dtype, options)
    if name == "binary_logistic" and classes != 2:
        raise ValueError(
            f"model='binary_logistic' has two classes, not {classes}: use 'logistic', "
            "or keep two classes (one_against_rest)"
        )
    _check_size(name, input_shape, preprocess)
    module = MODELS[name](classes=classes, **options)
    model = from_flax(
        module,
        input_shape,
        head=HEAD,
        preprocess=preprocess,
        name=name,
        dtype=dtype,
        initialiser=one_draw,
    )
    if name == "binary_logistic":
        model = model._replace(loss=_binary_cross_entropy)
    return model


def options_of(name: str) -> list[str]:
    """The options that a network takes beside those of every one.

    Raises:
        ValueError: there is no such network.
    """
    if names.is_path(name):
        taken = _parameters(name)
    else:
        checks.one_of("model", name, MODELS)
        taken = MODELS[name].__dataclass_fields__
    of_all = {"classes", "input_shape", "preprocess", "dtype", "parent", "name"}
    return sorted(set(taken) - of_all)


def _parameters(path: str) -> list[str]:
    """The names of the arguments of a user's own builder."""
    builder = names.imported("model", path, MODELS)
    if not callable(builder):
        raise ValueError(f"model={path!r} is no function that builds a network")
    parameters = inspect.signature(builder).parameters.values()
    return [one.name for one in parameters if one.kind not in ANY_NUMBER]


def _build_own(
    path: str,
    classes: int,
    input_shape: tuple[int, ...],
    preprocess: Callable[[jax.Array], jax.Array] | None,
    dtype: jnp.dtype | str,
    options: dict[str, Any],
) -> Model:
    """The network that a user's own builder makes; see `build`."""
    builder, taken = names.imported("model", path), _parameters(path)
    given = {"classes": classes, "input_shape": input_shape, **options}
    if not isinstance(builder, type):  # a module's own field of the name is no wish
        given |= {"preprocess": preprocess, "dtype": dtype}
    given = {key: value for key, value in given.items() if key in taken}
    with names.told("model", path):
        made = builder(**given)
    before = None if "preprocess" in given else preprocess
    if isinstance(made, nn.Module):
        made = _from_module(path, made, input_shape, before, dtype)
    elif not isinstance(made, Model):
        raise ValueError(
            f"model={path!r} returned {type(made).__name__}: it must return a "
            "fedvi.nn.Model or a flax.linen module"
        )
    elif "dtype" not in given and jnp.dtype(dtype) != jnp.float32:
        raise ValueError(f"model={path!r} takes no dtype={str(dtype)!r}")
    elif before is not None:
        made = preprocessed(made, before)
    if made.classes != classes:
        raise ValueError(
            f"model={path!r} has {made.classes} outputs, and the data {classes} "
            "classes: make it of the classes that it is given"
        )
    return made


def _from_module(
    path: str,
    module: nn.Module,
    input_shape: tuple[int, ...],
    preprocess: Callable[[jax.Array], jax.Array] | None,
    dtype: jnp.dtype | str,
) -> Model:
    try:
        return from_flax(
            module, input_shape, head=HEAD, preprocess=preprocess, dtype=dtype
        )
    except ValueError as error:
        raise ValueError(
            f"model={path!r}: {error} (for a head of another name return "
            "fedvi.nn.from_flax(module, input_shape, head=...))"
        ) from error


def _check_lengths(name: str, lengths: Any) -> None:
    if not isinstance(lengths, tuple | list):
        raise ValueError(f"{name}={lengths!r} must be a tuple of whole numbers")
    for i, length in enumerate(lengths):
        checks.whole(f"{name}[{i}]", length)


def _binary_cross_entropy(logits: jax.Array, y: jax.Array, mask: jax.Array):
    """`cross_entropy` of two classes from their difference: 1.7 times faster on CPU."""
    losses = optax.sigmoid_binary_cross_entropy(logits[:, 1] - logits[:, 0], y)
    return jnp.where(mask, losses, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def _check_size(
    name: str,
    input_shape: tuple[int, ...],
    preprocess: Callable[[jax.Array], jax.Array] | None,
) -> None:
    """Raises a ValueError if the preprocessed images do not fit the network."""
    if name in ("logistic", "binary_logistic", "mlp"):
        return
    raw = jax.ShapeDtypeStruct((1, *input_shape), jnp.float32)
    shape = jax.eval_shape(preprocess, raw).shape[1:] if preprocess else input_shape
    if name in ("vgg", "mobilenet", "resnet18"):
        fits = len(shape) == 3 and all(s > 0 and s % 32 == 0 for s in shape[:2])
        need = "height and width must be multiples of 32"
    else:
        fits = len(shape) == 3 and min(shape[:2]) >= 16
        need = "height and width must be at least 16"
    if not fits:
        raise ValueError(
            f"input_shape={input_shape}: preprocessed images {shape} do not suit "
            f"{name}, which takes (height, width, channels): {need}"
        )


def _flatten(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)
