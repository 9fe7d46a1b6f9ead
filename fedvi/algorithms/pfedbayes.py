"""pFedBayes: every client's posterior near a global one, by variational inference.

Zhang et al., "Federated learning via variational Bayesian inference: personalization,
sparsity and clustering" (2023), §3; first in "Personalized federated learning via
variational Bayesian inference" (ICML 2022).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.alternating import (
    Alternating,
    Learner,
    alternate,
    averaged,
    free_energy,
    initial_means,
    learner,
    require_moving,
    summands,
)
from fedvi.algorithms.registry import builder
from fedvi.options import option
from fedvi.variational import BayesianNetwork, normal, posterior_estimate

__all__ = ["Client", "PFedBayes", "Server", "pfedbayes", "pfedbayes_of"]


class Server(NamedTuple):
    """Server state: w, the global posterior."""

    posterior: Any


class Client(NamedTuple):
    """What a client keeps.

    Attributes:
      personal: q_i and its moments; never overwritten by the server.
      moments: of the localised global's optimiser, whose posterior is the broadcast.
      updates: rounds taken part in.
    """

    personal: Learner
    moments: Any
    updates: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PFedBayes(Alternating):
    """Options of `pfedbayes` and its kin."""

    zeta: float = option(
        10.0,
        "ζ, weight of the KL term. At 0 nothing moves w: only with upload=personal.",
        source="§6.2",
        at_least=0,
        traced=True,
    )
    rho: float = option(
        -2.5,
        "Initial unconstrained scale of normals and slabs, σ = softplus(ρ).",
        source="§6.2: σ = 0.079; cFedBayes' log(1 + ρ), Eq. 54, is not defined there",
        traced=True,
    )
    start: Literal["personal", "global"] = option(
        "personal",
        "Where q starts in a round. personal: where it stopped (Alg. 1); global: at "
        "the broadcast w, moments kept (Alg. 2), where w learns too little from each "
        "round (docs/sfedbayes.md).",
    )
    upload: Literal["localised", "personal"] = option(
        "localised",
        "What is sent. localised: w as the client moved it (Alg. 1); personal: q.",
    )
    beta: float = option(
        1.0,
        "β, the server's extrapolation.",
        source="public code",
        above=0,
        traced=True,
    )


@builder(PFedBayes)
def pfedbayes(task: Task, options: PFedBayes) -> Algorithm:
    """Builds pFedBayes.

    Client, alternately on every minibatch, Eq. 6 divided by n:
      min_q  -1/b Σ_j E_q[log p(y_j|x_j, θ)] + ζ/n KL(q ‖ w)      (Eq. 30)
      min_w  ζ/n KL(q ‖ w)      (Eq. 31, which leaves out ζ; to Adam all is one)
    Server: w <- (1 - β) w + β · average of the uploads.
    Prediction: mean over draws of the global w, or of the client's q as it is. A
    client that never took part adapts q from w first, by `task.finetuning`, one step
    a minibatch. Who does not upload does not train (Alg. 1 has all clients train).
    Metrics: `loss`, the mean of Eq. 30's first term over the minibatches; `kl`, of the
    trained q from the broadcast w, in nats.

    Raises:
      ValueError: an option outside its range, or more draws than fit in memory.
    """
    network = BayesianNetwork(task.model, normal(options.rho), options)
    return pfedbayes_of("pfedbayes", task, network)


def pfedbayes_of(name: str, task: Task, network: BayesianNetwork) -> Algorithm:
    """pFedBayes with posteriors of any family; `network.options` are `PFedBayes`."""
    options, family = network.options, network.family
    if options.upload == "localised":
        require_moving("zeta", options.zeta, "upload='localised'")

    def train(key, round, data, training, personal, localised, steps):
        energy = free_energy(network, options.zeta, data)
        rate = options.global_learning_rate
        return alternate(
            key, round, data, training, personal, localised, energy, steps, rate
        )

    def init(key):
        return Server(family.init(initial_means(task.model, key, options.init_std)))

    def init_client(key, server):
        fresh = learner(server.posterior, task.training)
        return Client(fresh, fresh.moments, jnp.zeros((), jnp.int32))

    def client_update(key, round, server, client, data):
        # A newcomer's q starts at the broadcast too.
        restart = (client.updates == 0) | (options.start == "global")
        own = client.personal
        q = optax.tree.where(restart, server.posterior, own.posterior)
        personal, localised, value = train(
            key,
            round,
            data,
            task.training,
            Learner(q, own.moments),
            Learner(server.posterior, client.moments),
            (options.personal_steps, options.global_steps),
        )
        sent = localised if options.upload == "localised" else personal
        return ClientOutput(
            optax.tree.sub(sent.posterior, server.posterior),
            1.0,
            Client(personal, localised.moments, client.updates + 1),
            {"loss": value, "kl": family.kl(personal.posterior, server.posterior)},
        )

    def server_update(key, round, server, aggregate):
        old = server.posterior
        new = averaged(family, options.average, old, aggregate.mean())
        moved = optax.tree.sub(new, old)
        return Server(optax.tree.add_scale(old, options.beta, moved))

    def personalise(key, server, client, data):
        newcomer = client.updates == 0
        # Without data nothing is trained: who took part is done.
        data = data._replace(size=jnp.where(newcomer, data.size, 0))
        fresh = learner(server.posterior, task.finetuning)
        adapted, _, _ = train(key, 0, data, task.finetuning, fresh, fresh, (1, 0))
        return optax.tree.where(newcomer, adapted.posterior, client.personal.posterior)

    return posterior_estimate(
        name,
        network,
        lambda server: server.posterior,
        init=init,
        init_client=init_client,
        client_update=client_update,
        server_update=server_update,
        personalise=personalise,
        statistics=lambda server, upload: summands(
            family, options.average, server.posterior, upload
        ),
    )
