"""FedHB with a mixture of prototypes.

"A hierarchical Bayesian approach to federated learning", §3.2 and appendix C.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.algorithm import Algorithm, ClientOutput, Task, Wire
from fedvi.algorithms.common import (
    classification_loss,
    log_probabilities,
    predict_with_params,
    require_body,
)
from fedvi.distributions import mixture
from fedvi.local import fold_minibatches, minimise

__all__ = ["Server", "fedhb_mixture"]


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


def fedhb_mixture(
    task: Task,
    *,
    components: int = 2,
    variance: float = 0.1,
    start: Literal["centre", "likelihood"] = "likelihood",
    prior_mean: Literal["zero", "previous"] = "previous",
    init_spread: float = 1.0,
    penalty_scale: float = 1.0,
) -> Algorithm:
    """Builds FedHB-Mixture.

    Client (Eq. 22, batch mean and 1/|D_i|):
      min_m  CE(m) - s/|D_i| log Σ_j exp(-‖m - r_j‖² / 2σ²)
    Server (Eq. 24, Alg. 4): one EM step on Σ c_j and Σ c_j m_i.
    Prediction (Eq. 82): Σ_j g_j(x) p(y|x, r_j), the gate g trained by FedAvg to tell
    which prototype is nearest to the model of the client that x came from.
    Personalisation (Eq. 84): the client's objective, body and head.

    Args:
      task: model, local training, population.
      components: K prototypes (§6: 2).
      variance: σ² (§6: 0.1).
      start: where m_i starts (Alg. 4 leaves it open): `centre`, the mean of the
        prototypes; `likelihood`, the prototype with the least loss on the client's own
        data, which was better at five local epochs and equal at one (Fashion-MNIST and
        MNIST, a held-out part of the training data).
      prior_mean: `zero`: the paper's μ_j ~ N(0, I), whose pull shrinks every prototype
        by mass / (mass + σ² N_f/N) in each round; `previous`: the prior is centred at
        the prototype's last value.
      init_spread: how far apart the prototypes start: r_j = r + spread (r'_j - r), r
        and r'_j independent draws of the model's initialiser. 1: independent
        networks; towards 0: near each other.
      penalty_scale: s, a factor on the penalty; 1 is the paper.

    Raises:
      ValueError: an option outside its range, or a model without a body.
    """
    checks.at_least("components", components, 1)
    checks.positive("variance", variance)
    checks.one_of("start", start, ("centre", "likelihood"))
    checks.one_of("prior_mean", prior_mean, ("zero", "previous"))
    checks.at_least("init_spread", init_spread, 0)
    checks.at_least("penalty_scale", penalty_scale, 0)
    require_body(task, "fedhb_mixture")
    model, gate_model = task.model, task.model.with_classes(components)

    def penalty(server, data, body):
        log_prior = mixture.log_prior(body, server.prototypes, variance)
        return -penalty_scale * log_prior / jnp.maximum(data.size, 1)

    def start_body(key, server, data):
        if start == "centre":
            return jax.tree.map(lambda r: r.mean(0), server.prototypes)
        losses = jax.lax.map(
            lambda body: _total_loss(
                model, key, {"body": body, "head": server.head}, data, task.training
            ),
            server.prototypes,
        )
        nearest = jnp.argmin(losses)
        return jax.tree.map(lambda r: r[nearest], server.prototypes)

    def init(key):
        base_key, gate_key, *keys = jax.random.split(key, 2 + components)
        base = model.init(base_key)
        others = jax.vmap(lambda k: model.init(k)["body"])(jnp.stack(keys))
        prototypes = jax.tree.map(
            lambda r, other: r[None] + init_spread * (other - r[None]),
            base["body"],
            others,
        )
        return Server(prototypes, base["head"], gate_model.init(gate_key))

    def statistics_of(shares, body, gate_body):
        weighted = jax.tree.map(
            lambda m: shares.reshape(-1, *[1] * m.ndim) * m[None], body
        )
        return {"mass": shares, "weighted": weighted, "gate": gate_body}

    def known(server, nearest):
        """What m_i and the gate's weights are sent as differences to."""
        prototype = jax.tree.map(lambda r: r[nearest], server.prototypes)
        return {"body": prototype, "gate": server.gate["body"]}

    def pack(server, statistics):
        mass, weighted = statistics["mass"], statistics["weighted"]
        nearest = jnp.argmax(mass).astype(jnp.int32)
        body = jax.tree.map(lambda w: w.sum(0), weighted)  # Σ_j c_j = 1
        sent = {"body": body, "gate": statistics["gate"]}
        moved = jax.tree.map(jnp.subtract, sent, known(server, nearest))
        return {"nearest": nearest, "mass": mass, **moved}

    def unpack(server, upload):
        moved = {name: upload[name] for name in ("body", "gate")}
        sent = jax.tree.map(jnp.add, known(server, upload["nearest"]), moved)
        return statistics_of(upload["mass"], sent["body"], sent["gate"])

    def client_update(key, round, server, client, data):
        body_key, gate_key, start_key = jax.random.split(key, 3)

        def loss(key, body, batch):
            params = {"body": body, "head": server.head}
            fit = classification_loss(model, params, batch)
            return fit + penalty(server, data, body)

        body, value = minimise(
            body_key,
            round,
            start_body(start_key, server, data),
            data,
            task.training,
            loss,
        )
        shares = mixture.responsibilities(body, server.prototypes, variance)
        nearest = jnp.argmax(shares)

        def gate_loss(key, gate_body, batch):
            gate = {**server.gate, "body": gate_body}
            labels = jnp.full_like(batch.y, nearest)
            return classification_loss(gate_model, gate, batch._replace(y=labels))

        gate_body, gate_value = minimise(
            gate_key, round, server.gate["body"], data, task.training, gate_loss
        )
        statistics = statistics_of(shares, body, gate_body)
        metrics = {
            "loss": value,
            "gate_loss": gate_value,
            "largest_share": shares.max(),
        }
        metrics.update({f"share_{j}": shares[j] for j in range(components)})
        return ClientOutput(statistics, 1.0, metrics=metrics)

    def server_update(key, round, server, aggregate):
        prototypes = mixture.m_step(
            aggregate.statistics["weighted"],
            aggregate.statistics["mass"],
            server.prototypes,
            variance=variance,
            prior_mean=server.prototypes if prior_mean == "previous" else None,
            participants=aggregate.participants,
            population=aggregate.population,
        )
        gate = {**server.gate, "body": aggregate.mean()["gate"]}
        return Server(prototypes, server.head, gate)

    def global_predictive(key, server, x, mask):
        log_gate = log_probabilities(gate_model, server.gate, x, mask)

        def predict(body):
            params = {"body": body, "head": server.head}
            return log_probabilities(model, params, x, mask)

        log_experts = jax.lax.map(predict, server.prototypes)
        return jax.nn.logsumexp(log_gate.T[:, :, None] + log_experts, axis=0)[None]

    def personalise(key, server, client, data):
        train_key, start_key = jax.random.split(key)
        body = start_body(start_key, server, data)

        def loss(key, params, batch):
            fit = classification_loss(model, params, batch)
            return fit + penalty(server, data, params["body"])

        params = {"body": body, "head": server.head}
        return minimise(train_key, 0, params, data, task.finetuning, loss)[0]

    return Algorithm(
        name="fedhb_mixture",
        init=init,
        client_update=client_update,
        server_update=server_update,
        global_predictive=global_predictive,
        personalise=personalise,
        personal_predictive=predict_with_params(model),
        wire=Wire(pack, unpack),
    )


def _total_loss(model, key, params, data, training):
    """Cross-entropy of one model, summed over one client's training data."""
    once = training._replace(epochs=1, augment=None)

    def add(key, total, batch):
        return total + batch.mask.sum() * classification_loss(model, params, batch)

    return fold_minibatches(key, data, once, add, jnp.zeros(()))
