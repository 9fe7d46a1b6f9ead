import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedvi.distributions import normal_inverse_wishart as niw
from fedvi.distributions import student_t
from fedvi.distributions.normal_inverse_wishart import NIW, NIWHyper

POPULATION = 12
EPSILON = 0.3


def tree(vector):
    return {"kernel": vector[:2], "bias": vector[2:]}


def cohort(rng, participants, size=3):
    """Uploads `m [participants, size]`, and their sums scaled to the population."""
    m = rng.normal(0.5, 1.0, (participants, size))
    scaling = POPULATION / participants
    return m, scaling * m.sum(0), scaling * (m**2).sum(0)


def objective(m0, v, m, p, mu0, hyper):
    """The server's loss as in the paper, Eq. 37 + N/N_f Σ_i Eq. 38, in matrices.

    With d = 1 the paper's model holds for each weight alone, and the sum over weights
    has the same traces and log-determinants.
    """
    inverse, log_det, keep = np.diag(1 / v), np.log(v).sum(), np.diag(p)
    n0, shift = hyper.n0, mu0 - m0
    loss = n0 * np.trace(inverse) + hyper.nu0 * log_det + n0 * shift @ inverse @ shift
    for m_i in m:
        rho = m_i @ keep @ inverse @ m_i - m0 @ keep @ inverse @ m_i
        rho += -m_i @ keep @ inverse @ m0 + m0 @ inverse @ m0
        clients = POPULATION / len(m)
        loss += clients * n0 * (rho + log_det / n0 + EPSILON**2 * np.trace(inverse))
    return loss / 2


@pytest.mark.parametrize("dimension", [1, 3])
@pytest.mark.parametrize("participants", [POPULATION, 4])
@pytest.mark.parametrize("prior", [0.0, 0.7])
def test_posterior_minimises_the_server_objective(dimension, participants, prior):
    rng = np.random.default_rng(0)
    m, total, squares = cohort(rng, participants)
    hyper = NIWHyper(samples=40, clients=POPULATION, dimension=dimension)
    mu0, p = np.full(3, prior), np.array([0.8, 0.8, 1.0])

    with jax.enable_x64(True):
        found = niw.posterior(
            hyper,
            tree(jnp.asarray(total)),
            tree(jnp.asarray(squares)),
            prior_mean=tree(jnp.asarray(mu0)),
            keep={"kernel": 0.8, "bias": 1.0},
            epsilon=EPSILON,
        )
    m0, v = (np.concatenate([t["kernel"], t["bias"]]) for t in found)

    def value(m0, v):
        return objective(m0, v, m, p, mu0, hyper)

    # Complex steps: derivatives exact to rounding.
    steps = 1e-30j * np.eye(3)
    slopes = [[value(m0 + s, v).imag, value(m0, v + s).imag] for s in steps]
    np.testing.assert_allclose(np.array(slopes) / 1e-30, 0, atol=1e-10)
    nearby = rng.normal(0, 0.05, (20, 2, 3))
    assert min(value(m0 + a, v * np.exp(b)) for a, b in nearby) > value(m0, v)


def test_posterior_in_float32_follows_float64():
    rng = np.random.default_rng(1)
    hyper = NIWHyper(samples=50_000, clients=100, dimension=1)
    # Clients that agree to 1e-3 around large weights: the sums cancel.
    m = 30 + 1e-3 * rng.normal(size=(10, 200))
    p, n = 0.999, hyper.clients
    total, squares = n / 10 * m.sum(0), n / 10 * (m**2).sum(0)
    mean = p * total / (n + 1)
    rho = n / 10 * (p * m**2 - 2 * p * mean * m + mean**2).sum(0)
    scale = hyper.n0 / (n + 3) * (1 + n * 1e-8 + mean**2 + rho)
    found = niw.posterior(
        hyper,
        jnp.float32(total),
        jnp.float32(squares),
        prior_mean=jnp.zeros(200),
        keep=p,
        epsilon=1e-4,
    )
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-4)


def test_scatter_never_falls_below_zero():
    # Equal clients: rounding of S2 - S1²/N has either sign, its true value is 0.
    m = np.random.default_rng(2).normal(0, 1e4, 10_000).astype(np.float32)
    hyper = NIWHyper(samples=1000, clients=7, dimension=1)
    found = niw.posterior(
        hyper, 7 * m, 7 * m * m, prior_mean=jnp.float32(m), keep=1.0, epsilon=0.0
    )
    assert (found.scale >= hyper.n0 / (7 + 3) * (1 - 1e-6)).all()


def test_without_dropout_the_mean_is_federated_averaging_shrunk():
    m, total, squares = cohort(np.random.default_rng(3), 5)
    args = NIWHyper(100, POPULATION, 1), jnp.float32(total), jnp.float32(squares)
    zero, average = jnp.zeros(3), jnp.float32(m.mean(0))
    found = niw.posterior(*args, prior_mean=zero, keep=1.0, epsilon=0.0)
    shrunk = m.mean(0) * POPULATION / (POPULATION + 1)
    np.testing.assert_allclose(found.mean, shrunk, rtol=1e-6)
    found = niw.posterior(*args, prior_mean=average, keep=1.0, epsilon=0.0)
    np.testing.assert_allclose(found.mean, m.mean(0), rtol=1e-6)


@pytest.mark.parametrize(
    "hyper, epsilon, named",
    [
        (NIWHyper(10, 5, 1), -1e-4, "epsilon"),
        (NIWHyper(10, 5, 1), float("nan"), "epsilon"),
        (NIWHyper(10, 0, 1), 0.0, "clients"),
        (NIWHyper(10, 5, 0), 0.0, "dimension"),
        (NIWHyper(-1, 5, 1), 0.0, "samples"),
    ],
)
def test_posterior_rejects_bad_hyper_parameters(hyper, epsilon, named):
    x = jnp.ones(2)
    with pytest.raises(ValueError, match=named):
        niw.posterior(hyper, x, x, prior_mean=x, keep=1.0, epsilon=epsilon)


@pytest.mark.parametrize("dimension", [1, 3_206_976])
def test_penalty_is_the_expected_prior_energy(dimension):
    # -E_q[log N(θ; m_0, Σ*)] over kept and dropped, a sample, less its value at m_0.
    hyper = NIWHyper(samples=50_000, clients=100, dimension=dimension)
    p, v, m, m0, size = 0.9, 2.5, 0.3, -0.1, 500
    covariance = v / (hyper.n0 + dimension + 1)

    def energy(m):
        return (p * (m - m0) ** 2 + (1 - p) * m0**2) / (2 * covariance * size)

    weight = niw.penalty_precision(hyper, jnp.float32(v), p, jnp.int32(size))
    penalty = weight * (m - m0) ** 2 / 2
    np.testing.assert_allclose(penalty, energy(m) - energy(m0), rtol=1e-6)


def test_penalty_of_an_empty_client_is_finite():
    hyper = NIWHyper(samples=100, clients=10, dimension=1)
    args = {"w": jnp.ones(3)}, {"w": 0.9}
    empty = jax.jit(lambda n: niw.penalty_precision(hyper, *args, n))(0)
    one = niw.penalty_precision(hyper, *args, 1)
    np.testing.assert_allclose(empty["w"], one["w"])
    assert np.isfinite(empty["w"]).all()


@pytest.mark.parametrize("dimension", [1, 3])
def test_log_prob_equals_scipy(dimension):
    rng = np.random.default_rng(4)
    hyper = NIWHyper(samples=6, clients=4, dimension=dimension)
    l0, n0 = hyper.l0, hyper.n0
    m0, mu = rng.normal(size=(2, 3))
    v, s = rng.uniform(0.5, 3, (2, 3))
    if dimension == 3:
        expected = stats.invwishart.logpdf(np.diag(s), n0, np.diag(v))
        expected += stats.multivariate_normal.logpdf(mu, m0, np.diag(s) / l0)
    else:
        expected = sum(
            stats.invgamma.logpdf(s[j], n0 / 2, scale=v[j] / 2)
            + stats.norm.logpdf(mu[j], m0[j], np.sqrt(s[j] / l0))
            for j in range(3)
        )
    m0, v, mu, s = (tree(jnp.float32(a)) for a in (m0, v, mu, s))
    found = niw.log_prob(NIW(m0, v), mu, s, l0=l0, n0=n0, dimension=dimension)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_log_prob_rejects_another_dimension():
    x = jnp.ones(3)
    with pytest.raises(ValueError, match="dimension=2"):
        niw.log_prob(NIW(x, x), x, x, l0=2, n0=9, dimension=2)


def test_mode_is_the_inverse_wishart_mode():
    hyper = NIWHyper(samples=6, clients=4, dimension=1)
    v = 2.0
    mean, covariance = niw.mode(hyper, NIW(jnp.float32(0.5), jnp.float32(v)))
    grid = np.linspace(0.05, 1.0, 20_001)
    density = stats.invwishart.logpdf(grid, hyper.n0, v)
    assert mean == 0.5
    np.testing.assert_allclose(covariance, grid[density.argmax()], atol=1e-4)


def test_predictive_is_the_marginal_over_mean_and_covariance():
    # E[N(θ; μ, Σ)] over draws of (μ, Σ), with a whole 3 × 3 Σ: SciPy's own sampler.
    rng = np.random.default_rng(5)
    hyper = NIWHyper(samples=4, clients=4, dimension=3)
    m0, v = np.array([0.5, -1.0, 0.0]), np.array([4.0, 1.0, 2.5])
    covariances = stats.invwishart(hyper.n0, np.diag(v)).rvs(100_000, random_state=rng)
    roots = np.linalg.cholesky(covariances)
    normals = rng.normal(size=(100_000, 3))
    means = m0 + np.einsum("nij,nj->ni", roots, normals) / np.sqrt(hyper.l0)
    df, loc, scale = niw.predictive(hyper, NIW(jnp.float32(m0), jnp.float32(v)))
    assert df == hyper.samples + 3

    for shift in ([0.0, 0.0, 0.0], [1.0, 1.0, -1.0], [2.0, 0.0, 0.0]):
        theta = m0 + np.array(shift)
        z = np.linalg.solve(roots, (theta - means)[..., None])[..., 0]
        log_det = 2 * np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(1)
        density = np.exp(-((z**2).sum(1) + log_det + 3 * np.log(2 * np.pi)) / 2).mean()
        found = student_t.log_prob(jnp.float32(theta), df, loc, scale)
        np.testing.assert_allclose(found, np.log(density), atol=0.03)


def test_predictive_per_weight_is_the_marginal_of_one_weight():
    rng = np.random.default_rng(6)
    hyper = NIWHyper(samples=4, clients=4, dimension=1)
    v = 3.0
    variance = stats.invgamma(hyper.n0 / 2, scale=v / 2).rvs(200_000, random_state=rng)
    mu = 0.5 + np.sqrt(variance / hyper.l0) * rng.normal(size=200_000)
    theta = mu + np.sqrt(variance) * rng.normal(size=200_000)
    df, loc, scale = niw.predictive(hyper, NIW(jnp.float32(0.5), jnp.float32(v)))
    distance = stats.kstest(theta, stats.t(df, float(loc), float(scale)).cdf).statistic
    assert distance < 1.63 / np.sqrt(200_000)  # the 1 % point
