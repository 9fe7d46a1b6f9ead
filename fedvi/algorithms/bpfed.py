"""BPFed: shared and personalised factors, both random, under a continual prior.

Chen, Liu, Cao and Zhang, "Bayesian personalized federated learning with shared and
personalized uncertainty representations" (2023).
"""

import re
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
from fedvi.distributions.mean_field import MeanField
from fedvi.nn import Model
from fedvi.variational import BayesianNetwork, normal

__all__ = ["Client", "Server", "bpfed", "personal_weights"]


class Server(NamedTuple):
    """Server state.

    Attributes:
      posterior: of the shared factors; None in place of the personalised ones.
      newcomer: the first prior of a client's personalised factors, the reverse.
    """

    posterior: Any
    newcomer: Any


class Client(NamedTuple):
    """What a client keeps.

    Attributes:
      personal: q_i of all factors, and its moments.
      prior: π, the continual prior of the personalised factors (η̄_i of Alg. 1).
      moments: of the optimiser of Eq. 11.
      updates: rounds taken part in.
    """

    personal: Learner
    prior: Any
    moments: Any
    updates: jax.Array


def bpfed(
    task: Task,
    *,
    personal_part: str = "head",
    zeta: float = 1.0,
    kl_direction: Literal["forward", "reverse"] = "forward",
    rho: float = -3.0,
    init_std: float | None = None,
    personal_steps: int = 5,
    global_steps: int = 1,
    global_learning_rate: float | None = None,
    start: Literal["prior", "broadcast", "personal"] = "prior",
    upload: Literal["localised", "personal"] = "localised",
    average: Literal["parameters", "moments"] = "parameters",
    sampling: Literal["weight", "local"] = "local",
    mc_samples: int = 1,
    num_samples: int = 10,
    eps_scale: float = 1.0,
) -> Algorithm:
    """Builds BPFed.

    The weights are shared factors θ and personalised factors φ_i. With the prior
    π = π(φ_i^{t-1}) π(θ^t) a client alternates on every minibatch (both divided by n)
      Eq. 10: min_q  -1/b Σ_j E_q[log p(y_j|x_j, φ, θ)] + ζ/n KL(q ‖ π)
      Eq. 11: min_π  ζ/n KL(q ‖ π)      (ζ = 1 there)
    and sends the shared half of π; the other half is its prior in its next round.
    Server: average of the uploads.
    A client that never took part learns q(φ) only, by `task.finetuning`, one step a
    minibatch, under the shared q(θ) as it is.

    Metrics: `loss`, the mean of Eq. 10's first term over the minibatches; `kl`,
    KL(q ‖ π) of the trained q and the π it started at, in nats.

    The global model that is evaluated has the shared posterior and, for φ, the prior
    that every client started from and moved away from since.

    Args:
      task: model, local training, population.
      personal_part: regular expression, found in the personalised weights' paths, such
        as `head/classifier/kernel` or `body/Dense_0/bias` (§VI: the last layer).
      zeta: ζ ≥ 0, weight of the KL terms (Eq. 10: 1; the public code's 1e-3 / 20 on
        the mean loss is ζ = 5e-5 n).
      kl_direction: `forward`, KL(q ‖ π) (Eq. 10, 11); `reverse`, KL(π ‖ q) in both
        (public code).
      rho: initial unconstrained scale (public code: -3, σ = 0.049).
      init_std: as of `pfedbayes`.
      personal_steps: steps of q on a minibatch (public code: 5).
      global_steps: steps of π on a minibatch (public code: 1).
      global_learning_rate: of π; default: that of q.
      start: where q starts in a round: `prior`, at π(φ_i^{t-1}) π(θ^t); `broadcast`,
        its q(φ) where it stopped, its q(θ) at π(θ^t) (Alg. 1 can be read either way);
        `personal`, both where they stopped (public code).
      upload: `localised`, the shared half of π (public code); `personal`, that of q
        (Alg. 1 can be read either way).
      average: as of `pfedbayes`, of the shared factors.
      sampling: as of `pfedbayes`.
      mc_samples: as of `pfedbayes`.
      num_samples: as of `pfedbayes`.
      eps_scale: as of `pfedbayes`.

    Raises:
      ValueError: an option outside its range, a split that leaves no shared or no
        personalised weight, or more draws than fit in memory.
    """
    check_zeta(zeta, upload)
    if init_std is not None:
        checks.positive("init_std", init_std)
    checks.one_of("kl_direction", kl_direction, ("forward", "reverse"))
    checks.one_of("start", start, ("prior", "broadcast", "personal"))
    checks.one_of("upload", upload, ("localised", "personal"))
    checks.one_of("average", average, ("parameters", "moments"))
    check_steps(personal_steps, global_steps, global_learning_rate)
    network = BayesianNetwork(
        task.model, normal(rho), sampling, mc_samples, num_samples, eps_scale
    ).check()
    family = network.family
    own_weights = personal_weights(task.model, personal_part)
    # Of a posterior, and of its moments: two trees of weights each.
    own = MeanField(own_weights, own_weights)

    def divergence(data, q, prior):
        pair = (q, prior) if kl_direction == "forward" else (prior, q)
        return zeta / jnp.maximum(data.size, 1) * gradient_only(family.kl)(*pair)

    def train(key, round, data, training, personal, prior, steps, complete):
        """`complete` makes a posterior of all weights of one of those that learn."""

        def objective(key, q, prior, batch):
            return network.loss(key, complete(q), batch) + divergence(data, q, prior)

        return alternate(
            key,
            round,
            data,
            training,
            personal,
            prior,
            objective=objective,
            divergence=lambda q, prior: divergence(data, q, prior),
            personal_steps=steps[0],
            global_steps=steps[1],
            global_learning_rate=global_learning_rate,
        )

    def init(key):
        posterior = family.init(normal_init(task.model, key, init_std))
        return Server(_shared(own, posterior), _personal(own, posterior))

    def init_client(key, server):
        fresh = learner(_join(server.posterior, server.newcomer), task.training)
        return Client(fresh, server.newcomer, fresh.moments, jnp.zeros((), jnp.int32))

    def start_of(server, client, prior):
        if start == "prior":
            return prior
        q = client.personal.posterior
        if start == "broadcast":
            q = _join(server.posterior, _personal(own, q))
        return where(client.updates == 0, prior, q)

    def client_update(key, round, server, client, data):
        prior = _join(server.posterior, client.prior)
        q = start_of(server, client, prior)
        personal, localised, value = train(
            key,
            round,
            data,
            task.training,
            client.personal._replace(posterior=q),
            Learner(prior, client.moments),
            (personal_steps, global_steps),
            complete=lambda q: q,
        )
        sent = localised if upload == "localised" else personal
        statistics = _shared(own, sent.posterior)
        if average == "moments":
            statistics = family.moments(statistics, server.posterior)
        state = Client(
            personal,
            _personal(own, localised.posterior),
            localised.moments,
            client.updates + 1,
        )
        metrics = {"loss": value, "kl": family.kl(personal.posterior, prior)}
        return ClientOutput(statistics, 1.0, state, metrics)

    def server_update(key, round, server, aggregate):
        shared = aggregate.mean()
        if average == "moments":
            shared = family.from_moments(shared, server.posterior)
        return server._replace(posterior=shared)

    def global_predictive(key, server, x, mask):
        return network.predict(key, _join(server.posterior, server.newcomer), x, mask)

    def personalise(key, server, client, data):
        newcomer = client.updates == 0
        # Without data nothing is trained: who took part is done.
        data = data._replace(size=jnp.where(newcomer, data.size, 0))
        fresh = learner(client.prior, task.finetuning)
        adapted, _, _ = train(
            key,
            0,
            data,
            task.finetuning,
            fresh,
            fresh,
            (1, 0),
            complete=lambda q: _join(server.posterior, q),
        )
        adapted = _join(server.posterior, adapted.posterior)
        return where(newcomer, adapted, client.personal.posterior)

    def personal_predictive(key, server, personal, x, mask):
        return network.predict(key, personal, x, mask)

    return Algorithm(
        name="bpfed",
        init=init,
        client_update=client_update,
        server_update=server_update,
        global_predictive=global_predictive,
        personalise=personalise,
        personal_predictive=personal_predictive,
        init_client=init_client,
        broadcast=lambda server: server._replace(newcomer=()),
        wire=posterior_wire(family, average, lambda server: server.posterior),
    )


def personal_weights(model: Model, pattern: str):
    """Pytree of bool like the model's parameters: whether a weight is personalised.

    Args:
      model: the network.
      pattern: regular expression, searched in paths such as `head/classifier/kernel`.

    Raises:
      ValueError: not a regular expression, or it leaves no weight on one side.
    """
    try:
        found = re.compile(pattern).search
    except re.error as error:
        raise ValueError(
            f"personal_part={pattern!r} is no regular expression: {error}"
        ) from None
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), shapes
    )
    split = jax.tree.map(lambda path: found(path) is not None, paths)
    if len(set(jax.tree.leaves(split))) < 2:
        side = "shared" if any(jax.tree.leaves(split)) else "personalised"
        raise ValueError(
            f"personal_part={pattern!r} leaves no {side} weight of {model.name}: it "
            f"has {', '.join(jax.tree.leaves(paths))}"
        )
    return split


def _shared(own, posterior):
    return jax.tree.map(lambda mine, leaf: None if mine else leaf, own, posterior)


def _personal(own, posterior):
    return jax.tree.map(lambda mine, leaf: leaf if mine else None, own, posterior)


def _join(shared, personal):
    """A posterior from its two halves, each None where the other is not."""
    return jax.tree.map(
        lambda a, b: b if a is None else a,
        shared,
        personal,
        is_leaf=lambda leaf: leaf is None,
    )
