"""FedPop and FedSOUL: a random head for each client over a shared body.

Kotelevskii, Vono, Moulines and Durmus, "FedPop: a Bayesian approach for personalised
federated learning", NeurIPS 2022, whose first version was called FedSOUL.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import at, log_probabilities, plain_loss, point_estimate
from fedvi.algorithms.partial_sharing import PersonalPart, split
from fedvi.algorithms.registry import builder
from fedvi.distributions.draws import standard_normal_like
from fedvi.flat import trees
from fedvi.local import LocalTraining, fold_minibatches, minimise
from fedvi.options import inherited, option

__all__ = ["Client", "FedPop", "FedSOUL", "fedpop", "fedsoul"]

Sampler = Literal["sgld", "optimizer"]


class Client(NamedTuple):
    """What a client keeps.

    Attributes:
      chain: last states of z_i, leaves `[samples, ...]`; the last is the current one.
      updates: rounds taken part in.
    """

    chain: Any
    updates: jax.Array


class FedPop(PersonalPart):
    """Options of `fedpop`."""

    sampler: Sampler = option(
        "optimizer",
        "Of z. sgld: Langevin steps (the paper's); optimizer: that of the local "
        "training on U/n, without noise (the public code, with Adam).",
    )
    sampler_steps: int = option(
        10, "Steps of z on a visit, a minibatch each.", source="public code", at_least=1
    )
    samples: int = option(
        5,
        "Last states of z that are kept, for the loss of the shared weights and the "
        "predictions to average over; at most sampler_steps.",
        source="public code",
        at_least=1,
    )
    body_steps: int = option(
        5,
        "Steps of the shared weights on a visit, a minibatch each.",
        source="public code",
        at_least=1,
    )
    sampler_step_size: float = option(
        1e-4,
        "γ of the Langevin steps. Below 2 over U's largest second derivative, which "
        "grows with the client's data.",
        only_with={"sampler": "sgld"},
        above=0,
        traced=True,
    )
    prior_std: float = option(
        1.0,
        "σ of the prior of z, fixed.",
        source="public code: softplus(0.54)",
        above=0,
        traced=True,
    )


class FedSOUL(FedPop):
    """Options of `fedsoul`."""

    sampler: Sampler = inherited(FedPop, "sampler", "sgld", "the paper, Algorithm 1")


@builder(FedPop)
def fedpop(task: Task, options: FedPop) -> Algorithm:
    """Builds FedPop.

    The weights are shared φ and a client's own z_i ~ N(0, σ² I); with its potential
      U(z) = ‖z‖² / 2σ² + Σ_j ℓ_j(φ, z)
    (Σ_j estimated by n times a minibatch's mean) a client's visit is
      z <- z - γ ∇U(z) + √(2γ) ξ, `sampler_steps` times (sgld), or the optimiser's
        steps on U/n (optimizer), from where z stopped;
      φ_i <- φ, `body_steps` steps of `task.training` on the mean of the losses under
        the last `samples` z.
    Server: φ <- φ + Σ_i n_i (φ_i - φ) / Σ_i n_i over the participants, as the shared
    objective Σ_i Σ_j ℓ_ij weighs a client by its data; the public code instead takes
    Adam's steps client by client, which is no function of a sum. It also keeps the
    moments of z's optimiser between visits, which begin afresh here.

    A client predicts with its `samples` z and the broadcast φ, an average over the
    chain as in training; the public code takes the last z alone (`samples=1`). A client
    that never took part runs a chain of as many minibatches as `task.finetuning` takes,
    and of at least `samples` epochs, or steps where `task.finetuning` counts those.
    The global model has z where all chains start.

    Metrics: `loss`, the mean over the steps of φ; `norm`, ‖z‖ at the end.

    Raises:
      ValueError: an option outside its range, more kept states than steps, or a split
        that leaves no shared or no personalised weight.
    """
    return _build("fedpop", task, options)


@builder(FedSOUL)
def fedsoul(task: Task, options: FedSOUL) -> Algorithm:
    """Builds FedSOUL: `fedpop` whose heads are drawn by Langevin steps.

    The paper's server also learns the prior of z, which is fixed here.

    Raises:
      ValueError: as `fedpop`.
    """
    return _build("fedsoul", task, options)


def _build(name: str, task: Task, options: FedPop) -> Algorithm:
    if options.samples > options.sampler_steps:
        raise ValueError(
            f"samples={options.samples} states of z do not come from "
            f"sampler_steps={options.sampler_steps}: use fewer, or more steps"
        )
    model = split(task.model, options.personal_part)
    task = task._replace(model=model, finetuning=_newcomers(task, options.samples))

    def sample(key, round_index, data, training, shared, chain):
        loss = plain_loss(model, {"shared": trees(shared)})
        potential = potential_of(
            lambda z, batch: loss(key, {"personal": z}, batch), options.prior_std, data
        )
        return run_chain(key, round_index, data, training, potential, chain, options)

    def init_client(key, server):
        def repeat(z):
            return jnp.broadcast_to(z, (options.samples, *z.shape))

        # All states are where the chain starts.
        chain = jax.tree.map(repeat, server["personal"])
        return Client(chain, jnp.zeros((), jnp.int32))

    def client_update(key, round_index, server, client, data):
        sample_key, train_key = jax.random.split(key)
        shared = server["shared"]
        visit = task.training._replace(steps=options.sampler_steps)
        chain = sample(sample_key, round_index, data, visit, shared, client.chain)

        def loss(key, shared, batch):
            one = plain_loss(model, {"shared": shared})
            # The body, of which there is one, is computed once.
            losses = jax.vmap(lambda z: one(key, {"personal": z}, batch))(trees(chain))
            return losses.mean()

        visit = task.training._replace(steps=options.body_steps)
        learned, value = minimise(train_key, round_index, shared, data, visit, loss)
        moved = optax.tree.sub(learned, shared)
        metrics = {"loss": value, "norm": optax.tree.norm(at(chain, -1))}
        return ClientOutput(
            moved, data.size, Client(chain, client.updates + 1), metrics
        )

    def server_update(key, round_index, server, aggregate):
        shared = optax.tree.add(server["shared"], aggregate.mean())
        return {**server, "shared": shared}

    def personalise(key, server, client, data):
        return sample(key, 0, data, task.finetuning, server["shared"], client.chain)

    def personal_predictive(key, server, chain, x, mask):
        def one(z):
            params = {"personal": z, "shared": server["shared"]}
            return log_probabilities(model, params, x, mask)

        return jax.vmap(one)(chain)

    return point_estimate(
        name,
        task,
        params_of=lambda server: server,
        init=model.init,
        init_client=init_client,
        client_update=client_update,
        server_update=server_update,
        personalise=personalise,
        personal_predictive=personal_predictive,
        broadcast=lambda server: {**server, "personal": ()},
        kept=lambda server, client: (client.updates > 0, client.chain),
        global_model=False,
    )


def _newcomers(task: Task, samples: int) -> LocalTraining:
    """`task.finetuning`, of as many steps as leave no copy of a chain's start."""
    visit = task.finetuning
    if visit.steps is None and not visit.epochs:
        return visit
    # An epoch is at least one step.
    steps = visit.steps and max(visit.steps, samples)
    return visit._replace(epochs=max(visit.epochs, samples), steps=steps)


def potential_of(loss, std, data):
    """U/n as a minibatch estimates it, `(z, batch) -> scalar`.

    Args:
      loss: `(z, batch) -> scalar`, mean of the examples' losses.
      std: σ of the prior.
      data: one client's `ClientData`.
    """

    def potential(z, batch):
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(z))
        return loss(z, batch) + squares / (2 * std**2 * data.size)

    return potential


def run_chain(
    key, round_index, data, training: LocalTraining, potential, chain, options
):
    """The chain's next states, a step a minibatch, from its last one.

    Args:
      key: typed PRNG key.
      round_index: scalar, for the optimiser's rate.
      data: one client's `ClientData`.
      training: minibatches; the optimiser of sampler="optimizer".
      potential: U/n, `(z, batch) -> scalar`, of the layers.
      chain: z's last states, leaves `[samples, ...]`.
      options: `FedPop`.
    """
    optimizer = training.optimizer_at(round_index)
    langevin = options.sampler == "sgld"

    def step(key, carry, batch):
        chain, moments = carry
        z = at(chain, -1)
        gradient = jax.grad(lambda z: potential(trees(z), batch))(z)
        if langevin:
            rate = options.sampler_step_size
            noise = standard_normal_like(key, z)

            def move(g, e):
                return jnp.sqrt(2 * rate) * e - rate * data.size * g

            updates = jax.tree.map(move, gradient, noise)
        else:
            updates, moments = optimizer.update(gradient, moments, z)
        z = optax.apply_updates(z, updates)
        chain = jax.tree.map(
            lambda c, one: jnp.concatenate([c[1:], one[None]]), chain, z
        )
        return chain, moments

    start = chain, () if langevin else optimizer.init(at(chain, -1))
    return fold_minibatches(key, data, training, step, start)[0]
