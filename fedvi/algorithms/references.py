"""Two reference points: no communication at all, and no federation at all."""

import jax
import jax.numpy as jnp

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import finetune, train_from
from fedvi.algorithms.fedavg import fedavg
from fedvi.algorithms.registry import builder
from fedvi.data import ClientData
from fedvi.options import Options

__all__ = ["centralised", "local_only"]


@builder()
def local_only(task: Task, options: Options) -> Algorithm:
    """Builds local training: every client keeps its own model and sends nothing.

    A client trains its own model whenever it is selected, from one common
    initialisation, and fine-tunes it like every other method before prediction. The
    "global" model is the untrained initialisation, a chance-level line.
    """

    def client_update(key, round_index, server, client, data):
        params, value = train_from(task, key, round_index, client, data)
        return ClientOutput((), 1.0, params, {"loss": value})

    return fedavg(task)._replace(
        name="local_only",
        init_client=lambda key, server: server.params,
        client_update=client_update,
        server_update=lambda key, round_index, server, aggregate: server,
        personalise=lambda key, server, client, data: finetune(task, key, client, data),
        broadcast=lambda server: (),
        global_model=False,
    )


@builder()
def centralised(task: Task, options: Options) -> Algorithm:
    """Builds centralised training, the last column of FedHB's Table 3.

    The participants upload their data (and the bytes up say so); the server runs
    `task.training` on the pooled examples, batches mixing clients. The upload is a
    stack, not a sum: memory grows with the cohort.
    """

    def server_update(key, round_index, server, aggregate):
        pooled = pool(aggregate.uploads)
        params, _ = train_from(task, key, round_index, server.params, pooled)
        return server._replace(params=params)

    return fedavg(task)._replace(
        name="centralised",
        client_update=lambda key, round_index, server, client, data: ClientOutput(
            data, 1.0
        ),
        server_update=server_update,
        broadcast=lambda server: (),
        reduce="stack",
    )


def pool(data: ClientData) -> ClientData:
    """The data of all clients `[clients, ...]` as one client's, real examples first."""
    cohort, capacity = data.y.shape
    padded = jnp.arange(capacity)[None, :] >= data.size[:, None]
    order = jnp.argsort(padded.reshape(-1), stable=True)
    x, y = jax.tree.map(
        lambda a: a.reshape(cohort * capacity, *a.shape[2:])[order], (data.x, data.y)
    )
    return ClientData(x, y, data.size.sum())
