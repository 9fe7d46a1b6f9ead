"""Scores of prior and likelihood, predictions and first particles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import particle_posterior, priors
from fedvi.local import Batch
from fedvi.particle_posterior import ParticlePosterior
from fedvi.stein import KERNELS, kde_score, svgd_direction
from fedvi.stein.kde import weakened_kde_score

KEY = jax.random.key(0)
SIZE = 12


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b
    )


@pytest.fixture(scope="module")
def posterior(task):
    return ParticlePosterior(task.model, priors.gaussian(task.model, 2.0), 3).check(6)


@pytest.fixture(scope="module")
def particles(posterior):
    return posterior.init(KEY)


def test_minibatch_scores_are_scaled_to_the_clients_size(posterior, particles, train):
    """Of equal minibatches they average to the gradient of Σ log p(y|x, θ)."""
    x, y = jnp.asarray(train.x[0]), jnp.asarray(train.y[0])
    mask = jnp.ones(4, bool)

    @jax.jit
    def scores(start):
        slots = start + jnp.arange(4)
        batch = Batch(x[slots], y[slots], mask)
        return posterior.likelihood_scores(particles, batch, SIZE)

    @jax.jit
    def log_likelihood_and_score():
        def log_prob(w):
            logits = posterior.model.apply(w, x[:SIZE])
            return jax.nn.log_softmax(logits)[jnp.arange(SIZE), y[:SIZE]].sum()

        return jax.vmap(jax.value_and_grad(log_prob))(particles)

    found, losses = zip(*(scores(start) for start in range(0, SIZE, 4)))
    log_probs, expected = log_likelihood_and_score()
    assert_close(jax.tree.map(lambda *s: sum(s) / 3, *found), expected, rtol=1e-4)
    np.testing.assert_allclose(np.mean(losses), -log_probs.mean() / SIZE, rtol=1e-5)


def test_masked_examples_do_not_enter_the_scores(posterior, particles, train):
    x, y = jnp.asarray(train.x[0]), jnp.asarray(train.y[0])
    mask = jnp.arange(6) < 4
    scores = jax.jit(posterior.likelihood_scores)
    found = scores(particles, Batch(x[:6], y[:6], mask), 4)
    expected = scores(particles, Batch(x[:4], y[:4], mask[:4]), 4)
    assert_close(found, expected)


def test_prior_scores_of_the_gaussian_are_minus_precision_times_w(posterior, particles):
    expected = jax.tree.map(lambda w: -2.0 * w, particles)
    assert_close(posterior.prior_scores(particles), expected)


def test_hierarchical_particles_have_a_likelihood_of_their_weights(task, train):
    prior = priors.hierarchical(task.model, 1.0, 0.01)
    posterior = ParticlePosterior(task.model, prior, 3).check(6)
    particles = posterior.init(KEY)
    batch = Batch(train.x[0], train.y[0], jnp.ones(20, bool))
    scores, _ = jax.jit(posterior.likelihood_scores)(particles, batch, 20)
    assert scores.log_precision.shape == (3,) and (scores.log_precision == 0).all()
    plain = ParticlePosterior(task.model, priors.gaussian(task.model, 1.0), 3)
    expected, _ = jax.jit(plain.likelihood_scores)(particles.weights, batch, 20)
    assert_close(scores.weights, expected)
    np.testing.assert_allclose(
        posterior.predict(particles, train.x[0]),
        plain.predict(particles.weights, train.x[0]),
        rtol=1e-5,
    )


def test_first_particles_come_from_the_prior_or_from_the_network(task):
    """The network's own: zero biases, kernels of its initialiser's size."""
    prior = priors.hierarchical(task.model, 1.0, 0.01)
    drawn = ParticlePosterior(task.model, prior, 50).init(KEY)
    own = ParticlePosterior(task.model, prior, 50, initial="network").init(KEY)
    np.testing.assert_array_equal(drawn.log_precision, own.log_precision)
    for biases, zero in ((own, True), (drawn, False)):
        bias = biases.weights["body"]["Dense_0"]["bias"]
        assert bias.shape == (50, 5) and (bias == 0).all() == zero
    kernel = own.weights["body"]["Dense_0"]["kernel"]
    single = task.model.init(jax.random.key(1))["body"]["Dense_0"]["kernel"]
    assert 0.6 < kernel.std() / single.std() < 1.6
    assert len(np.unique(kernel[:, 0, 0])) == 50


def test_predictions_of_many_particles_are_those_of_few(posterior, test):
    """70 particles in chunks of 32, which must not change a thing."""
    many = posterior._replace(particles=70)
    particles = many.init(KEY)
    x = jnp.asarray(test.x[0])
    found = jax.jit(many.predict)(particles, x)
    assert found.shape == (70, 10, 3)
    for start in (0, 30, 50):
        few = jax.tree.map(lambda leaf: leaf[start : start + 20], particles)
        expected = posterior._replace(particles=20).predict(few, x)
        np.testing.assert_allclose(
            found[start : start + 20], expected, rtol=1e-4, atol=1e-5
        )
    np.testing.assert_allclose(np.exp(found).sum(-1), 1, rtol=1e-5)


def test_only_so_many_particles_are_predicted_with_at_once(posterior, test):
    """The activations in the compiled program do not grow with their number."""
    x = jnp.asarray(np.tile(test.x[0], (200, 1)))

    def temporary(count):
        many = posterior._replace(particles=count)
        shapes = jax.eval_shape(many.init, KEY)
        compiled = jax.jit(lambda p: many.predict(p, x).sum()).lower(shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    hidden = 2000 * 5 * 4  # of one particle
    outputs = 320 * 2000 * 3 * 4
    assert temporary(320) < 2.5 * outputs + 32 * 4 * hidden


def test_density_scores_are_those_of_the_estimate_asked_for(posterior, particles):
    points = jax.tree.map(lambda leaf: leaf + 0.1, particles)
    found = posterior.density_scores(points, particles)
    assert_close(found, kde_score(points, particles, bandwidth=0.55))
    weak = posterior._replace(kde="repo", kde_bandwidth=0.3)
    assert_close(
        weak.density_scores(points, particles),
        weakened_kde_score(points, particles, bandwidth=0.3),
    )
    off = posterior._replace(kde="off").density_scores(points, particles)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(off))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_ascends_the_svgd_direction(posterior, particles, kernel):
    import optax

    optimizer = optax.sgd(0.1)
    scores = jax.tree.map(lambda leaf: 1 - leaf, particles)
    with_kernel = posterior._replace(kernel=kernel)
    moved, _ = with_kernel.step(optimizer, particles, scores, optimizer.init(particles))
    direction = svgd_direction(particles, scores, kernel=KERNELS[kernel])
    assert_close(moved, jax.tree.map(lambda p, d: p + 0.1 * d, particles, direction))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("particles", 0, "at least 1"),
        ("initial", "zeros", "network"),
        ("kernel", "laplace", "imq"),
        ("kde", "on", "lse"),
        ("kde_bandwidth", 0.0, "positive"),
        ("kde_bandwidth", -1.0, "positive"),
        ("kde_bandwidth", float("nan"), "positive"),
        ("kde_bandwidth", float("inf"), "finite"),
    ],
)
def test_options_outside_their_range_are_named(posterior, option, value, message):
    with pytest.raises(ValueError, match=f"{option}={value!r} must .*{message}"):
        posterior._replace(**{option: value}).check(6)


def test_more_particles_than_memory_holds_are_refused(posterior, monkeypatch):
    """Ten sets at work and none kept, of 53 weights of 4 bytes."""
    with pytest.raises(ValueError, match="do not fit into this device's memory"):
        posterior._replace(particles=10**12).check(6)
    monkeypatch.setattr(particle_posterior.os, "sysconf", lambda name: 150)
    with pytest.raises(ValueError, match=r"particles=11 of mlp .*: 10 do"):
        posterior._replace(particles=11).check(0)
    assert posterior._replace(particles=10).check(0).particles == 10
