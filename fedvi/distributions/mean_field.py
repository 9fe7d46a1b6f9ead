"""Mean-field normal N(mu, σ²) over parameter pytrees, σ = max(softplus(rho), floor)."""

from typing import NamedTuple

import chex
import distrax
import jax
import jax.numpy as jnp
import numpy as np

from fedvi.distributions.draws import standard_normal_like

__all__ = ["SCALE_FLOOR", "MeanField", "from_scale", "init", "kl", "sample", "scale"]

SCALE_FLOOR = 1e-8
"""Least σ.

float32's softplus is 0 below rho = -88, and log 0 makes the KL infinite and its
gradient NaN. The KL's derivatives reach σ_q² / σ_p³, 4e28 for σ_q = 200 over this
floor, inside float32's 3e38. And 1e-8 is the spacing of float32 numbers at 0.1: the
draw of a weight could not show a smaller σ. A rho below the floor has gradient 0.
"""


class MeanField(NamedTuple):
    """Parameters of a mean-field normal.

    Attributes:
      mu: means, parameter pytree.
      rho: unconstrained scales, same structure; see `scale`.
    """

    mu: chex.ArrayTree
    rho: chex.ArrayTree


def scale(q: MeanField) -> chex.ArrayTree:
    """σ = max(softplus(rho), SCALE_FLOOR), the standard deviations."""
    return jax.tree.map(_scale, q.rho)


def init(params: chex.ArrayTree, sigma: float) -> MeanField:
    """A mean-field normal around `params` with one standard deviation for all weights.

    Args:
      params: means, parameter pytree.
      sigma: standard deviation, above SCALE_FLOOR.

    Raises:
      ValueError: as `from_scale`.
    """
    return from_scale(params, jax.tree.map(lambda m: jnp.full_like(m, sigma), params))


def from_scale(mu: chex.ArrayTree, sigma: chex.ArrayTree) -> MeanField:
    """A mean-field normal from its means and standard deviations.

    Args:
      mu: means, pytree.
      sigma: standard deviations, same structure and shapes; finite and above
        SCALE_FLOOR. Values traced by `jit`, `vmap` or `grad` cannot be checked.

    Raises:
      ValueError: sigma has a value that is NaN, infinite, or not above SCALE_FLOOR.
    """
    for path, leaf in jax.tree.leaves_with_path(sigma):
        _check_scale(leaf, jax.tree_util.keystr(path))
    # The inverse of softplus, log(exp σ - 1), without the overflow.
    rho = jax.tree.map(lambda s: s + jnp.log(-jnp.expm1(-s)), sigma)
    return MeanField(mu, rho)


def sample(
    key: chex.PRNGKey, q: MeanField, eps_scale: chex.Numeric = 1.0
) -> chex.ArrayTree:
    """One reparametrised draw mu + eps_scale · σ · z, z ~ N(0, 1).

    Args:
      key: typed PRNG key.
      q: the distribution.
      eps_scale: factor on the noise; 0 gives the means.
    """
    noise = standard_normal_like(key, q.mu)
    return jax.tree.map(lambda m, s, z: m + eps_scale * s * z, q.mu, scale(q), noise)


def kl(q: MeanField, p: MeanField) -> jax.Array:
    """KL(q ‖ p) in nats, summed over all weights, scalar.

    Finite with a finite gradient in float32 for every rho up to 200 (σ = 200) and down
    to minus infinity, thanks to the floor.
    """

    def leaf(mu_q, rho_q, mu_p, rho_p):
        normal_q = distrax.Normal(mu_q, _scale(rho_q))
        normal_p = distrax.Normal(mu_p, _scale(rho_p))
        return jnp.sum(normal_q.kl_divergence(normal_p))

    return sum(jax.tree.leaves(jax.tree.map(leaf, *q, *p)))


def _scale(rho):
    return jnp.maximum(jax.nn.softplus(rho), SCALE_FLOOR)


def _check_scale(leaf, path):
    try:
        values = np.asarray(leaf)
    except jax.errors.TracerArrayConversionError:
        return
    bad = values[~(np.isfinite(values) & (values > SCALE_FLOOR))]
    if bad.size:
        raise ValueError(
            f"sigma{path} holds {bad.flat[0]}: a standard deviation must be finite and "
            f"above {SCALE_FLOOR}"
        )
