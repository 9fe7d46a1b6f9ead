"""sFedBayes: pFedBayes with spike-and-slab posteriors.

Zhang et al., "Federated learning via variational Bayesian inference: personalization,
sparsity and clustering" (2023), §4.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedvi import checks
from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.pfedbayes import pfedbayes_of
from fedvi.distributions import spike_and_slab
from fedvi.distributions.mean_field import MeanField
from fedvi.distributions.spike_and_slab import SpikeAndSlab
from fedvi.nn import parameter_count
from fedvi.variational import BayesianNetwork, bernoulli_gaussian

__all__ = ["sfedbayes"]


def sfedbayes(
    task: Task,
    *,
    inclusion: float = 0.99,
    temperature: float = 0.5,
    threshold: float = 0.0,
    keep: float = 1.0,
    zeta: float = 10.0,
    rho: float = -2.5,
    init_std: float | None = None,
    personal_steps: int = 5,
    global_steps: int = 1,
    global_learning_rate: float | None = None,
    start: Literal["personal", "global"] = "personal",
    upload: Literal["localised", "personal"] = "localised",
    average: Literal["parameters", "moments"] = "parameters",
    beta: float = 1.0,
    sampling: Literal["weight", "local"] = "local",
    mc_samples: int = 1,
    num_samples: int = 10,
    eps_scale: float = 1.0,
) -> Algorithm:
    """Builds sFedBayes.

    Every weight is θ = γ (μ + σ g), γ ~ Bernoulli(λ) (Eq. 32), so v = (μ, ρ, logit λ);
    objectives and server as of `pfedbayes`, with the KL of Eq. 34. λ is carried as its
    logit: optimised itself it leaves [0, 1] (the paper's Table 2 estimates 1.01).

    Metrics: those of `pfedbayes`; `inclusion`, the mean λ of the personal posteriors
    (the paper's estimated λ); `kept`, the share of gates that are 1 in one draw of them
    (its "sparsity"); with a threshold or `keep` also `sent`, the share of the weights
    sent whole, and `withheld`, the number of values that a participant does not send of
    the others (λ says which they are).

    Args:
      task: model, local training, population.
      inclusion: initial λ in (0, 1) (Table 2: 0.5 and 0.99).
      temperature: τ of the straight-through gradient of the gates (Eq. 41; the paper
        gives no value, constants left in public code: 0.5).
      threshold: of weights whose λ is below it only λ is sent, and the server takes
        its own last μ and ρ for them (§6.4); 0: all are sent.
      keep: in place of a threshold, the share in (0, 1] of the weights that are sent
        whole, those of the largest λ over all layers, of equal ones the first; 1: all.
        At least one weight.
      zeta: as of `pfedbayes`.
      rho: as of `pfedbayes`, of the slabs.
      init_std: as of `pfedbayes`.
      personal_steps: as of `pfedbayes`.
      global_steps: as of `pfedbayes`.
      global_learning_rate: as of `pfedbayes`.
      start: as of `pfedbayes`. Alg. 2 is `global`, where w learns too little from
        each round (docs/sfedbayes.md).
      upload: as of `pfedbayes`.
      average: as of `pfedbayes`.
      beta: as of `pfedbayes`.
      sampling: `weight`, one draw of gates and weights a step; `local`, the gates drawn
        so and the slabs by activation.
      mc_samples: as of `pfedbayes`.
      num_samples: as of `pfedbayes`.
      eps_scale: as of `pfedbayes`, of the slabs.

    Raises:
      ValueError: an option outside its range, both `threshold` and `keep`, or more
        draws than fit in memory.
    """
    checks.open_unit("inclusion", inclusion)
    checks.positive("temperature", temperature)
    checks.fraction("threshold", threshold)
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep!r} must lie in (0, 1]")
    if threshold > 0 and keep < 1:
        raise ValueError(
            f"threshold={threshold} and keep={keep} exclude each other: both say which "
            "weights are sent whole; give one of them"
        )
    family = bernoulli_gaussian(rho, inclusion, temperature)
    network = BayesianNetwork(
        task.model, family, sampling, mc_samples, num_samples, eps_scale
    )

    def sent_whole(upload):
        if keep < 1:
            # By the logit: λ itself is 1 in float32 from logits of 17.
            return _largest(upload.logit, keep)
        return jax.tree.map(
            lambda inclusion: inclusion >= threshold, spike_and_slab.inclusion(upload)
        )

    def transmit(upload, broadcast):
        sent = sent_whole(upload)
        slab = jax.tree.map(
            jnp.where, MeanField(sent, sent), upload.slab, broadcast.slab
        )
        arrived = SpikeAndSlab(slab, upload.logit)
        share, weights = _mean(sent), parameter_count(sent)
        return arrived, {"sent": share, "withheld": 2 * weights * (1 - share)}

    algorithm = pfedbayes_of(
        "sfedbayes",
        task,
        network,
        zeta=zeta,
        init_std=init_std,
        personal_steps=personal_steps,
        global_steps=global_steps,
        global_learning_rate=global_learning_rate,
        start=start,
        upload=upload,
        average=average,
        beta=beta,
        transmit=transmit if threshold > 0 or keep < 1 else None,
    )

    def client_update(key, round, server, client, data):
        train_key, gate_key = jax.random.split(key)
        output = algorithm.client_update(train_key, round, server, client, data)
        posterior = output.client.personal.posterior
        drawn = spike_and_slab.gates(gate_key, posterior, temperature)
        inclusions = spike_and_slab.inclusion(posterior)
        metrics = {"inclusion": _mean(inclusions), "kept": _mean(drawn)}
        return output._replace(metrics={**output.metrics, **metrics})

    return algorithm._replace(client_update=client_update)


def _largest(tree, share: float):
    """Pytree of bool: whether a weight is of the largest `share` of all, ties by place.

    A NaN counts as the largest.
    """
    flat, unravel = ravel_pytree(tree)
    count = max(1, math.floor(share * flat.size + 1e-9))
    chosen = jax.lax.top_k(flat, count)[1]
    largest = jnp.zeros(flat.shape, flat.dtype).at[chosen].set(1)
    return jax.tree.map(lambda leaf: leaf > 0, unravel(largest))


def _mean(tree):
    """Mean over all weights of a pytree."""
    total = sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(tree))
    return total / parameter_count(tree)
