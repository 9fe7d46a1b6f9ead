r"""Parallel distributed SVGD: all clients at once, the server multiplies their factors.

Kassab and Simeone, "Federated generalized Bayesian learning via distributed Stein
variational gradient descent", IEEE TSP 2022; Yang, Liu and Kassab, "Client selection
for federated Bayesian learning", §IV-E, compare with it.
"""

import math

import jax
import jax.numpy as jnp

from fedvi.algorithm import Algorithm, ClientOutput, StackedAggregate, Task
from fedvi.algorithms.registry import builder
from fedvi.algorithms.stein_client import (
    Server,
    SteinOptions,
    stein_algorithm,
    visit,
)
from fedvi.options import option
from fedvi.particle_posterior import ParticlePosterior, particle_posterior

__all__ = ["ParallelDSVGD", "parallel_dsvgd"]


class ParallelDSVGD(SteinOptions):
    """Options of `parallel_dsvgd`."""

    server_steps: int | None = option(
        None, "Steps of the server in a round; None: L.", at_least=1
    )


@builder(ParallelDSVGD)
def parallel_dsvgd(task: Task, options: ParallelDSVGD) -> Algorithm:
    r"""Builds parallel DSVGD.

    Every client makes DSVGD's visit from the same q and uploads the particles of its
    new $t_k$, as they are: the server has no old ones that they could be a difference
    to. It then moves its own particles by SVGD for

    $\nabla \log q = \nabla \log p_0 + \sum_k \nabla \log t_k$,

    each $t_k$ a kernel density estimate, by log-sum-exp, of what its client sent; the
    factor of a client that fails is missing for that round. With first_t="prior"
    those stand for p_0·t_k, and the estimate of the particles that all of them started
    as is taken off each. p_0 itself cannot be: no estimate is narrower than its kernel,
    and a prior that is would be divided by more often than it is multiplied (Bayesian
    logistic regression of 30 clients went to 50 % accuracy).

    `task.training` gives L, and the server's optimiser too.

    Raises:
      ValueError: more particles than fit in memory.
    """
    training = task.training
    # Three sets of each client: its old and new one, and the upload.
    posterior = particle_posterior(task.model, options, kept=3 * task.clients)
    server_steps = options.server_steps or training.steps
    server_steps = server_steps or training.epochs * math.ceil(
        task.samples / (task.clients * training.batch_size)
    )

    def init(key):
        particles = posterior.init(key)
        return Server(particles, particles)

    def client_update(key, round_index, server, client, data):
        _, client, metrics = visit(
            posterior, training, key, round_index, server, client, data
        )
        return ClientOutput(posterior.parts(client.factor), 1.0, client, metrics)

    def server_update(key, round_index, server, aggregate):
        optimizer = training.optimizer_at(round_index)

        def step(_, carry):
            q, moments = carry
            scores = product_scores(posterior, q, server.first, aggregate)
            return posterior.step(optimizer, q, scores, moments)

        start = (server.particles, optimizer.init(server.particles))
        q, _ = jax.lax.fori_loop(0, server_steps, step, start)
        return server._replace(particles=q)

    return stein_algorithm(
        "parallel_dsvgd",
        task,
        posterior,
        init=init,
        broadcast=lambda server: server._replace(first=()),
        client_update=client_update,
        server_update=server_update,
        cohort="all",
        reduce="stack",
    )


def product_scores(
    posterior: ParticlePosterior,
    q: jax.Array,
    first: jax.Array,
    aggregate: StackedAggregate,
) -> jax.Array:
    """∇ log (p_0 Π_k t_k) at q, of the clients that are there.

    Args:
      posterior: prior and density estimate.
      q: `[N, d]`.
      first: `[N, d]` what all the factors of first_t="prior" started as.
      aggregate: `uploads` `[cohort, ...]` of their particles' `parts`.
    """
    started = jnp.zeros_like(q)
    if posterior.options.first_t == "prior":
        started = posterior.density_scores(q, first)

    def add(total, factor):
        t, present = factor
        # `where`: an absent client's zeros are no density.
        score = posterior.density_scores(q, t) - started
        return total + jnp.where(present, score, 0.0), ()

    factors = (posterior.joined(aggregate.uploads), aggregate.weight > 0)
    return jax.lax.scan(add, posterior.prior_scores(q), factors)[0]
