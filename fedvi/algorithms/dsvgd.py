r"""Distributed Stein variational gradient descent (DSVGD).

Kassab and Simeone, "Federated generalized Bayesian learning via distributed Stein
variational gradient descent", IEEE TSP 2022; Yang, Liu and Kassab, "Client selection
for federated Bayesian learning", whose equations are cited here.

The global posterior is $q(\theta) = p_0(\theta) \prod_k t_k(\theta)$ (Eq. 4), held by
particles on the server; $t_k$, which stands for client k's likelihood $p_k$, by
particles that the client keeps. One client a round turns q into its tilted density
$\tilde p_k = (q / t_k) p_k$ (Eq. 6) by SVGD, and $t_k$ into $t_k q^{new} / q^{old}$.
"""

import math
from typing import Literal

from fedvi.algorithm import (
    Algorithm,
    ClientOutput,
    Importance,
    Task,
    difference_to,
)
from fedvi.algorithms.stein_client import Server, SteinClient, posterior_of

__all__ = ["dsvgd"]


def dsvgd(
    task: Task,
    *,
    particles: int = 20,
    prior: Literal["gaussian", "hierarchical"] = "gaussian",
    precision: float = math.e,
    gamma_shape: float = 1.0,
    gamma_rate: float = 0.01,
    initial: Literal["prior", "network"] = "prior",
    first_t: Literal["prior", "one"] = "one",
    kde: Literal["lse", "repo", "off"] = "lse",
    kde_bandwidth: float = 0.55,
    kernel: Literal["rbf", "imq"] = "rbf",
    local_loop_steps: int | None = None,
    report_batch_size: int | None = None,
) -> Algorithm:
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

    Args:
      task: model; `training` with L as its `steps`, or as its epochs.
      particles: N. The code has 6 for logistic regression and 20 for the network.
      prior: p_0 over the weights, "gaussian" of fixed `precision`, or "hierarchical"
        with ξ ~ Gamma(gamma_shape, gamma_rate) as their precision.
      precision: λ of the gaussian prior (DSVGD's network: e).
      gamma_shape: of the hierarchical prior (1).
      gamma_rate: of the hierarchical prior. The papers' 0.01; DSVGD's code has 100.
      initial: first particles: "prior" draws from p_0, "network" the network's own
        initial weights.
      first_t: "one": t_k = 1 until the client's first visit, as Algorithm 1 says, and
        p_0 is only in the particles that q starts with; those of t_k are draws from
        p_0 too, moved by L' steps. "prior" (DSVGD's code): t_k starts as the global
        particles and stands for p_0·t_k, and every visit adds ∇ log p_0, so that the
        target of a run's first visit is exactly p_0·p_k. What follows is not: all of
        p_0 against one client's data, it shrank the weights of small clients to
        nothing (`docs/dsvgd.md`).
      kde: "lse"; "repo" as the public code, whose terms all but vanish; "off": none,
        so that a visit is SVGD on p_0·p_k.
      kde_bandwidth: standard deviation of the estimates' kernel (0.55).
      kernel: of SVGD and the discrepancies: "rbf" (the papers) or "imq".
      local_loop_steps: L', steps of the local loop; None: L, the minibatches of a
        visit.
      report_batch_size: examples of each of the two draws, with replacement, from
        which a client computes its report; None: all it has, the paper's likelihood.
        Two draws make KSD and HIP unbiased, and double what it sends for the HIP.

    Raises:
      ValueError: an option outside its range; first_t="one" without a density estimate
        or with initial="network", which leave no prior at all.
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
        kde=kde,
        kde_bandwidth=kde_bandwidth,
        copies=2,  # their own and, for the HIP, their reports
    )
    if first_t == "one" and (kde != "lse" or initial == "network"):
        raise ValueError(
            "first_t='one' leaves the prior to the density estimate of particles drawn "
            f"from it, but kde={kde!r} and initial={initial!r}: use first_t='prior', "
            "or kde='lse' with initial='prior'"
        )
    side = SteinClient(posterior, first_t, local_loop_steps, report_batch_size).check()

    def client_update(key, round, server, client, data):
        new, client, metrics = side.visit(
            key, round, server.particles, client, data, task.training
        )
        return ClientOutput(new, 1.0, client, metrics)

    return side.algorithm(
        "dsvgd",
        task,
        client_update=client_update,
        server_update=lambda key, round, server, aggregate: Server(aggregate.mean()),
        importance={
            "ksd": Importance(side.report_ksd, lambda server, reports, counts: reports),
            "hip": Importance(side.report_scores, side.hip_with_mean),
        },
        cohort=1,
        wire=difference_to(lambda server: server.particles),
    )
