"""SCAFFOLD: control variates against the drift of the clients.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning",
ICML 2020.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import point_estimate, tilted_loss, train_from
from fedvi.algorithms.registry import builder
from fedvi.local import LocalTraining, num_steps
from fedvi.options import Options, option

__all__ = ["Scaffold", "Server", "path_length", "scaffold"]


class Server(NamedTuple):
    """Server state; all of it is sent.

    Attributes:
      params: x, the global model.
      control: c, the mean of all clients' c_i.
    """

    params: Any
    control: Any


class Scaffold(Options):
    """Options of `scaffold`."""

    # Never None: as `fedavg` has it, so that both are one flag.
    server_learning_rate: float | None = option(
        1.0,
        "η_g; 1 is averaging.",
        source="Karimireddy et al., §7",
        above=0,
        traced=True,
    )


@builder(Scaffold)
def scaffold(task: Task, options: Scaffold) -> Algorithm:
    """Builds SCAFFOLD.

    Client, from y = x, K steps of SGD on f_i(y) + <c - c_i, y>, then (option II)
      c_i⁺ = c_i - c + (x - y) / s,    s = η Σ_{k=1..K} (1 - β^k) / (1 - β),
    the mean gradient of f_i along the way. s is what K steps with heavy-ball momentum
    β make of a constant gradient; without momentum it is the paper's Kη. η is the rate
    of the round; at rate 0 a client keeps its c_i.
    Server: x <- x + η_g mean_{i∈S}(y_i - x), c <- c + 1/N Σ_{i∈S} (c_i⁺ - c_i).
    All weigh the same: c is the mean of the c_i in every round. (Not under a codec that
    rounds: the client keeps its c_i⁺ as it is, and the server what arrived.)

    A client sends two vectors of the model's size, and is sent two. Metrics: `loss`,
    the mean of f_i over the steps, without the linear term.

    Raises:
      ValueError: clients that train with another optimiser than SGD, whose steps are no
        multiple of a gradient.
    """
    if task.training.optimizer != "sgd":
        raise ValueError(
            f"optimizer={task.training.optimizer!r} does not fit scaffold, whose "
            "controls are mean gradients told from the path of SGD: use "
            "optimizer='sgd'"
        )

    def init(key):
        params = task.model.init(key)
        return Server(params, optax.tree.zeros_like(params))

    def client_update(key, round_index, server, control, data):
        start, slope = server.params, optax.tree.sub(server.control, control)
        loss = tilted_loss(task.model, slope)
        params, value = train_from(task, key, round_index, start, data, loss)
        moved = optax.tree.sub(params, start)
        length = path_length(round_index, data.size, task.training)
        changed = optax.tree.add_scale(server.control, 1 / length, moved)
        changed = optax.tree.scale(-1.0, changed)
        changed = optax.tree.where(length > 0, changed, optax.tree.zeros_like(changed))
        upload = {"params": moved, "control": changed}
        own = optax.tree.add(control, changed)
        return ClientOutput(upload, 1.0, own, {"loss": value})

    def server_update(key, round_index, server, aggregate):
        rate, share = options.server_learning_rate, 1 / aggregate.population
        mean, changed = aggregate.mean()["params"], aggregate.statistics["control"]
        return Server(
            optax.tree.add_scale(server.params, rate, mean),
            optax.tree.add_scale(server.control, share, changed),
        )

    return point_estimate(
        "scaffold",
        task,
        params_of=lambda server: server.params,
        init=init,
        client_update=client_update,
        server_update=server_update,
        init_client=lambda key, server: server.control,
    )


def path_length(round_index, size, training: LocalTraining):
    """[] η Σ_{k=1..K} (1 - β^k) / (1 - β): the way of a visit per unit of gradient.

    The K-th velocity under a constant gradient g is Σ_{j<K} β^j g.
    """
    steps, beta = num_steps(size, training), training.momentum
    slow = beta * (1 - jnp.power(beta, steps)) / (1 - beta)
    return training.learning_rate_at(round_index) * (steps - slow) / (1 - beta)
