"""Distributions over vectors seen as over parameter trees."""

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.distributions.student_t import StudentT
from fedvi.distributions.tree import Blocks, Frozen, Tree, as_tree, with_head
from fedvi.flat import flatten

KEY = jax.random.key(0)
BODY = {"bias": jnp.array([1.0, 2.0]), "kernel": jnp.arange(6.0).reshape(2, 3)}
PARAMS = {"body": flatten(BODY), "head": flatten({"kernel": jnp.array([[7.0, 8.0]])})}
NORMAL = distrax.Independent(distrax.Normal(PARAMS["body"].vector, 0.5), 1)


@pytest.fixture(scope="module")
def posterior() -> Tree:
    return with_head(NORMAL, {"body": PARAMS["body"]}, {"head": PARAMS["head"]})


def test_samples_are_trees_with_leading_axes_and_keep_the_head(posterior):
    draw = posterior.sample(seed=KEY, sample_shape=(4, 5))
    shapes = jax.tree.map(jnp.shape, draw)
    assert shapes == {
        "body": {"bias": (4, 5, 2), "kernel": (4, 5, 2, 3)},
        "head": {"kernel": (4, 5, 1, 2)},
    }
    assert (draw["head"]["kernel"] == jnp.array([[[[7.0, 8.0]]]])).all()
    assert len(np.unique(draw["body"]["kernel"])) == draw["body"]["kernel"].size
    one = posterior.sample(seed=KEY)
    assert jax.tree.map(jnp.shape, one) == posterior.event_shape
    assert posterior.batch_shape == () == posterior.base.batch_shape


def test_log_prob_is_the_bases_of_trees_flats_and_many_samples(posterior):
    draw = posterior.sample(seed=KEY, sample_shape=3)
    vectors = jnp.concatenate(
        [draw["body"]["bias"], draw["body"]["kernel"].reshape(3, 6)], axis=1
    )
    expected = jax.vmap(NORMAL.log_prob)(vectors)
    np.testing.assert_allclose(jax.vmap(posterior.log_prob)(draw), expected, rtol=1e-6)
    # distrax's own log_prob broadcasts, which the tests' settings refuse elsewhere.
    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(posterior.log_prob(draw), expected, rtol=1e-6)
    at_mean = NORMAL.log_prob(PARAMS["body"].vector)
    np.testing.assert_allclose(posterior.log_prob(PARAMS), at_mean)
    moved = {**PARAMS, "head": flatten({"kernel": jnp.zeros((1, 2))})}
    assert posterior.log_prob(moved) == -np.inf


def test_moments_are_trees_and_frozen_weights_do_not_vary(posterior):
    mean, std = posterior.mean(), posterior.stddev()
    np.testing.assert_array_equal(mean["body"]["kernel"], BODY["kernel"])
    np.testing.assert_array_equal(mean["head"]["kernel"], [[7.0, 8.0]])
    assert (std["body"]["bias"] == 0.5).all() and (std["head"]["kernel"] == 0).all()
    assert (posterior.variance()["body"]["bias"] == 0.25).all()


def test_entropies_add_up_and_frozen_weights_have_none(posterior):
    two = Blocks([NORMAL, StudentT(5, jnp.zeros(2), jnp.ones(2), joint=True)])
    parts = sum(part.entropy() for part in two.parts)
    np.testing.assert_allclose(as_tree(two, PARAMS).entropy(), parts)
    with pytest.raises(ValueError, match=r"frozen weights have no .* entropy"):
        posterior.entropy()


def test_the_divergence_of_blocks_is_the_sum_over_parts():
    wide = distrax.Independent(distrax.Normal(jnp.zeros(8), 2.0), 1)
    other = distrax.Independent(distrax.Normal(jnp.ones(2), 1.0), 1)
    p, q = (as_tree(Blocks([body, other]), PARAMS) for body in (NORMAL, wide))
    np.testing.assert_allclose(p.kl_divergence(q), NORMAL.kl_divergence(wide))


def test_plain_trees_have_the_same_layout():
    plain = as_tree(Blocks([NORMAL, Frozen(PARAMS["head"].vector)]), PARAMS)
    tree = {"body": BODY, "head": {"kernel": jnp.zeros((1, 2))}}
    assert as_tree(plain.base, tree).layout == plain.layout


def test_with_a_learned_head_nothing_is_frozen():
    whole = distrax.Independent(distrax.Normal(jnp.zeros(10), 0.5), 1)
    std = with_head(whole, PARAMS, {}).stddev()
    assert jax.tree.all(jax.tree.map(lambda s: (s == 0.5).all(), std))
