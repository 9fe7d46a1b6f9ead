"""The client's side of pFedBayes and its kin: two posteriors, updated in turn."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Task
from fedvi.algorithms.common import gradient_only
from fedvi.local import LocalTraining, check_stable, fold_minibatches, num_steps
from fedvi.options import option
from fedvi.variational import BayesianNetwork, Family, Sampling

__all__ = [
    "Alternating",
    "Learner",
    "alternate",
    "averaged",
    "free_energy",
    "learner",
    "require_moving",
    "require_stable",
    "summands",
]


class Alternating(Sampling):
    """Options of all methods that update two posteriors in turn."""

    init_std: float | None = option(
        None,
        "Standard deviation of the initial means of all weights, biases and "
        "normalisation included; None: the network's initialiser.",
        source="pFedBayes' public code: 0.1",
        above=0,
        traced=True,
    )
    personal_steps: int = option(
        5, "Steps of q on a minibatch.", source="pFedBayes' public code", at_least=1
    )
    global_steps: int = option(
        1, "Steps of w on a minibatch.", source="pFedBayes' public code", at_least=0
    )
    global_learning_rate: float | None = option(
        None, "Of w, in all rounds; None: that of q.", above=0, traced=True
    )
    average: Literal["parameters", "moments"] = option(
        "parameters",
        "Of the uploads. parameters: the mean of (μ, ρ) (pFedBayes Alg. 1); moments: "
        "the minimiser of Σ_i KL(. ‖ w) (Lemma A.2).",
    )


class Learner(NamedTuple):
    """A posterior and its optimiser's moments."""

    posterior: Any
    moments: Any


def learner(posterior, training: LocalTraining) -> Learner:
    """A learner whose optimiser has not moved yet."""
    return Learner(posterior, training.optimizer_at(0).init(posterior))


def require_moving(name: str, weight: float, sent: str) -> None:
    """Raises `ValueError` if the KL term's weight is 0, where nothing else moves w."""
    if not isinstance(weight, jax.core.Tracer) and weight == 0:
        raise ValueError(
            f"{name}={weight} with {sent} sends what nothing moves: give a positive "
            f"{name}, or another {sent.split('=')[0]}"
        )


def require_stable(
    task: Task, options: Alternating, name: str, sigma, w_moves: bool = True
) -> None:
    """Raises `ValueError` where SGD does not follow the KL term of every client.

    weight/n KL(q ‖ w) has the curvature weight / (n σ²) in the means of either. Where
    both move they also chase each other (`check_stable`). It is greatest on the client
    of the fewest examples. The bound is that of the start: it falls where σ shrinks.
    Personalisation is looked at whether or not a client will be personalised from w.

    Args:
      task: model, local training, population.
      options: of the method.
      name: of the one that is the KL term's weight.
      sigma: σ, of all weights at the start.
      w_moves: whether w makes steps of its own in training.
    """
    weight = getattr(options, name)
    examples = max(1, task.smallest or task.samples / max(1, task.clients))
    term = f"{name}={weight} for a client of {examples:.4g} examples"
    curvature = weight / (examples * sigma**2)
    moving = w_moves and options.global_steps > 0
    check_stable(task.training, curvature, term, chased=moving)
    if moving:
        w_training = task.training.at_rate(options.global_learning_rate)
        w_term = f"global_learning_rate: {term}"
        check_stable(w_training, curvature, w_term, chased=True)
    if task.finetuning.epochs > 0:
        check_stable(task.finetuning, curvature, f"in personalisation, {term}")


def summands(family: Family, average: str, near, moved):
    """The statistics of an upload: itself, or the moments of the posterior behind it.

    A posterior travels as `moved`, the difference of its parameters to the broadcast
    one, whatever the server averages: of rounded moments a variance may come out
    negative.
    """
    if average == "parameters":
        return moved
    return family.averages[average].statistics(optax.tree.add(near, moved), near)


def averaged(family: Family, average: str, near, mean):
    """The average posterior, from the mean of the `summands` around `near`."""
    if average == "parameters":
        return optax.tree.add(near, mean)
    return family.averages[average].posterior(mean, near)


def free_energy(
    network: BayesianNetwork,
    weight: float,
    data,
    kl: Callable | None = None,
    complete: Callable = lambda q: q,
) -> tuple[Callable, Callable]:
    """What `alternate` descends, of one client with n examples (pFedBayes Eq. 30, 31).

        objective   -1/b Σ_j E_q[log p(y_j|x_j, θ)] + weight/n KL(q ‖ w)
        divergence  weight/n KL(q ‖ w)

    For descent: the value of the first is its data term, of the second 0.

    Args:
      network: the likelihood.
      weight: of the KL term (ζ, λ).
      data: one client's `ClientData`.
      kl: `(q, w) -> scalar` in place of the family's.
      complete: makes a posterior of all weights of a `q` that has only some.
    """
    pull = gradient_only(kl or network.family.kl)

    def divergence(q, w):
        return weight / jnp.maximum(data.size, 1) * pull(q, w)

    def objective(key, q, w, batch):
        return network.loss(key, complete(q), batch) + divergence(q, w)

    return objective, divergence


def alternate(
    key,
    round_index,
    data,
    training: LocalTraining,
    personal: Learner,
    localised: Learner,
    energy: tuple[Callable, Callable],
    steps: tuple[int, int],
    global_learning_rate: float | None = None,
) -> tuple[Learner, Learner, jax.Array]:
    """Client update of pFedBayes' Alg. 1 (BPFed's and FedABML's are of its form).

    For every minibatch: steps of q on the objective with w held fixed, fresh draws in
    each, then steps of w on the divergence with q held fixed.

    Args:
      key: typed PRNG key.
      round_index: scalar, for the learning-rate schedule.
      data: one client's `ClientData`.
      training: minibatches and optimiser.
      personal: q.
      localised: w, the localised global posterior.
      energy: such as `free_energy` makes: the objective, `(key, q, w, Batch) ->
        scalar`, whose value is only reported; the divergence, `(q, w) -> scalar`.
      steps: on a minibatch: of q, of w.
      global_learning_rate: of w; None: that of `training`.

    Returns:
      (q, w, mean over the minibatches of the objective before q's last step).
    """
    objective, divergence = energy
    optimizer = training.optimizer_at(round_index)
    w_optimizer = training.at_rate(global_learning_rate).optimizer_at(round_index)

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
        q, value = jax.lax.fori_loop(0, steps[0], personal_step, start)
        w = jax.lax.fori_loop(0, steps[1], global_step, w)
        return q, w, total + value

    start = (personal, localised, jnp.zeros(()))
    q, w, total = fold_minibatches(key, data, training, minibatch, start)
    return q, w, total / jnp.maximum(num_steps(data.size, training), 1)


def _descend(optimizer, learner: Learner, gradients) -> Learner:
    updates, moments = optimizer.update(gradients, learner.moments, learner.posterior)
    return Learner(optax.apply_updates(learner.posterior, updates), moments)
