"""Partial sharing: a part of the weights is averaged, the rest is each client's own.

FedPer: Arivazhagan et al., "Federated learning with personalization layers", 2019.
FedRep: Collins et al., "Exploiting shared representations for personalized federated
learning", ICML 2021.
LG-FedAvg: Liang et al., "Think locally, act globally: federated learning with local
and global representations", 2020.
"""

import re
from typing import Any, Literal, NamedTuple

import jax
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import log_probabilities, plain_loss, point_estimate
from fedvi.algorithms.registry import builder
from fedvi.local import minimise
from fedvi.nn import Model, regroup, weight_paths
from fedvi.options import Options, inherited, option

__all__ = [
    "FedPer",
    "FedRep",
    "LGFedAvg",
    "PersonalPart",
    "Server",
    "fedper",
    "fedrep",
    "lg_fedavg",
    "split",
]


class Server(NamedTuple):
    """Server state.

    Attributes:
      shared: θ, the weights that are averaged.
      newcomer: φ_0, where every client's own weights start; not sent.
    """

    shared: Any
    newcomer: Any


Schedule = Literal["joint", "alternating"]


class PersonalPart(Options):
    """Option of methods that share a part of the weights."""

    personal_part: str = option(
        "head",
        "Regular expression, found in the personalised weights' paths, such as "
        "head/classifier/kernel or body/Dense_0/bias.",
        source="FedPer, FedPop, BPFed §VI: the last layer",
    )


class FedPer(PersonalPart):
    """Options of `fedper`."""

    schedule: Schedule = option(
        "joint",
        "How a client trains. joint: all weights together (FedPer); alternating: its "
        "own, the shared ones frozen, then the shared ones, its own frozen (FedRep).",
    )
    personal_epochs: int = option(
        10,
        "Epochs of a client's own weights in a round; the shared ones have those of "
        "training.",
        only_with={"schedule": "alternating"},
        source="FedRep's public code, CIFAR-10",
        at_least=0,
    )


class FedRep(FedPer):
    """Options of `fedrep`."""

    schedule: Schedule = inherited(FedPer, "schedule", "alternating", "FedRep, Alg. 1")


class LGFedAvg(FedPer):
    """Options of `lg_fedavg`."""

    personal_part: str = inherited(
        FedPer, "personal_part", "body", "LG-FedAvg: the early layers"
    )


@builder(FedPer)
def fedper(task: Task, options: FedPer) -> Algorithm:
    """Builds FedPer: shared body, own heads, trained together.

    Client: (θ_i, φ_i) by `task.training` on f_i from (θ, φ_i); φ_i stays with it.
    Server: θ <- Σ_i n_i θ_i / Σ_i n_i.
    A client predicts with (θ, φ_i), after fine-tuning φ_i by `task.finetuning`, θ
    frozen; one that never took part starts at the common φ_0.
    Metrics: `loss`, the mean of f_i over the steps.

    Raises:
      ValueError: a pattern that leaves no shared or no personalised weight.
    """
    return partially_shared("fedper", task, options)


@builder(FedRep)
def fedrep(task: Task, options: FedRep) -> Algorithm:
    """Builds FedRep: shared body, own heads, trained in turn.

    Client: φ_i by `personal_epochs` on f_i(θ, .) from φ_i, then θ_i by `task.training`
    on f_i(., φ_i) from θ. Server: θ <- mean θ_i, of uniform weights.
    Prediction as in `fedper`. Metrics: `loss`, the mean of f_i over the steps of θ.

    Raises:
      ValueError: as `fedper`.
    """
    return partially_shared("fedrep", task, options, uniform=True)


@builder(LGFedAvg)
def lg_fedavg(task: Task, options: LGFedAvg) -> Algorithm:
    """Builds LG-FedAvg: `fedper` with own early layers and shared last ones.

    Raises:
      ValueError: as `fedper`.
    """
    return partially_shared("lg_fedavg", task, options)


def partially_shared(
    name: str, task: Task, options: FedPer, uniform: bool = False
) -> Algorithm:
    """The family: equations in `fedper` and `fedrep`.

    Args:
      name: of the method.
      task: model and local training.
      options: which part is whose, and how it is trained.
      uniform: all clients weigh the same, and not by their sizes.
    """
    model = split(task.model, options.personal_part)

    def fit(key, round_index, learned, frozen, data, training):
        loss = plain_loss(model, frozen)
        return minimise(key, round_index, learned, data, training, loss)

    def in_turn(key, round_index, own, shared, data):
        keys = jax.random.split(key)
        training = task.training._replace(epochs=options.personal_epochs, steps=None)
        own, _ = fit(keys[0], round_index, own, shared, data, training)
        shared, value = fit(keys[1], round_index, shared, own, data, task.training)
        return {**own, **shared}, value

    def init(key):
        params = model.init(key)
        return Server(params["shared"], params["personal"])

    def client_update(key, round_index, server, client, data):
        own, shared = {"personal": client}, {"shared": server.shared}
        if options.schedule == "alternating":
            params, value = in_turn(key, round_index, own, shared, data)
        else:
            whole = {**own, **shared}
            params, value = fit(key, round_index, whole, {}, data, task.training)
        moved = optax.tree.sub(params["shared"], server.shared)
        weight = 1.0 if uniform else data.size
        return ClientOutput(moved, weight, params["personal"], {"loss": value})

    def server_update(key, round_index, server, aggregate):
        return server._replace(shared=optax.tree.add(server.shared, aggregate.mean()))

    def personalise(key, server, client, data):
        own, shared = {"personal": client}, {"shared": server.shared}
        return fit(key, 0, own, shared, data, task.finetuning)[0]["personal"]

    def personal_predictive(key, server, personal, x, mask):
        params = {"personal": personal, "shared": server.shared}
        return log_probabilities(model, params, x, mask)[None]

    return point_estimate(
        name,
        task._replace(model=model),
        params_of=lambda s: {"personal": s.newcomer, "shared": s.shared},
        init=init,
        client_update=client_update,
        server_update=server_update,
        init_client=lambda key, server: server.newcomer,
        personalise=personalise,
        personal_predictive=personal_predictive,
        broadcast=lambda server: server._replace(newcomer=()),
        global_model=False,
    )


def split(model: Model, pattern: str) -> Model:
    """The model with its weights in two groups, "personal" and "shared".

    Args:
      model: the network.
      pattern: regular expression, searched in paths such as `head/classifier/kernel`;
        where it is found, a weight is personalised.

    Raises:
      ValueError: not a regular expression, or it leaves no weight on one side.
    """
    try:
        found = re.compile(pattern).search
    except re.error as error:
        raise ValueError(
            f"personal_part={pattern!r} is no regular expression: {error}"
        ) from None
    paths = weight_paths(model)
    sides = {found(path) is not None for path in paths}
    if len(sides) < 2:
        side = "shared" if True in sides else "personalised"
        raise ValueError(
            f"personal_part={pattern!r} leaves no {side} weight of {model.name}, which "
            f"has {', '.join(paths)}: use a pattern of some of them, or a model with "
            "hidden layers"
        )
    return regroup(model, lambda path: "personal" if found(path) else "shared")
