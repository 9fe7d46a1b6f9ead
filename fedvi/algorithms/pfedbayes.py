"""pFedBayes: every client's posterior near a global one, by variational inference.

Zhang et al., "Federated learning via variational Bayesian inference: personalization,
sparsity and clustering" (2023), §3; first in "Personalized federated learning via
variational Bayesian inference" (ICML 2022).
"""

from collections.abc import Callable
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
    learner,
    require_moving,
    require_stable,
    summands,
)
from fedvi.algorithms.common import check_trained, normal_init
from fedvi.algorithms.registry import builder
from fedvi.distributions.mean_field import initial_scale
from fedvi.flat import in_one_piece
from fedvi.local import LocalTraining
from fedvi.options import option
from fedvi.variational import (
    BayesianNetwork,
    frozen_head,
    mean_field_normal,
    posterior_estimate,
)

__all__ = [
    "Client",
    "Halves",
    "PFedBayes",
    "PFedBayesKin",
    "Server",
    "pfedbayes",
    "pfedbayes_of",
]


class Server(NamedTuple):
    """Server state.

    Attributes:
      posterior: w, the global posterior; of the shared half where there is one.
      newcomer: the other half at a client's start, such as BPFed's first prior of a
        client's own factors; not sent.
    """

    posterior: Any
    newcomer: Any = ()


class Client(NamedTuple):
    """What a client keeps.

    Attributes:
      personal: q_i and its moments; never overwritten by the server.
      prior: of its own half, such as BPFed's continual prior of the client's own
        factors (η̄_i of its Alg. 1), or a frozen head.
      moments: of the localised global's optimiser, which starts at the broadcast.
      updates: rounds taken part in.
    """

    personal: Learner
    prior: Any
    moments: Any
    updates: jax.Array


class Halves(NamedTuple):
    """A posterior in two halves, shared and a client's own. The default: all shared.

    Attributes:
      shared: `(q) -> half`.
      own: `(q) -> half`.
      join: `(shared, own) -> q`.
      adapts_own: a client that never took part adapts its own half alone.
    """

    shared: Callable = lambda q: q
    own: Callable = lambda q: ()
    join: Callable = lambda shared, own: shared
    adapts_own: bool = False


class PFedBayesKin(Alternating):
    """Options of `pfedbayes` and of all that are built on it."""

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


class PFedBayes(PFedBayesKin):
    """Options of `pfedbayes`."""

    head: Literal["frozen", "trained"] = option(
        "trained",
        "The network's last layer. frozen: random, the same for all clients, without a "
        "posterior and never sent; trained: like the body.",
        source="pFedBayes; frozen: FedHB's tables",
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
      ValueError: an option outside its range, a learning rate that SGD would be
        unstable at, a frozen head without a body, or more draws than fit in memory.
    """
    family, halves = mean_field_normal(options.rho), None
    if options.head == "frozen":
        check_trained(task, options, "pfedbayes")
        task = task._replace(
            training=_of_body(task.training), finetuning=_of_body(task.finetuning)
        )
        family = frozen_head(family)
        halves = Halves(lambda q: q["body"], lambda q: q["head"], _with_head)
    network = BayesianNetwork(task.model, family, options)
    return pfedbayes_of("pfedbayes", task, network, halves)


def pfedbayes_of(
    name: str,
    task: Task,
    network: BayesianNetwork,
    halves: Halves | None = None,
    kl: Callable | None = None,
) -> Algorithm:
    """pFedBayes with posteriors of any family, all or half of them shared.

    Args:
      name: of the method.
      task: model, local training, population.
      network: its options are `PFedBayes`.
      halves: of a method whose clients do not send all of it.
      kl: `(q, w)`, in the objectives in place of the family's.
    """
    options, family = network.options, network.family
    shared, own, join, adapts_own = halves or Halves()
    if options.upload == "localised":
        require_moving("zeta", options.zeta, "upload='localised'")
    require_stable(task, options, "zeta", initial_scale(options.rho))

    def train(key, round_index, data, training, q, w, steps, complete=lambda q: q):
        energy = free_energy(network, options.zeta, data, kl, complete)
        rate = options.global_learning_rate
        return alternate(key, round_index, data, training, q, w, energy, steps, rate)

    def init(key):
        means = normal_init(network.model, key, options.init_std)
        # One vector of what nobody tells apart: fewer operations.
        q = family.init(means if halves else in_one_piece(means))
        return Server(shared(q), own(q))

    def init_client(key, server):
        fresh = learner(join(server.posterior, server.newcomer), task.training)
        return Client(fresh, server.newcomer, fresh.moments, jnp.zeros((), jnp.int32))

    def client_update(key, round_index, server, client, data):
        prior, q = join(server.posterior, client.prior), client.personal.posterior
        if options.start == "broadcast":
            q = join(server.posterior, own(q))
        # A newcomer's q starts at the prior in any case.
        restart = (client.updates == 0) | (options.start in ("global", "prior"))
        personal, localised, value = train(
            key,
            round_index,
            data,
            task.training,
            client.personal._replace(posterior=optax.tree.where(restart, prior, q)),
            Learner(prior, client.moments),
            (options.personal_steps, options.global_steps),
        )
        sent = localised if options.upload == "localised" else personal
        upload = optax.tree.sub(shared(sent.posterior), server.posterior)
        kept = own(localised.posterior)
        state = Client(personal, kept, localised.moments, client.updates + 1)
        metrics = {"loss": value, "kl": family.kl(personal.posterior, prior)}
        return ClientOutput(upload, 1.0, state, metrics)

    def server_update(key, round_index, server, aggregate):
        old = server.posterior
        new = averaged(family, options.average, old, aggregate.mean())
        moved = optax.tree.sub(new, old)
        return server._replace(posterior=optax.tree.add_scale(old, options.beta, moved))

    def personalise(key, server, client, data):
        def complete(q):
            return join(server.posterior, q) if adapts_own else q

        whole = join(server.posterior, client.prior)
        start = client.prior if adapts_own else whole
        fresh, tuning = learner(start, task.finetuning), task.finetuning
        q, _, _ = train(key, 0, data, tuning, fresh, fresh, (1, 0), complete)
        return complete(q.posterior)

    def kept(server, client):
        return client.updates > 0, client.personal.posterior

    return posterior_estimate(
        name,
        network,
        lambda server: join(server.posterior, server.newcomer),
        init=init,
        init_client=init_client,
        client_update=client_update,
        server_update=server_update,
        personalise=personalise,
        kept=kept,
        broadcast=lambda server: server._replace(newcomer=()),
        statistics=lambda server, upload: summands(
            family, options.average, server.posterior, upload
        ),
    )


def _with_head(body, head):
    return {"body": body, "head": head}


def _of_body(training: LocalTraining) -> LocalTraining:
    """`training` that leaves the head alone, which weight decay would not."""
    if not callable(training.optimizer):
        return training  # without a gradient those do not move

    def still(updates, _):
        return _with_head(updates["body"], optax.tree.zeros_like(updates["head"]))

    def optimizer(learning_rate):
        return optax.chain(training.optimizer(learning_rate), optax.stateless(still))

    return training._replace(optimizer=optimizer)
