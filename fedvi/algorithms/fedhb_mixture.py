"""FedHB with a mixture of prototypes.

"A hierarchical Bayesian approach to federated learning", §3.2 and appendix C.
"""

from typing import Any, Literal, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import (
    Head,
    check_trained,
    classification_loss,
    data_loss,
    log_probabilities,
    plain_loss,
    split_head,
)
from fedvi.algorithms.registry import builder
from fedvi.distributions import mixture
from fedvi.distributions.tree import Tree, with_head
from fedvi.flat import trees
from fedvi.local import Quadratic, minimise
from fedvi.options import option

__all__ = ["FedHBMixture", "Server", "fedhb_mixture"]


class Server(NamedTuple):
    """Server state.

    Attributes:
      prototypes: r, K times what is learned, `{"body"}` or all, leaves
        `[components, ...]`.
      frozen: `{"head"}`, shared by all prototypes and outside the penalty, or `{}`.
      gate: β, `{"body", "head"}` of the gating network, K outputs. Its head is random
        and frozen as well (the paper's footnote 9), or trained as well.
    """

    prototypes: Any
    frozen: Any
    gate: Any


class FedHBMixture(Head):
    """Options of `fedhb_mixture`."""

    components: int = option(2, "K, prototypes.", source="FedHB §6", at_least=1)
    variance: float = option(
        0.1,
        "σ², of a client around its prototype.",
        source="FedHB §6",
        above=0,
        traced=True,
    )
    epsilon: float = option(
        1e-4,
        "ε, standard deviation of a client's own posterior; training leaves it out.",
        source="FedHB §6",
        above=0,
        traced=True,
    )
    start: Literal["centre", "likelihood"] = option(
        "likelihood",
        "Where m_i starts (Alg. 4 leaves it open). centre is the mean of the "
        "prototypes; likelihood the prototype with the least loss on the client's own "
        "data, better at five local epochs and equal at one (Fashion-MNIST and MNIST, "
        "a held-out part of the training data).",
        source="docs/fedhb.md",
    )
    prior_mean: Literal["zero", "previous"] = option(
        "previous",
        "Centre of the prototypes' prior. zero is the paper's μ_j ~ N(0, I), whose "
        "pull shrinks every prototype by mass / (mass + σ² N_f/N) in each round; "
        "previous is the prototype's last value.",
        source="docs/fedhb.md",
    )
    init_spread: float = option(
        1.0,
        "How far apart the prototypes start. r_j = r + spread (r'_j - r), r and r'_j "
        "independent draws of the model's initialiser: 1 is independent networks, "
        "towards 0 near each other.",
        at_least=0,
        traced=True,
    )
    penalty_scale: float = option(
        1.0, "s, a factor on the penalty; 1 is the paper's.", at_least=0, traced=True
    )


@builder(FedHBMixture)
def fedhb_mixture(task: Task, options: FedHBMixture) -> Algorithm:
    """Builds FedHB-Mixture.

    Client (Eq. 22, batch mean and 1/|D_i|):
      min_m  CE(m) - s/|D_i| log Σ_j exp(-‖m - r_j‖² / 2σ²)
    whose second term SGD takes as a proximal step on the quadratic that EM puts above
    it, s/(2σ²|D_i|) ‖m - Σ_j c_j r_j‖² with the c of where m is: it has the same
    gradient there, is exact for K = 1, and stable at any strength.
    Server (Eq. 24, Alg. 4): one EM step on Σ c_j and Σ c_j (m_i - r_j). A client sends
    c, its nearest prototype's number and m_i less that prototype.
    Prediction (Eq. 82): Σ_j g_j(x) p(y|x, r_j), the gate g trained by FedAvg to tell
    which prototype is nearest to the model of the client that x came from.
    Personalisation (Eq. 84): the client's objective, body and head.
    m is all that is learned: the body, or with head=trained all weights.

    Metrics: `loss`, the mean of CE(m) over the local steps; `penalty`, the second term
    of Eq. 22 after the last of them; the gate's mean loss; the client's c.

    Raises:
      ValueError: a model of a frozen head alone.
    """
    check_trained(task, options, "fedhb_mixture")
    model, gate_model = task.model, task.model.with_classes(options.components)

    def init(key):
        base_key, gate_key, *keys = jax.random.split(key, 2 + options.components)
        base, frozen = split_head(model.init(base_key), options)
        others = jax.vmap(lambda k: split_head(model.init(k), options)[0])(
            jnp.stack(keys)
        )
        prototypes = jax.tree.map(
            lambda r, other: r[None] + options.init_spread * (other - r[None]),
            base,
            others,
        )
        return Server(prototypes, frozen, gate_model.init(gate_key))

    def client_update(key, round_index, server, client, data):
        body_key, gate_key, start_key = jax.random.split(key, 3)
        start = first_model(task, options, start_key, server, data)
        trained, value = train(
            task, task.training, options, body_key, round_index, server, start, data
        )
        shares = mixture.responsibilities(trained, server.prototypes, options.variance)
        nearest = jnp.argmax(shares).astype(jnp.int32)
        training, gate = task.training, server.gate
        gate_moved, gate_value = train_gate(
            gate_model, training, options, gate_key, round_index, gate, nearest, data
        )
        upload = {
            "nearest": nearest,
            "mass": shares,
            "model": optax.tree.sub(trained, prototype(server, nearest)),
            "gate": gate_moved,
        }
        metrics = {
            "loss": value,
            "penalty": penalty(options, server, trained, data.size),
            "gate_loss": gate_value,
            "largest_share": shares.max(),
        }
        metrics.update({f"share_{j}": share for j, share in enumerate(shares)})
        return ClientOutput(upload, 1.0, metrics=metrics)

    def personalise(key, server, client, data):
        train_key, start_key = jax.random.split(key)
        learned = first_model(task, options, start_key, server, data)
        start = {**server.frozen, **learned}
        return train(task, task.finetuning, options, train_key, 0, server, start, data)[
            0
        ]

    def global_predictive(key, server, x, mask):
        log_gate = log_probabilities(gate_model, server.gate, x, mask)

        def predict(learned):
            params = {**server.frozen, **learned}
            return log_probabilities(model, params, x, mask)

        log_experts = jax.lax.map(predict, server.prototypes)
        return jax.nn.logsumexp(log_gate.T[:, :, None] + log_experts, axis=0)[None]

    def personal_predictive(key, server, params, x, mask):
        return log_probabilities(model, params, x, mask)[None]

    return Algorithm(
        name="fedhb_mixture",
        init=init,
        client_update=client_update,
        statistics=statistics,
        server_update=lambda key, round_index, server, aggregate: server_update(
            options, server, aggregate
        ),
        global_predictive=global_predictive,
        personalise=personalise,
        personal_predictive=personal_predictive,
        posterior=lambda server: posterior(options, server),
        personal_posterior=lambda server, params: personal_posterior(options, params),
    )


def prototype(server: Server, j):
    """r_j."""
    return jax.tree.map(lambda r: r[j], server.prototypes)


def penalty(options: FedHBMixture, server: Server, learned, size):
    """-s/|D_i| log Σ_j exp(-‖m - r_j‖² / 2σ²) (Eq. 22)."""
    log_prior = mixture.log_prior(learned, server.prototypes, options.variance)
    return -options.penalty_scale * log_prior / jnp.maximum(size, 1)


def first_model(task: Task, options: FedHBMixture, key, server: Server, data):
    """Where a client's m_i starts."""
    if options.start == "centre":
        return jax.tree.map(lambda r: r.mean(0), server.prototypes)
    losses = jax.lax.map(
        lambda learned: total_loss(task, key, {**server.frozen, **learned}, data),
        server.prototypes,
    )
    return prototype(server, jnp.argmin(losses))


def total_loss(task: Task, key, params, data):
    """Cross-entropy of one model, summed over all of one client's training data."""
    loss = plain_loss(task.model)
    return data_loss(key, loss, params, data, task.training)


def train(
    task: Task, training, options: FedHBMixture, key, round_index, server, start, data
):
    """Descent of one client on Eq. 22: (trained params, mean loss).

    Args:
      start: the parameters to train, in Eq. 84 a head that was frozen too.
    """
    prototypes = trees(server.prototypes)
    weight = options.penalty_scale / (options.variance * jnp.maximum(data.size, 1))

    def loss(key, params, batch):
        return classification_loss(task.model, {**server.frozen, **params}, batch)

    def near(params):
        learned = {part: params[part] for part in prototypes}
        centre = mixture.expected(learned, prototypes, options.variance)
        # A head outside the prototypes has no prior.
        weights = {part: weight if part in prototypes else 0.0 for part in params}
        return Quadratic({**params, **centre}, weights)

    return minimise(key, round_index, start, data, training, loss, near)


def train_gate(gate_model, training, options, key, round_index, gate, nearest, data):
    """SGD of the gate, every example labelled `nearest`: (how far moved, mean loss)."""
    start, frozen = split_head(gate, options)

    def loss(key, learned, batch):
        labelled = batch._replace(y=jnp.full_like(batch.y, nearest))
        return classification_loss(gate_model, {**frozen, **learned}, labelled)

    learned, value = minimise(key, round_index, start, data, training, loss)
    return optax.tree.sub(learned, start), value


def statistics(server: Server, upload: dict) -> dict:
    """c_j, c_j (m_i - r_j) for every prototype, and what the gate moved by."""
    own = prototype(server, upload["nearest"])

    def moved(r, own, moved):
        return jax.vmap(lambda c, r: c * (moved + (own - r)))(upload["mass"], r)

    by_prototype = jax.tree.map(moved, server.prototypes, own, upload["model"])
    return {"mass": upload["mass"], "moved": by_prototype, "gate": upload["gate"]}


def server_update(options: FedHBMixture, server: Server, aggregate) -> Server:
    """One EM step (Eq. 24, Alg. 4), and the mean of the gates."""
    prototypes = mixture.m_step(
        aggregate.statistics["moved"],
        aggregate.statistics["mass"],
        server.prototypes,
        variance=options.variance,
        prior_mean=server.prototypes if options.prior_mean == "previous" else None,
        participants=aggregate.participants,
        population=aggregate.population,
    )
    gate, fixed = split_head(server.gate, options)
    gate = optax.tree.add(gate, aggregate.mean()["gate"])
    return Server(prototypes, server.frozen, {**fixed, **gate})


def posterior(options: FedHBMixture, server: Server) -> Tree:
    """p(θ|r), Gaussians around the prototypes (Eq. 20), and the frozen head."""
    base = mixture.distribution(server.prototypes, options.variance)
    return with_head(base, prototype(server, 0), server.frozen)


def personal_posterior(options: FedHBMixture, params) -> Tree:
    """v(θ) = N(m, ε² I) around the personalised model (Eq. 83).

    A head that was frozen in training has no spread.
    """
    learned, head = split_head(params, options)
    mean = ravel_pytree(learned)[0]
    base = distrax.Independent(distrax.Normal(mean, options.epsilon), 1)
    return with_head(base, learned, head)
