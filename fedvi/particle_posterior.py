"""A posterior held by particles: scores of prior, likelihood and densities, prediction.

What the Stein algorithms share. A particle set has leaves `[particles, ...]`; every
function sees one client's data at most.
"""

import numbers
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi import checks
from fedvi.nn import Model, parameter_count
from fedvi.priors import Prior
from fedvi.stein import KERNELS, kde_score, svgd_direction
from fedvi.stein.kde import weakened_kde_score

__all__ = ["ParticlePosterior"]

# Of a prediction: hundreds of particles shall not need that many times the activations.
_PARTICLES_AT_ONCE = 32


class ParticlePosterior(NamedTuple):
    """A network and its prior, with N particles in place of a posterior.

    Attributes:
      model: the network and its likelihood.
      prior: p_0 over particles.
      particles: N.
      initial: where particles start: "prior", draws from p_0; "network", the network's
        own initial weights, which a prior of precision e would drown in noise.
      kernel: of SVGD and the discrepancies, a key of `fedvi.stein.KERNELS`.
      kde: ∇ log of a density that particles stand for: "lse", by log-sum-exp; "repo",
        as DSVGD's public code (`weakened_kde_score`); "off", 0.
      kde_bandwidth: standard deviation of the density estimate's kernel.
    """

    model: Model
    prior: Prior
    particles: int
    initial: str = "prior"
    kernel: str = "rbf"
    kde: str = "lse"
    kde_bandwidth: float = 0.55

    def check(self, kept: int) -> "ParticlePosterior":
        """Returns itself.

        Args:
          kept: particle sets that all clients together hold in memory.

        Raises:
          ValueError: an option outside its range, or more particles than fit in memory.
        """
        checks.one_of("initial", self.initial, ("prior", "network"))
        checks.one_of("kernel", self.kernel, KERNELS)
        checks.one_of("kde", self.kde, ("lse", "repo", "off"))
        checks.positive("kde_bandwidth", self.kde_bandwidth)
        checks.finite("kde_bandwidth", self.kde_bandwidth)
        checks.at_least("particles", self.particles, 1)
        if not isinstance(self.particles, numbers.Integral):
            raise ValueError(f"particles={self.particles!r} must be a whole number")
        most = _most_particles(self.model, kept)
        if self.particles > most:
            raise ValueError(
                f"particles={self.particles} of {self.model.name} do not fit into this "
                f"device's memory with {kept} sets of them for the clients: {most:,} do"
            )
        return self

    def init(self, key) -> Any:
        """N particles."""

        def one(key):
            prior_key, network_key = jax.random.split(key)
            particle = self.prior.sample(prior_key)
            if self.initial == "prior":
                return particle
            return self.prior.with_weights(particle, self.model.init(network_key))

        return jax.vmap(one)(jax.random.split(key, self.particles))

    def prior_scores(self, particles: Any) -> Any:
        """∇ log p_0 at every particle."""
        return jax.vmap(jax.grad(self.prior.log_prob))(particles)

    def likelihood_scores(self, particles: Any, batch, size) -> tuple[Any, jax.Array]:
        """∇ log p_k at every particle, from a minibatch, and the mean loss.

        The minibatch's mean stands for that of all the client's examples:
        log p_k(θ) ≈ size · mean log p(y|x, θ).

        Args:
          particles: leaves `[N, ...]`.
          batch: `Batch` of the client.
          size: `[]` the client's number of examples.
        """

        def loss(particle):
            weights = self.prior.weights(particle)
            outputs = self.model.apply(weights, batch.x, batch.mask)
            return self.model.loss(outputs, batch.y, batch.mask)

        losses, gradients = jax.vmap(jax.value_and_grad(loss))(particles)
        return jax.tree.map(lambda g: -size * g, gradients), losses.mean()

    def density_scores(self, points: Any, particles: Any) -> Any:
        """∇ log q at `points`, for the density q that `particles` stand for."""
        if self.kde == "off":
            return jax.tree.map(jnp.zeros_like, points)
        score = kde_score if self.kde == "lse" else weakened_kde_score
        return score(points, particles, bandwidth=self.kde_bandwidth)

    def step(self, optimizer, particles: Any, scores: Any, moments: Any):
        """One step of SVGD for the density with these scores: (particles, moments)."""
        ascent = svgd_direction(particles, scores, kernel=KERNELS[self.kernel])
        gradient = jax.tree.map(jnp.negative, ascent)
        updates, moments = optimizer.update(gradient, moments, particles)
        return optax.apply_updates(particles, updates), moments

    def predict(self, particles: Any, x, mask=None) -> jax.Array:
        """Log class probabilities `[N, batch, classes]` of every particle."""

        def one(particle):
            weights = self.prior.weights(particle)
            return jax.nn.log_softmax(self.model.apply(weights, x, mask))

        if self.particles <= _PARTICLES_AT_ONCE:
            return jax.vmap(one)(particles)
        return jax.lax.map(one, particles, batch_size=_PARTICLES_AT_ONCE)


def _most_particles(model: Model, kept: int) -> int:
    """Particles that memory could hold, roughly.

    Beside the clients' sets a visit has ten at once: global and local particles, frozen
    densities, scores, direction, moments and temporaries.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    stats = jax.local_devices()[0].memory_stats() or {}
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = stats.get("bytes_limit", physical)
    return max(1, memory // ((kept + 10) * 4 * parameter_count(shapes)))
