"""FedEM: every client's data are a mixture of the same distributions.

Marfoq et al., "Federated multi-task learning under a mixture of distributions",
NeurIPS 2021.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import log_probabilities
from fedvi.algorithms.registry import builder
from fedvi.local import fold_minibatches, minimise
from fedvi.nn import Model
from fedvi.options import Options, option

__all__ = ["FedEM", "Server", "fedem", "responsibilities"]


class Server(NamedTuple):
    """Server state.

    Attributes:
      components: θ_m, leaves `[components, ...]`.
      weights: [components], mean of the participants' π_i, weighted by n_i.
    """

    components: Any
    weights: jax.Array


class FedEM(Options):
    """Options of `fedem`."""

    components: int = option(3, "M, models.", source="§5", at_least=1)
    em_steps: int = option(
        20,
        "EM steps on a client's mixture weights before prediction, models fixed.",
        at_least=0,
    )
    adapt: Literal["weights", "all"] = option(
        "weights",
        "What a client personalises. weights: π_i; all: then its own copies of the "
        "models too, by the weighted loss.",
        source="the paper has no fine-tuning",
    )


@builder(FedEM)
def fedem(task: Task, options: FedEM) -> Algorithm:
    """Builds FedEM.

    Client, ℓ_jm = -log p(y_j|x_j, θ_m):
      q_jm ∝ π_im exp(-ℓ_jm)                 (E step; of all its n_i examples)
      π_i  <- 1/n_i Σ_j q_jm                  (kept by the client, uniform at first)
      θ_im <- descent on 1/n_i Σ_j q_jm ℓ_jm  from θ_m, for every m
    Server: θ_m <- Σ_i n_i θ_im / Σ_i n_i, and the same mean of the π_i.
    Prediction: Σ_m π_m p(y|x, θ_m), global with the server's π, personal with the
    client's: `em_steps` of the first two lines from the π_i that it kept.

    With M = 1 it is FedAvg. The models start from different initialisations: equal
    ones would stay equal.

    Metrics: `loss`, the mean over the local steps of the weighted loss, summed over m;
    `share_m`, the mean π_im.
    """
    models = range(options.components)

    def init(key):
        components = jax.vmap(task.model.init)(jax.random.split(key, len(models)))
        return Server(components, jnp.full(len(models), 1 / len(models)))

    def losses(key, components, data):
        """[capacity, components] ℓ_jm."""

        def one(theta):
            return example_losses(task, key, theta, data)

        return jax.lax.map(one, components).T

    def client_update(key, round_index, server, client, data):
        q, pi = expectation(losses(key, server.components, data), client, data.size)
        start, training = server.components, task.training
        trained, values = maximisation(task, key, round_index, start, q, data, training)
        upload = optax.tree.sub(Server(trained, pi), server)
        shares = {f"share_{m}": pi[m] for m in models}
        metrics = {"loss": values.sum(), **shares}
        return ClientOutput(upload, data.size, pi, metrics)

    def personalise(key, server, client, data):
        found = losses(key, server.components, data)

        def step(_, pi):
            return expectation(found, pi, data.size)[1]

        pi = jax.lax.fori_loop(0, options.em_steps, step, client)
        if options.adapt == "weights":
            return Server((), pi)
        q, _ = expectation(found, pi, data.size)
        start, training = server.components, task.finetuning
        own, _ = maximisation(task, key, 0, start, q, data, training)
        return Server(own, pi)

    def server_update(key, round_index, server, aggregate):
        new = optax.tree.add(server, aggregate.mean())
        # Rounding, a codec's above all, may take a share that vanishes below 0.
        weights = jnp.maximum(new.weights, 0)
        return new._replace(weights=weights / weights.sum())

    def global_predictive(key, server, x, mask):
        return mixture(task.model, *server, x, mask)

    def personal_predictive(key, server, personal, x, mask):
        own = server if options.adapt == "weights" else personal
        return mixture(task.model, own.components, personal.weights, x, mask)

    return Algorithm(
        "fedem",
        init,
        client_update,
        server_update,
        global_predictive,
        personalise,
        personal_predictive,
        init_client=lambda key, server: jnp.full(len(models), 1 / len(models)),
    )


def mixture(model: Model, components, pi, x, mask):
    """[1, batch, classes] log Σ_m π_m p(y|x, θ_m)."""

    def one(params):
        return log_probabilities(model, params, x, mask)

    every = jax.lax.map(one, components)
    return jax.nn.logsumexp(jnp.log(pi)[:, None, None] + every, axis=0)[None]


def example_losses(task: Task, key, params, data):
    """[capacity] -log p(y_j|x_j, θ), 0 of padding; augmentation is left out."""

    def note(key, losses, batch):
        found = _losses(task, params, batch, data)
        return losses.at[batch.y].add(jnp.where(batch.mask, found, 0.0))

    zeros = jnp.zeros(data.y.shape)
    return fold_minibatches(key, _numbered(data), task.training.one_pass(), note, zeros)


def expectation(losses, pi, size):
    """(q [capacity, components], π [components]): E step, and its mean.

    Args:
      losses: [capacity, components] ℓ_jm.
      pi: [components] π.
      size: n, of which examples the mean is; of an empty client π stays.
    """
    q = responsibilities(losses, pi)
    real = jnp.arange(len(q)) < size
    total = jnp.where(real[:, None], q, 0.0).sum(0)
    return q, jnp.where(size > 0, total / jnp.maximum(size, 1), pi)


def responsibilities(losses, pi):
    """[examples, components] q_jm ∝ π_m exp(-ℓ_jm)."""
    return jax.nn.softmax(jnp.log(pi)[None] - losses, axis=-1)


def maximisation(task: Task, key, round_index, components, q, data, training):
    """M step, (θ_im, mean losses [components]): descent on 1/n Σ_j q_jm ℓ_jm."""

    def one(own):
        params, q = own

        def loss(key, params, batch):
            weighted = q[batch.y] * _losses(task, params, batch, data)
            total = jnp.where(batch.mask, weighted, 0.0).sum()
            return total / jnp.maximum(batch.mask.sum(), 1)

        return minimise(key, round_index, params, _numbered(data), training, loss)

    return jax.lax.map(one, (components, q.T))


def _numbered(data):
    """The data with each example's place for its label, by which q is found."""
    return data._replace(y=jnp.arange(data.y.shape[0]))


def _losses(task: Task, params, batch, data):
    """[batch] the model's loss of each example."""
    outputs = task.model.apply(params, batch.x, batch.mask)

    def one(output, place):
        return task.model.loss(output[None], data.y[place][None], jnp.ones(1, bool))

    return jax.vmap(one)(outputs, batch.y)
