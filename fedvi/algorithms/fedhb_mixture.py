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
    classification_loss,
    log_probabilities,
    require_body,
)
from fedvi.algorithms.registry import builder
from fedvi.distributions import mixture
from fedvi.distributions.tree import Tree, with_head
from fedvi.flat import trees
from fedvi.local import fold_minibatches, minimise
from fedvi.options import Options, option

__all__ = ["FedHBMixture", "Server", "fedhb_mixture"]


class Server(NamedTuple):
    """Server state.

    Attributes:
      prototypes: r, the K bodies, leaves `[components, ...]`.
      head: the frozen random head, shared by all prototypes; outside the penalty.
      gate: β, `{"body", "head"}` of the gating network, K outputs. Its head is random
        and frozen as well (the paper's footnote 9).
    """

    prototypes: Any
    head: Any
    gate: Any


class FedHBMixture(Options):
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
    Server (Eq. 24, Alg. 4): one EM step on Σ c_j and Σ c_j (m_i - r_j). A client sends
    c, its nearest prototype's number and m_i less that prototype.
    Prediction (Eq. 82): Σ_j g_j(x) p(y|x, r_j), the gate g trained by FedAvg to tell
    which prototype is nearest to the model of the client that x came from.
    Personalisation (Eq. 84): the client's objective, body and head.

    Raises:
      ValueError: a model without a body.
    """
    require_body(task, "fedhb_mixture")
    model, gate_model = task.model, task.model.with_classes(options.components)

    def init(key):
        base_key, gate_key, *keys = jax.random.split(key, 2 + options.components)
        base = model.init(base_key)
        others = jax.vmap(lambda k: model.init(k)["body"])(jnp.stack(keys))
        prototypes = jax.tree.map(
            lambda r, other: r[None] + options.init_spread * (other - r[None]),
            base["body"],
            others,
        )
        return Server(prototypes, base["head"], gate_model.init(gate_key))

    def client_update(key, round_index, server, client, data):
        body_key, gate_key, start_key = jax.random.split(key, 3)
        start = {"body": start_body(task, options, start_key, server, data)}
        trained, value = train(
            task, task.training, options, body_key, round_index, server, start, data
        )
        body = trained["body"]
        shares = mixture.responsibilities(body, server.prototypes, options.variance)
        nearest = jnp.argmax(shares).astype(jnp.int32)
        gate, gate_value = train_gate(
            gate_model, task.training, gate_key, round_index, server.gate, nearest, data
        )
        upload = {
            "nearest": nearest,
            "mass": shares,
            "body": optax.tree.sub(body, prototype(server, nearest)),
            "gate": optax.tree.sub(gate, server.gate["body"]),
        }
        metrics = {
            "loss": value,
            "gate_loss": gate_value,
            "largest_share": shares.max(),
        }
        metrics.update({f"share_{j}": share for j, share in enumerate(shares)})
        return ClientOutput(upload, 1.0, metrics=metrics)

    def personalise(key, server, client, data):
        train_key, start_key = jax.random.split(key)
        body = start_body(task, options, start_key, server, data)
        start = {"body": body, "head": server.head}
        return train(task, task.finetuning, options, train_key, 0, server, start, data)[
            0
        ]

    def global_predictive(key, server, x, mask):
        log_gate = log_probabilities(gate_model, server.gate, x, mask)

        def predict(body):
            params = {"body": body, "head": server.head}
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


def penalty(options: FedHBMixture, server: Server, body, size):
    """-s/|D_i| log Σ_j exp(-‖m - r_j‖² / 2σ²) (Eq. 22)."""
    log_prior = mixture.log_prior(body, server.prototypes, options.variance)
    return -options.penalty_scale * log_prior / jnp.maximum(size, 1)


def start_body(task: Task, options: FedHBMixture, key, server: Server, data):
    """Where a client's m_i starts."""
    if options.start == "centre":
        return jax.tree.map(lambda r: r.mean(0), server.prototypes)
    losses = jax.lax.map(
        lambda body: total_loss(task, key, {"body": body, "head": server.head}, data),
        server.prototypes,
    )
    return prototype(server, jnp.argmin(losses))


def total_loss(task: Task, key, params, data):
    """Cross-entropy of one model, summed over one client's training data."""
    once = task.training._replace(epochs=1, augment=None)

    def add(key, total, batch):
        return total + batch.mask.sum() * classification_loss(task.model, params, batch)

    return fold_minibatches(key, data, once, add, jnp.zeros(()))


def train(
    task: Task, training, options: FedHBMixture, key, round_index, server, start, data
):
    """Descent of one client on Eq. 22: (trained params, mean loss).

    Args:
      start: the parameters to train, the "body" and, in Eq. 84, the "head" too.
    """

    near = server._replace(prototypes=trees(server.prototypes))

    def loss(key, params, batch):
        params = {"head": server.head, **params}
        fit = classification_loss(task.model, params, batch)
        return fit + penalty(options, near, params["body"], data.size)

    return minimise(key, round_index, start, data, training, loss)


def train_gate(gate_model, training, key, round_index, gate, nearest, data):
    """SGD of the gate's body, every example labelled `nearest`: (body, mean loss)."""

    def loss(key, body, batch):
        labelled = batch._replace(y=jnp.full_like(batch.y, nearest))
        return classification_loss(gate_model, {**gate, "body": body}, labelled)

    return minimise(key, round_index, gate["body"], data, training, loss)


def statistics(server: Server, upload: dict) -> dict:
    """c_j, c_j (m_i - r_j) for every prototype, and what the gate moved by."""
    own = prototype(server, upload["nearest"])

    def moved(r, own, moved):
        return jax.vmap(lambda c, r: c * (moved + (own - r)))(upload["mass"], r)

    by_prototype = jax.tree.map(moved, server.prototypes, own, upload["body"])
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
    gate_body = optax.tree.add(server.gate["body"], aggregate.mean()["gate"])
    return Server(prototypes, server.head, {**server.gate, "body": gate_body})


def posterior(options: FedHBMixture, server: Server) -> Tree:
    """p(θ|r), Gaussians around the prototypes (Eq. 20), and the frozen head."""
    body = mixture.distribution(server.prototypes, options.variance)
    return with_head(body, {"body": prototype(server, 0), "head": server.head})


def personal_posterior(options: FedHBMixture, params) -> Tree:
    """v(θ) = N(m, ε² I) around the personalised body (Eq. 83), and its head."""
    mean = ravel_pytree(params["body"])[0]
    body = distrax.Independent(distrax.Normal(mean, options.epsilon), 1)
    return with_head(body, params)
