"""Two reference points: no communication at all, and no federation at all."""

import jax
import jax.numpy as jnp

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import classification_loss, finetune
from fedvi.algorithms.fedavg import fedavg
from fedvi.data import ClientData
from fedvi.local import minimise

__all__ = ["centralised", "local_only"]


def local_only(task: Task) -> Algorithm:
    """Builds local training: every client keeps its own model and sends nothing.

    A client trains its own model whenever it is selected, from one common
    initialisation, and fine-tunes it like every other method before prediction. The
    "global" model is the untrained initialisation, a chance-level line.
    """

    def loss(key, params, batch):
        return classification_loss(task.model, params, batch)

    def init_client(key, server):
        return server.params

    def client_update(key, round, server, client, data):
        params, value = minimise(key, round, client, data, task.training, loss)
        return ClientOutput((), 1.0, params, {"loss": value})

    def personalise(key, server, client, data):
        return finetune(task, key, client, data)

    return fedavg(task)._replace(
        name="local_only",
        init_client=init_client,
        client_update=client_update,
        server_update=lambda key, round, server, aggregate: server,
        personalise=personalise,
        broadcast=lambda server: (),
        wire=None,
    )


def centralised(task: Task) -> Algorithm:
    """Builds centralised training, the last column of FedHB's Table 3.

    The participants upload their data (and the bytes up say so); the server runs
    `task.training` on the pooled examples, batches mixing clients. The upload is a
    stack, not a sum: memory grows with the cohort.
    """

    def loss(key, params, batch):
        return classification_loss(task.model, params, batch)

    def client_update(key, round, server, client, data):
        return ClientOutput(data, 1.0)

    def server_update(key, round, server, aggregate):
        pooled = _pool(aggregate.statistics)
        params, _ = minimise(key, round, server.params, pooled, task.training, loss)
        return server._replace(params=params)

    return fedavg(task)._replace(
        name="centralised",
        client_update=client_update,
        server_update=server_update,
        broadcast=lambda server: (),
        reduce="stack",
        wire=None,
    )


def _pool(data: ClientData) -> ClientData:
    """All uploads as one client's data, real examples first."""
    cohort, capacity = data.y.shape
    padded = jnp.arange(capacity)[None, :] >= data.size[:, None]
    order = jnp.argsort(padded.reshape(-1), stable=True)
    x, y = jax.tree.map(
        lambda a: a.reshape(cohort * capacity, *a.shape[2:])[order], (data.x, data.y)
    )
    return ClientData(x, y, data.size.sum())
