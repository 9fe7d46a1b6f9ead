"""Spike-and-slab over parameter pytrees: each weight is 0 or normal.

sFedBayes ("Federated Learning via Variational Bayesian Inference", §4, Eq. 32):

    θ = γ (μ + σ g),   γ ~ Bernoulli(λ),   g ~ N(0, 1).

λ is carried as its logit: optimised directly it leaves [0, 1] (the paper's Table 2
estimates λ = 1.01).
"""

import math
from typing import NamedTuple

import chex
import distrax
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from tensorflow_probability.substrates import jax as tfp

from fedvi.distributions import mean_field
from fedvi.distributions.draws import draw_like
from fedvi.distributions.mean_field import MeanField
from fedvi.distributions.normal import Normal
from fedvi.distributions.tree import Tree, as_tree

__all__ = [
    "INCLUSION_FLOOR",
    "BernoulliGaussian",
    "SpikeAndSlab",
    "distribution",
    "from_moments",
    "from_probabilities",
    "gates",
    "inclusion",
    "init",
    "kl",
    "moments",
    "probabilities",
    "sample",
]

INCLUSION_FLOOR = 1e-6
"""Least λ and least 1 - λ.

They keep the KL finite: a prior λ of 0 or 1 would forbid what a client finds. Logits
beyond ±13.8 have gradient 0.
"""

_LOGIT_BOUND = math.log((1 - INCLUSION_FLOOR) / INCLUSION_FLOOR)


class SpikeAndSlab(NamedTuple):
    """Parameters of a spike-and-slab distribution.

    Attributes:
      slab: the normal of the weights that are not 0.
      logit: log(λ / (1 - λ)), pytree like `slab.mu`; see `inclusion`.
    """

    slab: MeanField
    logit: chex.ArrayTree


def init(slab: MeanField, inclusion: float) -> SpikeAndSlab:
    """A spike-and-slab distribution with one inclusion probability for all weights.

    Args:
      slab: the normal of the weights that are not 0.
      inclusion: λ, in (0, 1) (§6, Table 2: 0.5 and 0.99). Within INCLUSION_FLOOR of 0
        or 1 it is that of `inclusion` and has gradient 0. A value that JAX traces
        cannot be checked.

    Raises:
      ValueError: inclusion outside (0, 1).
    """
    if not isinstance(inclusion, jax.core.Tracer) and not 0 < inclusion < 1:
        raise ValueError(
            f"inclusion={inclusion} must lie in (0, 1): the probability that a weight "
            "is not 0"
        )
    # In float32 λ may round to 1, whose logit is infinite.
    logit = jnp.clip(_logit(inclusion), -2 * _LOGIT_BOUND, 2 * _LOGIT_BOUND)
    return SpikeAndSlab(slab, jax.tree.map(lambda m: jnp.full_like(m, logit), slab.mu))


class BernoulliGaussian(distrax.Distribution):
    """θ = γ (μ + σ g), element by element: an atom at 0 and a normal beside it.

    `log_prob` and `entropy` are with respect to Lebesgue measure and a point mass of 1
    at 0; the KL (Eq. 34) does not depend on that.

    Args:
      logit: of λ, `[d]`.
      slab: batch shape `[d]`.
    """

    def __init__(self, logit: jax.Array, slab: Normal):
        super().__init__()
        self.logit = logit
        self.slab = slab
        self.gate = distrax.Bernoulli(logits=logit)

    def _sample_n(self, key, n: int) -> jax.Array:
        gate_key, slab_key = jax.random.split(key)
        noise = jax.random.logistic(gate_key, (n, *self.batch_shape), self.logit.dtype)
        return (self.logit[None] + noise > 0) * self.slab._sample_n(slab_key, n)

    def log_prob(self, value: jax.Array) -> jax.Array:
        """log(1 - λ) at exactly 0, elsewhere log λ + log N(θ; μ, σ²)."""
        slab = jax.nn.log_sigmoid(self.logit) + self.slab.log_prob(value)
        return jnp.where(value == 0, jax.nn.log_sigmoid(-self.logit), slab)

    def mean(self) -> jax.Array:
        """λ μ."""
        return self.gate.probs * self.slab.loc

    def variance(self) -> jax.Array:
        """λ (σ² + (1 - λ) μ²)."""
        off = jax.nn.sigmoid(-self.logit)
        square = self.slab.variance() + off * jnp.square(self.slab.loc)
        return self.gate.probs * square

    def stddev(self) -> jax.Array:
        """Root of the variance."""
        return jnp.sqrt(self.variance())

    def entropy(self) -> jax.Array:
        """Of the gate, and λ times that of the slab, in nats."""
        return self.gate.entropy() + self.gate.probs * self.slab.entropy()

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Always ()."""
        return ()

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """`[d]`."""
        return self.slab.batch_shape


@tfp.distributions.RegisterKL(BernoulliGaussian, BernoulliGaussian)
def _registered(q: BernoulliGaussian, p: BernoulliGaussian, *_, **__):
    return _kl(q.logit, p.logit, q.slab.kl_divergence(p.slab))


def distribution(q: SpikeAndSlab) -> Tree:
    """`q` as a distribution object, over the tree of its layers.

    It draws the numbers of `sample`, and its KL is that of `kl`.
    """
    slab = Normal(ravel_pytree(q.slab.mu)[0], ravel_pytree(mean_field.scale(q.slab))[0])
    base = BernoulliGaussian(_clip(ravel_pytree(q.logit)[0]), slab)
    return as_tree(distrax.Independent(base, 1), q.slab.mu)


def inclusion(q: SpikeAndSlab) -> chex.ArrayTree:
    """λ = sigmoid(logit) within [INCLUSION_FLOOR, 1 - INCLUSION_FLOOR], per weight."""
    return jax.tree.map(lambda logit: jax.nn.sigmoid(_clip(logit)), q.logit)


def gates(key: chex.PRNGKey, q: SpikeAndSlab, temperature: float) -> chex.ArrayTree:
    """One draw of γ ~ Bernoulli(λ), 0.0 or 1.0, with a straight-through gradient.

    Forward γ = 1[η > 0], which is 1 with probability λ; backward the derivative of the
    Gumbel-sigmoid (Eq. 41)

        γ̃ = sigmoid(η / τ),   η = log(λ / (1 - λ)) + log(u / (1 - u)),   u ~ U(0, 1).

    The gradient is biased, whatever τ, and varies the more the smaller τ.

    Args:
      key: typed PRNG key.
      q: the distribution.
      temperature: τ (the paper gives none; public code: 0.5). A value that JAX traces
        cannot be checked.

    Returns:
      Pytree like `q.logit`.

    Raises:
      ValueError: temperature is not positive.
    """
    if not isinstance(temperature, jax.core.Tracer) and not temperature > 0:
        raise ValueError(
            f"temperature={temperature} must be positive, such as 0.5: it is τ"
        )

    def gate(logit, noise):
        eta = _clip(logit) + noise
        soft = jax.nn.sigmoid(eta / temperature)
        hard = (eta > 0).astype(soft.dtype)
        # The bracket is exactly 0: soft + (hard - soft) could miss hard by a rounding.
        return hard + (soft - jax.lax.stop_gradient(soft))

    # log(u / (1 - u)) is logistic; JAX keeps its u off 0 and 1.
    noise = draw_like(
        lambda shape, dtype: jax.random.logistic(key, shape, dtype), q.logit
    )
    return jax.tree.map(gate, q.logit, noise)


def sample(
    key: chex.PRNGKey,
    q: SpikeAndSlab,
    temperature: float,
    eps_scale: chex.Numeric = 1.0,
) -> chex.ArrayTree:
    """One draw γ (μ + eps_scale · σ · g) (Eq. 40), structure and shapes of `slab.mu`.

    Reparametrised in μ and σ, straight-through in the logits; see `gates`.

    Args:
      key: typed PRNG key.
      q: the distribution.
      temperature: τ of `gates`.
      eps_scale: factor on the slab's noise; see `mean_field.sample`.

    Raises:
      ValueError: temperature is not positive.
    """
    gate_key, slab_key = jax.random.split(key)
    slab = mean_field.sample(slab_key, q.slab, eps_scale)
    return jax.tree.map(jnp.multiply, gates(gate_key, q, temperature), slab)


def kl(q: SpikeAndSlab, p: SpikeAndSlab) -> jax.Array:
    """KL(q ‖ p) in nats, summed over all weights, scalar (Eq. 34).

        Σ KL(Bernoulli(λ_q) ‖ Bernoulli(λ_p)) + λ_q KL(N(μ_q, σ_q²) ‖ N(μ_p, σ_p²))

    The paper has it as an upper bound: the KL of the pairs (θ, γ). It is an equality:
    a slab is 0 with probability 0, so that γ = 1[θ ≠ 0] is a function of θ, under q and
    under p alike, and the pair says no more than θ.

    Finite with a finite gradient in float32 for every logit, and for the rho of
    `mean_field.kl`.
    """
    slabs = mean_field.kl_by_weight(q.slab, p.slab)
    terms = jax.tree.map(
        lambda a, b, slab: _kl(_clip(a), _clip(b), slab), q.logit, p.logit, slabs
    )
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(terms))


def moments(q: SpikeAndSlab, near: SpikeAndSlab) -> dict[str, chex.ArrayTree]:
    """What a server must average over clients to find the distribution closest to them.

    Args:
      q: a client's distribution.
      near: as in `mean_field.moments`, its slab N(c, s²).

    Returns:
      Three pytrees: `mass` λ less that of `near`, `first` λ (μ - c), `second`
      λ (σ² - s² + (μ - c)²).
    """
    slab = mean_field.moments(q.slab, near.slab)
    own = inclusion(q)

    def weighted(name):
        return jax.tree.map(jnp.multiply, own, slab[name])

    mass = jax.tree.map(jnp.subtract, own, inclusion(near))
    return {"mass": mass, "first": weighted("first"), "second": weighted("second")}


def from_moments(
    mean_statistics: dict[str, chex.ArrayTree], near: SpikeAndSlab
) -> SpikeAndSlab:
    """The spike-and-slab closest to the clients': Lemma A.2 for Eq. 34.

    The minimum of (1/N) Σ_i KL(q_i ‖ w) falls in two parts. That of the gates is a
    cross-entropy, least at λ_w = (1/N) Σ_i λ_i. That of the slabs is Lemma A.2 with
    client i weighted by λ_i: see `mean_field.from_moments` with m_i = λ_i.

    Args:
      mean_statistics: (weighted) mean over clients of their `moments`; not the sum,
        as the mean of the mass is λ_w.
      near: as given to `moments`.

    Returns:
      The optimum, its λ and σ kept within the bounds of `inclusion` and
      `mean_field.scale`; where the clients are at `near`, that to the last digit. The
      mean λ that the slab is divided by is at least INCLUSION_FLOOR: where `near` has a
      λ of almost 1 and the clients almost 0, rounding may leave less, or nothing.
    """
    change = mean_statistics["mass"]
    mass = jax.tree.map(
        lambda own, moved: jnp.maximum(own + moved, INCLUSION_FLOOR),
        inclusion(near),
        change,
    )
    slab = {
        name: jax.tree.map(jnp.divide, mean_statistics[name], mass)
        for name in ("first", "second")
    }
    return SpikeAndSlab(
        mean_field.from_moments(slab, near.slab),
        jax.tree.map(_moved_logit, near.logit, change),
    )


def probabilities(q: SpikeAndSlab, near: SpikeAndSlab) -> SpikeAndSlab:
    """What a server must average for the mean of (μ, ρ, λ) (Alg. 2), not of the logits.

    Args:
      q: a client's distribution.
      near: as in `moments`.

    Returns:
      Differences to `near`, that of λ in place of the logit's.
    """
    moved = jax.tree.map(jnp.subtract, q, near)
    change = jax.tree.map(jnp.subtract, inclusion(q), inclusion(near))
    return moved._replace(logit=change)


def from_probabilities(mean: SpikeAndSlab, near: SpikeAndSlab) -> SpikeAndSlab:
    """The distribution of the mean (μ, ρ, λ).

    Args:
      mean: (weighted) mean over clients of their `probabilities`.
      near: as given to `probabilities`.
    """
    slab = jax.tree.map(jnp.add, near.slab, mean.slab)
    return SpikeAndSlab(slab, jax.tree.map(_moved_logit, near.logit, mean.logit))


def _moved_logit(logit, change):
    """The logit of a λ that moved by `change`; without one, itself."""
    moved = _clip(_logit(jax.nn.sigmoid(_clip(logit)) + change))
    return jnp.where(change == 0, logit, moved)


@jax.custom_jvp
def _kl(logit_q, logit_p, slabs):
    """Eq. 34, element by element, from clipped logits ℓ and the slabs' KL.

    Its derivatives are written out:

        ∂/∂ℓ_q = λ_q (1 - λ_q) (ℓ_q - ℓ_p + slabs)   ∂/∂ℓ_p = λ_p - λ_q
        ∂/∂slabs = λ_q

    For equal distributions those of the logits are 0 to the last digit: Adam would
    make a step of what rounding leaves.
    """
    q, p = distrax.Bernoulli(logits=logit_q), distrax.Bernoulli(logits=logit_p)
    return q.kl_divergence(p) + q.probs * slabs


@_kl.defjvp
def _kl_jvp(primals, tangents):
    logit_q, logit_p, slabs = primals
    on, off = jax.nn.sigmoid(logit_q), jax.nn.sigmoid(-logit_q)
    # λ_p - λ_q, of which a difference would leave no digit where both are almost 1.
    more = -jax.nn.sigmoid(logit_p) * off * jnp.expm1(logit_q - logit_p)
    slopes = (on * off * (logit_q - logit_p + slabs), more, on)
    moved = sum(slope * tangent for slope, tangent in zip(slopes, tangents))
    return _kl(*primals), moved


def _logit(inclusion):
    return jnp.log(inclusion) - jnp.log1p(-inclusion)


def _clip(logit):
    return jnp.clip(logit, -_LOGIT_BOUND, _LOGIT_BOUND)
