"""The client's side of pFedBayes and its kin: two posteriors, updated in turn."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi import checks
from fedvi.algorithm import Wire
from fedvi.local import LocalTraining, fold_minibatches, num_steps
from fedvi.variational import Family

__all__ = [
    "Learner",
    "alternate",
    "check_steps",
    "check_zeta",
    "learner",
    "posterior_wire",
    "where",
]


class Learner(NamedTuple):
    """A posterior and its optimiser's moments."""

    posterior: Any
    moments: Any


def learner(posterior, training: LocalTraining) -> Learner:
    """A learner whose optimiser has not moved yet."""
    return Learner(posterior, training.optimizer_at(0).init(posterior))


def check_steps(
    personal_steps: int, global_steps: int, global_learning_rate: float | None
) -> None:
    """Raises `ValueError` for an option outside its range."""
    checks.at_least("personal_steps", personal_steps, 1)
    checks.at_least("global_steps", global_steps, 0)
    if global_learning_rate is not None:
        checks.positive("global_learning_rate", global_learning_rate)


def check_zeta(zeta: float, upload: str) -> None:
    """Raises `ValueError` for a ζ below 0, or of 0 where only the KL moves w."""
    checks.finite("zeta", zeta)
    checks.at_least("zeta", zeta, 0)
    if zeta == 0 and upload == "localised":
        raise ValueError(
            "zeta=0 with upload='localised' sends what nothing moves: give a positive "
            "zeta, or upload='personal'"
        )


def posterior_wire(
    family: Family, average: str, broadcast_of: Callable[[Any], Any]
) -> Wire:
    """A posterior travels as the difference of its parameters to the broadcast one.

    Not its moments, whatever the server averages: of rounded ones a variance may come
    out negative.

    Args:
      family: of the posterior.
      average: "parameters" or "moments", what the statistics are.
      broadcast_of: `(server) -> posterior`, that the client was sent.
    """

    def pack(server, statistics):
        near, q = broadcast_of(server), statistics
        if average == "moments":
            q = family.from_moments(statistics, near)
        return jax.tree.map(jnp.subtract, q, near)

    def unpack(server, moved):
        near = broadcast_of(server)
        q = jax.tree.map(jnp.add, near, moved)
        return family.moments(q, near) if average == "moments" else q

    return Wire(pack, unpack)


def alternate(
    key,
    round,
    data,
    training: LocalTraining,
    personal: Learner,
    localised: Learner,
    *,
    objective: Callable,
    divergence: Callable,
    personal_steps: int,
    global_steps: int,
    global_learning_rate: float | None = None,
) -> tuple[Learner, Learner, jax.Array]:
    """Client update of pFedBayes' Alg. 1 (BPFed's and FedABML's are of its form).

    For every minibatch: `personal_steps` steps of q on `objective` with w held fixed,
    fresh draws in each, then `global_steps` steps of w on `divergence` with q held
    fixed.

    Args:
      key: typed PRNG key.
      round: scalar, for the learning-rate schedule.
      data: one client's `ClientData`.
      training: minibatches and optimiser.
      personal: q.
      localised: w, the localised global posterior.
      objective: `(key, q, w, Batch) -> scalar`, with the gradient of Eq. 30 by q; its
        value is only reported, and may be that of the data term.
      divergence: `(q, w) -> scalar`, with the gradient of Eq. 31 by w.
      personal_steps: steps of q on a minibatch (public code: 5).
      global_steps: steps of w on a minibatch (public code: 1).
      global_learning_rate: of w; None: that of `training`.

    Returns:
      (q, w, mean over the minibatches of the objective before q's last step).
    """
    optimizer = training.optimizer_at(round)
    w_training = training
    if global_learning_rate is not None:
        w_training = training._replace(learning_rate=global_learning_rate)
    w_optimizer = w_training.optimizer_at(round)

    def minibatch(key, carry, batch):
        q, w, total = carry

        def personal_step(i, state):
            q, _ = state
            value, gradients = jax.value_and_grad(objective, argnums=1)(
                jax.random.fold_in(key, i), q.posterior, w.posterior, batch
            )
            return _descend(optimizer, q, gradients), value

        def global_step(_, w):
            gradients = jax.grad(divergence, argnums=1)(q.posterior, w.posterior)
            return _descend(w_optimizer, w, gradients)

        start = (q, jnp.zeros(()))
        q, value = jax.lax.fori_loop(0, personal_steps, personal_step, start)
        w = jax.lax.fori_loop(0, global_steps, global_step, w)
        return q, w, total + value

    start = (personal, localised, jnp.zeros(()))
    q, w, total = fold_minibatches(key, data, training, minibatch, start)
    return q, w, total / jnp.maximum(num_steps(data.size, training), 1)


def where(condition, a, b):
    """Pytree `a` if the scalar condition holds, else `b`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def _descend(optimizer, learner: Learner, gradients) -> Learner:
    updates, moments = optimizer.update(gradients, learner.moments, learner.posterior)
    return Learner(optax.apply_updates(learner.posterior, updates), moments)
