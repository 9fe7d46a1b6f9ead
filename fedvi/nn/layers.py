"""Layers as matrix products, fast when every client has its own weights.

Under `jax.vmap` over weights, and in gradients inside `lax.scan`, native convolutions
leave XLA's fast CPU path. There these layers use only slices, sums and products.
Parameter names, shapes and initialisers are those of `flax.linen`, so that weights move
freely between the two. Images are `[batch, height, width, channels]`.

On TPUs they compute the same in other ways (`tpu_layers.py`).
"""

from functools import partial
from itertools import compress

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fedvi.nn import tpu_layers

__all__ = [
    "BatchNorm",
    "Conv",
    "Dense",
    "DepthwiseConv",
    "avg_pool",
    "global_avg_pool",
    "max_pool",
]

Dense = nn.Dense

# On CPU a convolution of fewer input channels computes 2x2 pixels at once: LeNet's
# step (3 and 6) takes 0.64 of the time so, VGG's (3) 0.91 (one Intel Xeon core).
FEW_CHANNELS = 8


class Conv(nn.Module):
    """Two-dimensional convolution, as `flax.linen.Conv`.

    Maps `[batch, height, width, in]` to `[batch, height', width', features]`: shifted
    slices are concatenated to patches and multiplied by the kernel
    `[kernel height, kernel width, in, features]` in one product.

    Attributes:
        features: number of output channels.
        kernel_size: kernel height and width.
        strides: step in both directions.
        padding: "SAME" or "VALID".
        use_bias: whether to add a bias `[features]`.

    Raises:
        ValueError: another kind of kernel size, strides or padding, or an image smaller
            than the kernel.
    """

    features: int
    kernel_size: tuple[int, int]
    strides: int = 1
    padding: str = "SAME"
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        _check(self.kernel_size, self.strides, self.padding)
        image = x.shape[1:3]
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        x, kernel = promote_dtype(x, kernel)
        pads = _pads(x, self.kernel_size, self.strides, self.padding)
        backend, own = jax.default_backend(), None
        if backend == "tpu":
            own = tpu_layers.conv(x, kernel, self.strides, pads)
        x = jnp.pad(x, [(0, 0), *pads, (0, 0)])
        on_cpu, few = backend == "cpu", x.shape[-1] < FEW_CHANNELS
        pixels = max(self.kernel_size) == 1
        if own is not None:
            y = own
        elif on_cpu and few and self.strides == 1:
            y = _by_blocks(x, kernel)
        elif on_cpu and not few and not pixels and _fits(self.kernel_size, image):
            y = _shared_natively(x, kernel, self.strides)
        else:
            y = _by_patches(x, kernel, self.strides)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = _add(y, bias[None, None, None])
        return y


class DepthwiseConv(nn.Module):
    """One filter per channel, as `flax.linen.Conv` with `feature_group_count=channels`.

    Maps `[batch, height, width, channels]` to `[batch, height', width', channels]`
    with a kernel `[kernel height, kernel width, 1, channels]`: one multiply-add of a
    shifted slice for each kernel position.

    Attributes:
        kernel_size: kernel height and width.
        strides: step in both directions.
        padding: "SAME" or "VALID".
        use_bias: whether to add a bias `[channels]`.

    Raises:
        ValueError: as for `Conv`.
    """

    kernel_size: tuple[int, int]
    strides: int = 1
    padding: str = "SAME"
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        _check(self.kernel_size, self.strides, self.padding)
        channels = x.shape[-1]
        shape = (*self.kernel_size, 1, channels)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        x, kernel = promote_dtype(x, kernel)
        pads = _pads(x, self.kernel_size, self.strides, self.padding)
        if jax.default_backend() == "tpu":
            y = tpu_layers.depthwise(x, kernel, self.strides, pads)
        else:
            x = jnp.pad(x, [(0, 0), *pads, (0, 0)])
            taps = _taps(x, self.kernel_size, self.strides)
            filters = kernel.reshape(-1, 1, 1, 1, channels)
            # Sums in float32, whatever the activations are, as a product has them.
            y = sum(
                tap.astype(jnp.float32) * weight
                for tap, weight in zip(taps, filters.astype(jnp.float32), strict=True)
            ).astype(x.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (channels,))
            y = _add(y, bias[None, None, None])
        return y


class BatchNorm(nn.Module):
    """Batch normalisation by the statistics of the batch, in training and evaluation.

    Equals `flax.linen.BatchNorm(use_running_average=False)`, but keeps no running
    statistics, so that its only state is the parameters `scale` and `bias`
    `[channels]` (the models of FedBABU and FedHB: `track_running_stats=False`).

    Call it with `x` `[batch, ..., channels]` and optionally `mask` `[batch]` bool:
    examples with a false mask do not enter the statistics, though they are normalised
    by them. If no example counts, mean and variance are zero.

    Attributes:
        epsilon: added to the variance; 1e-5, as in `flax.linen`.
        relu: whether the result goes through a ReLU.
    """

    epsilon: float = 1e-5
    relu: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        channels = x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        if jax.default_backend() == "tpu":
            options = self.epsilon, self.relu
            return tpu_layers.batch_norm(x, scale, bias, mask, *options)
        if mask is not None:
            mask = mask.reshape(-1, *[1] * (x.ndim - 1))
        # Statistics in float32, whatever the activations are.
        wide = x.astype(jnp.float32)
        centred = wide - _masked_mean(wide, mask)
        # Two passes: the mean of squares minus the squared mean cancels in float32.
        variance = _masked_mean(centred * centred, mask)
        scale, bias = (v.reshape(*[1] * (x.ndim - 1), -1) for v in (scale, bias))
        y = centred * (lax.rsqrt(variance + self.epsilon) * scale) + bias
        y = y.astype(x.dtype)
        return nn.relu(y) if self.relu else y


def max_pool(x: jax.Array, window: int = 2) -> jax.Array:
    """Largest value of each window of `window x window` pixels, without overlap.

    Maps `[batch, height, width, channels]` to
    `[batch, height // window, width // window, channels]`; rows and columns left over
    are dropped. Equals `flax.linen.max_pool` with equal window and strides; the
    gradient goes to the first largest pixel.

    Raises:
        ValueError: the image is smaller than the window.
    """
    pixels = _windows(x, window)
    # Not `pixels.max(3)`: its gradient compares the maximum with pixels that XLA may
    # have recomputed with another rounding, and then finds no maximum at all.
    winner = jnp.argmax(lax.stop_gradient(pixels), axis=3, keepdims=True)
    position = lax.broadcasted_iota(winner.dtype, (1, 1, 1, window * window, 1), 3)
    return jnp.where(position == winner, pixels, 0).sum(axis=3)


def avg_pool(x: jax.Array, window: int = 2) -> jax.Array:
    """Mean of each window of `window x window` pixels, without overlap.

    Shapes and errors as for `max_pool`. Equals `flax.linen.avg_pool` with equal window
    and strides.
    """
    return _windows(x, window).mean(axis=3)


def global_avg_pool(x: jax.Array) -> jax.Array:
    """Mean over pixels: `[batch, height, width, channels]` to `[batch, channels]`."""
    return x.mean(axis=(1, 2))


# Ways to convolve images `[batch, h, w, in]`, padded before, with one kernel
# `[kernel h, kernel w, in, features]`: each gives `[batch, h', w', features]`.


def _by_patches(x: jax.Array, kernel: jax.Array, strides: int) -> jax.Array:
    patches = jnp.concatenate(_taps(x, kernel.shape[:2], strides), axis=-1)
    shape = patches.shape[:-1]
    # A product of two matrices is faster than one with four-dimensional patches.
    patches = patches.reshape(-1, patches.shape[-1])
    weights = kernel.reshape(patches.shape[-1], -1)
    wide = len(patches) > len(weights) > weights.shape[1]
    if wide and jax.default_backend() == "cpu":
        # The weights' gradient sums over the rows of two matrices: XLA on CPU is up to
        # 1.7 times as fast with the narrower one first. The barrier keeps the gradient
        # in that order.
        weights = lax.optimization_barrier(weights.T).T
    return (patches @ weights).reshape(*shape, -1)


def _by_blocks(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """By patches of 2x2 pixels at once."""
    rows, columns = (n - k + 1 for n, k in zip(x.shape[1:3], kernel.shape))
    y = _by_patches(*_as_blocks(x, kernel), 1)
    return _as_pixels(y)[:, :rows, :columns]


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _shared_natively(x: jax.Array, kernel: jax.Array, strides: int) -> jax.Array:
    """XLA's convolution where clients share the kernel and nothing is differentiated.

    Such are evaluations, and bodies under a head that is trained alone. XLA is slow at
    one kernel for each client, and at gradients: there, by patches.
    """
    return _native_if_shared(x, kernel, strides)


@partial(_shared_natively.defjvp, symbolic_zeros=True)
def _differentiated(strides, primals, tangents):
    moves = [not isinstance(t, SymbolicZero) for t in tangents]

    def convolve(*moving):
        given = iter(moving)
        x, kernel = (next(given) if m else p for m, p in zip(moves, primals))
        return _by_patches(x, kernel, strides)

    chosen = [list(compress(values, moves)) for values in (primals, tangents)]
    return jax.jvp(convolve, *chosen)


def _native_if_shared(x: jax.Array, kernel: jax.Array, strides: int) -> jax.Array:
    @jax.custom_batching.custom_vmap
    def convolve(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (strides,) * 2, "VALID", dimension_numbers=numbers
        )

    @convolve.def_vmap
    def over_clients(clients, spread, x, kernel):
        if spread[1]:
            axes = [0 if s else None for s in spread]
            one = partial(_by_patches, strides=strides)
            return jax.vmap(one, axes)(x, kernel), True
        y = convolve(x.reshape(-1, *x.shape[2:]), kernel)
        return y.reshape(clients, -1, *y.shape[1:]), True

    return convolve(x, kernel)


def _add(y: jax.Array, bias: jax.Array) -> jax.Array:
    """In float32: the bias's gradient is a sum over all pixels of a batch."""
    wide = y.astype(jnp.float32) + bias.astype(jnp.float32)
    return wide.astype(y.dtype)


def _masked_mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Mean over all axes but the last, of the examples that count; axes are kept."""
    axes = tuple(range(x.ndim - 1))
    if mask is None:
        return x.mean(axis=axes, keepdims=True)
    total = jnp.where(mask, x, 0).sum(axis=axes, keepdims=True)
    pixels = x.size // (x.shape[0] * x.shape[-1])
    return total / jnp.maximum(mask.sum() * pixels, 1)


def _windows(x: jax.Array, window: int) -> jax.Array:
    """`[batch, h, w, channels]` to `[batch, h', w', window * window, channels]`."""
    batch, height, width, channels = x.shape
    rows, columns = height // window, width // window
    if not rows or not columns:
        raise ValueError(
            f"window={window} is larger than the {height}x{width} image: "
            "pool less or use larger images"
        )
    x = x[:, : rows * window, : columns * window]
    x = x.reshape(batch, rows, window, columns, window, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows, columns, window * window, channels)


def _as_blocks(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A convolution of pixels as one of 2x2 blocks of pixels, all four at once.

    Thin products with few channels become wider, and patches less than half as large;
    a 5x5 kernel takes 1.44 times as many multiplications, a 3x3 kernel 1.78 times.

    `x` `[batch, height, width, in]` becomes `[batch, rows, columns, 4 * in]`, with
    zeros behind the last row and column if they are needed. `kernel` `[height, width,
    in, features]` becomes `[height // 2 + 1, width // 2 + 1, 4 * in, 4 * features]`:
    a copy for each pixel of the output's block, shifted to it, and zeros.
    """
    channels, features = kernel.shape[2:]
    spans = [size // 2 + 1 for size in kernel.shape[:2]]
    pads = [
        (0, 2 * (-(-(pixels - size + 1) // 2) + span - 1) - pixels)
        for pixels, size, span in zip(x.shape[1:3], kernel.shape, spans)
    ]
    x = _windows(jnp.pad(x, [(0, 0), *pads, (0, 0)]), 2)
    spare = [2 * span - size for size, span in zip(kernel.shape, spans)]
    copies = [
        jnp.pad(kernel, [(i, spare[0] - i), (j, spare[1] - j), (0, 0), (0, 0)])
        for i in range(2)
        for j in range(2)
    ]
    kernel = jnp.concatenate(copies, axis=3)
    kernel = _windows(kernel.reshape(1, *kernel.shape[:2], -1), 2)
    return (
        x.reshape(*x.shape[:3], -1),
        kernel.reshape(*spans, 4 * channels, 4 * features),
    )


def _as_pixels(y: jax.Array) -> jax.Array:
    """Blocks `[batch, rows, columns, 4 * n]` to `[batch, 2 * rows, 2 * columns, n]`."""
    batch, rows, columns, _ = y.shape
    y = y.reshape(batch, rows, columns, 2, 2, -1).transpose(0, 1, 3, 2, 4, 5)
    return y.reshape(batch, 2 * rows, 2 * columns, -1)


def _check(kernel_size: tuple[int, int], strides: int, padding: str) -> None:
    if not isinstance(kernel_size, tuple) or len(kernel_size) != 2:
        raise ValueError(f"kernel_size={kernel_size!r}: give (height, width)")
    if not isinstance(strides, int) or strides < 1:
        raise ValueError(f"strides={strides!r}: give one positive whole number")
    if padding not in ("SAME", "VALID"):
        raise ValueError(f"padding={padding!r}: give 'SAME' or 'VALID'")


def _pads(
    x: jax.Array, kernel_size: tuple[int, int], strides: int, padding: str
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Zeros that `padding` asks for: (above, below), (left, right)."""
    image = x.shape[1:3]
    pads = lax.padtype_to_pads(image, kernel_size, (strides,) * 2, padding)
    padded = tuple(size + sum(pad) for size, pad in zip(image, pads, strict=True))
    if not _fits(kernel_size, padded):
        raise ValueError(
            f"kernel_size={kernel_size} is larger than the {image[0]}x{image[1]} "
            "image: use a smaller kernel, larger images or padding='SAME'"
        )
    return tuple(pads)


def _fits(kernel_size: tuple[int, int], image: tuple[int, ...]) -> bool:
    return all(kernel <= size for kernel, size in zip(kernel_size, image))


def _taps(x: jax.Array, kernel_size: tuple[int, int], strides: int) -> list[jax.Array]:
    """For each kernel position, the pixels `[batch, h', w', channels]` it meets."""
    rows, columns = kernel_size
    return [
        tap
        for row in _shifts(x, 1, rows, strides)
        for tap in _shifts(row, 2, columns, strides)
    ]


def _shifts(x: jax.Array, axis: int, kernel: int, strides: int) -> list[jax.Array]:
    """For each position of a kernel along `axis`, the pixels that it meets."""
    last = (x.shape[axis] - kernel) // strides * strides
    return [
        lax.slice_in_dim(x, start, start + last + 1, strides, axis)
        for start in range(kernel)
    ]
