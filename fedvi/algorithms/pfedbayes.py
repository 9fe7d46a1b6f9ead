"""pFedBayes: every client's posterior near a global one, by variational inference.

Zhang et al., "Federated learning via variational Bayesian inference: personalization,
sparsity and clustering" (2023), §3; first in "Personalized federated learning via
variational Bayesian inference" (ICML 2022).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.alternating import (
    Learner,
    alternate,
    check_steps,
    check_zeta,
    learner,
    posterior_wire,
    where,
)
from fedvi.algorithms.common import gradient_only, normal_init
from fedvi.variational import BayesianNetwork, normal

__all__ = ["Client", "Server", "pfedbayes", "pfedbayes_of"]


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


def pfedbayes(
    task: Task,
    *,
    zeta: float = 10.0,
    rho: float = -2.5,
    init_std: float | None = None,
    personal_steps: int = 5,
    global_steps: int = 1,
    global_learning_rate: float | None = None,
    start: Literal["personal", "global"] = "personal",
    upload: Literal["localised", "personal"] = "localised",
    average: Literal["parameters", "moments"] = "parameters",
    beta: float = 1.0,
    sampling: Literal["weight", "local"] = "local",
    mc_samples: int = 1,
    num_samples: int = 10,
    eps_scale: float = 1.0,
) -> Algorithm:
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

    Args:
      task: model, local training, population.
      zeta: ζ ≥ 0, weight of the KL term (§6.2: 10). At 0 nothing moves w: only with
        `upload=personal`.
      rho: initial unconstrained scale, σ = softplus(ρ) (§6.2: -2.5, σ = 0.079).
      init_std: standard deviation of the initial means of all weights, biases and
        normalisation included (public code: 0.1); default: the network's initialiser.
      personal_steps: steps of q on a minibatch (public code: 5).
      global_steps: steps of w on a minibatch (public code: 1).
      global_learning_rate: of w, in all rounds; default: that of q.
      start: where q starts in a round: `personal`, where it stopped (Alg. 1);
        `global`, at the broadcast w, moments kept (Alg. 2).
      upload: `localised`, w as the client moved it (Alg. 1); `personal`, q itself.
      average: of the uploads: `parameters`, the mean of (μ, ρ) (Alg. 1); `moments`,
        the minimiser of Σ_i KL(. ‖ w) (Lemma A.2).
      beta: β > 0, the server's extrapolation (public code: 1).
      sampling: `weight`, one draw of the weights a step (the paper); `local`, draws
        of the activations, for dense layers with the same expected gradient and less
        variance; convolutions are better served by `weight`.
      mc_samples: a, draws a step.
      num_samples: draws of a prediction.
      eps_scale: factor on the noise of every draw (the paper: 1; public code: 0.001).

    Raises:
      ValueError: an option outside its range, or more draws than fit in memory.
    """
    network = BayesianNetwork(
        task.model, normal(rho), sampling, mc_samples, num_samples, eps_scale
    )
    return pfedbayes_of(
        "pfedbayes",
        task,
        network,
        zeta=zeta,
        init_std=init_std,
        personal_steps=personal_steps,
        global_steps=global_steps,
        global_learning_rate=global_learning_rate,
        start=start,
        upload=upload,
        average=average,
        beta=beta,
    )


def pfedbayes_of(
    name: str,
    task: Task,
    network: BayesianNetwork,
    *,
    zeta: float,
    init_std: float | None,
    personal_steps: int,
    global_steps: int,
    global_learning_rate: float | None,
    start: str,
    upload: str,
    average: str,
    beta: float,
    transmit: Callable | None = None,
) -> Algorithm:
    """pFedBayes with posteriors of any family; options as of `pfedbayes`.

    `transmit`, `(upload, broadcast) -> (upload, metrics)`, says what arrives of an
    uploaded posterior at a server that knows its own broadcast.
    """
    check_zeta(zeta, upload)
    if init_std is not None:
        checks.positive("init_std", init_std)
    checks.one_of("start", start, ("personal", "global"))
    checks.one_of("upload", upload, ("localised", "personal"))
    checks.one_of("average", average, ("parameters", "moments"))
    checks.positive("beta", beta)
    check_steps(personal_steps, global_steps, global_learning_rate)
    family = network.check().family

    def divergence(data, q, w):
        return zeta / jnp.maximum(data.size, 1) * gradient_only(family.kl)(q, w)

    def train(key, round, data, training, personal, localised, steps):
        def objective(key, q, w, batch):
            return network.loss(key, q, batch) + divergence(data, q, w)

        return alternate(
            key,
            round,
            data,
            training,
            personal,
            localised,
            objective=objective,
            divergence=lambda q, w: divergence(data, q, w),
            personal_steps=steps[0],
            global_steps=steps[1],
            global_learning_rate=global_learning_rate,
        )

    def init(key):
        return Server(family.init(normal_init(task.model, key, init_std)))

    def init_client(key, server):
        fresh = learner(server.posterior, task.training)
        return Client(fresh, fresh.moments, jnp.zeros((), jnp.int32))

    def client_update(key, round, server, client, data):
        # A newcomer's q starts at the broadcast too.
        restart = (client.updates == 0) | (start == "global")
        own = client.personal
        q = where(restart, server.posterior, own.posterior)
        personal, localised, value = train(
            key,
            round,
            data,
            task.training,
            Learner(q, own.moments),
            Learner(server.posterior, client.moments),
            (personal_steps, global_steps),
        )
        sent = (localised if upload == "localised" else personal).posterior
        metrics = {"loss": value, "kl": family.kl(personal.posterior, server.posterior)}
        if transmit is not None:
            sent, more = transmit(sent, server.posterior)
            metrics |= more
        statistics = sent
        if average == "moments":
            statistics = family.moments(sent, server.posterior)
        state = Client(personal, localised.moments, client.updates + 1)
        return ClientOutput(statistics, 1.0, state, metrics)

    def server_update(key, round, server, aggregate):
        new = aggregate.mean()
        if average == "moments":
            new = family.from_moments(new, server.posterior)
        return Server(
            jax.tree.map(
                lambda old, new: (1 - beta) * old + beta * new, server.posterior, new
            )
        )

    def global_predictive(key, server, x, mask):
        return network.predict(key, server.posterior, x, mask)

    def personalise(key, server, client, data):
        newcomer = client.updates == 0
        # Without data nothing is trained: who took part is done.
        data = data._replace(size=jnp.where(newcomer, data.size, 0))
        fresh = learner(server.posterior, task.finetuning)
        adapted, _, _ = train(key, 0, data, task.finetuning, fresh, fresh, (1, 0))
        return where(newcomer, adapted.posterior, client.personal.posterior)

    def personal_predictive(key, server, personal, x, mask):
        return network.predict(key, personal, x, mask)

    return Algorithm(
        name=name,
        init=init,
        client_update=client_update,
        server_update=server_update,
        global_predictive=global_predictive,
        personalise=personalise,
        personal_predictive=personal_predictive,
        init_client=init_client,
        wire=posterior_wire(family, average, lambda server: server.posterior),
    )
