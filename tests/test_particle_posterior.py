"""Scores of prior and likelihood, predictions, first particles, what they stand for."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from fedvi.algorithms.dsvgd import DSVGD
from fedvi.flat import flatten, trees
from fedvi.local import Batch
from fedvi.particle_posterior import particle_posterior
from fedvi.stein import KERNELS, kde_score, svgd_direction
from fedvi.stein.kde import weakened_kde_score

KEY = jax.random.key(0)
SIZE = 12


def with_options(posterior, **options):
    options = dataclasses.replace(posterior.options, **options)
    return posterior._replace(options=options)


@pytest.fixture(scope="module")
def posterior(task):
    """Of an MLP of 53 weights and their precision."""
    options = DSVGD(particles=3, prior="hierarchical", gamma_rate=1.0)
    return particle_posterior(task.model, options, kept=6)


@pytest.fixture(scope="module")
def particles(posterior):
    return jax.jit(posterior.init)(KEY)


@pytest.fixture(scope="module")
def likelihood_scores(posterior):
    return jax.jit(posterior.likelihood_scores)


def test_minibatch_scores_are_scaled_to_the_clients_size(
    posterior, particles, likelihood_scores, train
):
    """Of equal minibatches they average to the gradient of Σ log p(y|x, θ)."""
    x, y = jnp.asarray(train.x[0]), jnp.asarray(train.y[0])
    assert particles.shape == (3, 54)

    @jax.jit
    @jax.vmap
    @jax.value_and_grad
    def log_likelihood_and_score(particle):
        logits = posterior.model.apply(posterior.parameters(particle), x[:SIZE])
        return jax.nn.log_softmax(logits)[jnp.arange(SIZE), y[:SIZE]].sum()

    batches = [slice(start, start + 4) for start in range(0, SIZE, 4)]
    found, losses = zip(
        *(
            likelihood_scores(particles, Batch(x[b], y[b], jnp.ones(4, bool)), SIZE)
            for b in batches
        )
    )
    log_probs, expected = log_likelihood_and_score(particles)
    np.testing.assert_allclose(sum(found) / 3, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.mean(losses), -log_probs.mean() / SIZE, rtol=1e-5)
    # The log precision has no likelihood; padding does not enter.
    assert (found[0][:, -1] == 0).all()
    mask = jnp.arange(4) < 3
    found, _ = likelihood_scores(particles, Batch(x[:4], y[:4], mask), 3)
    other = jnp.where(mask[:, None], x[:4], 9.0)
    expected, _ = likelihood_scores(particles, Batch(other, y[:4], mask), 3)
    np.testing.assert_array_equal(found, expected)


def test_prior_scores_are_those_of_a_normal_and_its_precision(posterior, particles):
    w, log_xi = np.float64(particles[:, :-1]), np.float64(particles[:, -1:])
    found = posterior.prior_scores(particles)
    np.testing.assert_allclose(found[:, :-1], -np.exp(log_xi) * w, rtol=1e-4)
    squares = np.square(w).sum(1, keepdims=True)
    expected = 0.5 * (53 - np.exp(log_xi) * squares) + 1 - np.exp(log_xi)
    np.testing.assert_allclose(found[:, -1:], expected, rtol=1e-4, atol=1e-4)


def test_first_particles_come_from_the_prior_or_from_the_network(posterior, particles):
    """The network's own: zero biases, kernels of its initialiser's size."""
    network = with_options(posterior, initial="network", first_t="prior")
    own = jax.jit(network.init)(KEY)
    np.testing.assert_array_equal(particles[:, -1], own[:, -1])
    parameters = jax.vmap(posterior.parameters)
    for those, zero in ((own, True), (particles, False)):
        bias = parameters(those)["body"]["Dense_0"]["bias"]
        assert bias.shape == (3, 5) and (bias == 0).all() == zero
    kernel = parameters(own)["body"]["Dense_0"]["kernel"]
    single = trees(posterior.model.init(KEY))["body"]["Dense_0"]["kernel"]
    assert 0.6 < kernel.std() / single.std() < 1.6
    assert len(np.unique(kernel[:, 0, 0])) == 3


def test_predictions_of_many_particles_are_those_of_few(posterior, test):
    """70 particles in chunks of 32, which must not change a thing."""
    particles = jax.random.normal(KEY, (70, 54))
    x = jnp.asarray(test.x[0])
    found = jax.jit(posterior.predict)(particles, x)
    assert found.shape == (70, 10, 3)
    for start in (0, 30, 50):
        few = particles[start : start + 20]
        expected = posterior.predict(few, x)
        np.testing.assert_allclose(
            found[start : start + 20], expected, rtol=1e-4, atol=1e-5
        )
    np.testing.assert_allclose(np.exp(found).sum(-1), 1, rtol=1e-5)


def test_only_so_many_particles_are_predicted_with_at_once(posterior, test):
    """The activations in the compiled program do not grow with their number."""
    x = jnp.asarray(np.tile(test.x[0], (200, 1)))
    particles = jax.ShapeDtypeStruct((320, 54), jnp.float32)
    compiled = jax.jit(lambda p: posterior.predict(p, x).sum()).lower(particles)
    temporary = compiled.compile().memory_analysis().temp_size_in_bytes
    hidden = 2000 * 5 * 4  # of one particle
    outputs = 320 * 2000 * 3 * 4
    assert temporary < 2.5 * outputs + 32 * 4 * hidden


def test_density_scores_are_those_of_the_estimate_asked_for(posterior, particles):
    points = particles + 0.1
    found = posterior.density_scores(points, particles)
    np.testing.assert_array_equal(found, kde_score(points, particles, bandwidth=0.55))
    weak = with_options(posterior, kde="repo", kde_bandwidth=3.0, first_t="prior")
    found = weak.density_scores(points, particles)
    expected = weakened_kde_score(points, particles, bandwidth=3.0)
    np.testing.assert_array_equal(found, expected)
    off = with_options(posterior, kde="off", first_t="prior")
    assert (off.density_scores(points, particles) == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_ascends_the_svgd_direction(posterior, particles, kernel):
    optimizer = optax.sgd(0.1)
    scores = 1 - particles
    one = with_options(posterior, kernel=kernel)
    moved, _ = one.step(optimizer, particles, scores, optimizer.init(particles))
    direction = svgd_direction(particles, scores, kernel=KERNELS[kernel])
    np.testing.assert_allclose(moved, particles + 0.1 * direction, rtol=1e-6, atol=1e-6)


def test_the_distribution_is_the_density_estimate_over_the_parameter_tree(posterior):
    """Without the log precision; against SciPy, and its draws against its moments."""
    particles = np.asarray(jax.random.normal(KEY, (3, 54)))
    weights = np.float64(particles[:, :-1])
    distribution = posterior.distribution(particles)
    assert set(distribution.event_shape) == {"body", "head"}
    point = posterior.parameters(particles[1] + 0.3)
    logs = norm(weights, 0.55).logpdf(weights[1] + 0.3).sum(1)
    expected = logsumexp(logs) - np.log(3)
    np.testing.assert_allclose(distribution.log_prob(point), expected, rtol=1e-5)
    mean, stddev = (
        flatten(t).vector for t in (distribution.mean(), distribution.stddev())
    )
    np.testing.assert_allclose(mean, weights.mean(0), rtol=1e-5, atol=1e-6)
    expected = np.sqrt(weights.var(0) + 0.55**2)
    np.testing.assert_allclose(stddev, expected, rtol=1e-5)
    draws = distribution.sample(seed=KEY, sample_shape=2000)
    draws = np.asarray(jax.vmap(lambda tree: flatten(tree).vector)(draws))
    assert np.abs(draws.mean(0) - mean).max() < 5 * stddev.max() / np.sqrt(2000)
    assert np.abs(draws.std(0) / stddev - 1).max() < 5 / np.sqrt(2 * 2000)


@pytest.mark.parametrize("kde", ["off", "repo"])
def test_without_an_estimate_all_mass_is_on_the_particles(posterior, particles, kde):
    point_mass = with_options(posterior, kde=kde, first_t="prior")
    distribution = point_mass.distribution(particles)
    rows = np.asarray(particles[:, :-1])
    draws = distribution.sample(seed=KEY, sample_shape=50)
    draws = np.asarray(jax.vmap(lambda tree: flatten(tree).vector)(draws))
    which = (draws[:, None] == rows[None]).all(-1)
    assert (which.sum(1) == 1).all() and which.any(0).all()
    at = posterior.parameters(particles[1])
    np.testing.assert_allclose(distribution.log_prob(at), -np.log(3), rtol=1e-6)
    beside = posterior.parameters(particles[1] + 0.1)
    assert distribution.log_prob(beside) == -np.inf
    stddev = flatten(distribution.stddev()).vector
    np.testing.assert_allclose(stddev, rows.std(0), rtol=1e-4, atol=1e-6)


def test_more_particles_than_memory_holds_are_refused(task, monkeypatch):
    """Ten sets at work and none kept, of 53 weights of 4 bytes."""
    with pytest.raises(ValueError, match="do not fit into this device's memory"):
        particle_posterior(task.model, DSVGD(particles=10**12), kept=6)
    monkeypatch.setattr(os, "sysconf", lambda name: 150)
    with pytest.raises(ValueError, match=r"particles=11 of mlp .*: 10 do"):
        particle_posterior(task.model, DSVGD(particles=11), kept=0)
    assert particle_posterior(task.model, DSVGD(particles=10), kept=0)
