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
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Importance, Task
from fedvi.algorithms.registry import builder
from fedvi.algorithms.stein_client import (
    Server,
    SteinOptions,
    other_terms,
    stein_algorithm,
    visit,
)
from fedvi.local import Batch
from fedvi.options import option
from fedvi.particle_posterior import ParticlePosterior, particle_posterior
from fedvi.stein import hip

__all__ = ["DSVGD", "dsvgd"]


class DSVGD(SteinOptions):
    """Options of `dsvgd`."""

    kde: Literal["lse", "repo", "off"] = option(
        "lse",
        "∇ log of a density that particles stand for: by log-sum-exp; as the public "
        "code, whose terms all but vanish; or none, so that a visit is SVGD on "
        "p_0·p_k.",
    )
    factor: Literal["particles", "gaussian"] = option(
        "particles",
        "What stands for t_k: particles, as in the papers; or a Gaussian fitted to the "
        "scores of p_k at a visit's last particles, with which q = p_0·Π t_k holds "
        "exactly and no density is estimated (`kde_bandwidth` is not used).",
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
    All three densities are kernel density estimates of frozen particles, which does not
    hold the posterior of all data over many visits (docs/dsvgd.md, "What the posterior
    is worth"). With factor="gaussian" there is no estimate and no local loop:

    $\nabla \log \tilde p_k = \nabla \log p_0 + \sum_{m \ne k} \nabla \log t_m
    + \nabla \log p_k, \qquad \nabla \log t_k = h_k - \lambda_k \theta$,

    h_k and λ_k `[d]` the least-squares fit to ∇ log p_k, of all the client's examples,
    at the last particles; the server keeps Π_k t_k and sends it with its particles.

    `importance` has "ksd", the discrepancy between q and the client's tilted density,
    and "hip", the inner product of the SVGD directions for the client's likelihood and
    for the mean log-likelihood of the clients that can be selected (Eq. 24 by Lemma 3).

    The temperature α of the free energy is 1, and both loops have the same step size.
    L are the `steps` of `task.training`, or its epochs.

    Raises:
      ValueError: first_t="one" without a density estimate or with initial="network",
        which leave no prior at all; options of the density estimate with
        factor="gaussian"; more particles than fit in memory.
    """
    _check(options)
    gaussian = options.factor == "gaussian"
    # Two sets of each client: its own and, for the HIP, its report.
    posterior = particle_posterior(task.model, options, kept=2 * task.clients)

    def client_update(key, round_index, server, client, data):
        old = client.factor
        new, client, metrics = visit(
            posterior, task.training, key, round_index, server, client, data
        )
        change = optax.tree.sub(client.factor, old) if gaussian else ()
        moved = posterior.parts(new - server.particles)
        return ClientOutput((moved, change), 1.0, client, metrics)

    def server_update(key, round_index, server, aggregate):
        moved, change = aggregate.mean()
        return Server(
            server.particles + posterior.joined(moved),
            product=optax.tree.add(server.product, change),
        )

    def report_scores(key, server, client, data):
        return reported_scores(posterior, key, server.particles, data)

    def report_ksd(key, server, client, data):
        q = server.particles
        likelihood = reported_scores(posterior, key, q, data)
        others = sum(other_terms(posterior, q, server, client).values())
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


def _check(options: DSVGD) -> None:
    """Raises `ValueError` for options that do not suit one another."""
    if options.factor == "gaussian":
        defaults = {"kde": "lse", "first_t": "one", "local_loop_steps": None}
        for name, default in defaults.items():
            value = getattr(options, name)
            if value != default:
                raise ValueError(
                    f"{name}={value!r} has no meaning with factor='gaussian', which "
                    "estimates no density, has p_0 exactly and no local loop: leave "
                    f"{name} at {default!r}"
                )
    elif options.first_t == "one" and (
        options.kde != "lse" or options.initial == "network"
    ):
        raise ValueError(
            "first_t='one' leaves the prior to the density estimate of particles drawn "
            f"from it, but kde={options.kde!r} and initial={options.initial!r}: use "
            "first_t='prior', or kde='lse' with initial='prior'"
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

    def of_draw(key):
        slots = jax.random.randint(key, (drawn,), 0, jnp.maximum(data.size, 1))
        mask = jnp.broadcast_to(data.size > 0, (drawn,))
        batch = Batch(data.x[slots], data.y[slots], mask)
        return posterior.likelihood_scores(q, batch, data.size)[0]

    if drawn is None:
        return (posterior.full_likelihood_scores(q, data),)
    first, second = jax.random.split(key)
    return of_draw(first), of_draw(second)


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
