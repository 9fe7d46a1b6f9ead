import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedvi.distributions import normal_inverse_wishart as niw
from fedvi.distributions.normal_inverse_wishart import NIW, NIWHyper

POPULATION = 12
EPSILON = 0.3


def tree(vector):
    return {"kernel": vector[:2], "bias": vector[2:]}


CENTRE = np.array([0.4, -0.6, 0.2])


def cohort(rng, participants, size=3):
    """`m [participants, size]`, and the sums about CENTRE scaled to the population."""
    m = rng.normal(0.5, 1.0, (participants, size))
    delta = m - CENTRE[:size]
    scaling = POPULATION / participants
    return m, scaling * delta.sum(0), scaling * (delta**2).sum(0)


def uncentred(hyper, total, squares, mu0, p, epsilon):
    """Eq. 18 as the paper has it, from Σm_i and Σm_i², with μ_0; float64 NumPy."""
    n = hyper.clients
    mean = (mu0 + p * total) / (n + 1)
    rho = p * squares - 2 * p * mean * total + n * mean**2
    factor = hyper.n0 / (n + hyper.dimension + 2)
    return mean, factor * (1 + n * epsilon**2 + (mean - mu0) ** 2 + rho)


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
@pytest.mark.parametrize("prior", ["zero", "previous"])
def test_posterior_minimises_the_server_objective(dimension, participants, prior):
    rng = np.random.default_rng(0)
    m, total, squares = cohort(rng, participants)
    hyper = NIWHyper(samples=40, clients=POPULATION, dimension=dimension)
    p = np.array([0.8, 0.8, 1.0])
    mu0 = CENTRE if prior == "previous" else np.zeros(3)

    with jax.enable_x64(True):
        found = niw.posterior(
            hyper,
            *map(tree, (total, squares)),
            centre=tree(CENTRE),
            prior_mean=tree(mu0),
            keep={"kernel": 0.8, "bias": 1.0},
            epsilon=EPSILON,
        )
    m0, v = (np.concatenate([t["kernel"], t["bias"]]) for t in found)
    scaled = POPULATION / participants
    sums = scaled * m.sum(0), scaled * (m**2).sum(0)
    expected = uncentred(hyper, *sums, mu0, p, EPSILON)
    np.testing.assert_allclose((m0, v), expected, rtol=1e-12)

    def value(m0, v):
        return objective(m0, v, m, p, mu0, hyper)

    # Complex steps: derivatives exact to rounding.
    steps = 1e-30j * np.eye(3)
    slopes = [[value(m0 + s, v).imag, value(m0, v + s).imag] for s in steps]
    np.testing.assert_allclose(np.array(slopes) / 1e-30, 0, atol=1e-10)
    nearby = rng.normal(0, 0.05, (20, 2, 3))
    assert min(value(m0 + a, v * np.exp(b)) for a, b in nearby) > value(m0, v)


def test_clients_that_agree_do_not_cancel_in_float32():
    """Far from 0, 1e-3 from each other: sums about 0 would lose their scatter."""
    rng = np.random.default_rng(1)
    hyper = NIWHyper(samples=50_000, clients=100, dimension=1)
    centre = np.full(200, 30.0)
    delta = 1e-3 * rng.normal(size=(10, 200))
    total, squares = 10 * delta.sum(0), 10 * (delta**2).sum(0)
    found = niw.posterior(
        hyper,
        *map(jnp.float32, (total, squares)),
        centre=jnp.float32(centre),
        prior_mean=jnp.float32(centre),
        keep=1.0,
        epsilon=0.0,
    )
    m = centre + delta
    sums = 10 * m.sum(0), 10 * (m**2).sum(0)
    mean, scale = uncentred(hyper, *sums, centre, 1.0, 0.0)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-6)


def test_scatter_never_falls_below_zero():
    # Equal clients: rounding of S2 - S1²/N has either sign, its true value is 0.
    delta = np.random.default_rng(2).normal(0, 1e4, 10_000).astype(np.float32)
    hyper = NIWHyper(samples=1000, clients=7, dimension=1)
    found = niw.posterior(
        hyper,
        7 * delta,
        7 * delta * delta,
        centre=0.0 * delta,
        prior_mean=delta,
        keep=1.0,
        epsilon=0.0,
    )
    assert (found.scale >= hyper.n0 / (7 + 3) * (1 - 1e-6)).all()


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
        niw.posterior(hyper, x, x, centre=x, prior_mean=x, keep=1.0, epsilon=epsilon)


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


def test_predictive_is_the_marginal_over_mean_and_covariance():
    # E[N(θ; μ, Σ)] over draws of (μ, Σ), with a whole 3 × 3 Σ: SciPy's own sampler.
    rng = np.random.default_rng(5)
    hyper = NIWHyper(samples=4, clients=4, dimension=3)
    m0, v = np.array([0.5, -1.0, 0.0]), np.array([4.0, 1.0, 2.5])
    covariances = stats.invwishart(hyper.n0, np.diag(v)).rvs(50_000, random_state=rng)
    roots = np.linalg.cholesky(covariances)
    normals = rng.normal(size=(50_000, 3))
    means = m0 + np.einsum("nij,nj->ni", roots, normals) / np.sqrt(hyper.l0)
    found = niw.distribution(hyper, NIW(*map(tree, map(jnp.float32, (m0, v)))))
    assert found.df == hyper.samples + 3

    for shift in ([0.0, 0.0, 0.0], [1.0, 1.0, -1.0], [2.0, 0.0, 0.0]):
        theta = m0 + np.array(shift)
        z = np.linalg.solve(roots, (theta - means)[..., None])[..., 0]
        log_det = 2 * np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(1)
        density = np.exp(-((z**2).sum(1) + log_det + 3 * np.log(2 * np.pi)) / 2).mean()
        ours = found.log_prob(jnp.float32(np.roll(theta, 1)))  # bias before kernel
        np.testing.assert_allclose(ours, np.log(density), atol=0.04)


def test_the_per_weight_scale_depends_on_the_clients_not_on_their_data():
    """√(S (|D|+2) / ((N+3) (|D|+1))), S = V_0 (N+3) / n_0: 0.1 for 100 clients."""
    for samples in (10**3, 10**5, 10**7):
        hyper = NIWHyper(samples, clients=100, dimension=1)
        unseen = jnp.zeros(2)
        server = niw.posterior(
            hyper,
            unseen,
            unseen,
            centre=unseen,
            prior_mean=unseen,
            keep=1.0 + unseen,
            epsilon=1e-4,
        )
        scale = niw.distribution(hyper, server).scale
        np.testing.assert_allclose(scale, np.sqrt(1 / 103), rtol=1e-3)
    # With one covariance for all, d far above |D|: √(S / |D|), which does.
    joint = NIWHyper(10**4, clients=100, dimension=10**8)
    v0 = joint.n0 / (joint.clients + joint.dimension + 2)
    scale = niw.distribution(joint, NIW(unseen, jnp.full(2, v0))).scale
    np.testing.assert_allclose(scale, 0.01, rtol=1e-3)


def test_predictive_per_weight_is_the_marginal_of_one_weight():
    rng = np.random.default_rng(6)
    hyper = NIWHyper(samples=4, clients=4, dimension=1)
    v = 3.0
    variance = stats.invgamma(hyper.n0 / 2, scale=v / 2).rvs(200_000, random_state=rng)
    mu = 0.5 + np.sqrt(variance / hyper.l0) * rng.normal(size=200_000)
    theta = mu + np.sqrt(variance) * rng.normal(size=200_000)
    found = niw.distribution(hyper, NIW(jnp.full(2, 0.5), jnp.full(2, v)))
    student = stats.t(found.df, 0.5, float(found.scale[0]))
    # Two weights are independent.
    np.testing.assert_allclose(
        found.log_prob(jnp.array([0.7, -2.0])),
        student.logpdf([0.7, -2.0]).sum(),
        rtol=1e-5,
    )
    distance = stats.kstest(theta, student.cdf).statistic
    assert distance < 1.63 / np.sqrt(200_000)  # the 1 % point
