"""The discrepancy and the inner product against Eq. 19 by autodiff and by spectra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.stein import KERNELS, RBF, hip, ksd, median_bandwidth

N, D = 6, 2
RNG = np.random.default_rng(0)
PARTICLES, SCORES1, SCORES2 = RNG.normal(size=(3, N, D)).astype(np.float32)

inner = jax.jit(hip, static_argnames="kernel")
discrepancy = jax.jit(ksd, static_argnames=("kernel", "statistic"))


@pytest.fixture(scope="module", params=KERNELS)
def four_terms(request):
    """`(kernel, h -> the four terms of Eq. 19 [4, N, N])`, by autodiff."""
    kernel = KERNELS[request.param]

    @jax.jit
    def terms(h):
        def k(a, b):
            return kernel.value(jnp.sum(jnp.square(a - b)) / h)

        def pair(a, s1, b, s2):
            first, second = jax.grad(k, 0), jax.grad(k, 1)
            mixed = jax.jacfwd(first, 1)(a, b)
            return jnp.stack(
                [
                    k(a, b) * s1 @ s2,
                    s1 @ second(a, b),
                    first(a, b) @ s2,
                    jnp.trace(mixed),
                ]
            )

        rows = jax.vmap(pair, (None, None, 0, 0), 1)
        return jax.vmap(rows, (0, 0, None, None), 1)(
            PARTICLES, SCORES1, PARTICLES, SCORES2
        )

    return kernel, terms


def test_the_inner_product_is_equation_19(four_terms):
    kernel, terms = four_terms
    for h in (0.8, 5.0):
        expected = np.asarray(terms(h))
        # Each term matters, or a wrong sign would not show.
        assert (np.abs(expected.sum((1, 2))) > 0.1).all()
        found = inner(PARTICLES, SCORES1, SCORES2, kernel=kernel, bandwidth=h)
        np.testing.assert_allclose(found, expected.sum() / N**2, rtol=1e-4)
    h = median_bandwidth(PARTICLES)
    found = inner(PARTICLES, SCORES1, SCORES2, kernel=kernel)
    np.testing.assert_allclose(found, terms(h).sum() / N**2, rtol=1e-4)


def eq_10(four_terms, scores):
    """Σ of the four terms over pairs `[N, N]`, with one set of scores, in NumPy."""
    kernel, _ = four_terms
    h = float(median_bandwidth(PARTICLES))
    x, s = np.float64(PARTICLES), np.float64(scores)
    apart = x[:, None] - x[None]
    r = np.square(apart).sum(-1) / h
    k, g, c = (np.float64(f(jnp.float32(r))) for f in kernel)
    cross = np.einsum("id,ijd->ij", s, apart) - np.einsum("jd,ijd->ij", s, apart)
    return k * (s @ s.T) + 2 / h * g * cross + 2 * D * g / h - 4 * r * c / h


def test_both_statistics_are_means_over_pairs(four_terms):
    kernel = four_terms[0]
    pairs = eq_10(four_terms, SCORES1)
    found = discrepancy(PARTICLES, SCORES1, kernel=kernel)
    np.testing.assert_allclose(found, pairs.mean(), rtol=1e-5)
    found = discrepancy(PARTICLES, SCORES1, kernel=kernel, statistic="u")
    others = pairs.sum() - np.trace(pairs)
    np.testing.assert_allclose(found, others / (N * (N - 1)), rtol=1e-4)


def test_the_discrepancy_is_the_inner_product_with_itself(four_terms):
    kernel = four_terms[0]
    np.testing.assert_allclose(
        inner(PARTICLES, SCORES1, SCORES1, kernel=kernel),
        discrepancy(PARTICLES, SCORES1, kernel=kernel),
        rtol=1e-6,
    )


def test_the_inner_product_is_symmetric(four_terms):
    kernel = four_terms[0]
    there = inner(PARTICLES, SCORES1, SCORES2, kernel=kernel)
    back = inner(PARTICLES, SCORES2, SCORES1, kernel=kernel)
    np.testing.assert_allclose(there, back, rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_it_is_the_inner_product_of_the_directions_in_the_kernel_s_space(offset):
    """Of their Fourier coefficients: exp(-‖θ-θ'‖²/h) = E[exp(iω(θ-θ'))] for
    ω ~ N(0, 2I/h), here by Gauss-Hermite quadrature."""
    h, nodes = 1.7, 60
    x = np.float32(PARTICLES + np.float32(offset))
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    omega = np.stack(np.meshgrid(points, points), -1).reshape(-1, 2) * np.sqrt(2 / h)
    mass = np.outer(weights, weights).ravel() / (2 * np.pi)
    waves = np.exp(1j * omega @ np.float64(x - np.float32(offset)).T)  # [Q, N]

    def coefficients(scores):
        """φ(ω) = 1/N Σ_j (s_j + iω) exp(iωθ_j), `[Q, D]`."""
        return (waves[..., None] * (scores[None] + 1j * omega[:, None])).mean(1)

    first, second = coefficients(SCORES1), coefficients(SCORES2)
    expected = np.einsum("q,qd,qd->", mass, first, second.conj())
    assert abs(expected.imag) < 1e-9
    found = inner(x, SCORES1, SCORES2, kernel=RBF, bandwidth=h)
    np.testing.assert_allclose(found, expected.real, rtol=1e-4)


def test_the_sum_over_clients_is_the_inner_product_with_the_mean(four_terms):
    """Lemma 3: Σ_m ⟨φ_k, φ_m⟩ = K ⟨φ_k, φ'⟩, the trace terms included."""
    kernel, clients = four_terms[0], 5
    scores = np.random.default_rng(1).normal(size=(clients, N, D)).astype(np.float32)
    pairs = [
        [float(inner(PARTICLES, a, b, kernel=kernel)) for b in scores] for a in scores
    ]
    with_mean = [
        float(inner(PARTICLES, a, scores.mean(0), kernel=kernel)) for a in scores
    ]
    np.testing.assert_allclose(
        np.sum(pairs, axis=1), clients * np.array(with_mean), rtol=1e-4
    )


def test_it_is_negative_for_opposed_scores_and_the_discrepancy_never(four_terms):
    kernel = four_terms[0]
    pull = np.full((N, D), 5, np.float32)
    assert inner(PARTICLES, pull, -pull, kernel=kernel) < -1
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x, s = rng.normal(size=(2, N, D)).astype(np.float32)
        assert discrepancy(x, s, kernel=kernel) >= 0


def test_it_vanishes_in_the_mean_for_draws_from_the_target():
    """The U statistic of N(0, I) over 200 sets, and of sets that are shifted by 0.5."""
    draws = np.random.default_rng(3).normal(size=(200, 50, D)).astype(np.float32)

    @jax.jit
    def statistics(draws):
        return jax.vmap(lambda x: ksd(x, -x, kernel=RBF, bandwidth=2.0, statistic="u"))(
            draws
        )

    at_home = np.asarray(statistics(draws))
    assert abs(at_home.mean()) < 4 * at_home.std() / np.sqrt(200)
    away = np.asarray(statistics(draws + np.float32(0.5)))
    assert away.mean() > 20 * at_home.std() / np.sqrt(200)
    assert np.median(away) > np.quantile(at_home, 0.95)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(("kernel", "trace"), [("rbf", 2 * D), ("imq", D)])
def test_one_and_identical_particles_have_a_finite_discrepancy(kernel, trace, offset):
    """C15: ‖mean score‖² and a trace term of h = 1, the same whatever the scores."""
    measure = functools.partial(discrepancy, kernel=KERNELS[kernel])
    same = np.repeat(PARTICLES[:1] + np.float32(offset), N, axis=0)
    for scores in (SCORES1, SCORES2):
        expected = np.square(scores.mean(0)).sum() + trace
        np.testing.assert_allclose(measure(same, scores), expected, rtol=1e-5)
        expected = np.square(scores[0]).sum() + trace
        np.testing.assert_allclose(measure(same[:1], scores[:1]), expected, rtol=1e-5)


def test_no_array_of_pairs_times_dimension():
    count, dimension = 64, 20_000
    shape = jax.ShapeDtypeStruct((count, dimension), jnp.float32)
    compiled = discrepancy.lower(shape, shape, kernel=RBF).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 6 * count * dimension * 4 + 100 * count**2


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="statistic='w' must be one of v, u"):
        ksd(PARTICLES, SCORES1, statistic="w")
    with pytest.raises(ValueError, match="statistic='u' of one particle"):
        ksd(PARTICLES[:1], SCORES1[:1], statistic="u")
    for bandwidth in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"bandwidth={bandwidth!r} must be"):
            ksd(PARTICLES, SCORES1, bandwidth=bandwidth)
    with pytest.raises(ValueError, match="scores1 has shape"):
        hip(PARTICLES, SCORES1[:3], SCORES2)
    with pytest.raises(ValueError, match="scores2 is a tuple, and must be a matrix"):
        hip(PARTICLES, SCORES1, (SCORES2,))
    with pytest.raises(ValueError, match="particles is of shape .* must be a matrix"):
        hip(PARTICLES[:0], SCORES1[:0], SCORES2[:0])
