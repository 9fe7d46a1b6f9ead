"""What the algorithm files share: loss, prediction, fine-tuning, a frozen head."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, Task
from fedvi.distributions.draws import standard_normal_like
from fedvi.flat import trees
from fedvi.local import Batch, LocalTraining, fold_minibatches, minimise
from fedvi.nn import Model, parameter_count
from fedvi.options import Options, option

__all__ = [
    "Head",
    "OwnModel",
    "at",
    "check_trained",
    "classification_loss",
    "data_loss",
    "finetune",
    "gradient_only",
    "halves_of",
    "log_probabilities",
    "normal_init",
    "plain_loss",
    "point_estimate",
    "split_head",
    "tilted_loss",
    "train_from",
]


class OwnModel(NamedTuple):
    """What a client keeps that has a model of its own, and predicts with it.

    Attributes:
      params: its weights.
      updates: rounds taken part in.
    """

    params: Any
    updates: jax.Array

    @classmethod
    def of(cls, params) -> "OwnModel":
        """Before the first round."""
        return cls(params, jnp.zeros((), jnp.int32))

    def trained(self, params) -> "OwnModel":
        """After one more."""
        return OwnModel(params, self.updates + 1)

    def kept(self) -> tuple[jax.Array, Any]:
        """As `Algorithm.kept` returns it."""
        return self.updates > 0, self.params


class Head(Options):
    """Option of methods whose clients may leave the last layer alone in training."""

    head: Literal["frozen", "trained"] = option(
        "frozen",
        "The network's last layer, until personalisation. frozen: as it was "
        "initialised; trained: learned, sent and averaged like the body, and part of "
        "whatever holds for it (posterior, penalty, dropout).",
        source="FedBABU; FedHB §6",
    )


def split_head(params, options: Head) -> tuple[dict, dict]:
    """(what the clients train, what stays as it is) of `{"body", "head"}`."""
    if options.head == "trained":
        return params, {}
    return {"body": params["body"]}, {"head": params["head"]}


def check_trained(task: Task, options: Head, algorithm: str) -> None:
    """Raises `ValueError` if the model is all head, and the head frozen."""
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    if not parameter_count(split_head(params, options)[0]):
        raise ValueError(
            f"model={task.model.name!r} has no body, and with head='frozen' "
            f"{algorithm} trains nothing else: use a model with hidden layers, or "
            "head='trained'"
        )


def classification_loss(model: Model, params, batch):
    """Loss of `model` with `params` on a `Batch`: cross-entropy, unless it says so."""
    return model.loss(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)


def normal_init(model: Model, key, std: float | None):
    """Parameters from N(0, std²), biases included; None: the model's initialiser."""
    params = model.init(key)
    if std is None:
        return params
    noise = standard_normal_like(key, params)
    return jax.tree.map(lambda z: std * z, noise)


def log_probabilities(model: Model, params, x, mask=None):
    """Log class probabilities `[batch, classes]`."""
    return jax.nn.log_softmax(model.apply(params, x, mask))


def gradient_only(penalty: Callable) -> Callable:
    """`penalty` for descent: its gradient, and the value 0.

    Descent does not ask for the value, and a large sum is slow in XLA on CPU: without
    it a client of pFedBayes' MLP takes 0.84 of the time. A `loss` that adds this to the
    data term is the data term.

    Args:
      penalty: pytrees -> scalar. In reverse mode only.
    """

    @jax.custom_vjp
    def pull(*args):
        value = jax.eval_shape(penalty, *args)
        return jnp.zeros(value.shape, value.dtype)

    def forward(*args):
        return pull(*args), args

    def backward(args, cotangent):
        return jax.vjp(penalty, *args)[1](cotangent)

    pull.defvjp(forward, backward)
    return pull


def at(stacked, index):
    """One entry of every leaf's leading axis: a cluster of several, a chain's state."""
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def halves_of(batch: Batch) -> tuple[Batch, Batch]:
    """(the even examples, the odd ones) of a minibatch: to adapt to, and to ask about.

    Half as many slots each, which costs half of masking them does; of a single slot the
    second half is the same slot, masked.
    """
    if batch.mask.shape[0] < 2:
        return batch, batch._replace(mask=jnp.zeros_like(batch.mask))
    places = jnp.arange(batch.mask.shape[0])
    return tuple(Batch(*(leaf[places[start::2]] for leaf in batch)) for start in (0, 1))


def point_estimate(
    name: str,
    task: Task,
    params_of: Callable,
    init: Callable,
    client_update: Callable,
    server_update: Callable,
    **functions,
) -> Algorithm:
    """The `Algorithm` of a method whose models are single values of the parameters.

    The global model predicts with `params_of(server)`; a client fine-tunes those,
    body and head, and predicts with what comes out.

    Args:
      name: of the method.
      task: model and local training.
      params_of: `(server) -> params`.
      init: of `Algorithm`, like the next two.
      client_update: likewise.
      server_update: likewise.
      **functions: other fields of `Algorithm`, in place of these or beside them.
    """
    model = task.model

    def global_predictive(key, server, x, mask):
        return log_probabilities(model, params_of(server), x, mask)[None]

    def personalise(key, server, client, data):
        return finetune(task, key, params_of(server), data)

    def personal_predictive(key, server, params, x, mask):
        return log_probabilities(model, params, x, mask)[None]

    defaults = {
        "global_predictive": global_predictive,
        "personalise": personalise,
        "personal_predictive": personal_predictive,
    }
    functions = {**defaults, **functions}
    functions.setdefault("population", task.population)
    return Algorithm(name, init, client_update, server_update, **functions)


def train_from(task: Task, key, round_index, params, data, loss=None, near=None):
    """`task.training` of one client from `params`: (trained params, mean loss).

    Args:
      task: model and local training.
      key: as `minimise`, with the next three.
      round_index: likewise.
      params: likewise.
      data: likewise.
      loss: likewise; None: the model's.
      near: optional `Quadratic`, added to the loss.
    """
    loss, near = loss or plain_loss(task.model), trees(near)
    penalty = None if near is None else lambda layers: near
    return minimise(key, round_index, params, data, task.training, loss, penalty)


def finetune(task: Task, key, params, data, near=None):
    """`task.finetuning` of one client from `params`, as `train_from`."""
    tuning = task._replace(training=task.finetuning)
    return train_from(tuning, key, 0, params, data, near=near)[0]


def plain_loss(model: Model, frozen=None) -> Callable:
    """`classification_loss` as `minimise` calls it.

    Args:
      model: the network.
      frozen: groups of its parameters that are not trained; None: all are.
    """

    def loss(key, params, batch):
        whole = params if frozen is None else {**frozen, **params}
        return classification_loss(model, whole, batch)

    return loss


def tilted_loss(model: Model, slope) -> Callable:
    """`plain_loss` with the gradient of loss + <slope, params>, and the loss's value.

    Args:
      model: the network.
      slope: of its parameters' structure; added to every gradient, so that momentum
        carries both alike.
    """
    loss, slope = plain_loss(model), trees(slope)
    tilt = gradient_only(lambda slope, layers: optax.tree.vdot(slope, layers))
    return lambda key, layers, batch: loss(key, layers, batch) + tilt(slope, layers)


def data_loss(key, loss: Callable, params, data, training: LocalTraining):
    """[] a mean loss `(key, params, batch)` as its sum over one client's data."""

    def add(key, total, batch):
        return total + batch.mask.sum() * loss(key, params, batch)

    return fold_minibatches(key, data, training.one_pass(), add, jnp.zeros(()))
