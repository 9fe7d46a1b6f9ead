r"""Parallel distributed SVGD: all clients at once, the server multiplies their factors.

Kassab and Simeone, "Federated generalized Bayesian learning via distributed Stein
variational gradient descent", IEEE TSP 2022; Yang, Liu and Kassab, "Client selection
for federated Bayesian learning", §IV-E, compare with it.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.stein_client import Server, SteinClient, posterior_of

__all__ = ["parallel_dsvgd"]


def parallel_dsvgd(
    task: Task,
    *,
    particles: int = 20,
    prior: Literal["gaussian", "hierarchical"] = "gaussian",
    precision: float = math.e,
    gamma_shape: float = 1.0,
    gamma_rate: float = 0.01,
    initial: Literal["prior", "network"] = "prior",
    first_t: Literal["prior", "one"] = "one",
    kde_bandwidth: float = 0.55,
    kernel: Literal["rbf", "imq"] = "rbf",
    local_loop_steps: int | None = None,
    server_steps: int | None = None,
) -> Algorithm:
    r"""Builds parallel DSVGD.

    Every client makes DSVGD's visit from the same q and uploads the particles of its
    new $t_k$. The server then moves its own particles by SVGD for

    $\nabla \log q = \nabla \log p_0 + \sum_k \nabla \log t_k$,

    each $t_k$ a kernel density estimate, by log-sum-exp, of what its client sent; the
    factor of a client that fails is missing for that round. With first_t="prior"
    those stand for p_0·t_k, and the estimate of the particles that all of them started
    as is taken off each. p_0 itself cannot be: no estimate is narrower than its kernel,
    and a prior that is would be divided by more often than it is multiplied (Bayesian
    logistic regression of 30 clients went to 50 % accuracy).

    Args:
      task: model; `training` gives L, and the server's optimiser too.
      particles: as in `dsvgd`.
      prior: as in `dsvgd`.
      precision: as in `dsvgd`.
      gamma_shape: as in `dsvgd`.
      gamma_rate: as in `dsvgd`.
      initial: as in `dsvgd`.
      first_t: as in `dsvgd`.
      kde_bandwidth: as in `dsvgd`.
      kernel: as in `dsvgd`.
      local_loop_steps: L' as in `dsvgd`.
      server_steps: steps of the server in a round; default L.

    Raises:
      ValueError: an option outside its range.
    """
    posterior = posterior_of(
        task,
        particles=particles,
        prior=prior,
        precision=precision,
        gamma_shape=gamma_shape,
        gamma_rate=gamma_rate,
        initial=initial,
        kernel=kernel,
        kde_bandwidth=kde_bandwidth,
        copies=3,  # their old and new ones, and the uploads
    )
    side = SteinClient(posterior, first_t, local_loop_steps).check()
    training = task.training
    if server_steps is None:
        server_steps = training.steps or training.epochs * math.ceil(
            task.samples / (task.clients * training.batch_size)
        )
    checks.at_least("server_steps", server_steps, 1)

    def client_update(key, round, server, client, data):
        _, client, metrics = side.visit(
            key, round, server.particles, client, data, training
        )
        return ClientOutput(client.particles, 1.0, client, metrics)

    def server_update(key, round, server, aggregate):
        present = aggregate.weight > 0
        optimizer = training.optimizer_at(round)
        density = posterior.density_scores

        def scores_at(q):
            first = jax.tree.map(jnp.zeros_like, q)
            if first_t == "prior":
                first = density(q, server.first)

            def add(total, factor):
                # `where`: an absent client's zeros are no density.
                return jax.tree.map(
                    lambda a, t, f: a + jnp.where(factor[1], t - f, 0.0),
                    total,
                    density(q, factor[0]),
                    first,
                ), ()

            factors = (aggregate.statistics, present)
            return jax.lax.scan(add, posterior.prior_scores(q), factors)[0]

        def step(_, carry):
            q, moments = carry
            return posterior.step(optimizer, q, scores_at(q), moments)

        start = (server.particles, optimizer.init(server.particles))
        q, _ = jax.lax.fori_loop(0, server_steps, step, start)
        return server._replace(particles=q)

    def init(key):
        particles = posterior.init(key)
        return Server(particles, particles)

    return side.algorithm(
        "parallel_dsvgd",
        task,
        init=init,
        broadcast=lambda server: server._replace(first=()),
        client_update=client_update,
        server_update=server_update,
        cohort="all",
        reduce="stack",
    )
