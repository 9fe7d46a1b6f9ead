"""Where the clients agree, nothing moves: gradients and averages to the last digit.

Adam divides a gradient by its size: of what rounding leaves it makes a whole step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms.common import gradient_only
from fedvi.distributions import mixture
from fedvi.local import Quadratic
from fedvi.variational import bernoulli_gaussian, mean_field_normal

FAMILIES = {
    "softplus": mean_field_normal(-2.5),
    "exp": mean_field_normal(-4.0, "exp"),
    "gates": bernoulli_gaussian(-2.5, 0.99, 0.5),
}
KLS = {name: family.kl for name, family in FAMILIES.items()}
PENALTIES = {
    **KLS,
    # BPFed's kl_direction=reverse, and what the objectives descend.
    "reverse": lambda q, p: FAMILIES["softplus"].kl(p, q),
    **{f"{name} for descent": gradient_only(kl) for name, kl in KLS.items()},
    # FedProx and FedHB-NIW; FedHB-Mixture, whose prototypes may coincide.
    "quadratic": lambda q, p: Quadratic(p, 3.7).value(q),
    "mixture": lambda q, p: mixture.log_prior(
        q, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf, leaf]), p), 0.1
    ),
}


def posterior(name, seed=0):
    """A family's posterior whose parameters are drawn; of others a tree of weights."""
    rng = np.random.default_rng(seed)
    weights = {"w": jnp.zeros((40, 3)), "b": jnp.zeros(7)}
    family = FAMILIES.get(name.split()[0])
    if name == "reverse":
        family = FAMILIES["softplus"]
    start = family.init(weights) if family else weights
    return jax.tree.map(
        lambda leaf: leaf + rng.normal(0, 1.5, leaf.shape).astype(np.float32), start
    )


@pytest.mark.parametrize("name", sorted(PENALTIES))
def test_a_penalty_has_no_gradient_at_its_least(name, optimised):
    q = posterior(name)
    gradients = optimised(jax.grad(PENALTIES[name], argnums=(0, 1)))
    # Two arrays, and one twice: XLA must see no difference.
    for p in (q, jax.tree.map(jnp.array, q)):
        for leaf in jax.tree.leaves(gradients(q, p)):
            assert leaf.dtype == jnp.float32
            np.testing.assert_array_equal(leaf, 0)
    # It can fail: elsewhere every parameter has one.
    for leaf in jax.tree.leaves(gradients(q, posterior(name, seed=1))):
        assert (leaf != 0).mean() > 0.9


def test_a_proximal_step_leaves_the_centre_where_it_is():
    centre = posterior("quadratic")

    @jax.jit
    def run(params, centre):
        penalty = Quadratic(centre, 3.7)
        return penalty.gradient(params), penalty.proximal(params, 0.3)

    gradient, after = run(centre, jax.tree.map(jnp.array, centre))
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(leaf, 0)
    jax.tree.map(np.testing.assert_array_equal, after, centre)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_average_of_equal_posteriors_is_theirs(name):
    """Weighted over clients, as the server does it: no step for w's optimiser."""
    near, weights = posterior(name), np.float32([3, 0.7, 13])
    family = FAMILIES[name]
    for average in family.averages.values():

        @functools.partial(jax.jit, static_argnums=0)
        def averaged(average, clients, near):
            each = jax.vmap(average.statistics, (0, None))(clients, near)
            mean = jax.tree.map(
                lambda leaf: jnp.tensordot(weights, leaf, 1) / weights.sum(), each
            )
            return average.posterior(mean, near)

        same = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), near)
        jax.tree.map(np.testing.assert_array_equal, averaged(average, same, near), near)
        moved = jax.tree.map(lambda leaf: leaf + 0.1, same)
        for found, start in zip(
            jax.tree.leaves(averaged(average, moved, near)), jax.tree.leaves(near)
        ):
            assert (found != start).all()
