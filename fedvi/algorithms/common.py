"""What the algorithm files share: the classification loss, prediction, fine-tuning."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.algorithm import Task
from fedvi.distributions.draws import standard_normal_like
from fedvi.local import minimise
from fedvi.nn import Model

__all__ = [
    "classification_loss",
    "finetune",
    "gradient_only",
    "log_probabilities",
    "normal_init",
    "predict_with_params",
    "quadratic_penalty",
    "quadratic_pull",
    "require_body",
]


def require_body(task: Task, algorithm: str) -> None:
    """Raises `ValueError` if the model is all head, which `algorithm` freezes."""
    shapes = jax.eval_shape(task.model.init, jax.random.key(0))
    if not jax.tree.leaves(shapes["body"]):
        raise ValueError(
            f"model={task.model.name!r} has no body and {algorithm} trains only the "
            "body: use a model with hidden layers, or fedavg or fedprox"
        )


def classification_loss(model: Model, params, batch):
    """Loss of `model` with `params` on a `Batch`: cross-entropy, unless it says so."""
    return model.loss(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)


def normal_init(model: Model, key, std: float | None):
    """Parameters from N(0, std²), biases included; None: the model's initialiser.

    Raises:
      ValueError: `std` is not positive.
    """
    params = model.init(key)
    if std is None:
        return params
    checks.positive("init_std", std)
    noise = standard_normal_like(key, params)
    return jax.tree.map(lambda z: std * z, noise)


def log_probabilities(model: Model, params, x, mask=None):
    """Log class probabilities `[batch, classes]`."""
    return jax.nn.log_softmax(model.apply(params, x, mask))


def quadratic_penalty(params, centre, precision):
    """½ Σ_j w_j (θ_j - μ_j)² over a pytree.

    Args:
      params: θ.
      centre: μ, same structure.
      precision: w, same structure, or one number for all.
    """
    precision = _like(precision, params)
    terms = jax.tree.map(
        lambda p, c, w: jnp.sum(w * jnp.square(p - c)), params, centre, precision
    )
    return 0.5 * jax.tree.reduce(jnp.add, terms, jnp.zeros(()))


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


quadratic_pull = gradient_only(quadratic_penalty)
"""`quadratic_penalty` for descent."""


def _like(precision, params):
    """One number for every leaf, unless there is a tree of them already."""
    if isinstance(precision, (dict, list, tuple)):
        return precision
    return jax.tree.map(lambda _: precision, params)


def finetune(task: Task, key, params, data):
    """Trains body and head on one client's data by `task.finetuning`.

    Args:
      task: model and hyper-parameters.
      key: typed PRNG key.
      params: `{"body": ..., "head": ...}` to start from.
      data: the client's `ClientData`.
    """

    def loss(key, params, batch):
        return classification_loss(task.model, params, batch)

    return minimise(key, 0, params, data, task.finetuning, loss)[0]


def predict_with_params(model: Model) -> Callable:
    """The `personal_predictive` of an algorithm whose personal model is its params."""

    def personal_predictive(key, server, params, x, mask):
        return log_probabilities(model, params, x, mask)[None]

    return personal_predictive
