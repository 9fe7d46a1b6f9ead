"""FedABML: a shared prior from which few steps lead to every client's posterior.

Liu, Lv, Zeng, Xu, Wang and Yu, "Personalized federated learning via amortized Bayesian
meta-learning" (2023).
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.alternating import (
    Alternating,
    alternate,
    averaged,
    free_energy,
    learner,
    require_moving,
    require_stable,
    summands,
)
from fedvi.algorithms.common import halves_of, normal_init
from fedvi.algorithms.registry import builder
from fedvi.distributions.mean_field import initial_scale
from fedvi.flat import in_one_piece
from fedvi.local import minimise
from fedvi.options import option
from fedvi.variational import BayesianNetwork, mean_field_normal, posterior_estimate

__all__ = ["FedABML", "Server", "fedabml", "loss_after_adaptation"]


class Server(NamedTuple):
    """Server state: θ, the prior N(m, exp(ν)²) of every client's weights."""

    prior: Any


class FedABML(Alternating):
    """Options of `fedabml`; what is said of q and w holds for φ and θ."""

    theta_update: Literal["alternate", "average", "meta"] = option(
        "average",
        "Readings of the paper. alternate: Alg. 1, θ_i follows φ by gradient steps on "
        "the KL, and is sent; average: φ is sent and θ is the average of the φ_i (with "
        "average=moments the minimiser of Eq. 3.5 for given φ_i); meta: θ_i descends "
        "the loss of φ(θ_i) on every other example of a minibatch, through the plain "
        "gradient steps that made φ from θ_i on the rest (amortised inference as in "
        "§3.3).",
    )
    kl_weight: float = option(
        0.01,
        "λ of Fig. 3. At 0 nothing moves θ_i: not with theta_update=alternate.",
        source="ours, from a held-out part of Fashion-MNIST's training data; the "
        "paper gives no value",
        at_least=0,
        traced=True,
    )
    nu: float = option(
        -4.0,
        "Initial log-scale ν, σ = exp(ν).",
        source="the paper gives none",
        traced=True,
    )
    personal_steps: int = option(
        5, "k, steps of φ on a minibatch.", source="§5.3: 5; Alg. 1: 1", at_least=1
    )
    finetune_steps: int = option(
        5,
        "Steps of φ on a minibatch in personalisation; 1: an epoch is what it is for "
        "FedAvg.",
        evaluation="rows",
        at_least=1,
    )
    global_steps: int = option(
        1,
        "Steps of θ on a minibatch.",
        only_with={"theta_update": "alternate"},
        source="Alg. 1",
        at_least=0,
    )
    inner_learning_rate: float | None = option(
        None,
        "Of φ's steps; None: η, that of training.",
        only_with={"theta_update": "meta"},
        above=0,
        traced=True,
    )
    mc_samples: int = option(
        5, "s, draws that a step's loss is averaged of.", source="§5.3", at_least=1
    )


@builder(FedABML)
def fedabml(task: Task, options: FedABML) -> Algorithm:
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

    Raises:
      ValueError: an option outside its range, or more draws than fit in memory.
    """
    alternates = options.theta_update == "alternate"
    if alternates:
        require_moving("kl_weight", options.kl_weight, "theta_update='alternate'")
    if options.theta_update == "meta" and task.training.batch_size < 2:
        raise ValueError(
            f"batch_size={task.training.batch_size} with theta_update='meta' leaves no "
            "example to ask about: use at least 2"
        )
    _require_stable(task, options)
    family = mean_field_normal(options.nu, "exp")
    network = BayesianNetwork(task.model, family, options)

    def infer(key, round_index, data, training, theta, steps):
        """(φ, θ_i, mean data term) after a client's minibatches (Alg. 1, lines 6 to 9).

        `steps` on a minibatch: of φ, of θ.
        """
        energy = free_energy(network, options.kl_weight, data)
        fresh, rate = learner(theta, training), options.global_learning_rate
        phi, theta, value = alternate(
            key, round_index, data, training, fresh, fresh, energy, steps, rate
        )
        return phi.posterior, theta.posterior, value

    def meta_learn(key, round_index, data, theta):
        """(θ_i, mean data term): descent on the loss after adaptation."""
        objective, _ = free_energy(network, options.kl_weight, data)
        inner = task.training.at_rate(options.inner_learning_rate)
        rate = inner.learning_rate_at(round_index)
        loss = loss_after_adaptation(objective, options.personal_steps, rate)
        training = task.training.at_rate(options.global_learning_rate)
        return minimise(key, round_index, theta, data, training, loss)

    def init(key):
        means = normal_init(task.model, key, options.init_std)
        return Server(family.init(in_one_piece(means)))

    def client_update(key, round_index, server, client, data):
        if options.theta_update == "meta":
            sent, value = meta_learn(key, round_index, data, server.prior)
        else:
            steps = (options.personal_steps, options.global_steps if alternates else 0)
            phi, theta, value = infer(
                key, round_index, data, task.training, server.prior, steps
            )
            sent = theta if alternates else phi
        metrics = {"loss": value, "kl": family.kl(sent, server.prior)}
        moved = optax.tree.sub(sent, server.prior)
        return ClientOutput(moved, 1.0, metrics=metrics)

    def server_update(key, round_index, server, aggregate):
        mean = aggregate.mean()
        return Server(averaged(family, options.average, server.prior, mean))

    def personalise(key, server, client, data):
        steps = (options.finetune_steps, 0)
        return infer(key, 0, data, task.finetuning, server.prior, steps)[0]

    return posterior_estimate(
        "fedabml",
        network,
        lambda server: server.prior,
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalise=personalise,
        statistics=lambda server, upload: summands(
            family, options.average, server.prior, upload
        ),
    )


def _require_stable(task: Task, options: FedABML) -> None:
    """Refuses steps of φ or θ that the KL term would throw off."""
    sigma, update = initial_scale(options.nu, "exp"), options.theta_update
    require_stable(task, options, "kl_weight", sigma, w_moves=update == "alternate")
    if update == "meta":  # φ's steps are plain ones
        plain = task.training.at_rate(options.inner_learning_rate)
        inner = plain._replace(optimizer="sgd", momentum=0.0)
        task = task._replace(training=inner)
        require_stable(task, options, "kl_weight", sigma, w_moves=False)


def loss_after_adaptation(objective, steps: int, rate):
    """`meta`'s loss of θ, `(key, θ, Batch) -> scalar`, as `minimise` calls it.

    φ is made of θ by plain gradient steps on the even examples, and asked about the
    odd ones; the gradient goes through those steps.

    Args:
      objective: L, `(key, φ, θ, Batch) -> scalar`.
      steps: of φ.
      rate: their step size.
    """

    def adapt(key, theta, support):
        def step(i, phi):
            gradients = jax.grad(objective, argnums=1)(
                jax.random.fold_in(key, i), phi, theta, support
            )
            return optax.tree.add_scale(phi, -rate, gradients)

        return jax.lax.fori_loop(0, steps, step, theta)

    def after(key, theta, batch):
        adapt_key, query_key = jax.random.split(key)
        support, query = halves_of(batch)
        phi = adapt(adapt_key, theta, support)
        value = objective(query_key, phi, theta, query)
        # A last batch of one example has none to ask about.
        return jnp.where(query.mask.any(), value, 0.0)

    return after
