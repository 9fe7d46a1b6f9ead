"""pFedMe: personal models as Moreau envelopes of the clients' losses.

Dinh, Tran and Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS
2020.
"""

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import OwnModel, finetune, plain_loss
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.registry import builder
from fedvi.flat import like_flats, trees
from fedvi.local import Quadratic, check_stable, descent, fold_minibatches, num_steps
from fedvi.options import Options, option

__all__ = ["PFedMe", "envelope", "pfedme"]


class PFedMe(Options):
    """Options of `pfedme`."""

    personal_penalty: float = option(
        15.0,
        "λ, weight of half the squared distance of a client's own model from w.",
        source="pFedBayes §6.2; FedABML §5",
        above=0,
        traced=True,
    )
    personal_steps: int = option(
        5, "K, steps of θ on a minibatch.", source="FedABML §5", at_least=1
    )
    inner_learning_rate: float | None = option(
        None, "η_p, of θ's steps; None: η, that of training.", above=0, traced=True
    )
    beta: float = option(
        1.0, "β, the server's extrapolation.", source="§4", above=0, traced=True
    )


@builder(PFedMe)
def pfedme(task: Task, options: PFedMe) -> Algorithm:
    """Builds pFedMe.

    Client, from w_i = w, on every minibatch (Alg. 1):
      θ   <- K steps of rate η_p on  min_θ f_i(θ) + λ/2 ‖θ - w_i‖²
      w_i <- w_i - η λ (w_i - θ)
    the second line being a gradient step on the Moreau envelope of f_i, since at its
    minimum λ (w_i - θ) = ∇f_i(θ). θ starts at w and goes on from one minibatch to the
    next, as in the public code; it descends by the optimiser of `task.training`, with
    SGD by exact proximal steps. w makes plain steps whatever that is: under Adam, whose
    rates are small, η λ is too, and w hardly follows θ. The code's weight decay of θ is
    left out.
    Server: w <- (1 - β) w + β · uniform average of the w_i. All clients train and some
    are averaged in the paper; here those train that are.
    Prediction: w, or a client's own last θ, which it keeps (before the average, as the
    paper has it); a client that never took part finds its θ by `task.finetuning`.

    Metrics: `loss`, the mean of f_i(θ) over all steps.

    Raises:
      ValueError: a rate η with which w's steps diverge: η λ >= 2.
    """
    plain = task.training._replace(optimizer="sgd", momentum=0.0)
    weight = options.personal_penalty
    term = f"personal_penalty={weight}"
    # w makes plain steps whatever the optimiser of θ is.
    check_stable(plain, weight, term, otherwise="give a smaller personal_penalty")

    def client_update(key, round_index, server, client, data):
        theta, w, value = envelope(task, options, key, round_index, server.params, data)
        moved = optax.tree.sub(w, server.params)
        return ClientOutput(moved, 1.0, client.trained(theta), {"loss": value})

    def server_update(key, round_index, server, aggregate):
        mean = aggregate.mean()
        params = optax.tree.add_scale(server.params, options.beta, mean)
        return server._replace(params=params)

    def personalise(key, server, client, data):
        near = Quadratic(trees(server.params), weight)
        return finetune(task, key, server.params, data, near)

    return fedavg(task)._replace(
        name="pfedme",
        init_client=lambda key, server: OwnModel.of(server.params),
        client_update=client_update,
        server_update=server_update,
        personalise=personalise,
        kept=lambda server, client: client.kept(),
    )


def envelope(task: Task, options: PFedMe, key, round_index, params, data):
    """(θ, w_i, mean loss) after a client's minibatches, from w_i = θ = `params`."""
    weight, loss = options.personal_penalty, plain_loss(task.model)
    inner = task.training.at_rate(options.inner_learning_rate)
    init, descend = descent(inner, round_index)
    rate = task.training.learning_rate_at(round_index)

    def step(key, carry, batch):
        theta, moments, w, total = carry
        near = Quadratic(w, weight)

        def inner_step(i, carry):
            theta, moments, total = carry
            step_key = jax.random.fold_in(key, i)
            value, gradients = jax.value_and_grad(loss, 1)(step_key, theta, batch)
            theta, moments = descend(theta, moments, gradients, near)
            return theta, moments, total + value

        inner = theta, moments, total
        inner = jax.lax.fori_loop(0, options.personal_steps, inner_step, inner)
        theta, moments, total = inner
        w = optax.tree.add_scale(w, rate * weight, optax.tree.sub(theta, w))
        return theta, moments, w, total

    w = trees(params)
    start = (w, init(w), w, jnp.zeros(()))
    theta, _, w, total = fold_minibatches(key, data, task.training, step, start)
    steps = options.personal_steps * num_steps(data.size, task.training)
    theta, w = like_flats(theta, params), like_flats(w, params)
    return theta, w, total / jnp.maximum(steps, 1)
