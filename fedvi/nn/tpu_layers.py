"""The layers of `layers.py` as a TPU moves fewer bytes for them; results are the same.

A TPU stores the last two axes of an array in tiles of 8 x 128 numbers and moves whole
tiles: 32 channels at the end take the room of 128. So images lie in another order:

    wide      [height, width, batch, channels]
    narrow    [height, channels, width * batch], where few channels would leave tiles
              empty

A pixel beside another one then is a shift by whole rows of tiles, or by `batch` numbers
of an axis. XLA cancels the transpositions between one layer and the next.

The derivatives are written by hand where XLA takes a pass over an image for each sum.
They are functions of JAX, so that they can be differentiated again, but not in forward
mode (`jax.jvp`).
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["batch_norm", "conv", "depthwise"]

LANES, SUBLANES = 128, 8
# Convolutions of so many input channels are XLA's own; of fewer, products of patches.
NATIVE_CHANNELS = 64
# Numbers that one output of a convolution by pixels may sum: each is a term of its own.
FEW_TERMS = 32

Pads = tuple[tuple[int, int], tuple[int, int]]


def batch_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mask: jax.Array | None,
    epsilon: float,
    relu: bool,
) -> jax.Array:
    """`BatchNorm`; statistics are one pass over `x`, and so are the gradient's sums."""
    if x.ndim not in (2, 4):
        pixels = x.reshape(x.shape[0], -1, 1, x.shape[-1])
        y = batch_norm(pixels, scale, bias, mask, epsilon, relu)
        return y.reshape(x.shape)
    narrow = _is_narrow(x.shape)
    stored = _stored(x)
    channel = 1 if narrow else x.ndim - 1
    if mask is not None:
        mask = jnp.tile(mask, x.shape[2]) if narrow else mask[:, None]
        mask = mask.reshape(*[1] * (stored.ndim - mask.ndim), *mask.shape)
    y = _normalise(stored, scale, bias, mask, epsilon, relu, channel)
    return _restored(y, x.shape)


def conv(x: jax.Array, kernel: jax.Array, strides: int, pads: Pads) -> jax.Array | None:
    """`Conv` without its bias, or None where patches are as good."""
    *size, inputs, features = kernel.shape
    if size == [1, 1]:
        return _product(x[:, ::strides, ::strides], kernel[0, 0])
    shape = (*_outputs(x, kernel, strides, pads), features)
    if strides == 1 and size[0] * size[1] * inputs <= FEW_TERMS and _is_narrow(shape):
        batch, height, width, _ = x.shape
        stored = x.transpose(3, 1, 2, 0).reshape(inputs, height, width * batch)
        y = _by_pixels(stored, kernel, _starts(pads), shape[1:3], batch)
        return _restored(y, shape)
    if inputs < NATIVE_CHANNELS:
        return None
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
        x, kernel, (strides,) * 2, pads, dimension_numbers=numbers
    )
    return _rounded(y, x.dtype)


def depthwise(x: jax.Array, kernel: jax.Array, strides: int, pads: Pads) -> jax.Array:
    """`DepthwiseConv` without its bias: a pass forward, one for each gradient."""
    shape = (*_outputs(x, kernel, strides, pads), x.shape[-1])
    batch, rows, columns, channels = shape
    kernel = kernel[:, :, 0]
    if not _is_narrow(x.shape):
        steps = (strides, strides)
        y = _filter(_stored(x), kernel, steps, _starts(pads), (rows, columns), None)
        return _as_wide(y)
    if strides == 1:
        y = _filter(_stored(x), kernel, (1, 1), _starts(pads), (rows, columns), batch)
        return _as_narrow(y, shape)
    # Strides in the lanes cost more than the columns that they leave out.
    width = strides * (columns - 1) + 1
    y = _filter(_stored(x), kernel, (strides, 1), _starts(pads), (rows, width), batch)
    y = y.reshape(rows, channels, width, batch)[:, :, ::strides]
    return _rounded(y, x.dtype).transpose(3, 0, 2, 1)


# How images lie.


def _is_narrow(shape: tuple[int, ...]) -> bool:
    """Whether images `[batch, height, width, channels]` lie so."""
    if len(shape) != 4:
        return False
    batch, _, width, channels = shape
    wide = _padding(channels, LANES) * _padding(batch, SUBLANES)
    # A change of the order takes passes of its own: it must save more than half.
    return wide > 2 * _padding(width * batch, LANES) * _padding(channels, SUBLANES)


def _padding(size: int, tile: int) -> float:
    """What an axis takes beside what it holds."""
    return -(-size // tile) * tile / size


def _stored(x: jax.Array) -> jax.Array:
    """`[batch, height, width, channels]` as it lies; other arrays as they are."""
    if x.ndim != 4:
        return x
    if not _is_narrow(x.shape):
        return x.transpose(1, 2, 0, 3)
    batch, height, width, channels = x.shape
    return x.transpose(1, 3, 2, 0).reshape(height, channels, width * batch)


def _restored(y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The other way round."""
    if len(shape) != 4:
        return y
    return _as_narrow(y, shape) if _is_narrow(shape) else _as_wide(y)


def _as_narrow(y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    batch, height, width, channels = shape
    return y.reshape(height, channels, width, batch).transpose(3, 0, 2, 1)


def _as_wide(y: jax.Array) -> jax.Array:
    return y.transpose(2, 0, 1, 3)


def _float(x: jax.Array) -> jax.Array:
    """In float32, or in what `x` has if that is more."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    # Without the barrier XLA keeps float32 in place of bfloat16: twice the bytes.
    return lax.optimization_barrier(x.astype(dtype))


def _outputs(
    x: jax.Array, kernel: jax.Array, strides: int, pads: Pads
) -> tuple[int, int, int]:
    """(batch, height', width')."""
    sizes = zip(x.shape[1:3], pads, kernel.shape[:2], strict=True)
    rows, columns = ((n + sum(pad) - k) // strides + 1 for n, pad, k in sizes)
    return x.shape[0], rows, columns


def _starts(pads: Pads) -> tuple[int, int]:
    """Zeros above and left of an image."""
    return pads[0][0], pads[1][0]


def _window(x, start, size, strides, batch, rows=0) -> jax.Array:
    """Rows and columns `start, start + strides, ...`, `size` of them; 0 outside.

    Args:
        x: images as they lie, wide or narrow, rows along the axis `rows`.
        start: (row, column), which may lie outside.
        size: how many of each.
        strides: between them; of columns 1 if narrow.
        batch: of narrow images; None: wide.
        rows: see there.
    """
    pixel, columns = (1, rows + 1) if batch is None else (batch, x.ndim - 1)
    axes = (
        (rows, start[0], size[0], strides[0]),
        (
            columns,
            start[1] * pixel,
            size[1] * pixel,
            strides[1],
        ),
    )
    pads = [(0, 0, 0)] * x.ndim
    first, last, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for axis, begin, count, step in axes:
        end = begin + step * (count - 1) + 1
        pads[axis] = (max(-begin, 0), max(end - x.shape[axis], 0), 0)
        first[axis], last[axis] = (at + pads[axis][0] for at in (begin, end))
        steps[axis] = step
    # One pad and one slice, which XLA fuses into the sum that they are for.
    return lax.slice(lax.pad(x, jnp.zeros((), x.dtype), pads), first, last, steps)


def _sums(terms: list[jax.Array], axes: tuple[int, ...]) -> jax.Array:
    """Each array's sum over `axes`, all in one reduction: `[terms, ...]`."""
    return jnp.stack(_reduce(tuple(terms), axes, terms[0].shape))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _reduce(terms, axes, shape):
    def add(a, b):
        return tuple(x + y for x, y in zip(a, b, strict=True))

    zeros = tuple(jnp.zeros((), term.dtype) for term in terms)
    return tuple(lax.reduce(terms, zeros, add, axes))


def _reduce_backward(axes, shape, _, gradients):
    wide = (jnp.expand_dims(gradient, axes) for gradient in gradients)
    return (tuple(jnp.broadcast_to(gradient, shape) for gradient in wide),)


_reduce.defvjp(lambda *arguments: (_reduce(*arguments), None), _reduce_backward)


# Batch normalisation.


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _normalise(x, scale, bias, mask, epsilon, relu, channel):
    """`x` as it lies; `mask` of its batch axis, behind which only `[1]` may follow."""
    return _normalise_forward(x, scale, bias, mask, epsilon, relu, channel)[0]


def _normalise_forward(x, scale, bias, mask, epsilon, relu, channel):
    mean, inverse, count = _statistics(x, mask, epsilon, channel)
    saved = x, scale, bias, mask, mean, inverse, count
    y = _affine(*saved[:3], mean, inverse)[1]
    return _rounded(jax.nn.relu(y) if relu else y, x.dtype), saved


def _normalise_backward(epsilon, relu, channel, saved, gradient):
    x, scale, bias, mask, mean, inverse, count = saved
    axes = tuple(axis for axis in range(x.ndim) if axis != channel)
    normal, y = _affine(x, scale, bias, mean, inverse)
    gradient = _float(gradient)
    if relu:
        gradient = jnp.where(y > 0, gradient, 0)
    by_bias = gradient.sum(axis=axes, keepdims=True)
    by_scale = (gradient * normal).sum(axis=axes, keepdims=True)
    # Through mean and variance, to which only examples of the mask belong.
    through = (by_bias + normal * by_scale) / count
    if mask is not None:
        through = jnp.where(mask, through, 0)
    by_x = _float(scale).reshape(inverse.shape) * inverse * (gradient - through)
    by_scale, by_bias = (
        value.reshape(-1).astype(scale.dtype) for value in (by_scale, by_bias)
    )
    return _rounded(by_x, x.dtype), by_scale, by_bias, None


_normalise.defvjp(_normalise_forward, _normalise_backward)


def _statistics(x, mask, epsilon, channel):
    """Mean, 1 / deviation, both with `x`'s axes, and how many numbers they are of."""
    near = x if x.ndim < 3 else lax.slice_in_dim(x, len(x) // 2, len(x) // 2 + 1)
    near, _ = _mean(_float(near), mask, channel)
    # The mean of squares minus the squared mean cancels in float32, but not around a
    # number near the mean, as that of the middle row is.
    near = lax.stop_gradient(near)
    centred = _float(x) - near
    mean, count = _mean(centred, mask, channel)
    square, _ = _mean(centred * centred, mask, channel)
    variance = jnp.maximum(square - mean * mean, 0)
    return near + mean, lax.rsqrt(variance + epsilon), count


def _mean(x, mask, channel):
    """Mean over all axes but one, which are kept, and how many numbers it is of."""
    axes = tuple(axis for axis in range(x.ndim) if axis != channel)
    count = x.size // x.shape[channel]
    if mask is not None:
        real = mask.sum(dtype=x.dtype)
        count = jnp.maximum(real * (count // mask.size), 1)
        x = jnp.where(mask, x, 0)
    return x.sum(axis=axes, keepdims=True) / count, count


def _affine(x, scale, bias, mean, inverse):
    """(normalised, with scale and bias)."""
    scale, bias = (_float(v).reshape(mean.shape) for v in (scale, bias))
    normal = (_float(x) - mean) * inverse
    return normal, normal * scale + bias


# Convolutions.


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`[batch, height, width, in]` and `[in, out]`: a convolution of single pixels."""
    shape = (*x.shape[:-1], kernel.shape[-1])
    if _is_narrow(x.shape) and _is_narrow(shape):
        y = lax.dot_general(kernel, _stored(x), (((0,), (1,)), ((), ())))
        return _as_narrow(_rounded(y, x.dtype).transpose(1, 0, 2), shape)
    y = lax.dot_general(x.transpose(1, 2, 0, 3), kernel, (((3,), (0,)), ((), ())))
    return _as_wide(_rounded(y, x.dtype))


def _positions(kernel: jax.Array) -> Iterator[tuple[int, int]]:
    rows, columns = kernel.shape[:2]
    return ((row, column) for row in range(rows) for column in range(columns))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _by_pixels(x, kernel, starts, size, batch):
    """`x` `[in, height, width * batch]` to narrow images, without patches."""
    return _by_pixels_forward(x, kernel, starts, size, batch)[0]


def _by_pixels_forward(x, kernel, starts, size, batch):
    weights = _float(kernel).reshape(-1, 1, kernel.shape[-1], 1)
    pixels = _pixels(x, kernel, starts, size, batch)
    y = sum(p * weight for p, weight in zip(pixels, weights, strict=True))
    return _rounded(y, x.dtype), (x, kernel)


def _by_pixels_backward(starts, size, batch, saved, gradient):
    x, kernel = saved
    wide = _float(gradient)
    terms = [p * wide for p in _pixels(x, kernel, starts, size, batch)]
    by_kernel = _sums(terms, (0, 2)).reshape(kernel.shape).astype(kernel.dtype)
    inputs = x.shape[1], x.shape[2] // batch
    by_x = 0
    for row, column in _positions(kernel):
        start = starts[0] - row, starts[1] - column
        moved = _window(gradient, start, inputs, (1, 1), batch)
        wide = _float(moved), _float(kernel[row, column])
        by_x += jnp.einsum("hcn,ic->ihn", *wide)
    return _rounded(by_x, x.dtype), by_kernel


_by_pixels.defvjp(_by_pixels_forward, _by_pixels_backward)


def _pixels(x, kernel, starts, size, batch) -> list[jax.Array]:
    """For each kernel position and input channel, `[height', 1, width' * batch]`."""
    return [
        _float(channel)[:, None]
        for row, column in _positions(kernel)
        for channel in _window(
            x, (row - starts[0], column - starts[1]), size, (1, 1), batch, rows=1
        )
    ]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _filter(x, kernel, strides, starts, size, batch):
    """Depthwise: images as they lie, `kernel` `[rows, columns, channels]`; `_window`'s
    arguments.
    """
    return _filter_forward(x, kernel, strides, starts, size, batch)[0]


def _filter_forward(x, kernel, strides, starts, size, batch):
    y = _weighted(x, kernel, -1, strides, starts, size, batch)
    return _rounded(y, x.dtype), (x, kernel)


def _filter_backward(strides, starts, size, batch, saved, gradient):
    x, kernel = saved
    wide = _float(gradient)
    terms = [
        _float(_window(x, (row - starts[0], column - starts[1]), size, strides, batch))
        * wide
        for row, column in _positions(kernel)
    ]
    by_kernel = _sums(terms, (0, 1, 2) if batch is None else (0, 2))
    if max(strides) > 1:
        zeros = [(0, 0, stride - 1) for stride in strides] + [(0, 0, 0)] * (x.ndim - 2)
        gradient = lax.pad(gradient, jnp.zeros((), x.dtype), zeros)
        gradient = _rounded(gradient, x.dtype)
    inputs = x.shape[0], x.shape[1] if batch is None else x.shape[2] // batch
    by_x = _weighted(gradient, kernel, 1, (1, 1), starts, inputs, batch)
    by_kernel = by_kernel.reshape(kernel.shape).astype(kernel.dtype)
    return _rounded(by_x, x.dtype), by_kernel


_filter.defvjp(_filter_forward, _filter_backward)


def _weighted(x, kernel, sign, strides, starts, size, batch) -> jax.Array:
    """The sum of weights times windows, which begin at sign (starts - position)."""
    # A number for each channel and all pixels.
    weights = _float(kernel)
    others = (2, 3, 4) if batch is None else (2, 4)
    weights = jnp.expand_dims(weights, others)
    total = 0
    for row, column in _positions(kernel):
        start = sign * (starts[0] - row), sign * (starts[1] - column)
        moved = _window(x, start, size, strides, batch)
        total += _float(moved) * weights[row, column]
    return total
