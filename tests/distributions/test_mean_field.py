import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.distributions import mean_field
from fedvi.distributions.mean_field import MeanField

RHOS = np.array([-200.0, -100.0, -50.0, 0.0, 50.0, 200.0])


def scale64(rho):
    return np.maximum(np.logaddexp(0, rho), mean_field.SCALE_FLOOR)


def slope64(rho):
    return (np.logaddexp(0, rho) > mean_field.SCALE_FLOOR) / (1 + np.exp(-rho))


def kl64(mu_q, rho_q, mu_p, rho_p):
    s, t = scale64(rho_q), scale64(rho_p)
    return np.log(t / s) + (s**2 + (mu_q - mu_p) ** 2) / (2 * t**2) - 0.5


def gradient64(mu_q, rho_q, mu_p, rho_p):
    """Derivatives of `kl64` by hand."""
    s, t, shift = scale64(rho_q), scale64(rho_p), mu_q - mu_p
    return (
        shift / t**2,
        (-1 / s + s / t**2) * slope64(rho_q),
        -shift / t**2,
        (1 / t - (s**2 + shift**2) / t**3) * slope64(rho_p),
    )


def test_kl_and_gradient_of_extreme_rho_equal_float64():
    rho_q, rho_p = (a.ravel() for a in np.meshgrid(RHOS, RHOS))
    mu_q, mu_p = np.full(36, 0.75), np.full(36, -0.5)

    def kl(mu_q, rho_q, mu_p, rho_p):
        return mean_field.kl(MeanField(mu_q, rho_q), MeanField(mu_p, rho_p))

    derivatives = jax.jit(jax.vmap(jax.value_and_grad(kl, argnums=(0, 1, 2, 3))))
    args = [jnp.float32(a) for a in (mu_q, rho_q, mu_p, rho_p)]
    values, gradients = derivatives(*args)
    assert np.isfinite(values).all()
    np.testing.assert_allclose(
        values, kl64(mu_q, rho_q, mu_p, rho_p), rtol=2e-5, atol=1e-6
    )
    expected = gradient64(mu_q, rho_q, mu_p, rho_p)
    for found, reference in zip(gradients, expected, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, reference, rtol=2e-5, atol=1e-6)


def test_kl_at_the_steepest_scale_is_finite():
    # Just above the floor the gradient in rho is at its largest.
    rho = np.log(1.1 * mean_field.SCALE_FLOOR)
    q = MeanField(jnp.full(10, 1e3), jnp.full(10, 200.0))
    p = MeanField(jnp.zeros(10), jnp.full(10, rho))
    value, gradient = jax.jit(jax.value_and_grad(mean_field.kl, argnums=1))(q, p)
    expected = 10 * kl64(1e3, 200.0, 0.0, rho)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    np.testing.assert_allclose(gradient.rho, gradient64(1e3, 200.0, 0.0, rho)[3], 1e-4)


def test_kl_sums_over_the_tree_and_is_zero_for_equal_ones():
    q = mean_field.init({"a": jnp.ones((2, 3)), "b": jnp.zeros(4)}, 0.5)
    p = mean_field.init({"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}, 2.0)
    each = np.log(2 / 0.5) + 0.5**2 / (2 * 2**2) - 0.5
    expected = 10 * each + 6 * 1 / (2 * 2**2)
    np.testing.assert_allclose(mean_field.kl(q, p), expected, rtol=1e-6)
    assert mean_field.kl(q, q) == 0


@pytest.mark.parametrize("sigma", [1e-6, 0.05, 1.0, 150.0])
def test_scale_inverts_from_scale(sigma):
    q = mean_field.init({"w": jnp.zeros(3)}, sigma)
    np.testing.assert_allclose(mean_field.scale(q)["w"], sigma, rtol=2e-5)


def test_ten_thousand_draws_have_the_asked_spread():
    q = mean_field.init({"w": jnp.full(10_000, 0.3), "b": jnp.full(10_000, -1.0)}, 0.05)
    draw = mean_field.sample(jax.random.key(0), q)
    for name, mean in [("w", 0.3), ("b", -1.0)]:
        np.testing.assert_allclose(np.std(draw[name]), 0.05, rtol=0.03)
        np.testing.assert_allclose(np.mean(draw[name]), mean, atol=0.002)
    doubled = mean_field.sample(jax.random.key(0), q, eps_scale=2.0)
    np.testing.assert_allclose(doubled["w"] - 0.3, 2 * (draw["w"] - 0.3), atol=1e-6)
    centre = mean_field.sample(jax.random.key(0), q, eps_scale=0.0)
    np.testing.assert_array_equal(centre["w"], q.mu["w"])
    assert abs(np.corrcoef(draw["w"], draw["b"])[0, 1]) < 0.05


def test_sample_is_reparametrised():
    q = mean_field.init(jnp.zeros(5), 0.05)

    def total(q):
        draw = mean_field.sample(jax.random.key(0), q)
        return jnp.sum(draw), draw / 0.05

    gradient, z = jax.jit(jax.grad(total, has_aux=True))(q)
    np.testing.assert_array_equal(gradient.mu, 1.0)
    np.testing.assert_allclose(gradient.rho, z * jax.nn.sigmoid(q.rho), rtol=1e-4)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
def test_scale_must_be_positive(bad):
    mu = {"w": jnp.zeros(3)}
    with pytest.raises(ValueError, match=r"sigma\['w'\] holds"):
        mean_field.from_scale(mu, {"w": jnp.array([1.0, bad, 1.0])})
    with pytest.raises(ValueError, match="sigma"):
        mean_field.init(mu, bad)


def test_from_scale_works_on_traced_values():
    build = jax.jit(lambda s: mean_field.from_scale(jnp.zeros(2), s).rho)
    np.testing.assert_allclose(
        build(jnp.ones(2)), mean_field.from_scale(jnp.zeros(2), jnp.ones(2)).rho
    )
