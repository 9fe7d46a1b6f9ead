"""FedHB with a normal-inverse-Wishart posterior.

"A hierarchical Bayesian approach to federated learning", §3.1 and appendix B.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import (
    classification_loss,
    log_probabilities,
    point_estimate,
    quadratic_penalty,
    quadratic_pull,
    require_body,
)
from fedvi.algorithms.registry import builder
from fedvi.distributions import dropout, normal_inverse_wishart
from fedvi.distributions.normal_inverse_wishart import NIW, NIWHyper
from fedvi.distributions.tree import Tree, with_head
from fedvi.flat import trees
from fedvi.local import LocalTraining, minimise
from fedvi.nn import parameter_count
from fedvi.options import Options, option

__all__ = ["FedHBNIW", "Server", "fedhb_niw"]


class Server(NamedTuple):
    """Server state.

    Attributes:
      posterior: NIW(mean m_0, scale V_0) over the body's parameters.
      head: the frozen random head; outside d, m_0, V_0 and the penalty.
    """

    posterior: NIW
    head: Any


class FedHBNIW(Options):
    """Options of `fedhb_niw`."""

    covariance: Literal["per_weight", "joint"] = option(
        "per_weight",
        "One covariance for all weights, or one for each. joint is the paper's literal "
        "formula, d = number of body parameters; its penalty coefficient is about "
        "d/|D_i|, far beyond what gradient steps can follow, so it is taken as an "
        "exact proximal step. per_weight is an independent normal-inverse-gamma for "
        "each weight, d = 1, by gradient steps.",
    )
    prior_mean: Literal["zero", "previous"] = option(
        "previous",
        "Prior mean μ_0. zero is the paper's and shrinks the mean by N/(N+1) in every "
        "round, which cost 1.2 points of global accuracy and an ECE of 0.10 instead of "
        "0.03; previous is the last m_0.",
        source="docs/fedhb.md",
    )
    p_drop: float = option(
        0.001,
        "1 - p, the probability that a weight column is dropped.",
        source="FedHB §6",
        at_least=0,
        below=1,
    )
    epsilon: float = option(
        1e-4,
        "ε, standard deviation of the spikes.",
        source="FedHB §6",
        at_least=0,
        traced=True,
    )
    spike_noise: bool = option(
        False,
        "Draw the spikes' own noise. Off: a thousandth of a weight's size, and a "
        "normal draw per weight and step.",
    )
    penalty_scale: float = option(
        0.1,
        "s, a factor on the penalty; 1 is the paper's. 0.1 was the best of 0.01 to 3 "
        "for five local epochs and above FedBABU for one (Fashion-MNIST, a held-out "
        "part of the training data); 1 is better for one epoch alone.",
        source="docs/fedhb.md",
        at_least=0,
        traced=True,
    )
    prediction: Literal["mode", "sample"] = option(
        "mode", "The global model: the mode m_0, or a sample of the Student-t."
    )
    num_samples: int = option(
        1, "S, Student-t samples a prediction.", source="FedHB §3.1", at_least=1
    )


@builder(FedHBNIW)
def fedhb_niw(task: Task, options: FedHBNIW) -> Algorithm:
    """Builds FedHB-NIW.

    Client (Eq. 17), batch mean and 1/|D_i|, m̃ a draw of the spiky mixture (Eq. 16):
      min_m  CE(m̃) + s·p (n_0 + d + 1) / (2 |D_i|) Σ_j (m - m_0)_j² / V_0j
    Server (Eq. 18, with N/N_f of Alg. 3): closed form from Σδ_i and Σδ_i² of what is
    sent, δ_i = m_i - m_0.
    Prediction (Eq. 19): Student-t around m_0, or its mode m_0.
    Personalisation (Eq. 46): the client's objective, body and head.

    Metrics: `loss`, the mean of CE(m̃) over the local steps; `penalty`, the second term
    of Eq. 17 after the last of them.

    Raises:
      ValueError: `num_samples` without samples, or a model without a body.
    """
    if options.num_samples > 1 and options.prediction == "mode":
        raise ValueError(
            f"num_samples={options.num_samples} has no effect with prediction='mode': "
            "give prediction='sample'"
        )
    require_body(task, "fedhb_niw")
    hyper = sizes(task, options)

    def init(key):
        params = task.model.init(key)
        zeros = optax.tree.zeros_like(params["body"])
        # V_0 before any client was seen: Eq. 18 without scatter.
        unseen = server_posterior(hyper, options, zeros, zeros, zeros)
        return Server(NIW(params["body"], unseen.scale), params["head"])

    def client_update(key, round_index, server, client, data):
        centre, weights = penalty(hyper, options, server, data)
        start = {"body": centre}
        trained, value = train(
            task, task.training, options, key, round_index, server, start, weights, data
        )
        left = quadratic_penalty(trained["body"], centre, weights)
        moved = optax.tree.sub(trained["body"], centre)
        return ClientOutput(moved, 1.0, metrics={"loss": value, "penalty": left})

    def server_update(key, round_index, server, aggregate):
        # Σ over all N clients, estimated from the N_f participants (Alg. 3).
        to_population = hyper.clients / aggregate.participants
        sums = optax.tree.scale(to_population, aggregate.statistics)
        new = server_posterior(
            hyper, options, server.posterior.mean, sums["delta"], sums["delta2"]
        )
        return server._replace(posterior=new)

    def global_predictive(key, server, x, mask):
        if options.prediction == "mode":
            return log_probabilities(task.model, mode(server), x, mask)[None]
        samples = options.num_samples
        draws = posterior(hyper, server).sample(seed=key, sample_shape=samples)
        return jax.lax.map(lambda p: log_probabilities(task.model, p, x, mask), draws)

    def personalise(key, server, client, data):
        _, weights = penalty(hyper, options, server, data)
        return train(
            task, task.finetuning, options, key, 0, server, mode(server), weights, data
        )[0]

    return point_estimate(
        "fedhb_niw",
        task,
        params_of=mode,
        init=init,
        client_update=client_update,
        statistics=statistics,
        server_update=server_update,
        global_predictive=global_predictive,
        personalise=personalise,
        posterior=lambda server: posterior(hyper, server),
        personal_posterior=lambda server, params: personal_posterior(options, params),
    )


def sizes(task: Task, options: FedHBNIW) -> NIWHyper:
    """|D|, N and d."""
    body = jax.eval_shape(task.model.init, jax.random.key(0))["body"]
    dimension = parameter_count(body) if options.covariance == "joint" else 1
    return NIWHyper(task.samples, task.clients, dimension)


def mode(server: Server) -> dict:
    """The parameters at m_0."""
    return {"body": server.posterior.mean, "head": server.head}


def penalty(hyper: NIWHyper, options: FedHBNIW, server: Server, data):
    """Centre and weights of a client's penalty ½ Σ_j w_j (m - m_0)_j² (Eq. 17)."""
    centre, scale = server.posterior
    keep = dropout.keep_probabilities(centre, 1 - options.p_drop)
    weights = normal_inverse_wishart.penalty_precision(hyper, scale, keep, data.size)
    return centre, optax.tree.scale(options.penalty_scale, weights)


def train(
    task: Task,
    training: LocalTraining,
    options: FedHBNIW,
    key,
    round_index,
    server: Server,
    start: dict,
    weights,
    data,
):
    """Descent of one client on Eq. 17: (trained params, mean loss).

    Args:
      start: the parameters to train, m_0 as "body" and, in Eq. 46, the "head" too.
      weights: of the penalty.
    """
    joint = options.covariance == "joint"
    centre, weights = trees((server.posterior.mean, weights))

    def loss(key, params, batch):
        params = {"head": server.head, **params}
        value = spiky_loss(task.model, options, key, params, batch)
        return (
            value if joint else value + quadratic_pull(params["body"], centre, weights)
        )

    def proximal(params, step_size):
        body = proximal_step(centre, weights, params["body"], step_size)
        return {**params, "body": body}

    return minimise(
        key, round_index, start, data, training, loss, proximal if joint else None
    )


def spiky_loss(model, options: FedHBNIW, key, params, batch):
    """CE(m̃) on a batch, m̃ a draw of the spiky mixture around the body (Eq. 16)."""
    noise = options.epsilon if options.spike_noise else None
    body = dropout.sample(key, params["body"], 1 - options.p_drop, noise)
    return classification_loss(model, {**params, "body": body}, batch)


def proximal_step(centre, precision, params, step_size):
    """argmin_θ ½ Σ_j w_j (θ - μ)_j² + ‖θ - params‖² / (2 step_size), by layers."""
    return jax.tree.map(
        lambda p, c, w: (p + step_size * w * c) / (1 + step_size * w),
        *trees((params, centre, precision)),
    )


def statistics(server: Server, moved) -> dict:
    """δ and δ², so that a bound on what is sent bounds both."""
    return {"delta": moved, "delta2": jax.tree.map(jnp.square, moved)}


def server_posterior(
    hyper: NIWHyper, options: FedHBNIW, centre, sum_delta, sum_delta2
) -> NIW:
    """Eq. 18 from the sums over the population, about the mean that was broadcast."""
    zero = options.prior_mean == "zero"
    return normal_inverse_wishart.posterior(
        hyper,
        sum_delta,
        sum_delta2,
        centre=centre,
        prior_mean=optax.tree.zeros_like(centre) if zero else centre,
        keep=dropout.keep_probabilities(centre, 1 - options.p_drop),
        epsilon=options.epsilon,
    )


def posterior(hyper: NIWHyper, server: Server) -> Tree:
    """The Student-t of the body (Eq. 19), and the frozen head."""
    body = normal_inverse_wishart.distribution(hyper, server.posterior)
    return with_head(body, mode(server))


def personal_posterior(options: FedHBNIW, params) -> Tree:
    """v(θ), the spiky mixture around the personalised body (Eq. 45), and its head."""
    body = dropout.Spiky(params["body"], 1 - options.p_drop, options.epsilon)
    return with_head(body, params)
