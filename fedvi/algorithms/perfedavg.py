"""Per-FedAvg: an initialisation from which a gradient step suits every client.

Fallah, Mokhtari and Ozdaglar, "Personalized federated learning with theoretical
guarantees: a model-agnostic meta-learning approach", NeurIPS 2020.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import gradient_only, halves_of, plain_loss, train_from
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.registry import builder
from fedvi.options import Options, option

__all__ = ["PerFedAvg", "meta_loss", "perfedavg"]


class PerFedAvg(Options):
    """Options of `perfedavg`."""

    gradient: Literal["first_order", "hessian_free", "exact"] = option(
        "hessian_free",
        "Of the loss after a step of adaptation. first_order leaves its second "
        "derivatives out, hessian_free takes them from a central difference of "
        "gradients, exact from differentiation through the step.",
        source="FedABML §5",
    )
    inner_learning_rate: float | None = option(
        0.01,
        "α, of the step of adaptation; None: that of training.",
        source="BPFed's public code on CIFAR-10",
        above=0,
        traced=True,
    )
    difference: float = option(
        1e-3,
        "δ: how far, in gradients, the two points lie on either side. A ReLU that "
        "switches between them adds its jump over 2δ.",
        only_with={"gradient": "hessian_free"},
        above=0,
        traced=True,
    )


@builder(PerFedAvg)
def perfedavg(task: Task, options: PerFedAvg) -> Algorithm:
    """Builds Per-FedAvg.

    A client descends, by `task.training`, the loss after a step,
      F(w) = f(w'; B'),  w' = w - α ∇f(w; B)
      ∇F = (I - α ∇²f(w; B)) ∇f(w'; B')
    on the even examples B and the odd ones B' of every minibatch (the paper draws
    three; with ∇² on B too it is exactly the gradient of this F).
    first_order: ∇f(w'; B'); hessian_free: ∇²f(w) g as
    (∇f(w + δ g) - ∇f(w - δ g)) / 2δ. Server: uniform mean of those who have two
    examples or more.
    Personalisation: `task.finetuning` from w (in the paper one step of rate α).

    Metrics: `loss`, the mean of F over the steps; one without an odd example counts 0.

    Raises:
      ValueError: minibatches of one example, which leave none to ask about.
    """
    if task.training.batch_size < 2:
        raise ValueError(
            f"batch_size={task.training.batch_size} leaves no example to ask about "
            "after the step of adaptation: use at least 2"
        )

    def client_update(key, round_index, server, client, data):
        start, inner = server.params, task.training.at_rate(options.inner_learning_rate)
        rate = inner.learning_rate_at(round_index)
        loss = meta_loss(plain_loss(task.model), options, rate)
        params, value = train_from(task, key, round_index, start, data, loss)
        moved = optax.tree.sub(params, start)
        weight = jnp.where(data.size > 1, 1.0, 0.0)
        return ClientOutput(moved, weight, metrics={"loss": value})

    return fedavg(task)._replace(name="perfedavg", client_update=client_update)


def meta_loss(loss: Callable, options: PerFedAvg, rate) -> Callable:
    """F, `(key, w, Batch) -> scalar`, whose gradient is the one that is asked for.

    Args:
      loss: f, as of `minimise`.
      options: which gradient, and δ.
      rate: α.
    """
    kind = options.gradient
    gradient_of = jax.grad(loss, argnums=1)

    def after_a_step(key, params, batch):
        step_key, query_key = jax.random.split(key)
        support, query = halves_of(batch)
        # A last batch of one example has none to ask about.
        asked = query.mask.any()

        gradients = gradient_of(step_key, params, support)
        if kind != "exact":
            gradients = jax.lax.stop_gradient(gradients)
        adapted = optax.tree.add_scale(params, -rate, gradients)
        value = loss(query_key, adapted, query) * asked
        if kind != "hessian_free":
            return value
        still = jax.lax.stop_gradient(params)
        outer = gradient_of(query_key, jax.lax.stop_gradient(adapted), query)
        delta = options.difference
        sides = [
            gradient_of(step_key, optax.tree.add_scale(still, side, outer), support)
            for side in (delta, -delta)
        ]
        curved = optax.tree.scale(-rate / (2 * delta) * asked, optax.tree.sub(*sides))
        return value + gradient_only(optax.tree.vdot)(curved, params)

    return after_a_step
