"""FedABML: a shared prior from which few steps lead to every client's posterior.

Liu, Lv, Zeng, Xu, Wang and Yu, "Personalized federated learning via amortized Bayesian
meta-learning" (2023).
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.alternating import (
    alternate,
    check_steps,
    learner,
    posterior_wire,
)
from fedvi.algorithms.common import gradient_only, normal_init
from fedvi.local import minimise
from fedvi.variational import BayesianNetwork, normal

__all__ = ["Server", "fedabml"]


class Server(NamedTuple):
    """Server state: θ, the prior N(m, exp(ν)²) of every client's weights."""

    prior: Any


def fedabml(
    task: Task,
    *,
    theta_update: Literal["alternate", "average", "meta"] = "average",
    kl_weight: float = 0.01,
    nu: float = -4.0,
    init_std: float | None = None,
    personal_steps: int = 5,
    finetune_steps: int = 5,
    global_steps: int = 1,
    global_learning_rate: float | None = None,
    inner_learning_rate: float | None = None,
    average: Literal["parameters", "moments"] = "parameters",
    sampling: Literal["weight", "local"] = "local",
    mc_samples: int = 5,
    num_samples: int = 10,
    eps_scale: float = 1.0,
) -> Algorithm:
    """Builds FedABML.

    With L(φ, θ) = -1/b Σ_j E_φ[log p(y_j|x_j, w)] + λ/n KL(φ ‖ θ), Eq. 3.5 divided by
    n, a client starts at φ = θ_i = θ (3.8) and, on every minibatch,
      φ   <- φ - η ∇_φ L(φ, θ_i)         (personal_steps times)
      θ_i <- θ_i - η' ∇_θ L(φ, θ_i)      (Alg. 1, line 9)
    Server: θ <- average of what the clients send. A client keeps nothing.
    Prediction: draws of θ; personalised, of φ after `task.finetuning` from θ.
    Metrics: `loss`, the mean of L's first term over the minibatches; `kl`, of what is
    sent from θ, in nats.

    The gradient in line 9 is that of the KL term alone: θ follows φ by η' λ / (n σ²) of
    the way a step. `theta_update` offers three readings of the paper.

    Args:
      task: model, local training, population.
      theta_update: `alternate`, Alg. 1: θ_i follows φ by gradient steps on the KL, and
        is sent; `average`, φ is sent and θ is the `average` of the φ_i (with `moments`
        the minimiser of Eq. 3.5 for given φ_i); `meta`, θ_i descends the loss of φ(θ_i)
        on every other example of a minibatch, through the plain gradient steps that
        made φ from θ_i on the rest (amortised inference as in §3.3).
      kl_weight: λ ≥ 0 of Fig. 3 (the paper gives no value; ours is from a held-out
        part of Fashion-MNIST's training data).
      nu: initial log-scale ν, σ = exp(ν) (the paper gives none).
      init_std: as of `pfedbayes`.
      personal_steps: k, steps of φ on a minibatch (§5.3: 5; Alg. 1: 1).
      finetune_steps: the same in personalisation; 1: an epoch is what it is for FedAvg.
      global_steps: steps of θ on a minibatch (`alternate` only; Alg. 1: 1).
      global_learning_rate: η'; default: η.
      inner_learning_rate: of φ's steps in `meta`; default: η.
      average: as of `pfedbayes`.
      sampling: as of `pfedbayes`.
      mc_samples: s, draws a step (§5.3: 5).
      num_samples: draws of a prediction.
      eps_scale: factor on the noise of every draw.

    Raises:
      ValueError: an option outside its range, or more draws than fit in memory.
    """
    checks.one_of("theta_update", theta_update, ("alternate", "average", "meta"))
    checks.one_of("average", average, ("parameters", "moments"))
    checks.finite("kl_weight", kl_weight)
    checks.at_least("kl_weight", kl_weight, 0)
    checks.finite("nu", nu)
    for name, value in (
        ("init_std", init_std),
        ("inner_learning_rate", inner_learning_rate),
    ):
        if value is not None:
            checks.positive(name, value)
    check_steps(personal_steps, global_steps, global_learning_rate)
    checks.at_least("finetune_steps", finetune_steps, 1)
    if theta_update == "meta" and task.training.batch_size < 2:
        raise ValueError(
            f"batch_size={task.training.batch_size} with theta_update='meta' leaves no "
            "example to ask about: use at least 2"
        )
    if theta_update == "alternate" and kl_weight == 0:
        raise ValueError(
            "kl_weight=0 with theta_update='alternate' sends what nothing moves: give "
            "a positive kl_weight, or another theta_update"
        )
    network = BayesianNetwork(
        task.model, normal(nu, "exp"), sampling, mc_samples, num_samples, eps_scale
    ).check()
    family = network.family

    def loss(data):
        """L(φ, θ) of one client and its KL term, for descent: their values lack it."""
        weight = kl_weight / jnp.maximum(data.size, 1)

        def divergence(phi, theta):
            return weight * gradient_only(family.kl)(phi, theta)

        def value(key, phi, theta, batch):
            return network.loss(key, phi, batch) + divergence(phi, theta)

        return value, divergence

    def infer(key, round, data, training, theta, steps):
        """(φ, θ_i, mean data term) after a client's minibatches (Alg. 1, lines 6 to 9).

        `steps` on a minibatch: of φ, of θ.
        """
        objective, divergence = loss(data)
        phi, theta, value = alternate(
            key,
            round,
            data,
            training,
            learner(theta, training),
            learner(theta, training),
            objective=objective,
            divergence=divergence,
            personal_steps=steps[0],
            global_steps=steps[1],
            global_learning_rate=global_learning_rate,
        )
        return phi.posterior, theta.posterior, value

    def meta_learn(key, round, data, theta):
        """(θ_i, mean data term): descent on the loss after adaptation."""
        objective, _ = loss(data)
        training = task.training
        if global_learning_rate is not None:
            training = training._replace(learning_rate=global_learning_rate)
        rate = inner_learning_rate or task.training.learning_rate_at(round)

        def adapt(key, theta, support):
            def step(i, phi):
                gradients = jax.grad(objective, argnums=1)(
                    jax.random.fold_in(key, i), phi, theta, support
                )
                return jax.tree.map(lambda p, g: p - rate * g, phi, gradients)

            return jax.lax.fori_loop(0, personal_steps, step, theta)

        def after_adaptation(key, theta, batch):
            adapt_key, query_key = jax.random.split(key)
            even = jnp.arange(batch.mask.shape[0]) % 2 == 0
            support = batch._replace(mask=batch.mask & even)
            query = batch._replace(mask=batch.mask & ~even)
            phi = adapt(adapt_key, theta, support)
            value = objective(query_key, phi, theta, query)
            # A last batch of one example has none to ask about.
            return jnp.where(query.mask.any(), value, 0.0)

        return minimise(key, round, theta, data, training, after_adaptation)

    def init(key):
        return Server(family.init(normal_init(task.model, key, init_std)))

    def client_update(key, round, server, client, data):
        if theta_update == "meta":
            sent, value = meta_learn(key, round, data, server.prior)
        else:
            steps = (personal_steps, global_steps if theta_update == "alternate" else 0)
            phi, theta, value = infer(
                key, round, data, task.training, server.prior, steps
            )
            sent = theta if theta_update == "alternate" else phi
        moved = family.kl(sent, server.prior)
        if average == "moments":
            sent = family.moments(sent, server.prior)
        return ClientOutput(sent, 1.0, metrics={"loss": value, "kl": moved})

    def server_update(key, round, server, aggregate):
        prior = aggregate.mean()
        if average == "moments":
            prior = family.from_moments(prior, server.prior)
        return Server(prior)

    def global_predictive(key, server, x, mask):
        return network.predict(key, server.prior, x, mask)

    def personalise(key, server, client, data):
        steps = (finetune_steps, 0)
        return infer(key, 0, data, task.finetuning, server.prior, steps)[0]

    def personal_predictive(key, server, personal, x, mask):
        return network.predict(key, personal, x, mask)

    return Algorithm(
        name="fedabml",
        init=init,
        client_update=client_update,
        server_update=server_update,
        global_predictive=global_predictive,
        personalise=personalise,
        personal_predictive=personal_predictive,
        wire=posterior_wire(family, average, lambda server: server.prior),
    )
