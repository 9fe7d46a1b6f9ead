"""BPFed: shared and personalised factors, both random, under a continual prior.

Chen, Liu, Cao and Zhang, "Bayesian personalized federated learning with shared and
personalized uncertainty representations" (2023).
"""

from typing import Literal

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.partial_sharing import PersonalPart, split
from fedvi.algorithms.pfedbayes import Halves, PFedBayesKin, pfedbayes_of
from fedvi.algorithms.registry import builder
from fedvi.distributions import mean_field
from fedvi.distributions.mean_field import MeanField
from fedvi.flat import trees
from fedvi.nn import Model
from fedvi.options import option
from fedvi.variational import BayesianNetwork, mean_field_normal

__all__ = ["BPFed", "bpfed", "half", "join"]


class BPFed(PersonalPart, PFedBayesKin):
    """Options of `bpfed`; what is said of w holds for π."""

    zeta: float = option(
        1.0,
        "ζ, weight of the KL terms. At 0 nothing moves π: only with upload=personal.",
        source="Eq. 10; the public code's 1e-3 / 20 on the mean loss is ζ = 5e-5 n",
        at_least=0,
        traced=True,
    )
    kl_direction: Literal["forward", "reverse"] = option(
        "forward",
        "forward: KL(q ‖ π) (Eq. 10, 11); reverse: KL(π ‖ q) in both (public code).",
    )
    rho: float = option(
        -3.0,
        "Initial unconstrained scale, σ = softplus(ρ).",
        source="public code: σ = 0.049",
        traced=True,
    )
    start: Literal["prior", "broadcast", "personal"] = option(
        "prior",
        "Where q starts in a round. prior: at π(φ_i^{t-1}) π(θ^t); broadcast: its q(φ) "
        "where it stopped, its q(θ) at π(θ^t) (Alg. 1 can be read either way); "
        "personal: both where they stopped (public code).",
    )
    upload: Literal["localised", "personal"] = option(
        "localised",
        "What is sent. localised: the shared half of π (public code); personal: that "
        "of q (Alg. 1 can be read either way).",
    )


@builder(BPFed)
def bpfed(task: Task, options: BPFed) -> Algorithm:
    """Builds BPFed.

    The weights are shared factors θ and personalised factors φ_i. With the prior
    π = π(φ_i^{t-1}) π(θ^t) a client alternates on every minibatch (both divided by n)
      Eq. 10: min_q  -1/b Σ_j E_q[log p(y_j|x_j, φ, θ)] + ζ/n KL(q ‖ π)
      Eq. 11: min_π  ζ/n KL(q ‖ π)      (ζ = 1 there)
    and sends the shared half of π; the other half is its prior in its next round.
    Server: π(θ) <- (1 - β) π(θ) + β · average of the uploads, β = 1 in the paper.
    A client that never took part learns q(φ) only, by `task.finetuning`, one step a
    minibatch, under the shared q(θ) as it is.

    Metrics: `loss`, the mean of Eq. 10's first term over the minibatches; `kl`,
    KL(q ‖ π) of the trained q and the π it started at, in nats.

    The global model that is evaluated has the shared posterior and, for φ, the prior
    that every client started from and moved away from since.

    Raises:
      ValueError: an option outside its range, a split that leaves no shared or no
        personalised weight, a model without `regrouped`, or more draws than fit in
        memory.
    """
    model = split(task.model, options.personal_part)
    family = mean_field_normal(options.rho)
    family = family._replace(distribution=lambda q: _distribution(task.model, q))
    halves = Halves(
        shared=lambda q: half(q, "shared"),
        own=lambda q: half(q, "personal"),
        join=join,
        adapts_own=True,
    )

    def kl(q, prior):
        pair = (q, prior) if options.kl_direction == "forward" else (prior, q)
        return family.kl(*pair)

    network = BayesianNetwork(model, family, options)
    algorithm = pfedbayes_of("bpfed", task, network, halves, kl)
    return algorithm._replace(global_model=False)


def half(q: MeanField, group: str) -> MeanField:
    """The posterior of one group's weights."""
    return MeanField(q.mu[group], q.rho[group], q.link)


def join(shared: MeanField, personal: MeanField) -> MeanField:
    """A posterior of all weights from its two halves."""
    return MeanField(
        {"personal": personal.mu, "shared": shared.mu},
        {"personal": personal.rho, "shared": shared.rho},
        shared.link,
    )


def _distribution(model: Model, q: MeanField):
    """Over `model`'s own tree of weights, body and head."""

    def ungrouped(params):
        leaves = {}
        for group in trees(params).values():
            leaves |= flatten_dict(group)
        shapes = jax.eval_shape(lambda key: trees(model.init(key)), jax.random.key(0))
        return {
            name: unflatten_dict({path: leaves[path] for path in flatten_dict(part)})
            for name, part in shapes.items()
        }

    return mean_field.distribution(MeanField(ungrouped(q.mu), ungrouped(q.rho), q.link))
