"""Losses, draws and predictions of a network with random weights."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import variational
from fedvi.distributions import mean_field
from fedvi.flat import trees
from fedvi.local import Batch
from fedvi.nn import build, parameter_count
from fedvi.variational import (
    BayesianNetwork,
    Sampling,
    bernoulli_gaussian,
    mean_field_normal,
)

KEY = jax.random.key(4)
FAMILIES = {
    "normal": mean_field_normal(-1.0),
    "gates": bernoulli_gaussian(-1.0, 0.7, 0.5),
}


def network(model, family="normal", sampling="weight", **options):
    options = Sampling(sampling=sampling, **{"num_samples": 3, **options})
    return BayesianNetwork(model, FAMILIES[family], options)


@pytest.fixture(scope="module")
def batch(train):
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    return Batch(data.x[:8], data.y[:8], jnp.arange(8) < 6)


@pytest.fixture(scope="module")
def logistic():
    return build("logistic", classes=3, input_shape=(6,))


def posterior(model, family="normal"):
    """With scales, and inclusions, that differ from weight to weight."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: leaf + 0.5 * rng.normal(size=leaf.shape).astype(np.float32),
        start(model, family),
    )


def slab(q):
    return getattr(q, "slab", q)


def start(model, family):
    return jax.jit(lambda: FAMILIES[family].init(model.init(KEY)))()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_both_samplings_have_one_expected_gradient_and_local_less_variance(
    task, batch, family
):
    q, count = posterior(task.model, family), 4000

    def moments(sampling):
        loss = network(task.model, family, sampling).loss
        draws = jax.vmap(jax.grad(loss, argnums=1), (0, None, None))
        # The same keys, so the same gates: they are drawn as weights are in both.
        gradients = jax.jit(draws)(jax.random.split(KEY, count), q, batch)
        flat = np.concatenate(
            [np.reshape(g, (count, -1)) for g in jax.tree.leaves(gradients)], axis=1
        ).astype(np.float64)
        return flat.mean(0), flat.var(0)

    (weight_mean, weight_var), (local_mean, local_var) = map(
        moments, ("weight", "local")
    )
    error = np.sqrt((weight_var + local_var) / count)
    assert (np.abs(weight_mean - local_mean) < 4.5 * error + 1e-7).all()
    # The comparison means something: gradients are far from 0 at this precision.
    assert np.median(np.abs(weight_mean) / (error + 1e-12)) > 4
    less = 0.7 if family == "normal" else 0.9  # the gates' share is the same
    assert local_var.sum() < less * weight_var.sum()


@pytest.mark.parametrize("sampling", ["weight", "local"])
def test_noise_of_a_linear_model_is_that_of_its_weights(logistic, batch, sampling):
    """10,000 draws of the logits, whose deviation eps_scale halves."""
    q, x = posterior(logistic), np.asarray(batch.x[:1], np.float64)
    scale = jax.device_get(trees(mean_field.scale(q)))["head"]["classifier"]
    deviation = 0.5 * np.sqrt(x**2 @ scale["kernel"] ** 2 + scale["bias"] ** 2)
    one = network(logistic, sampling=sampling, eps_scale=0.5)
    draws = jax.jit(jax.vmap(lambda key: one._outputs(key, q, batch.x[:1], None)))(
        jax.random.split(KEY, 10_000)
    )
    np.testing.assert_allclose(draws.std(0), deviation, rtol=0.03)
    np.testing.assert_allclose(
        draws.mean(0), logistic.apply(q.mu, batch.x[:1]), atol=0.05 * deviation.max()
    )


def test_gates_switch_weights_off_and_noise_is_the_slabs(logistic):
    """θ = γ(μ + σg): with λ = 0.3 and 10,000 draws (sFedBayes Eq. 40)."""
    family = bernoulli_gaussian(-1.0, 0.3, 0.5)
    q = family.init(jax.tree.map(jnp.ones_like, logistic.init(KEY)))
    means, scales = jax.jit(jax.vmap(lambda key: family.conditional(key, q)))(
        jax.random.split(KEY, 10_000)
    )
    gates = means["head"].vector
    assert set(np.unique(gates)) == {0.0, 1.0}
    np.testing.assert_allclose(gates.mean(0), 0.3, atol=0.025)
    softplus = np.log1p(np.exp(-1.0))
    np.testing.assert_allclose(scales["head"].vector, gates * softplus, rtol=1e-6)


def test_mc_samples_averages_losses_of_different_draws(task, batch):
    q = posterior(task.model)
    one = network(task.model)
    many = network(task.model, mc_samples=4)

    @jax.jit
    def losses():
        each = [one.loss(key, q, batch) for key in jax.random.split(KEY, 4)]
        return jnp.stack(each), many.loss(KEY, q, batch)

    each, average = losses()
    assert len(np.unique(each)) == 4
    np.testing.assert_allclose(average, np.mean(each), rtol=1e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_without_noise_a_normal_is_its_mean_and_gates_still_switch(task, batch, family):
    q = posterior(task.model, family)
    still = network(task.model, family, "local", eps_scale=0.0, num_samples=4)

    @jax.jit
    def run():
        draws = still.predict(KEY, q, batch.x, batch.mask)
        logits = task.model.apply(slab(q).mu, batch.x, batch.mask)
        plain = task.model.loss(logits, batch.y, batch.mask)
        return draws, jax.nn.log_softmax(logits), still.loss(KEY, q, batch), plain

    draws, expected, loss, plain = run()
    assert draws.shape == (4, 8, 3)
    np.testing.assert_allclose(np.exp(draws).sum(-1), 1, rtol=1e-5)
    spread = np.abs(draws - draws[:1]).max()
    if family == "gates":
        assert spread > 0.1
        return
    # apply_local leaves the noise of its least variance, 1e-8.
    assert spread < 1e-5
    np.testing.assert_allclose(draws[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, plain, rtol=1e-5)


def test_1_and_10_draws_give_different_likelihoods(task, batch):  # C6
    q = posterior(task.model)

    def nll(draws):
        """-log of the mean probability of the labels, float64."""
        predict = jax.jit(network(task.model, num_samples=draws).predict)
        log_probs = predict(KEY, q, batch.x, batch.mask)
        probabilities = np.exp(np.asarray(log_probs, np.float64))
        assert len(np.unique(probabilities[:, 0, 0])) == draws
        mean = probabilities.mean(0)[np.arange(6), batch.y[:6]]
        return -np.log(mean).mean()

    assert abs(nll(1) - nll(10)) > 0.01


def test_the_loss_sees_real_examples_only(task, batch):
    q, one = posterior(task.model), network(task.model)
    spoilt = batch._replace(x=jnp.where(batch.mask[:, None], batch.x, jnp.nan))
    loss = jax.jit(one.loss)
    assert loss(KEY, q, spoilt) == loss(KEY, q, batch)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_posterior_closest_to_one_is_itself(task, family):
    q, near = posterior(task.model, family), start(task.model, family)
    family = FAMILIES[family]

    @jax.jit
    def closest():
        moments = family.averages["moments"]
        same = moments.posterior(moments.statistics(q, near), near)
        return same, family.kl(q, same), family.kl(q, near)

    same, distance, far = closest()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), same, q
    )
    assert abs(distance) < 1e-3 < far


def test_fedabmls_link_is_kept_by_the_moments():
    family = mean_field_normal(-2.0, "exp")
    near = family.init({"w": jnp.zeros(3)})
    assert near.link == "exp"
    moments = family.averages["moments"]
    same = jax.jit(lambda: moments.posterior(moments.statistics(near, near), near))()
    assert same.link == "exp"
    np.testing.assert_allclose(same.rho["w"], -2.0, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_training_draws_what_the_distribution_draws(task, batch, family):
    """Weights of `sampling=weight` are the family's own samples."""
    q = posterior(task.model, family)

    @jax.jit
    def run():
        drawn = FAMILIES[family].distribution(q).sample(seed=KEY)
        found = network(task.model, family)._outputs(KEY, q, batch.x, batch.mask)
        return found, task.model.apply(drawn, batch.x, batch.mask)

    found, expected = run()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", ["mc_samples", "num_samples"])
def test_more_draws_than_fit_say_how_many_do(task, monkeypatch, option):
    """Every draw takes its weights, noise and gradients: three float32 a weight."""
    weights = parameter_count(jax.eval_shape(task.model.init, KEY))
    pages = {"SC_PAGE_SIZE": 6 * 4 * weights, "SC_PHYS_PAGES": 1234}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert variational._most_draws(task.model) == 1234
    network(task.model, **{option: 1234})
    with pytest.raises(ValueError, match=f"{option}=1235 .* memory: 1,234 do"):
        network(task.model, **{option: 1235})


def test_many_draws_are_made_in_groups(task, train, monkeypatch):
    """The same draws, whatever the group; the last group may be smaller."""
    seven = network(task.model, sampling="local", num_samples=7)
    q = seven.family.init(task.model.init(jax.random.key(0)))
    x = jnp.asarray(train.x[0][:3])
    together = jax.jit(seven.predict)(jax.random.key(1), q, x)
    monkeypatch.setattr(variational, "_DRAWS_AT_ONCE", 3)
    grouped = jax.jit(lambda *args: seven.predict(*args))(jax.random.key(1), q, x)
    np.testing.assert_allclose(grouped, together, rtol=1e-5, atol=1e-6)
