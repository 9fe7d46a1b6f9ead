"""Gaussian mixture of prototype networks.

"A hierarchical Bayesian approach to federated learning", §3.2 and appendix C:

    p(θ_i | r) = Σ_j 1/K N(θ_i; r_j, σ² I),   r_j ~ N(0, I).

Prototypes are one pytree whose leaves have a leading [components] axis, or a `Flat`
`[components, d]`.
"""

import chex
import distrax
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedvi import checks
from fedvi.flat import trees

__all__ = [
    "EMPTY_MASS",
    "distribution",
    "expected",
    "log_prior",
    "m_step",
    "responsibilities",
    "squared_distances",
]

EMPTY_MASS = 0.01
"""Total responsibility, in clients, below which a prototype counts as empty.

The distances of networks make responsibilities one-hot, so that a mass is almost 0 or
almost a whole number and any value between would do. This one is the prior's own weight
σ² N_f/N at σ² = 0.1 (§6) and a tenth of the clients: below it, the M-step would be more
zero than data.
"""


def distribution(
    prototypes: chex.ArrayTree, variance: chex.Numeric
) -> distrax.MixtureSameFamily:
    """p(θ | r) over the vector of all weights (Eq. 20); it has no closed-form entropy.

    Args:
      prototypes: r, leaves `[components, ...]`.
      variance: σ².

    Raises:
      ValueError: variance <= 0.
    """
    checks.positive("variance", variance)
    means = jax.vmap(lambda r: ravel_pytree(r)[0])(prototypes)
    return distrax.MixtureSameFamily(
        distrax.Categorical(logits=jnp.zeros(means.shape[0])),
        distrax.Independent(distrax.Normal(means, jnp.sqrt(variance)), 1),
    )


def squared_distances(params: chex.ArrayTree, prototypes: chex.ArrayTree) -> jax.Array:
    """‖m - r_j‖² for each prototype, [components].

    By differences: ‖m‖² - 2 m·r + ‖r‖² cancels in float32 when m is near r.

    Args:
      params: m, pytree.
      prototypes: r, leaves `[components, ...]`.
    """
    params, prototypes = trees((params, prototypes))

    def distance(j):
        squares = jax.tree.map(
            lambda m, r: jnp.sum(jnp.square(m - r[j])), params, prototypes
        )
        return sum(jax.tree.leaves(squares))

    # One by one: a vmap over the components was 12 times slower on CPU, where XLA does
    # not fuse the differences into a reduction that keeps an axis.
    components = jax.tree.leaves(prototypes)[0].shape[0]
    return jnp.stack([distance(j) for j in range(components)])


def responsibilities(
    params: chex.ArrayTree, prototypes: chex.ArrayTree, variance: chex.Numeric
) -> jax.Array:
    """c(j|i) = softmax_j(-‖m - r_j‖² / 2σ²), [components] (E-step, Eq. 24).

    Args:
      params: m, pytree.
      prototypes: r, leaves `[components, ...]`.
      variance: σ² (§6: 0.1).

    Raises:
      ValueError: variance <= 0.
    """
    return jax.nn.softmax(_log_kernels(params, prototypes, variance))


def log_prior(
    params: chex.ArrayTree, prototypes: chex.ArrayTree, variance: chex.Numeric
) -> jax.Array:
    """log Σ_j exp(-‖m - r_j‖² / 2σ²), scalar (Eq. 22): log p(m | r) up to a constant.

    Its gradient is (Σ_j c(j|i) r_j - m) / σ², its Hessian at least -I / σ²: a penalty
    of -s/|D_i| log p(m | r) has curvatures of at most s / (σ² |D_i|). Args and errors
    as `responsibilities`.
    """
    return jax.nn.logsumexp(_log_kernels(params, prototypes, variance))


def expected(
    params: chex.ArrayTree, prototypes: chex.ArrayTree, variance: chex.Numeric
) -> chex.ArrayTree:
    """Σ_j c(j|i) r_j, structure of `params`: where its own c would have m (E-step).

    -log p(m | r) lies under ‖m - Σ_j c_j r_j‖² / 2σ² + constant for any fixed c
    (Jensen), and touches it with the same gradient where c is m's own. Args and errors
    as `responsibilities`.
    """
    shares = responsibilities(params, prototypes, variance)
    return jax.tree.map(lambda r: jnp.tensordot(shares, r, axes=1), prototypes)


def m_step(
    moved: chex.ArrayTree,
    mass: jax.Array,
    prototypes: chex.ArrayTree,
    *,
    variance: chex.Numeric,
    prior_mean: chex.ArrayTree | None = None,
    participants: chex.Numeric,
    population: int,
) -> chex.ArrayTree:
    """The new prototypes (M-step of Eq. 24, for a part of the clients as in Alg. 4).

        r_j <- (σ²/N ν_j + 1/N_f Σ_i c(j|i) m_i) / (σ²/N + 1/N_f Σ_i c(j|i))
             = r_j + (w (ν_j - r_j) + S_j) / (w + Σ_i c(j|i)),   w = σ² N_f/N

    for the prior μ_j ~ N(ν_j, I), with S_j = Σ_i c(j|i) (m_i - r_j). The paper has
    ν = 0.

    A prototype with less than `EMPTY_MASS` keeps its value, where the formula would
    send it to zero and lose a network. With ν = 0 the objective (Eq. 23) still never
    rises: the bound that the M-step lowers is a sum over prototypes, and one kept adds
    nothing. With ν_j = r_j what never rises is its sum over the clients; the paper's
    ½‖r‖², which is no part of that model, may rise by more.

    Args:
      moved: S over the participants, leaves `[components, ...]`.
      mass: Σ_i c(j|i) over the participants, [components].
      prototypes: the current r, leaves `[components, ...]`.
      variance: σ².
      prior_mean: ν, structure of `prototypes`; None: zero.
      participants: [] N_f, may be traced.
      population: N.

    Raises:
      ValueError: variance <= 0.
    """
    checks.positive("variance", variance)
    prior = variance * participants / population
    if prior_mean is None:
        prior_mean = jax.tree.map(jnp.zeros_like, prototypes)

    def component(moved, mass, prototype, centre):
        empty = mass < EMPTY_MASS
        weight = jnp.where(empty, 1.0, prior + mass)
        return jax.tree.map(
            lambda s, r, v: jnp.where(empty, r, r + (prior * (v - r) + s) / weight),
            moved,
            prototype,
            centre,
        )

    return jax.vmap(component)(moved, mass, prototypes, prior_mean)


def _log_kernels(params, prototypes, variance):
    checks.positive("variance", variance)
    return -squared_distances(params, prototypes) / (2 * variance)
