import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats
from scipy.special import expit, xlogy

from fedvi.distributions import mean_field, spike_and_slab
from fedvi.distributions.mean_field import MeanField
from fedvi.distributions.spike_and_slab import INCLUSION_FLOOR, SpikeAndSlab

LINKS = ("softplus", "exp")
LOGITS = np.array([-200.0, -100.0, -50.0, -13.0, 0.0, 13.0, 50.0, 100.0, 200.0])
EXTREMES = np.array([-200.0, -100.0, -50.0, 0.0, 50.0, 200.0])


def inclusion64(logit):
    """λ and 1 - λ."""
    bounds = INCLUSION_FLOOR, 1 - INCLUSION_FLOOR
    return np.clip(expit(logit), *bounds), np.clip(expit(-logit), *bounds)


def bernoulli_kl64(lam, off, lam_p, off_p):
    return lam * np.log(lam / lam_p) + off * np.log(off / off_p)


def normal_kl64(mu, s, mu_p, t):
    return np.log(t / s) + (s**2 + (mu - mu_p) ** 2) / (2 * t**2) - 0.5


def single(mu, sigma, lam, link="softplus"):
    return spike_and_slab.init(mean_field.init(jnp.float32(mu), sigma, link), lam)


def of(mu, rho, logit, link="softplus"):
    return SpikeAndSlab(MeanField(mu, rho, link), logit)


def test_kl_and_gradient_of_extreme_logits_equal_float64():
    logit_q, logit_p = (a.ravel() for a in np.meshgrid(LOGITS, LOGITS))
    mu_q, mu_p, s, t = 0.75, -0.5, 0.3, 0.8
    rho_q, rho_p = (np.log(np.expm1(sigma)) for sigma in (s, t))

    def kl(logit_q, logit_p):
        q, p = of(mu_q, rho_q, logit_q), of(mu_p, rho_p, logit_p)
        return spike_and_slab.kl(jax.tree.map(jnp.float32, q), p)

    derivatives = jax.jit(jax.vmap(jax.value_and_grad(kl, argnums=(0, 1))))
    values, gradients = derivatives(jnp.float32(logit_q), jnp.float32(logit_p))

    (lam, off), (lam_p, off_p) = inclusion64(logit_q), inclusion64(logit_p)
    slab = normal_kl64(mu_q, s, mu_p, t)
    expected = bernoulli_kl64(lam, off, lam_p, off_p) + lam * slab
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-7)
    inside = np.abs(logit_q) < 13.5, np.abs(logit_p) < 13.5
    odds = np.log(lam / off) - np.log(lam_p / off_p)
    references = inside[0] * lam * off * (odds + slab), inside[1] * (lam_p - lam)
    for found, reference in zip(gradients, references, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, reference, rtol=1e-4, atol=2e-7)


@pytest.mark.parametrize("link", LINKS)
def test_kl_and_gradient_are_finite_for_extreme_scales_and_logits(link):
    grid = np.meshgrid(EXTREMES, EXTREMES, EXTREMES, EXTREMES)
    rho_q, rho_p, logit_q, logit_p = (jnp.float32(a.ravel()) for a in grid)

    def kl(rho_q, rho_p, logit_q, logit_p):
        q, p = of(0.75, rho_q, logit_q, link), of(-0.5, rho_p, logit_p, link)
        return spike_and_slab.kl(q, p)

    derivatives = jax.jit(jax.vmap(jax.value_and_grad(kl, argnums=(0, 1, 2, 3))))
    for leaf in jax.tree.leaves(derivatives(rho_q, rho_p, logit_q, logit_p)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("link", LINKS)
def test_kl_in_both_directions_is_that_of_the_weights_not_a_bound(link):
    # θ has density λ N(θ) off 0 and an atom 1 - λ at 0: no latent γ here.
    args_q, args_p = (0.4, 0.5, 0.7), (-0.3, 1.2, 0.2)
    for a, b in [(args_q, args_p), (args_p, args_q)]:
        slab_a, slab_b = stats.norm(*a[:2]), stats.norm(*b[:2])

        def integrand(x, slab_a=slab_a, slab_b=slab_b, a=a, b=b):
            log_ratio = np.log(a[2] / b[2]) + slab_a.logpdf(x) - slab_b.logpdf(x)
            return a[2] * slab_a.pdf(x) * log_ratio

        continuous, _ = integrate.quad(integrand, -15, 15, limit=200)
        atom = xlogy(1 - a[2], (1 - a[2]) / (1 - b[2]))
        found = spike_and_slab.kl(single(*a, link), single(*b))
        np.testing.assert_allclose(found, continuous + atom, rtol=1e-5)


def test_kl_sums_over_the_tree_and_is_zero_for_equal_ones():
    mu = {"a": jnp.ones((2, 3)), "b": jnp.zeros(4)}
    q = spike_and_slab.init(mean_field.init(mu, 0.5), 0.9)
    p = spike_and_slab.init(mean_field.init(jax.tree.map(jnp.zeros_like, mu), 2.0), 0.3)
    each = bernoulli_kl64(0.9, 0.1, 0.3, 0.7) + 0.9 * normal_kl64(0, 0.5, 0, 2)
    expected = 10 * each + 6 * 0.9 / (2 * 2**2)
    np.testing.assert_allclose(spike_and_slab.kl(q, p), expected, rtol=1e-5)
    assert spike_and_slab.kl(q, q) == 0


def test_kl_with_everything_included_is_the_slabs():
    q, p = (
        SpikeAndSlab(mean_field.init(jnp.full(50, mu), sigma), jnp.full(50, 200.0))
        for mu, sigma in [(0.1, 0.05), (0.0, 0.2)]
    )
    slabs = mean_field.kl(q.slab, p.slab)
    np.testing.assert_allclose(spike_and_slab.kl(q, p), slabs, rtol=1e-5)


def test_inclusion_is_clipped():
    q = of(jnp.zeros(5), jnp.zeros(5), jnp.array([-200.0, -14.0, 0.0, 14.0, 200.0]))
    found = spike_and_slab.inclusion(q)
    np.testing.assert_allclose(found, [1e-6, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-6], rtol=2e-6)
    assert (found < 1).all()


@pytest.mark.parametrize("lam", [0.02, 0.5, 0.99])
def test_gates_are_open_as_often_as_asked(lam):
    count = 200_000
    mu = {"w": jnp.zeros((count, 1)), "b": jnp.zeros(count)}
    q = spike_and_slab.init(mean_field.init(mu, 0.1), lam)
    np.testing.assert_allclose(spike_and_slab.inclusion(q)["b"], lam, rtol=1e-5)
    open_ = spike_and_slab.gates(jax.random.key(0), q, 0.5)
    assert jax.tree.map(jnp.shape, open_) == jax.tree.map(jnp.shape, mu)
    w, b = np.ravel(open_["w"]), np.asarray(open_["b"])
    assert set(np.unique(w)) == set(np.unique(b)) == {0.0, 1.0}
    error = 4 * np.sqrt(lam * (1 - lam) / count)
    np.testing.assert_allclose([w.mean(), b.mean()], lam, atol=error)
    assert abs(np.corrcoef(w, b)[0, 1]) < 0.01


def test_gates_stay_finite_and_shut_or_open_at_extreme_logits():
    logit = jnp.repeat(jnp.float32(EXTREMES), 1000)
    q = of(jnp.zeros_like(logit), jnp.zeros_like(logit), logit)

    def total(q):
        # So soft that a logit of ±50 would have a gradient, were it not clipped.
        gates = spike_and_slab.gates(jax.random.key(1), q, 5.0)
        return jnp.sum(gates), gates

    gradient, gates = jax.jit(jax.grad(total, has_aux=True))(q)
    slopes = gradient.logit.reshape(6, 1000)
    assert (slopes[3] > 0).all()
    np.testing.assert_array_equal(np.delete(slopes, 3, axis=0), 0)
    frequency = gates.reshape(6, 1000).mean(1)
    np.testing.assert_allclose(frequency, [0, 0, 0, 0.5, 1, 1], atol=0.06)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_gradient_of_gates_is_that_of_the_gumbel_sigmoid(temperature):
    count, key = 1000, jax.random.key(2)
    logit = jnp.linspace(-4, 4, count)
    q = of(jnp.zeros(count), jnp.zeros(count), logit)
    weights = jnp.linspace(-1, 2, count)

    def hard(q):
        gates = spike_and_slab.gates(key, q, temperature)
        return jnp.sum(weights * gates), gates

    gradient, gates = jax.jit(jax.grad(hard, has_aux=True))(q)
    # Eq. 41 by hand, with the noise of the same key.
    eta = np.float64(logit) + np.float64(jax.random.logistic(key, (count,)))
    soft = expit(eta / temperature)
    np.testing.assert_array_equal(gates, eta > 0)
    expected = weights * soft * (1 - soft) / temperature
    np.testing.assert_allclose(gradient.logit, expected, rtol=1e-4, atol=2e-6)


def test_sample_is_zero_or_the_slab_and_draws_twice():
    count, lam = 40_000, 0.3
    mu = {"w": jnp.full(count, 0.3), "b": jnp.full(count, -1.0)}
    q = spike_and_slab.init(mean_field.init(mu, 0.05, "exp"), lam)

    def draw(key):
        return spike_and_slab.sample(key, q, 0.5)

    theta = jax.jit(draw)(jax.random.key(3))
    for name, mean in [("w", 0.3), ("b", -1.0)]:
        kept = np.asarray(theta[name])[np.asarray(theta[name]) != 0]
        np.testing.assert_allclose(len(kept) / count, lam, atol=0.01)
        np.testing.assert_allclose(kept.mean(), mean, atol=0.002)
        np.testing.assert_allclose(kept.std(), 0.05, rtol=0.03)
    means = spike_and_slab.sample(jax.random.key(3), q, 0.5, eps_scale=0.0)
    assert set(np.unique(means["w"])) == {0.0, np.float32(0.3)}
    assert str(jax.make_jaxpr(draw)(jax.random.key(3))).count("random_bits") == 2


def test_sample_with_everything_included_is_the_slab():
    mu = jnp.linspace(-1, 1, 100)
    q = SpikeAndSlab(mean_field.init(mu, 0.05), jnp.full(100, 200.0))

    def total(q):
        draw = spike_and_slab.sample(jax.random.key(4), q, 0.5)
        return jnp.sum(draw), draw

    gradient, draw = jax.jit(jax.grad(total, has_aux=True))(q)
    z = (np.asarray(draw) - mu) / 0.05
    assert 0.7 < z.std() < 1.3
    np.testing.assert_array_equal(gradient.slab.mu, 1)
    slope = z * jax.nn.sigmoid(q.slab.rho)
    np.testing.assert_allclose(gradient.slab.rho, slope, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(gradient.logit, 0)


def clients(rng, count=6):
    """Distributions of `count` clients, leaves `[count, 2]` in float64."""
    mu = {"w": rng.normal(0.3, 0.2, (count, 2)), "b": rng.normal(0.3, 0.2, (count, 2))}
    sigma = jax.tree.map(lambda m: rng.uniform(0.05, 0.6, m.shape), mu)
    logit = jax.tree.map(lambda m: rng.normal(0, 2, m.shape), mu)
    return SpikeAndSlab(mean_field.from_scale(mu, sigma), logit), sigma


def optimum(q, near):
    each = jax.vmap(spike_and_slab.moments, (0, None))(q, near)
    mean = jax.tree.map(lambda leaf: leaf.mean(0), each)
    return spike_and_slab.from_moments(mean, near)


@pytest.mark.parametrize("link", LINKS)
def test_from_moments_weights_the_slabs_by_inclusion(link):
    q, sigmas = clients(np.random.default_rng(0))
    centre = {"w": jnp.full(2, 0.25), "b": jnp.zeros(2)}
    near = spike_and_slab.init(mean_field.init(centre, 0.3, link), 0.4)
    found = optimum(jax.tree.map(jnp.float32, q), near)
    for name in ("w", "b"):
        mu, sigma, lam = q.slab.mu[name], sigmas[name], expit(q.logit[name])
        mean = np.average(mu, axis=0, weights=lam)
        second = np.average(sigma**2 + mu**2, axis=0, weights=lam)
        np.testing.assert_allclose(
            spike_and_slab.inclusion(found)[name], lam.mean(0), rtol=1e-5
        )
        np.testing.assert_allclose(found.slab.mu[name], mean, rtol=1e-5)
        scale = mean_field.scale(found.slab)[name]
        np.testing.assert_allclose(scale, np.sqrt(second - mean**2), rtol=1e-5)


@pytest.mark.parametrize("link", LINKS)
def test_from_moments_has_zero_gradient(link):
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        q, _ = clients(rng)
        centre = jax.tree.map(lambda m: jnp.asarray(m[0]), q.slab.mu)
        near = spike_and_slab.init(mean_field.init(centre, 1, link), 0.4)

        def objective(w):
            return jax.vmap(spike_and_slab.kl, (0, None))(q, w).mean()

        best = optimum(q, near)
        value, gradient = jax.jit(jax.value_and_grad(objective))(best)
        for leaf in jax.tree.leaves(gradient):
            np.testing.assert_allclose(leaf, 0, atol=1e-12)
        averaged = jax.tree.map(lambda leaf: leaf.mean(0), q)  # of mu, rho and logit
        assert objective(averaged) > value + 0.01


def test_from_moments_keeps_inclusions_at_their_bounds():
    logit = jnp.full((3, 2), 200.0).at[:, 1].set(-200.0)
    q = of(jnp.full((3, 2), 0.5), jnp.zeros((3, 2)), logit)
    found = optimum(q, of(jnp.full(2, 0.4), jnp.zeros(2), jnp.array([10.0, -10.0])))
    np.testing.assert_allclose(
        spike_and_slab.inclusion(found), [1 - 1e-6, 1e-6], rtol=1e-5
    )
    np.testing.assert_allclose(found.slab.mu, 0.5, rtol=1e-6)
    np.testing.assert_allclose(mean_field.scale(found.slab), np.log(2), rtol=1e-5)


def test_from_moments_of_clients_that_left_a_near_of_almost_1():
    """The mean λ, 1 + (10⁻⁶ - 1) in float32, may be 0: the slab stays finite."""
    q = of(jnp.full((3, 2), 0.5), jnp.zeros((3, 2)), jnp.full((3, 2), -20.0))
    found = optimum(q, of(jnp.full(2, 0.4), jnp.zeros(2), jnp.full(2, 20.0)))
    np.testing.assert_allclose(found.slab.mu, 0.5, atol=0.02)
    np.testing.assert_allclose(mean_field.scale(found.slab), np.log(2), rtol=0.05)
    none = {"mass": -jnp.ones(2), "first": jnp.zeros(2), "second": jnp.zeros(2)}
    near = of(jnp.full(2, 0.4), jnp.zeros(2), jnp.full(2, 20.0))
    found = spike_and_slab.from_moments(none, near)
    np.testing.assert_allclose(found.slab.mu, 0.4)


def test_from_probabilities_averages_inclusions_where_parameters_average_logits():
    """Alg. 2 averages (μ, ρ, λ)."""
    q = jax.tree.map(jnp.float32, clients(np.random.default_rng(4))[0])
    near = jax.tree.map(lambda leaf: leaf[0] + 0.5, q)
    each = jax.vmap(spike_and_slab.probabilities, (0, None))(q, near)
    mean = jax.tree.map(lambda leaf: leaf.mean(0), each)
    found = spike_and_slab.from_probabilities(mean, near)
    parameters = jax.tree.map(lambda leaf: leaf.mean(0), q)
    for name in ("w", "b"):
        inclusions = expit(q.logit[name]).mean(0)
        np.testing.assert_allclose(expit(found.logit[name]), inclusions, rtol=1e-5)
        assert np.abs(inclusions - expit(parameters.logit[name])).max() > 0.003
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        found.slab,
        parameters.slab,
    )


def test_the_distribution_measures_and_draws_as_the_functions_do():
    rng = np.random.default_rng(3)
    q, p = (
        SpikeAndSlab(
            mean_field.from_scale(
                {"w": jnp.float32(rng.normal(size=200))},
                {"w": jnp.float32(rng.uniform(0.1, 2, 200))},
            ),
            {"w": jnp.float32(rng.normal(size=200))},
        )
        for _ in range(2)
    )
    ours, other = spike_and_slab.distribution(q), spike_and_slab.distribution(p)
    key = jax.random.key(1)
    draw = ours.sample(seed=key)["w"]
    same = spike_and_slab.sample(key, q, 0.5)["w"]
    np.testing.assert_allclose(draw, same, rtol=1e-6)
    divergence = spike_and_slab.kl(q, p)
    np.testing.assert_allclose(ours.kl_divergence(other), divergence, rtol=1e-5)
    # log_prob, entropy, mean and deviation against sums over both parts in float64.
    lam = expit(np.float64(q.logit["w"]))
    slab = stats.norm(
        np.float64(q.slab.mu["w"]), np.float64(mean_field.scale(q.slab)["w"])
    )
    x = np.float64(draw)
    density = np.where(x == 0, np.log1p(-lam), np.log(lam) + slab.logpdf(x))
    np.testing.assert_allclose(ours.log_prob({"w": draw}), density.sum(), rtol=1e-5)
    gate = -lam * np.log(lam) - (1 - lam) * np.log1p(-lam)
    entropy = (gate + lam * slab.entropy()).sum()
    np.testing.assert_allclose(ours.entropy(), entropy, rtol=1e-4)
    np.testing.assert_allclose(ours.mean()["w"], lam * slab.mean(), rtol=1e-5)
    second = lam * (slab.var() + slab.mean() ** 2)
    deviation = np.sqrt(second - (lam * slab.mean()) ** 2)
    np.testing.assert_allclose(ours.stddev()["w"], deviation, rtol=1e-4)
    # -E[log q] is the entropy, and E[log q - log p] the KL, of 2,000 draws.
    draws = ours.sample(seed=key, sample_shape=(2000,))
    log_q, log_p = jax.jit(jax.vmap(lambda x: (ours.log_prob(x), other.log_prob(x))))(
        draws
    )
    for found, expected in ((-log_q, entropy), (log_q - log_p, divergence)):
        error = found.std() / np.sqrt(2000)
        assert abs(found.mean() - expected) < 4 * error


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 1.01, float("nan")])
def test_inclusion_must_be_a_probability(bad):
    slab = mean_field.init({"w": jnp.zeros(3)}, 0.1)
    with pytest.raises(ValueError, match=rf"inclusion={bad} must lie in \(0, 1\)"):
        spike_and_slab.init(slab, bad)


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan")])
def test_temperature_must_be_positive(bad):
    q = single(0.0, 0.1, 0.5)
    for draw in (spike_and_slab.gates, spike_and_slab.sample):
        with pytest.raises(ValueError, match=f"temperature={bad} must be positive"):
            draw(jax.random.key(0), q, bad)
