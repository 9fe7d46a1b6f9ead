"""Normal-inverse-Wishart over parameter pytrees, with a diagonal scale.

"A hierarchical Bayesian approach to federated learning", §3.1 and appendix B:

    μ | Σ ~ N(m_0, Σ / l_0),   Σ ~ IW(V_0, n_0),   V_0 diagonal.

Two readings of the dimension d share every formula here. d = number of parameters: one
covariance for all weights, the paper's. d = 1: an independent normal-inverse-gamma for
each weight, which is the paper's model applied to every weight alone.
"""

from typing import NamedTuple

import chex
import distrax
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedvi import checks
from fedvi.distributions.student_t import StudentT

__all__ = [
    "NIW",
    "NIWHyper",
    "distribution",
    "penalty_precision",
    "posterior",
]


class NIWHyper(NamedTuple):
    """Sizes that fix the scalar parameters of prior and posterior (appendix B).

    Static Python integers: their ratios are exact before they reach float32.

    Attributes:
      samples: |D|, training examples of all clients together.
      clients: N, clients in the population.
      dimension: d, the number of parameters, or 1 for one distribution per weight.
    """

    samples: int
    clients: int
    dimension: int

    @property
    def lambda0(self) -> int:
        """λ_0 = 1, how many clients the prior mean counts for."""
        return 1

    @property
    def nu0(self) -> int:
        """ν_0 = d + 2, which makes E[Σ] = I under the prior."""
        return self.dimension + 2

    @property
    def l0(self) -> int:
        """l_0 = |D| + 1."""
        return self.samples + self.lambda0

    @property
    def n0(self) -> int:
        """n_0 = |D| + d + 2."""
        return self.samples + self.nu0


class NIW(NamedTuple):
    """The variational parameters of q(μ, Σ); l_0 and n_0 are fixed by `NIWHyper`.

    Attributes:
      mean: m_0, parameter pytree, or `Flat`.
      scale: diagonal of V_0, same structure, positive.
    """

    mean: chex.ArrayTree
    scale: chex.ArrayTree


def posterior(
    hyper: NIWHyper,
    sum_delta: chex.ArrayTree,
    sum_delta2: chex.ArrayTree,
    *,
    centre: chex.ArrayTree,
    prior_mean: chex.ArrayTree,
    keep: chex.ArrayTree,
    epsilon: chex.Numeric,
) -> NIW:
    """The server's optimum of Eq. 37 + Σ_i Eq. 38 in closed form (Eq. 18 and 41).

    From sums of δ_i = m_i - c about the mean c that was broadcast:

        a    = c + Σδ_i / N,   the average of the m_i
        m_0  = (λ_0 μ_0 + p N a) / (λ_0 + N)
        V_0  = n_0/(N+d+2) · (1 + N ε² + λ_0 (m_0 - μ_0)² + Σρ_i)
        Σρ_i = p (Σδ_i² - (Σδ_i)²/N) + p N (a - m_0)² + (1 - p) N m_0²

    which sums ρ_i = p m_i² - 2p m_0 m_i + m_0², the excess of E_q[(θ_i - m_0)²] over
    ε². The paper has μ_0 = 0 and c = 0. Its matrix ρ carries p m_i m_iᵀ off the
    diagonal, which is p² between weights of different columns, as their masks are
    independent; the diagonal, all that is used, agrees.

    Args:
      hyper: |D|, N, d.
      sum_delta: Σδ_i over the population: the participants' sum times N/N_f (Alg. 3).
      sum_delta2: Σδ_i² over the population, scaled alike.
      centre: c.
      prior_mean: μ_0. Zeros are the paper's and shrink m_0 by N/(N+1) each time.
      keep: p of each weight (`dropout.keep_probabilities`).
      epsilon: ε, standard deviation of the spikes (§6: 1e-4).

    Raises:
      ValueError: a size in `hyper` that is not positive, or epsilon < 0.
    """
    if hyper.samples < 0 or hyper.clients < 1 or hyper.dimension < 1:
        raise ValueError(f"hyper={hyper} needs samples >= 0, clients and dimension > 0")
    checks.at_least("epsilon", epsilon, 0)
    clients, strength = hyper.clients, hyper.lambda0
    factor = hyper.n0 / (clients + hyper.dimension + 2)

    def mean(total, c, prior, p):
        return (strength * prior + p * (clients * c + total)) / (strength + clients)

    def scale(total, squares, c, prior, p, m0):
        # Only the scatter is a difference of sums, which rounding can push below 0.
        scatter = jnp.maximum(squares - total * (total / clients), 0)
        rho = p * (scatter + clients * jnp.square(c + total / clients - m0))
        rho += (1 - p) * clients * jnp.square(m0)
        shift = strength * jnp.square(m0 - prior)
        return factor * (1 + clients * epsilon**2 + shift + rho)

    m0 = jax.tree.map(mean, sum_delta, centre, prior_mean, keep)
    v0 = jax.tree.map(scale, sum_delta, sum_delta2, centre, prior_mean, keep, m0)
    return NIW(m0, v0)


def penalty_precision(
    hyper: NIWHyper,
    scale: chex.ArrayTree,
    keep: chex.ArrayTree,
    client_samples: chex.Numeric,
) -> chex.ArrayTree:
    """Weights w of a client's penalty ½ Σ_j w_j (m - m_0)_j² (Eq. 17 and 35).

        w = p (n_0 + d + 1) / (V_0 |D_i|)

    The division by |D_i| belongs to a likelihood taken as the mean over a batch.

    Args:
      hyper: |D|, N, d.
      scale: V_0.
      keep: p of each weight.
      client_samples: [] |D_i|, may be traced; 0 counts as 1, which keeps the
        weights of an empty client finite.

    Returns:
      Pytree of the structure of `scale`.
    """
    samples = jnp.maximum(client_samples, 1)
    strength = hyper.n0 + hyper.dimension + 1
    # |D_i| last: what is before it is the same for all clients of a round.
    return jax.tree.map(lambda v, p: p * strength / v / samples, scale, keep)


def distribution(hyper: NIWHyper, niw: NIW) -> distrax.Distribution:
    """The posterior over weights, θ ~ N(μ, Σ) with (μ, Σ) ~ NIW integrated out.

    Over the vector of all weights, a Student-t (Eq. 19 and 42) with n_0 - d + 1 =
    |D| + 3 degrees of freedom, location m_0 and scale
    sqrt((l_0 + 1) V_0 / (l_0 (n_0 - d + 1))): the multivariate one, or with d = 1 one
    for each weight.
    """
    df = hyper.n0 - hyper.dimension + 1
    factor = (hyper.l0 + 1) / (hyper.l0 * df)
    loc, v0 = ravel_pytree(niw.mean)[0], ravel_pytree(niw.scale)[0]
    return StudentT(df, loc, jnp.sqrt(factor * v0), joint=hyper.dimension > 1)
