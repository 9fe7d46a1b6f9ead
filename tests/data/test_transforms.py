"""Normalisation and augmentation against numpy loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.data.transforms import crop_and_flip, pixel_statistics, standardise


def images(n, h=6, w=5, c=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, h, w, c), dtype=np.uint8)


@pytest.mark.parametrize("n", [1, 64, 150])
def test_pixel_statistics_are_those_of_the_flattened_channels(n):
    x = images(n)
    mean, std = pixel_statistics(x)
    flat = x.reshape(-1, 3).astype(np.float64) / 255
    np.testing.assert_allclose(mean, flat.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(std, flat.std(axis=0), rtol=1e-6)
    assert mean.dtype == std.dtype == np.float32


def test_feature_statistics_are_exact_far_from_zero():
    x = (1e4 + np.random.default_rng(0).normal(size=(200, 4))).astype(np.float32)
    x[:, 2] = 7.0
    mean, std = pixel_statistics(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(std[[0, 1, 3]], wide.std(axis=0)[[0, 1, 3]], rtol=1e-5)
    assert std[2] == 1.0  # constant


def test_rare_one_hot_features_stay_finite():
    """One 1 in n rows standardises to about √n; a column of zeros stays as it is."""
    n = 10_000
    x = np.zeros((n, 3), np.float32)
    x[17, 0] = 1
    x[:, 2] = np.arange(n) % 7000  # beside a feature of a quite other scale
    mean, std = pixel_statistics(x)
    unseen = np.array([[0, 1, 0]], np.float32)
    got = np.asarray(standardise(mean, std)(jnp.asarray(np.concatenate([x, unseen]))))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[17, 0], np.sqrt(n - 1), rtol=1e-4)
    assert (got[:-1, 1] == 0).all() and got[-1, 1] == 1


def test_constant_pixels_have_std_1():
    mean, std = pixel_statistics(np.full((3, 2, 2, 1), 51, np.uint8))
    np.testing.assert_allclose(mean, [0.2], rtol=1e-6)
    assert std.tolist() == [1.0]


def test_standardised_pixels_equal_the_formula():
    x = images(40)
    mean, std = pixel_statistics(x)
    got = jax.jit(standardise(mean, std))(x)
    assert got.dtype == jnp.float32
    expected = (x.astype(np.float64) / 255 - mean.astype(float)) / std.astype(float)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    np.testing.assert_allclose(np.mean(got, axis=(0, 1, 2)), np.zeros(3), atol=1e-5)
    np.testing.assert_allclose(np.std(got, axis=(0, 1, 2)), np.ones(3), atol=1e-5)


def test_standardised_features_and_scalar_statistics():
    x = np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)
    got = standardise([2.0, 4.0], [1.0, 2.0])(jnp.asarray(x))
    np.testing.assert_allclose(got, [[-1, -1], [1, 1]])
    got = standardise(0.5, 0.5)(jnp.array([[[0], [255]]], jnp.uint8))
    np.testing.assert_allclose(got, [[[-1], [1]]])


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.0, np.nan], 1.0, "mean=.* must be finite"),
        (0.0, [1.0, 0.0], "std=.* must be positive"),
        (0.0, -1.0, "std=.* must be positive"),
        (0.0, np.inf, "std=.* must be positive and finite"),
    ],
)
def test_statistics_that_would_make_nan(mean, std, message):
    with pytest.raises(ValueError, match=message):
        standardise(mean, std)


@partial(jax.jit, static_argnums=2)
def draw(key, padding, n):
    key_offset, key_flip = jax.random.split(key)
    offset = jax.random.randint(key_offset, (n, 2), 0, 2 * padding + 1)
    return offset, jax.random.bernoulli(key_flip, 0.5, (n,))


def by_loop(key, x, padding):
    """The same draws, image by image in numpy."""
    offset, flip = draw(key, padding, len(x))
    _, h, w, _ = x.shape
    out = np.empty_like(x)
    for i, image in enumerate(x):
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        top, left = (int(o) for o in offset[i])
        crop = padded[top : top + h, left : left + w]
        out[i] = crop[:, ::-1] if flip[i] else crop
    return out


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crop_and_flip_equals_a_numpy_loop(padding):
    x, key = images(8), jax.random.key(padding)
    got = jax.jit(crop_and_flip(padding))(key, x)
    assert got.dtype == jnp.uint8
    np.testing.assert_array_equal(got, by_loop(key, x, padding))


def test_augmentation_is_the_same_under_jit_vmap_and_scan():
    augment = crop_and_flip(2)
    x = jnp.asarray(images(24).reshape(3, 8, 6, 5, 3))
    keys = jax.random.split(jax.random.key(0), 3)
    expected = np.stack([by_loop(k, b, 2) for k, b in zip(keys, np.asarray(x))])
    np.testing.assert_array_equal(jax.jit(jax.vmap(augment))(keys, x), expected)
    mapped = jax.jit(partial(jax.lax.map, lambda pair: augment(*pair)))((keys, x))
    np.testing.assert_array_equal(mapped, expected)


def test_every_offset_and_both_directions_occur_equally_often():
    """A single bright pixel in the middle shows each image's draw."""
    x = np.zeros((6000, 5, 5, 1), np.uint8)
    x[:, 2, 2] = 1
    got = np.asarray(jax.jit(crop_and_flip(1))(jax.random.key(0), x))[..., 0]
    places = got.sum(axis=0)
    assert places[1:4, 1:4].sum() == 6000
    # 9 places, binomial: 5 standard deviations around 667.
    assert (np.abs(places[1:4, 1:4] - 6000 / 9) < 5 * np.sqrt(6000 * 8 / 81)).all()
    ramp = np.zeros((6000, 1, 2, 1), np.uint8)
    ramp[:, 0, 1] = 1
    turned = jax.jit(crop_and_flip(0))(jax.random.key(1), ramp)[:, 0, 0, 0]
    assert abs(np.asarray(turned).mean() - 0.5) < 5 * 0.5 / np.sqrt(6000)


def test_augmentation_refuses_what_is_no_image_batch():
    with pytest.raises(ValueError, match=r"x has shape \(3, 4\): augmentation takes"):
        jax.jit(crop_and_flip())(jax.random.key(0), jnp.zeros((3, 4)))
    with pytest.raises(ValueError, match="padding=-1"):
        crop_and_flip(-1)
