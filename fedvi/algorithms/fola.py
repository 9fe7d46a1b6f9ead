"""FOLA: Laplace approximations at the clients, and their product at the server.

Liu, Jiang, Zheng, Chen, Qi, Huang and Shao, "A Bayesian federated learning framework
with online Laplace approximation" (2021).
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import plain_loss
from fedvi.algorithms.registry import builder
from fedvi.distributions import mean_field
from fedvi.flat import trees
from fedvi.local import Quadratic, minimise, squared_gradients
from fedvi.options import option
from fedvi.variational import (
    BayesianNetwork,
    Sampling,
    mean_field_normal,
    posterior_estimate,
)

__all__ = ["FOLA", "Server", "fola"]


class Server(NamedTuple):
    """Server state.

    Attributes:
      mean: μ, of the global posterior.
      precision: the diagonal of its Λ.
    """

    mean: Any
    precision: Any


class FOLA(Sampling):
    """Options of `fola`."""

    precision: float = option(
        1000.0,
        "λ, of the prior of every weight, whose mean is the network's start. Draws "
        "are at most λ^-½ wide; λ/|D| pulls as FedProx's μ does.",
        source="Fashion-MNIST (|D| = 60,000): below it a draw of an MLP is noise",
        above=0,
        traced=True,
    )
    memory: float = option(
        0.0,
        "Share of the precision, beyond the prior's, that a round keeps of the last. "
        "1 is the paper's online update, which counts a client's data once a round: Λ "
        "grows and the steps shrink without end.",
        at_least=0,
        at_most=1,
        traced=True,
    )
    likelihood: Literal["population", "client"] = option(
        "population",
        "What a client's n_i examples stand for. population: all |D|, so that the "
        "product is the posterior of all data; client: themselves, and the mean of the "
        "precisions is as wide as one client's (the paper).",
    )


@builder(FOLA)
def fola(task: Task, options: FOLA) -> Algorithm:
    """Builds FOLA.

    With the broadcast N(μ, Λ⁻¹), P = λ + memory (Λ - λ), and s_i = |D| / n_i
    (likelihood=population) or 1,
      client: μ_i = argmin_θ s_i Σ_j ℓ_j(θ) + ½ (θ - μ)ᵀ P (θ - μ),  Λ_i = P + s_i F_i,
    F_i the diagonal of the empirical Fisher information at μ_i;
      server: Λ <- Σ_i π_i Λ_i,  μ <- Λ⁻¹ Σ_i π_i Λ_i μ_i,  π_i = n_i / Σ n_i,
    the product of the N(μ_i, Λ_i⁻¹)^π_i. Where Σ_j ℓ_j is quadratic with the diagonal
    curvature F_i, a first round of all clients whose minima are exact ends, with
    likelihood=population, at the posterior of their pooled data. F_i sees examples one
    by one: with batch normalisation that is another network than the one trained.

    A client adapts as it trains, by `task.finetuning`. Metrics: `loss`, the mean of ℓ
    over the steps.

    Raises:
      ValueError: an option outside its range, or more draws than fit in memory.
    """
    network = BayesianNetwork(task.model, mean_field_normal(0.0, "exp"), options)
    loss = plain_loss(task.model)

    def posterior(server):
        sigma = jax.tree.map(lambda p: p**-0.5, server.precision)
        return mean_field.from_scale(server.mean, sigma, "exp")

    def prior(server):
        return jax.tree.map(
            lambda p: options.precision + options.memory * (p - options.precision),
            server.precision,
        )

    def fit(key, round_index, server, data, training):
        """(μ_i, s_i F_i, mean loss)."""
        train_key, fisher_key = jax.random.split(key)
        population = options.likelihood == "population"
        size = jnp.maximum(data.size, 1)  # of an empty client the prior is left
        stands_for = float(task.samples) if population else size
        pull = optax.tree.scale(1 / stands_for, prior(server))
        near = Quadratic(*trees((server.mean, pull)))
        mean, value = minimise(
            train_key, round_index, server.mean, data, training, loss, lambda _: near
        )
        fisher = squared_gradients(fisher_key, mean, data, training, loss)
        return mean, optax.tree.scale(stands_for / size, fisher), value

    def init(key):
        mean = task.model.init(key)
        return Server(mean, optax.tree.full_like(mean, options.precision))

    def client_update(key, round_index, server, client, data):
        mean, fisher, value = fit(key, round_index, server, data, task.training)
        upload = {"mean": optax.tree.sub(mean, server.mean), "fisher": fisher}
        return ClientOutput(upload, data.size, metrics={"loss": value})

    def statistics(server, upload):
        precision = optax.tree.add(prior(server), upload["fisher"])
        return {**upload, "mean": optax.tree.mul(precision, upload["mean"])}

    def server_update(key, round_index, server, aggregate):
        sums = aggregate.mean()
        precision = optax.tree.add(prior(server), sums["fisher"])
        moved = optax.tree.div(sums["mean"], precision)
        return Server(optax.tree.add(server.mean, moved), precision)

    def personalise(key, server, client, data):
        mean, fisher, _ = fit(key, 0, server, data, task.finetuning)
        return posterior(Server(mean, optax.tree.add(prior(server), fisher)))

    return posterior_estimate(
        "fola",
        network,
        posterior,
        init,
        client_update,
        server_update,
        personalise,
        statistics=statistics,
    )
