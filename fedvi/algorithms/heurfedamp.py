"""HeurFedAMP: every client has its own cloud model, of those that are like its own.

Huang et al., "Personalized cross-silo federated learning on non-IID data", AAAI 2021.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import OwnModel, point_estimate, train_from
from fedvi.algorithms.registry import builder
from fedvi.flat import trees
from fedvi.local import Quadratic
from fedvi.nn import parameter_count
from fedvi.options import Options, option

__all__ = ["HeurFedAMP", "Server", "heurfedamp"]


class Server(NamedTuple):
    """Server state; N is the number of all clients.

    Attributes:
      cloud: the initial model; of what one client gets, its u_i.
      models: what every client sent last, as vectors `[N, weights]`; not sent.
      updates: `[N]` int32, how many each has sent; not sent.
    """

    cloud: Any
    models: jax.Array
    updates: jax.Array


class HeurFedAMP(Options):
    """Options of `heurfedamp`."""

    own_share: float = option(
        0.5,
        "ξ, share of a client's own model in its cloud model.",
        source="pFedBayes' appendix B.1: 0.5 (its §6.2 has 5)",
        at_least=0,
        at_most=1,
        traced=True,
    )
    sharpness: float = option(
        25.0,
        "σ, how much likeness counts among the other clients' models; 0: not at all.",
        source="a public port; the papers give none",
        at_least=0,
        traced=True,
    )
    personal_penalty: float = option(
        1.0,
        "λ/α, weight of half the squared distance of a client's own model from its "
        "cloud model.",
        at_least=0,
        traced=True,
    )
    start: Literal["own", "cloud"] = option(
        "own",
        "Where a client starts in a round: at w_i, or at u_i.",
        source="a public port; from u_i accuracy falls with the rounds (digits)",
    )


@builder(HeurFedAMP)
def heurfedamp(task: Task, options: HeurFedAMP) -> Algorithm:
    """Builds HeurFedAMP.

    Server: keeps every client's last model w_j, and sends client i
      u_i = ξ w_i + (1 - ξ) Σ_j a_ij w_j,  a_ij = softmax_j(σ cos(w_i, w_j))
    over the other clients j that have sent one; where there is no other, w_i, and for a
    client that has sent none the mean of all. That is N times the weights in memory,
    and as many products for each participant.
    Client:  min_w  f_i(w) + λ/(2α) ‖w - u_i‖²,  sent and kept.
    Prediction: w_i; a client that never took part fine-tunes its u_i.

    There is no global model: `global_predictive` is that of u_i.

    Metrics: `loss`, the mean of f_i over the steps.
    """

    def init(key):
        params = task.model.init(key)
        models = jnp.zeros((task.ids, parameter_count(params)), jnp.float32)
        return Server(params, models, jnp.zeros(task.ids, jnp.int32))

    def unicast(server, client_id):
        first, unravel = ravel_pytree(server.cloud)
        sent = server.updates > 0
        others = sent & (jnp.arange(task.ids) != client_id)
        own, known = server.models[client_id], sent[client_id]
        likeness = options.sharpness * cosines(server.models, own) * known
        shares = jax.nn.softmax(jnp.where(others, likeness, -jnp.inf), where=others)
        rest = jnp.where(others, shares, 0.0) @ server.models
        some = others.any()
        mixed = options.own_share * own + (1 - options.own_share) * rest
        cloud = jnp.where(some, rest, first)
        cloud = jnp.where(known, jnp.where(some, mixed, own), cloud)
        return Server(unravel(cloud), (), ())

    def client_update(key, round_index, server, client, data):
        near = Quadratic(trees(server.cloud), options.personal_penalty)
        start = server.cloud
        if options.start == "own":
            start = optax.tree.where(client.updates > 0, client.params, start)
        params, value = train_from(task, key, round_index, start, data, near=near)
        moved = optax.tree.sub(params, server.cloud)
        return ClientOutput(moved, 1.0, client.trained(params), {"loss": value})

    def server_update(key, round_index, server, aggregate):
        def model(sent):
            client_id, moved = sent
            cloud = unicast(server, client_id).cloud
            return ravel_pytree(optax.tree.add(cloud, moved))[0]

        arrived = jax.lax.map(model, (aggregate.client_ids, aggregate.uploads))
        counted = server.updates[aggregate.client_ids] + 1
        return server._replace(
            models=aggregate.noted(server.models, arrived),
            updates=aggregate.noted(server.updates, counted),
        )

    return point_estimate(
        "heurfedamp",
        task,
        params_of=lambda server: server.cloud,
        init=init,
        init_client=lambda key, server: OwnModel.of(server.cloud),
        client_update=client_update,
        server_update=server_update,
        unicast=unicast,
        kept=lambda server, client: client.kept(),
        reduce="stack",
        global_model=False,
    )


def cosines(models, own):
    """`[N]` cosines of the angles between models `[N, weights]` and one `[weights]`."""
    norms = jnp.linalg.norm(models, axis=1) * jnp.linalg.norm(own)
    return models @ own / jnp.maximum(norms, 1e-12)
