"""FedBE: an ensemble of models drawn near the clients', distilled at the server.

Chen and Chao, "FedBE: making Bayesian model ensemble applicable to federated learning",
ICLR 2021.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, Task
from fedvi.algorithms.common import at, log_probabilities
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.registry import builder
from fedvi.data import ClientData
from fedvi.distributions.draws import standard_normal_like
from fedvi.flat import like_flats, trees
from fedvi.local import iterates, num_steps
from fedvi.options import Options, option

__all__ = ["FedBE", "Server", "fedbe"]


class Server(NamedTuple):
    """Server state.

    Attributes:
      params: the global model.
      inputs: [examples, ...] raw and without labels; not sent.
    """

    params: Any
    inputs: Any


class FedBE(Options):
    """Options of `fedbe`."""

    teacher_draws: int = option(
        10,
        "Teachers that are drawn, beside the average and the clients.",
        source="public code; FedHB H.1: three",
        at_least=0,
    )
    draw_scale: float = option(
        0.1,
        "Factor on the draws' standard deviation.",
        source="public code; 1 in the paper",
        at_least=0,
        traced=True,
    )
    distillation_epochs: int = option(
        20, "Passes over the unlabelled inputs.", source="the paper", at_least=1
    )
    distillation_learning_rate: float = option(
        1e-3, "Of the distillation.", source="the paper", above=0, traced=True
    )


@builder(FedBE)
def fedbe(task: Task, options: FedBE) -> Algorithm:
    """Builds FedBE.

    Clients are FedAvg's, of updates Δ_i. With π_i = n_i / Σ n_i the server's teachers
    are the average θ + Σ π_i Δ_i, the clients' θ + Δ_i, and draws
      θ + r (m + draw_scale · s ε),  ε ~ N(0, I),
    of each layer: m and s² mean and variance by π of the Δ_i / ‖Δ_i‖, r = Σ π_i ‖Δ_i‖.
    The average is trained on the mean of their probabilities of the unlabelled inputs
    (cross-entropy, the optimiser and batches of `task.training`, no augmentation);
    θ <- mean of its iterates over the second half of the steps (SWA, whose cyclic rate
    is a constant one here). The public code's loss is also divided by the number of
    classes, so that its rate of 0.001 is a tenth of that here with ten of them, and it
    sharpens the teachers' mean (temperature 0.5).

    Metrics: `loss`, the mean over a client's steps.

    Raises:
      ValueError: an option outside its range, or a task without unlabelled inputs.
    """
    if task.unlabelled is None:
        raise ValueError(
            "task.unlabelled=None: fedbe distils on unlabelled inputs that the server "
            "has: give Task.of(..., unlabelled=1000), or --unlabelled=1000"
        )
    training = task.training._replace(
        epochs=options.distillation_epochs,
        learning_rate=options.distillation_learning_rate,
        steps=None,
        augment=None,
    )

    def init(key):
        return Server(task.model.init(key), jnp.asarray(task.unlabelled))

    def server_update(key, round_index, server, aggregate):
        draw_key, train_key = jax.random.split(key)
        model, start, inputs = task.model, trees(server.params), server.inputs
        uploads, weight = trees(aggregate.uploads), aggregate.weight
        moved, counts = teachers(draw_key, uploads, weight, options)

        def taught(moved):
            teacher = optax.tree.add(start, moved)
            return probabilities(model, teacher, inputs, training.batch_size)

        labels = jnp.tensordot(counts, jax.lax.map(taught, moved), 1) / counts.sum()
        average = optax.tree.add(start, at(moved, 0))
        student = distil(train_key, model, average, inputs, labels, training)
        return server._replace(params=like_flats(student, server.params))

    return fedavg(task)._replace(
        name="fedbe",
        init=init,
        server_update=server_update,
        broadcast=lambda server: server._replace(inputs=()),
        reduce="stack",
    )


def teachers(key, uploads, weight, options: FedBE):
    """The teachers' differences to the broadcast, the average's first.

    Args:
      key: typed PRNG key.
      uploads: Δ_i, leaves `[cohort, ...]`.
      weight: [cohort], 0 for who sent nothing.
      options: of the draws.

    Returns:
      (leaves `[1 + cohort + teacher_draws, ...]`, 1 for a teacher and 0 for a client
      that sent nothing).
    """
    share, draws = weight / weight.sum(), options.teacher_draws

    def mean(stacked):
        return jnp.tensordot(share, stacked, 1)

    def layer(moved, noise):
        rows = moved.reshape(len(share), -1)
        norms = jnp.linalg.norm(rows, axis=1)
        unit = rows / jnp.where(norms > 0, norms, 1.0)[:, None]
        centre = mean(unit)
        spread = jnp.sqrt(mean((unit - centre[None]) ** 2))
        noise = noise.reshape(draws, rows.shape[1])
        drawn = centre[None] + options.draw_scale * spread[None] * noise
        found = jnp.concatenate([mean(rows)[None], rows, mean(norms) * drawn])
        return found.reshape(-1, *moved.shape[1:])

    shapes = jax.tree.map(
        lambda u: jax.ShapeDtypeStruct((draws, *u.shape[1:]), u.dtype), uploads
    )
    noise = standard_normal_like(key, shapes)
    counts = jnp.concatenate([jnp.ones(1), weight > 0, jnp.ones(draws)])
    return jax.tree.map(layer, uploads, noise), counts


def probabilities(model, params, x, batch_size: int):
    """[examples, classes] of one teacher, a batch at a time."""
    size = min(batch_size, len(x))
    padding = [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1)
    batches = jnp.pad(x, padding, mode="edge").reshape(-1, size, *x.shape[1:])
    real = (jnp.arange(batches.shape[0] * size) < len(x)).reshape(-1, size)

    def one(batch):
        return jnp.exp(log_probabilities(model, params, *batch))

    found = jax.lax.map(one, (batches, real))
    return found.reshape(-1, found.shape[-1])[: len(x)]


def distil(key, model, params, inputs, labels, training):
    """The mean of a student's iterates over the second half of its steps.

    Args:
      key: typed PRNG key.
      model: the network.
      params: where the student starts, layers.
      inputs: [examples, ...] raw.
      labels: [examples, classes] probabilities.
      training: of the student.
    """
    data = ClientData(inputs, labels, jnp.int32(len(inputs)))
    first = num_steps(data.size, training) // 2
    count = num_steps(data.size, training) - first

    def loss(key, params, batch):
        outputs = model.apply(params, batch.x, batch.mask)
        losses = optax.softmax_cross_entropy(outputs, batch.y)
        return jnp.where(batch.mask, losses, 0.0).sum() / batch.mask.sum()

    def add(params, seen):
        step, mean = seen
        share = jnp.where(step >= first, 1 / count, 0.0)
        return step + 1, optax.tree.add_scale(mean, share, params)

    seen = 0, optax.tree.zeros_like(params)
    _, _, (_, mean) = iterates(key, 0, params, data, training, loss, see=add, seen=seen)
    return mean
