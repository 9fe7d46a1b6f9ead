"""sFedBayes: pFedBayes with spike-and-slab posteriors.

Zhang et al., "Federated learning via variational Bayesian inference: personalization,
sparsity and clustering" (2023), §4.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.alternating import require_stable
from fedvi.algorithms.pfedbayes import PFedBayesKin, pfedbayes_of
from fedvi.algorithms.registry import builder
from fedvi.distributions import mean_field, spike_and_slab
from fedvi.distributions.spike_and_slab import SpikeAndSlab
from fedvi.local import LocalTraining
from fedvi.nn import parameter_count
from fedvi.options import option
from fedvi.variational import BayesianNetwork, bernoulli_gaussian

__all__ = ["SFedBayes", "largest", "sent_whole", "sfedbayes", "withhold"]


MOST_OF_A_STEP = 0.3
"""Of a logit: λ moves by 0.075 at most, and 93 such steps cross its whole range."""


class SFedBayes(PFedBayesKin):
    """Options of `sfedbayes`."""

    inclusion: float = option(
        0.99,
        "Initial λ, the probability that a weight is not 0.",
        source="Table 2: 0.5 and 0.99",
        above=0,
        below=1,
        traced=True,
    )
    temperature: float = option(
        0.5,
        "τ of the straight-through gradient of the gates (Eq. 41).",
        source="constants left in public code; the paper gives no value",
        above=0,
        traced=True,
    )
    average: Literal["parameters", "probabilities", "moments"] = option(
        "parameters",
        "Of the uploads. parameters: the mean of (μ, ρ, logit λ); probabilities: of "
        "(μ, ρ, λ) (Alg. 2); moments: the minimiser of Σ_i KL(. ‖ w) (Lemma A.2), "
        "whose λ is that of probabilities.",
    )
    inclusion_rate: float | None = option(
        None,
        "Factor on the learning rate of the logits of λ. A step of size a on the logit "
        "moves λ by λ (1 - λ) a; None: 1 / (λ (1 - λ)) at the initial λ (101 at 0.99), "
        "where alone λ moves as fast as if it were stepped itself: below it, faster.",
        source="Alg. 2 steps λ itself, at the initial λ; docs/sfedbayes.md",
        above=0,
        traced=True,
    )
    threshold: float = option(
        0.0,
        "Of weights whose λ is below it only λ is sent, and the server takes its own "
        "last μ and ρ for them (§6.4); 0: all are sent.",
        at_least=0,
        below=1,
    )
    keep: float = option(
        1.0,
        "In place of a threshold, the share of the weights that are sent whole, those "
        "of the largest λ over all layers, of equal ones the first; 1: all. At least "
        "one weight.",
        above=0,
        at_most=1,
    )


@builder(SFedBayes)
def sfedbayes(task: Task, options: SFedBayes) -> Algorithm:
    """Builds sFedBayes.

    Every weight is θ = γ (μ + σ g), γ ~ Bernoulli(λ) (Eq. 32), so v = (μ, ρ, logit λ);
    objectives and server as of `pfedbayes`, with the KL of Eq. 34. λ is carried as its
    logit: optimised itself it leaves [0, 1] (the paper's Table 2 estimates 1.01).

    Metrics: those of `pfedbayes`; `inclusion`, the mean λ of the personal posteriors
    (the paper's estimated λ); `kept`, the share of gates that are 1 in one draw of them
    (its "sparsity"); with a threshold or `keep` also `sent`, the share of the weights
    sent whole, and `withheld`, the number of values that a participant does not send of
    the others (λ says which they are).

    Raises:
      ValueError: an option outside its range, both `threshold` and `keep`, steps of
        the logits of λ that are too long, or more draws than fit in memory.
    """
    if options.threshold > 0 and options.keep < 1:
        raise ValueError(
            f"threshold={options.threshold} and keep={options.keep} exclude each "
            "other: both say which weights are sent whole; give one of them"
        )
    family = bernoulli_gaussian(options.rho, options.inclusion, options.temperature)
    network = BayesianNetwork(task.model, family, options)
    # Here, where the optimiser still has its name.
    require_stable(task, options, "zeta", mean_field.initial_scale(options.rho))
    rate = options.inclusion_rate
    if rate is None:
        floor = spike_and_slab.INCLUSION_FLOOR
        start = jnp.clip(options.inclusion, floor, 1 - floor)
        rate = 1 / (start * (1 - start))
    task = task._replace(
        training=logits_at(task.training, rate),
        finetuning=logits_at(task.finetuning, rate),
    )
    algorithm = pfedbayes_of("sfedbayes", task, network)

    def client_update(key, round_index, server, client, data):
        train_key, gate_key = jax.random.split(key)
        output = algorithm.client_update(train_key, round_index, server, client, data)
        posterior = output.client.personal.posterior
        metrics = dict(output.metrics)
        metrics["inclusion"] = _mean(spike_and_slab.inclusion(posterior))
        drawn = spike_and_slab.gates(gate_key, posterior, options.temperature)
        metrics["kept"] = _mean(drawn)
        upload = output.upload
        if options.threshold > 0 or options.keep < 1:
            arriving = optax.tree.add(server.posterior, upload)
            sent = sent_whole(arriving, options.threshold, options.keep)
            upload = withhold(upload, sent)
            metrics["sent"] = share = _mean(sent)
            metrics["withheld"] = 2 * parameter_count(sent) * (1 - share)
        return output._replace(upload=upload, metrics=metrics)

    return algorithm._replace(client_update=client_update)


def logits_at(training: LocalTraining, factor: float) -> LocalTraining:
    """`training` whose steps of the logits of λ are `factor` times as long.

    Raises:
      ValueError: Adam and its like, whose steps are about as long as their rate, would
        throw λ about: a logit of 13.8 is the last that has a gradient.
    """
    rate = training.learning_rate_at(0)
    bounded = training.optimizer != "sgd" and not callable(training.optimizer)
    known = not any(isinstance(number, jax.core.Tracer) for number in (rate, factor))
    looked_at = bounded and known and training.epochs > 0
    if looked_at and rate * factor > 1.005 * MOST_OF_A_STEP:  # the message rounds
        raise ValueError(
            f"learning_rate={float(rate):.3g} with inclusion_rate={float(factor):.3g} "
            f"(by default 1 / (λ (1 - λ)) at the initial λ) moves the logits of λ by "
            f"{rate * factor:.3g} a step, more than {MOST_OF_A_STEP}: give "
            f"inclusion_rate={MOST_OF_A_STEP / float(rate):.3g} or less"
        )

    def quicken(updates, _):
        longer = jax.tree.map(lambda step: factor * step, updates.logit)
        return updates._replace(logit=longer)

    def optimizer(learning_rate):
        own = training.at_rate(learning_rate).optimizer_at(0)  # may be 0 by now
        return optax.chain(own, optax.stateless(quicken))

    return training._replace(optimizer=optimizer)


def sent_whole(q: SpikeAndSlab, threshold: float, keep: float):
    """Pytree of bool: the weights of which more than λ is sent."""
    if keep < 1:
        # By the logit: λ itself is 1 in float32 from logits of 17.
        return largest(q.logit, keep)
    return jax.tree.map(lambda own: own >= threshold, spike_and_slab.inclusion(q))


def withhold(moved: SpikeAndSlab, sent) -> SpikeAndSlab:
    """An upload whose slabs say nothing new where `sent` is False: differences of 0."""

    def chosen(leaves):
        return jax.tree.map(lambda own, leaf: jnp.where(own, leaf, 0), sent, leaves)

    mu, rho = chosen(moved.slab.mu), chosen(moved.slab.rho)
    return moved._replace(slab=dataclasses.replace(moved.slab, mu=mu, rho=rho))


def largest(tree, share: float):
    """Pytree of bool: whether a weight is of the largest `share` of all, ties by place.

    A NaN counts as the largest.
    """
    flat, unravel = ravel_pytree(tree)
    count = max(1, math.floor(share * flat.size + 1e-9))
    chosen = jax.lax.top_k(flat, count)[1]
    ones = jnp.zeros(flat.shape, flat.dtype).at[chosen].set(1)
    return jax.tree.map(lambda leaf: leaf > 0, unravel(ones))


def _mean(tree):
    """Mean over all weights of a pytree."""
    total = sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(tree))
    return total / parameter_count(tree)
