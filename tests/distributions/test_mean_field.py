from functools import partial

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from fedvi.distributions import mean_field
from fedvi.distributions.mean_field import MeanField

LINKS = ("softplus", "exp")
RHOS = np.array([-200.0, -100.0, -50.0, 0.0, 50.0, 200.0])  # C14


def scale64(rho, link="softplus"):
    if link == "exp":
        bounds = np.log([mean_field.SCALE_FLOOR, mean_field.SCALE_CEILING])
        return np.exp(np.clip(rho, *bounds))
    return np.maximum(np.logaddexp(0, rho), mean_field.SCALE_FLOOR)


def slope64(rho, link="softplus"):
    if link == "exp":
        return scale64(rho, link) * (scale64(rho, link) == np.exp(rho))
    return (np.logaddexp(0, rho) > mean_field.SCALE_FLOOR) / (1 + np.exp(-rho))


def normal_kl64(mu_q, s, mu_p, t):
    return np.log(t / s) + (s**2 + (mu_q - mu_p) ** 2) / (2 * t**2) - 0.5


def kl64(mu_q, rho_q, mu_p, rho_p, link_q="softplus", link_p="softplus"):
    return normal_kl64(mu_q, scale64(rho_q, link_q), mu_p, scale64(rho_p, link_p))


def gradient64(mu_q, rho_q, mu_p, rho_p, link_q="softplus", link_p="softplus"):
    """Derivatives of `kl64` by hand."""
    s, t, shift = scale64(rho_q, link_q), scale64(rho_p, link_p), mu_q - mu_p
    return (
        shift / t**2,
        (-1 / s + s / t**2) * slope64(rho_q, link_q),
        -shift / t**2,
        (1 / t - (s**2 + shift**2) / t**3) * slope64(rho_p, link_p),
    )


@pytest.mark.parametrize("link_p", LINKS)
@pytest.mark.parametrize("link_q", LINKS)
def test_kl_and_gradient_of_extreme_rho_equal_float64(link_q, link_p):
    # Where a link is in force the slopes are steepest: one step inside its bounds.
    rhos = np.concatenate([RHOS, np.log([1.1e-8, 0.9e4])])
    rho_q, rho_p = (a.ravel() for a in np.meshgrid(rhos, rhos))
    mu_q, mu_p = np.full(64, 0.75), np.full(64, -0.5)

    def kl(mu_q, rho_q, mu_p, rho_p):
        q, p = MeanField(mu_q, rho_q, link_q), MeanField(mu_p, rho_p, link_p)
        return mean_field.kl(q, p)

    derivatives = jax.jit(jax.vmap(jax.value_and_grad(kl, argnums=(0, 1, 2, 3))))
    args = [jnp.float32(a) for a in (mu_q, rho_q, mu_p, rho_p)]
    values, gradients = derivatives(*args)
    # The rho that float32 holds: exp turns its rounding into one of the scale.
    exact = [np.float64(a) for a in args]
    expected = kl64(*exact, link_q, link_p)
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values, expected, rtol=5e-5, atol=1e-6)
    references = gradient64(*exact, link_q, link_p)
    for found, reference in zip(gradients, references, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, reference, rtol=5e-5, atol=1e-6)


@pytest.mark.parametrize("largest", [200.0, 1e6])
def test_kl_at_the_steepest_scale_is_finite(largest):
    # Just above the floor the gradient in rho is at its largest.
    rho = np.log(1.1 * mean_field.SCALE_FLOOR)
    q = MeanField(jnp.full(10, 1e3), jnp.full(10, largest))
    p = MeanField(jnp.zeros(10), jnp.full(10, rho))
    value, gradient = jax.jit(jax.value_and_grad(mean_field.kl, argnums=1))(q, p)
    expected = 10 * kl64(1e3, largest, 0.0, rho)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    slope = gradient64(1e3, largest, 0.0, rho)[3]
    np.testing.assert_allclose(gradient.rho, slope, rtol=1e-4)


@pytest.mark.parametrize("link_p", LINKS)
@pytest.mark.parametrize("link_q", LINKS)
def test_kl_in_both_directions_equals_distrax_and_the_integral(link_q, link_p):
    mu_q, s, mu_p, t = 0.3, 0.6, -0.4, 1.7
    q = mean_field.init(jnp.float32(mu_q), s, link_q)
    p = mean_field.init(jnp.float32(mu_p), t, link_p)
    for found, (a, b) in [
        (mean_field.kl(q, p), ((mu_q, s), (mu_p, t))),
        (mean_field.kl(p, q), ((mu_p, t), (mu_q, s))),
    ]:
        normal_a, normal_b = stats.norm(*a), stats.norm(*b)

        def integrand(x, normal_a=normal_a, normal_b=normal_b):
            return normal_a.pdf(x) * (normal_a.logpdf(x) - normal_b.logpdf(x))

        integral, _ = integrate.quad(integrand, -20, 20, limit=200)
        by_distrax = distrax.Normal(*a).kl_divergence(distrax.Normal(*b))
        np.testing.assert_allclose(found, integral, rtol=1e-5)
        np.testing.assert_allclose(found, by_distrax, rtol=1e-5)
        np.testing.assert_allclose(found, normal_kl64(*a, *b), rtol=1e-5)


def test_kl_sums_over_the_tree_and_is_zero_for_equal_ones():
    q = mean_field.init({"a": jnp.ones((2, 3)), "b": jnp.zeros(4)}, 0.5)
    p = mean_field.init({"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}, 2.0)
    each = np.log(2 / 0.5) + 0.5**2 / (2 * 2**2) - 0.5
    terms = mean_field.kl_by_weight(q, p)
    np.testing.assert_allclose(terms["a"], np.full((2, 3), each + 1 / 8), rtol=1e-6)
    np.testing.assert_allclose(terms["b"], np.full(4, each), rtol=1e-6)
    expected = 10 * each + 6 * 1 / (2 * 2**2)
    np.testing.assert_allclose(mean_field.kl(q, p), expected, rtol=1e-6)
    assert mean_field.kl(q, q) == 0


def test_the_gradient_of_equal_normals_is_zero_to_the_last_digit(optimised):
    rng = np.random.default_rng(0)
    q = MeanField(jnp.float32(rng.normal(size=999)), jnp.float32(rng.normal(size=999)))
    for gradient in optimised(jax.grad(mean_field.kl, argnums=(0, 1)))(q, q):
        assert not gradient.mu.any() and not gradient.rho.any()


def test_second_derivatives_of_the_kl_equal_differences_of_the_first():
    # FedABML's `meta` differentiates through gradient steps.
    args = [jnp.float32(a) for a in (0.3, -1.0, -0.2, 0.4)]

    def kl(*args):
        return mean_field.kl(MeanField(*args[:2]), MeanField(*args[2:]))

    found = np.array(jax.jit(jax.hessian(kl, argnums=(0, 1, 2, 3)))(*args))
    for i in range(4):
        up, down = (
            [np.float64(a) + h * (i == j) for j, a in enumerate(args)]
            for h in (1e-5, -1e-5)
        )
        column = (np.array(gradient64(*up)) - np.array(gradient64(*down))) / 2e-5
        np.testing.assert_allclose(found[:, i], column, rtol=1e-4, atol=1e-5)


def test_kl_of_narrow_normals_around_large_means_does_not_cancel():
    mu_q, mu_p = np.float32(30.0), np.float32(30.0 + 2e-4)
    q = mean_field.init(jnp.float32(mu_q), 1e-4)
    p = mean_field.init(jnp.float32(mu_p), 1e-4)
    expected = (np.float64(mu_q) - np.float64(mu_p)) ** 2 / (2 * 1e-8)
    np.testing.assert_allclose(mean_field.kl(q, p), expected, rtol=1e-4)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("sigma", [1e-6, 0.05, 1.0, 150.0])
def test_scale_inverts_from_scale(sigma, link):
    q = mean_field.init({"w": jnp.zeros(3)}, sigma, link)
    np.testing.assert_allclose(mean_field.scale(q)["w"], sigma, rtol=2e-5)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("rho", [-2.5, -200.0, 200.0])
def test_from_rho_is_the_unconstrained_scale(rho, link):
    q = mean_field.from_rho({"w": jnp.ones(3)}, rho, link)
    np.testing.assert_array_equal(q.mu["w"], 1)
    np.testing.assert_allclose(mean_field.scale(q)["w"], scale64(rho, link), rtol=2e-6)


@pytest.mark.parametrize("link", LINKS)
def test_ten_thousand_draws_have_the_asked_spread(link):
    mu = {"w": jnp.full(10_000, 0.3), "b": jnp.full(10_000, -1.0)}
    q = mean_field.init(mu, 0.05, link)
    draw = mean_field.sample(jax.random.key(0), q)
    for name, mean in [("w", 0.3), ("b", -1.0)]:
        np.testing.assert_allclose(np.std(draw[name]), 0.05, rtol=0.03)
        np.testing.assert_allclose(np.mean(draw[name]), mean, atol=0.002)
    doubled = mean_field.sample(jax.random.key(0), q, eps_scale=2.0)
    np.testing.assert_allclose(doubled["w"] - 0.3, 2 * (draw["w"] - 0.3), atol=1e-6)
    centre = mean_field.sample(jax.random.key(0), q, eps_scale=0.0)
    np.testing.assert_array_equal(centre["w"], q.mu["w"])
    assert abs(np.corrcoef(draw["w"], draw["b"])[0, 1]) < 0.05


@pytest.mark.parametrize(
    "link, slope", [("softplus", jax.nn.sigmoid), ("exp", jnp.exp)]
)
def test_sample_is_reparametrised_from_one_draw(link, slope):
    q = mean_field.init({"w": jnp.zeros(5), "b": jnp.zeros(2)}, 0.05, link)

    def total(q):
        draw = mean_field.sample(jax.random.key(0), q)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(draw)), draw

    gradient, draw = jax.jit(jax.grad(total, has_aux=True))(q)
    for name in ("w", "b"):
        z = draw[name] / 0.05
        np.testing.assert_array_equal(gradient.mu[name], 1.0)
        expected = z * slope(q.rho[name])
        np.testing.assert_allclose(gradient.rho[name], expected, rtol=1e-4)
    assert str(jax.make_jaxpr(total)(q)).count("random_bits") == 1


def clients(rng, link, count=6):
    """Normals of `count` clients, leaves `[count, 2]` in float64, around 0.3."""
    mu = {"w": rng.normal(0.3, 0.2, (count, 2)), "b": rng.normal(0.3, 0.2, (count, 2))}
    sigma = jax.tree.map(lambda m: rng.uniform(0.05, 0.6, m.shape), mu)
    return mean_field.from_scale(mu, sigma, link)


def closest(q, near):
    """The closest to the normals along the leading axis of `q`."""
    each = jax.vmap(mean_field.moments, (0, None))(q, near)
    mean = jax.tree.map(lambda leaf: leaf.mean(0), each)
    return mean_field.from_moments(mean, near)


@pytest.mark.parametrize("link", LINKS)
def test_from_moments_is_the_mixtures_mean_and_variance(link):
    q = clients(np.random.default_rng(0), "softplus")
    near = mean_field.init({"w": jnp.full(2, 0.25), "b": jnp.zeros(2)}, 0.3, link)
    found = closest(jax.tree.map(jnp.float32, q), near)
    assert found.link == link
    for name in ("w", "b"):
        mu, sigma = q.mu[name], scale64(np.float64(q.rho[name]))
        mean = mu.mean(0)  # Eq. A.6 and A.7
        variance = (sigma**2 + (mu - mean[None]) ** 2).mean(0)
        np.testing.assert_allclose(found.mu[name], mean, rtol=1e-5)
        scale = mean_field.scale(found)[name]
        np.testing.assert_allclose(scale, np.sqrt(variance), rtol=1e-5)


@pytest.mark.parametrize("link", LINKS)
def test_from_moments_has_zero_gradient(link):
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        q = clients(rng, "softplus")
        near = mean_field.init(jax.tree.map(lambda m: jnp.asarray(m[0]), q.mu), 1, link)

        def objective(w):
            return jax.vmap(mean_field.kl, (0, None))(q, w).mean()

        best = closest(q, near)
        value, gradient = jax.jit(jax.value_and_grad(objective))(best)
        for leaf in jax.tree.leaves(gradient):
            np.testing.assert_allclose(leaf, 0, atol=1e-12)
        averaged = jax.tree.map(lambda leaf: leaf.mean(0), q)  # of mu and rho
        assert objective(averaged) > value + 0.01


def test_from_moments_keeps_small_scales_of_clients_that_agree():
    # Around zero, 30² would swallow 1e-3² in float32.
    rng = np.random.default_rng(2)
    mu = np.float32(30 + 1e-3 * rng.normal(size=(5, 200)))
    q = mean_field.from_scale(jnp.asarray(mu), jnp.full((5, 200), 1e-3))
    found = closest(q, mean_field.init(jnp.full(200, 30.0), 0.01))
    mu = mu.astype(np.float64)
    np.testing.assert_allclose(found.mu, mu.mean(0), rtol=1e-7)
    expected = np.sqrt(1e-6 + mu.var(0))
    np.testing.assert_allclose(mean_field.scale(found), expected, rtol=1e-4)


@pytest.mark.parametrize("link", LINKS)
def test_from_moments_of_rounded_variance_is_floored(link):
    statistics = {"first": jnp.ones(2), "second": jnp.zeros(2)}
    near = mean_field.init(jnp.zeros(2), 0.5, link)
    found = mean_field.from_moments(statistics, near)
    np.testing.assert_allclose(mean_field.scale(found), 1e-8, rtol=1e-4)


def test_the_link_is_part_of_the_structure():
    q = mean_field.init({"w": jnp.ones(2)}, 0.1, "exp")
    doubled = jax.jit(partial(jax.tree.map, lambda leaf: 2 * leaf))(q)
    assert doubled.link == "exp"
    np.testing.assert_array_equal(doubled.mu["w"], 2)
    assert len(jax.tree.leaves(q)) == 2
    other = mean_field.init({"w": jnp.ones(2)}, 0.1)
    assert jax.tree.structure(q) != jax.tree.structure(other)


def test_the_distribution_measures_and_draws_as_the_functions_do():
    rng = np.random.default_rng(3)
    shapes = {"a": (2, 3), "b": (4,)}
    q, p = (
        mean_field.from_scale(
            {k: jnp.float32(rng.normal(size=s)) for k, s in shapes.items()},
            {k: jnp.float32(rng.uniform(0.1, 2, s)) for k, s in shapes.items()},
            link,
        )
        for link in LINKS
    )
    ours, other = mean_field.distribution(q), mean_field.distribution(p)
    key = jax.random.key(1)
    same = ours.sample(seed=key), mean_field.sample(key, q)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *same)
    np.testing.assert_allclose(ours.kl_divergence(other), mean_field.kl(q, p), 1e-6)
    # The KL is the library's own: distrax's leaves a rounding error in the gradient.
    gradient = jax.grad(lambda q: mean_field.distribution(q).kl_divergence(ours))(q)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))
    # An independent reference in float64.
    point = same[0]
    mu, sigma, x = (
        np.concatenate([np.ravel(tree[k]) for k in shapes]).astype(np.float64)
        for tree in (q.mu, mean_field.scale(q), point)
    )
    normal = stats.norm(mu, sigma)
    np.testing.assert_allclose(ours.log_prob(point), normal.logpdf(x).sum(), 1e-5)
    np.testing.assert_allclose(ours.entropy(), normal.entropy().sum(), 1e-5)
    jax.tree.map(np.testing.assert_array_equal, ours.mean(), q.mu)
    jax.tree.map(np.testing.assert_array_equal, ours.stddev(), mean_field.scale(q))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
def test_scale_must_be_positive(bad, link):  # C18
    mu = {"w": jnp.zeros(3)}
    with pytest.raises(
        ValueError, match=rf"sigma\['w'\] holds {np.float32(bad)}.*above"
    ):
        mean_field.from_scale(mu, {"w": jnp.array([1.0, bad, 1.0])}, link)
    with pytest.raises(ValueError, match=f"sigma holds {bad}: .* above 1e-08"):
        jax.jit(lambda m: mean_field.init(m, bad, link))(mu)


def test_the_exp_link_has_a_greatest_scale():
    assert mean_field.scale(mean_field.init(jnp.zeros(()), 2e4)) == 2e4
    with pytest.raises(ValueError, match="sigma holds 20000.0: .* at most 10000"):
        mean_field.init(jnp.zeros(()), 2e4, "exp")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rho_must_be_finite(bad):
    with pytest.raises(ValueError, match=f"rho={bad} must be a finite number"):
        mean_field.from_rho(jnp.zeros(2), bad)


def test_an_unknown_link_is_named():
    message = r"link='log1p' is unknown: choose one of \('softplus', 'exp'\)"
    zeros = jnp.zeros(2)
    for build in (
        lambda: MeanField(zeros, zeros, "log1p"),
        lambda: mean_field.init(zeros, 0.1, "log1p"),
        lambda: mean_field.from_rho(zeros, 0.1, "log1p"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.parametrize("link", LINKS)
def test_from_scale_works_on_traced_values(link):
    build = jax.jit(lambda s: mean_field.from_scale(jnp.zeros(2), s, link).rho)
    np.testing.assert_allclose(
        build(jnp.ones(2)), mean_field.from_scale(jnp.zeros(2), jnp.ones(2), link).rho
    )
