"""What the algorithm files share: loss, prediction, fine-tuning, a frozen head."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedvi.algorithm import Algorithm, Task
from fedvi.distributions.draws import standard_normal_like
from fedvi.local import LocalTraining, fold_minibatches, minimise
from fedvi.nn import Model, parameter_count
from fedvi.options import Options, option

__all__ = [
    "Head",
    "check_trained",
    "classification_loss",
    "data_loss",
    "finetune",
    "gradient_only",
    "log_probabilities",
    "normal_init",
    "plain_loss",
    "point_estimate",
    "split_head",
    "train_from",
]


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


def train_from(task: Task, key, round_index, params, data):
    """`task.training` of one client from `params`: (trained params, mean loss)."""
    return minimise(
        key, round_index, params, data, task.training, plain_loss(task.model)
    )


def finetune(task: Task, key, params, data):
    """`task.finetuning` of one client from `params`, body and head."""
    loss = plain_loss(task.model)
    return minimise(key, 0, params, data, task.finetuning, loss)[0]


def plain_loss(model: Model) -> Callable:
    """`classification_loss` as `minimise` calls it."""
    return lambda key, params, batch: classification_loss(model, params, batch)


def data_loss(key, loss: Callable, params, data, training: LocalTraining):
    """[] a mean loss `(key, params, batch)` as its sum over one client's data."""

    def add(key, total, batch):
        return total + batch.mask.sum() * loss(key, params, batch)

    return fold_minibatches(key, data, training.one_pass(), add, jnp.zeros(()))
