"""A posterior held by particles: scores of prior, likelihood and densities, prediction.

What the Stein algorithms share. A particle is a vector: the network's weights, and with
the hierarchical prior the log of their precision as one more coordinate. Every function
sees one client's data at most.
"""

import math
from typing import Any, ClassVar, Literal, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import optax

from fedvi.distributions import priors
from fedvi.distributions.tree import Tree
from fedvi.evaluation import fold_batches
from fedvi.flat import Flat, Layout, flatten, trees
from fedvi.local import Batch
from fedvi.nn import Model
from fedvi.options import Options, option
from fedvi.placement import device_memory
from fedvi.stein import KERNELS, kde_score, svgd_direction
from fedvi.stein.kde import weakened_kde_score
from fedvi.stein.kernels import Kernel

__all__ = ["ParticleOptions", "ParticlePosterior", "particle_posterior"]

# Of a prediction: hundreds of particles shall not need that many times the activations.
_PARTICLES_AT_ONCE = 32
_EXAMPLES_AT_ONCE = 500  # of a likelihood: bounds the activations of all particles


class ParticleOptions(Options):
    """Options of a posterior held by particles."""

    particles: int = option(
        20, "N.", source="DSVGD's code: 6 for logistic regression", at_least=1
    )
    prior: Literal["gaussian", "hierarchical"] = option(
        "gaussian",
        "p_0 over the weights: of fixed precision, or with ξ ~ Gamma(gamma_shape, "
        "gamma_rate) as their precision.",
    )
    precision: float = option(
        math.e,
        "λ of the gaussian prior.",
        only_with={"prior": "gaussian"},
        source="DSVGD's network",
        above=0,
        traced=True,
    )
    gamma_shape: float = option(
        1.0,
        "Of the hierarchical prior.",
        only_with={"prior": "hierarchical"},
        above=0,
        traced=True,
    )
    gamma_rate: float = option(
        0.01,
        "Of the hierarchical prior.",
        source="the papers; DSVGD's code has 100",
        only_with={"prior": "hierarchical"},
        above=0,
        traced=True,
    )
    initial: Literal["prior", "network"] = option(
        "prior",
        "First particles: draws from p_0, or the network's own initial weights, which "
        "a prior of precision e would drown in noise.",
    )
    kernel: Literal["rbf", "imq"] = option(
        "rbf", "Of SVGD and the discrepancies.", source="rbf: the papers"
    )
    kde_bandwidth: float = option(
        0.55,
        "Standard deviation of the density estimates' kernel.",
        source="DSVGD's code",
        above=0,
        traced=True,
    )
    # Options of `dsvgd` alone.
    kde: ClassVar[Literal["lse", "repo", "off"]] = "lse"
    factor: ClassVar[Literal["particles", "gaussian"]] = "particles"


class ParticlePosterior(NamedTuple):
    """A network and its prior, with N particles in place of a posterior.

    Attributes:
      model: the network and its likelihood.
      prior: p_0 over particles `[d]`.
      layout: how a particle's first coordinates fall into the network's parameters.
      options: number of particles, kernel and density estimate.
    """

    model: Model
    prior: distrax.Distribution
    layout: Layout
    options: ParticleOptions

    @property
    def kernel(self) -> Kernel:
        """Of SVGD and the discrepancies."""
        return KERNELS[self.options.kernel]

    def init(self, key) -> jax.Array:
        """N particles, `[N, d]`."""

        def one(key):
            prior_key, network_key = jax.random.split(key)
            particle = self.prior.sample(seed=prior_key)
            if self.options.initial == "prior":
                return particle
            weights = flatten(trees(self.model.init(network_key))).vector
            return particle.at[: self.size].set(weights)

        return jax.vmap(one)(jax.random.split(key, self.options.particles))

    @property
    def size(self) -> int:
        """Number of the network's weights."""
        return sum(self.layout.sizes)

    def parameters(self, particle: jax.Array) -> Any:
        """The network's parameters in a particle `[d]`, a view."""
        return Flat(particle[: self.size], self.layout).tree()

    def parts(self, particles: jax.Array) -> tuple[Any, ...]:
        """Particles as they are sent: layers of weights, and the log precision if they
        have one, for which a codec has scales of their own."""
        weights = Flat(particles[:, : self.size], self.layout)
        rest = particles[:, self.size :]
        return (weights, rest) if rest.size else (weights,)

    @staticmethod
    def joined(parts: tuple[Any, ...]) -> jax.Array:
        """The reverse of `parts`, of any leading axes."""
        return jnp.concatenate(jax.tree.leaves(parts), axis=-1)

    def prior_scores(self, particles: jax.Array) -> jax.Array:
        """`[N, d]` ∇ log p_0 at every particle."""
        return jax.vmap(jax.grad(self.prior.log_prob))(particles)

    def likelihood_scores(self, particles: jax.Array, batch, size):
        """∇ log p_k at every particle `[N, d]`, from a minibatch, and the mean loss.

        The minibatch's mean stands for that of all the client's examples:
        log p_k(θ) ≈ size · mean log p(y|x, θ).

        Args:
          particles: `[N, d]`.
          batch: `Batch` of the client.
          size: `[]` the client's number of examples.
        """

        def loss(particle):
            outputs = self.model.apply(self.parameters(particle), batch.x, batch.mask)
            return self.model.loss(outputs, batch.y, batch.mask)

        losses, gradients = jax.vmap(jax.value_and_grad(loss))(particles)
        return -size * gradients, losses.mean()

    def full_likelihood_scores(self, particles: jax.Array, data) -> jax.Array:
        """∇ log p_k at every particle `[N, d]`, from all the client's examples."""

        def add(total, number, start, x, y, mask):
            # The first example in place of padding, of which a NaN would reach the
            # gradient through the mask.
            x = jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, x[:1])
            batch = Batch(x, y, mask)
            return total + self.likelihood_scores(particles, batch, mask.sum())[0]

        if data.y.shape[0] > _EXAMPLES_AT_ONCE:
            zero = jnp.zeros_like(particles)
            return fold_batches(add, data, _EXAMPLES_AT_ONCE, zero)
        mask = jnp.arange(data.y.shape[0]) < data.size
        return add(0.0, 0, 0, data.x, data.y, mask)

    def density_scores(self, points: jax.Array, particles: jax.Array) -> jax.Array:
        """∇ log q at `points`, for the density q that `particles` stand for."""
        if self.options.kde == "off":
            return jnp.zeros_like(points)
        score = kde_score if self.options.kde == "lse" else weakened_kde_score
        return score(points, particles, bandwidth=self.options.kde_bandwidth)

    def step(self, optimizer, particles: jax.Array, scores: jax.Array, moments: Any):
        """One step of SVGD for the density with these scores: (particles, moments)."""
        ascent = svgd_direction(particles, scores, kernel=self.kernel)
        updates, moments = optimizer.update(-ascent, moments, particles)
        return optax.apply_updates(particles, updates), moments

    def predict(self, particles: jax.Array, x, mask=None) -> jax.Array:
        """Log class probabilities `[N, batch, classes]` of every particle."""

        def one(particle):
            logits = self.model.apply(self.parameters(particle), x, mask)
            return jax.nn.log_softmax(logits)

        if len(particles) <= _PARTICLES_AT_ONCE:
            return jax.vmap(one)(particles)
        return jax.lax.map(one, particles, batch_size=_PARTICLES_AT_ONCE)

    def distribution(self, particles: jax.Array) -> Tree:
        """Over the network's parameters, what the particles stand for.

        With kde="lse" their kernel density estimate; else, or with Gaussian factors,
        where the algorithm has no density of theirs to speak of, all mass on the
        particles, 1/N each (`log_prob` is with respect to counting). The log precision
        is left out.
        """
        weights = particles[:, : self.size]
        kernel = distrax.Deterministic(weights)
        if self.options.kde == "lse" and self.options.factor == "particles":
            kernel = distrax.Normal(weights, self.options.kde_bandwidth)
        shares = distrax.Categorical(logits=jnp.zeros(len(weights)))
        components = distrax.Independent(kernel, 1)
        return Tree(distrax.MixtureSameFamily(shares, components), self.layout)


def particle_posterior(
    model: Model, options: ParticleOptions, kept: int
) -> ParticlePosterior:
    """The particle posterior that options describe.

    Args:
      model: the network.
      options: the others'.
      kept: particle sets that all clients together hold in memory.

    Raises:
      ValueError: more particles than fit in memory.
    """
    layout = jax.eval_shape(
        lambda key: flatten(trees(model.init(key))), jax.random.key(0)
    ).layout
    size = sum(layout.sizes)
    if options.prior == "gaussian":
        prior = priors.gaussian(size, options.precision)
    else:
        prior = priors.Hierarchical(size, options.gamma_shape, options.gamma_rate)
    # Beside the clients' sets a visit has ten at once: global and local particles,
    # frozen densities, scores, direction, moments and temporaries.
    most = max(1, device_memory() // ((kept + 10) * 4 * size))
    if options.particles > most:
        raise ValueError(
            f"particles={options.particles} of {model.name} do not fit into this "
            f"device's memory with {kept} sets of them for the clients: {most:,} do"
        )
    return ParticlePosterior(model, prior, layout, options)
