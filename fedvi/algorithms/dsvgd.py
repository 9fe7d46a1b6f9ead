r"""Distributed Stein variational gradient descent (DSVGD).

Kassab and Simeone, "Federated generalized Bayesian learning via distributed Stein
variational gradient descent", IEEE TSP 2022; Yang, Liu and Kassab, "Client selection
for federated Bayesian learning", whose equations are cited here.

The global posterior is $q(\theta) = p_0(\theta) \prod_k t_k(\theta)$ (Eq. 4), held by
particles on the server; $t_k$, which stands for client k's likelihood $p_k$, by
particles that the client keeps. One client a round turns q into its tilted density
$\tilde p_k = (q / t_k) p_k$ (Eq. 6) by SVGD, and $t_k$ into $t_k q^{new} / q^{old}$.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fedvi.algorithm import Algorithm, ClientOutput, Importance, Task
from fedvi.algorithms.registry import builder
from fedvi.algorithms.stein_client import (
    Server,
    SteinOptions,
    other_terms,
    stein_algorithm,
    visit,
)
from fedvi.evaluation import fold_batches
from fedvi.local import Batch
from fedvi.options import option
from fedvi.particle_posterior import ParticlePosterior, particle_posterior
from fedvi.stein import hip

__all__ = ["DSVGD", "dsvgd"]

_EXAMPLES_AT_ONCE = 500  # of a report: bounds the activations of all particles


class DSVGD(SteinOptions):
    """Options of `dsvgd`."""

    kde: Literal["lse", "repo", "off"] = option(
        "lse",
        "∇ log of a density that particles stand for: by log-sum-exp; as the public "
        "code, whose terms all but vanish; or none, so that a visit is SVGD on "
        "p_0·p_k.",
    )
    report_batch_size: int | None = option(
        None,
        "Examples of each of the two draws, with replacement, from which a client "
        "computes its report; None: all it has, the paper's likelihood. Two draws make "
        "KSD and HIP unbiased, and double what it sends for the HIP.",
        at_least=1,
    )


@builder(DSVGD)
def dsvgd(task: Task, options: DSVGD) -> Algorithm:
    r"""Builds DSVGD: one client a round moves the global particles by SVGD.

    A visit has two loops. The global one (Eq. 13) takes L = `task.training` minibatch
    steps of `svgd_direction` for

    $\nabla \log \tilde p_k = \nabla \log q^{(i-1)} - \nabla \log t_k^{(i-1)}
    + \nabla \log p_k$,

    the local one (Eq. 14) L' steps for $\nabla \log t_k^{(i)} = \nabla \log q^{(i)}
    - \nabla \log q^{(i-1)} + \nabla \log t_k^{(i-1)}$, each with its optimiser afresh.
    All three densities are kernel density estimates of frozen particles.

    `importance` has "ksd", the discrepancy between q and the client's tilted density,
    and "hip", the inner product of the SVGD directions for the client's likelihood and
    for the mean log-likelihood of the clients that can be selected (Eq. 24 by Lemma 3).

    The temperature α of the free energy is 1, and both loops have the same step size.
    L are the `steps` of `task.training`, or its epochs.

    Raises:
      ValueError: first_t="one" without a density estimate or with initial="network",
        which leave no prior at all; more particles than fit in memory.
    """
    if options.first_t == "one" and (
        options.kde != "lse" or options.initial == "network"
    ):
        raise ValueError(
            "first_t='one' leaves the prior to the density estimate of particles drawn "
            f"from it, but kde={options.kde!r} and initial={options.initial!r}: use "
            "first_t='prior', or kde='lse' with initial='prior'"
        )
    # Two sets of each client: its own and, for the HIP, its report.
    posterior = particle_posterior(task.model, options, kept=2 * task.clients)

    def client_update(key, round_index, server, client, data):
        q = server.particles
        new, client, metrics = visit(
            posterior, task.training, key, round_index, q, client, data
        )
        return ClientOutput(posterior.parts(new - q), 1.0, client, metrics)

    def server_update(key, round_index, server, aggregate):
        return Server(server.particles + posterior.joined(aggregate.mean()))

    def report_scores(key, server, client, data):
        return reported_scores(posterior, key, server.particles, data)

    def report_ksd(key, server, client, data):
        q = server.particles
        likelihood = reported_scores(posterior, key, q, data)
        others = sum(other_terms(posterior, q, q, client).values())
        first, second = likelihood[0] + others, likelihood[-1] + others
        return hip(q, first, second, kernel=posterior.kernel)

    def hip_scores(server, reports, counts):
        return hip_with_mean(posterior, server.particles, reports, counts)

    return stein_algorithm(
        "dsvgd",
        task,
        posterior,
        client_update=client_update,
        server_update=server_update,
        importance={
            "ksd": Importance(report_ksd, lambda server, reports, counts: reports),
            "hip": Importance(report_scores, hip_scores),
        },
        cohort=1,
    )


def reported_scores(
    posterior: ParticlePosterior, key, q: jax.Array, data
) -> tuple[jax.Array, ...]:
    """∇ log p_k at the global particles (step 4 of Algorithm 2), once or twice.

    Once from all examples, or twice from independent draws of `report_batch_size`:
    noise that all particles share does not average out of a square, but out of a
    product of two.
    """
    drawn = posterior.options.report_batch_size

    def of_batch(x, y, mask, size):
        return posterior.likelihood_scores(q, Batch(x, y, mask), size)[0]

    def of_draw(key):
        slots = jax.random.randint(key, (drawn,), 0, jnp.maximum(data.size, 1))
        mask = jnp.broadcast_to(data.size > 0, (drawn,))
        return of_batch(data.x[slots], data.y[slots], mask, data.size)

    def add(total, number, start, x, y, mask):
        return total + of_batch(_only_real(x, mask), y, mask, mask.sum())

    if drawn is not None:
        first, second = jax.random.split(key)
        return of_draw(first), of_draw(second)
    capacity = data.y.shape[0]
    if capacity > _EXAMPLES_AT_ONCE:
        return (fold_batches(add, data, _EXAMPLES_AT_ONCE, jnp.zeros_like(q)),)
    mask = jnp.arange(capacity) < data.size
    return (of_batch(_only_real(data.x, mask), data.y, mask, data.size),)


def hip_with_mean(
    posterior: ParticlePosterior, q: jax.Array, reports, counts
) -> jax.Array:
    """`[clients]` ⟨φ_k, φ'⟩ of every client (Eq. 24); φ' is that of the mean score.

    Args:
      posterior: whose kernel it is.
      q: `[N, d]`.
      reports: one or two independent `[clients, N, d]` scores.
      counts: `[clients]` bool, those that are in the mean.
    """
    weights = counts / jnp.maximum(counts.sum(), 1)
    mean = jnp.tensordot(weights, reports[-1], axes=1)
    return jax.vmap(lambda s: hip(q, s, mean, kernel=posterior.kernel))(reports[0])


def _only_real(x, mask):
    """Examples with the first in place of padding, of which a NaN would reach the
    gradient through the mask."""
    return jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, x[:1])
