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
    first_t: Literal["prior", "one"] = "prior",
    kde: Literal["lse", "repo"] = "lse",
    kde_bandwidth: float = 0.55,
    kernel: Literal["rbf", "imq"] = "rbf",
    local_loop_steps: int | None = None,
    server_steps: int | None = None,
) -> Algorithm:
    r"""Builds parallel DSVGD.

    Every client makes DSVGD's visit from the same q and uploads the particles of its
    new $t_k$. The server then moves its own particles by SVGD for

    $\nabla \log q = \nabla \log p_0 + \sum_k \nabla \log t_k$,

    each $t_k$ a kernel density estimate of what its client sent. Those of
    first_t="prior" stand for p_0·t_k: then p_0 is taken off again for all but one.

    Args:
      task: model; `training` gives L, and the server's optimiser too.
      particles: as in `dsvgd`.
      prior: as in `dsvgd`.
      precision: as in `dsvgd`.
      gamma_shape: as in `dsvgd`.
      gamma_rate: as in `dsvgd`.
      initial: as in `dsvgd`.
      first_t: as in `dsvgd`.
      kde: as in `dsvgd`; without an estimate there is nothing to multiply.
      kde_bandwidth: as in `dsvgd`.
      kernel: as in `dsvgd`.
      local_loop_steps: L' as in `dsvgd`.
      server_steps: steps of the server in a round; default L.

    Raises:
      ValueError: an option outside its range.
    """
    checks.one_of("kde", kde, ("lse", "repo"))
    posterior = posterior_of(
        task,
        particles=particles,
        prior=prior,
        precision=precision,
        gamma_shape=gamma_shape,
        gamma_rate=gamma_rate,
        initial=initial,
        kernel=kernel,
        kde=kde,
        kde_bandwidth=kde_bandwidth,
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
        priors = 1.0 if first_t == "one" else 1.0 - present.sum()
        optimizer = training.optimizer_at(round)

        def scores_at(q):
            def add(total, factor):
                scores = posterior.density_scores(q, factor[0])
                # `where`: an absent client's zeros are no density.
                return jax.tree.map(
                    lambda a, s: a + jnp.where(factor[1], s, 0.0), total, scores
                ), ()

            start = jax.tree.map(lambda s: priors * s, posterior.prior_scores(q))
            return jax.lax.scan(add, start, (aggregate.statistics, present))[0]

        def step(_, carry):
            q, moments = carry
            return posterior.step(optimizer, q, scores_at(q), moments)

        start = (server.particles, optimizer.init(server.particles))
        return Server(jax.lax.fori_loop(0, server_steps, step, start)[0])

    return side.algorithm(
        "parallel_dsvgd",
        task,
        client_update=client_update,
        server_update=server_update,
        cohort="all",
        reduce="stack",
    )
