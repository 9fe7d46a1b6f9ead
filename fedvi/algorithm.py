"""The contract: a federated algorithm is a handful of pure functions over pytrees.

Every function sees ONE client: no function has a leading clients axis.
`fedvi.federation` adds that axis, by `vmap`, by a loop over chunks and over devices.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedvi import checks
from fedvi.data import settled_clients
from fedvi.local import LocalTraining
from fedvi.nn import Model
from fedvi.selection import full

__all__ = [
    "Aggregate",
    "Algorithm",
    "ClientOutput",
    "Importance",
    "StackedAggregate",
    "Task",
    "own_settings",
]

Server = Any
Client = Any
Personal = Any


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """JAX's defaults for types, in which algorithms are written and compiled.

    A user who works in float64, or has JAX refuse to promote types, gets the same
    states and figures as one who does not.
    """
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


class Task(NamedTuple):
    """What every algorithm's builder is given.

    Attributes:
      model: the network, with its split into body and head.
      training: how a client trains in a round.
      finetuning: how a client personalises.
      clients: N, number of clients that hold training data and may take part.
      samples: |D|, number of training examples of those clients together.
      smallest: training examples of the one of them that has the fewest; None: not
        known, and taken to be the mean.
      total: clients of the federation, those included that hold no data or take no
        part; None: as many as `clients`.
      unlabelled: `[examples, ...]` raw inputs that the server has; None: it has none.
    """

    model: Model
    training: LocalTraining
    finetuning: LocalTraining
    clients: int
    samples: int
    smallest: int | None = None
    total: int | None = None
    unlabelled: Any = None

    @property
    def ids(self) -> int:
        """What every client's id is below."""
        return self.clients if self.total is None else self.total

    @property
    def population(self) -> tuple[int, int, int | None, int | None]:
        """(clients, samples, smallest, total), which must be true of a federation."""
        return self.clients, self.samples, self.smallest, self.total

    @classmethod
    def of(
        cls,
        model: Model,
        train: Any,
        training: LocalTraining | None = None,
        finetuning: LocalTraining | None = None,
        candidates: Any = None,
        unlabelled: int = 0,
    ) -> "Task":
        """The task of these clients, whose numbers come from their data.

        Args:
          model: the network.
          train: all clients' training data: `ClientData` with leaves `[clients, ...]`,
            or a `fedvi.data.ClientSource`.
          training: in a round; None: the defaults of `LocalTraining`, FedBABU's.
          finetuning: of personalisation; None: FedBABU's five epochs, rate 1e-3.
          candidates: ids of the clients that may take part; None: all.
          unlabelled: how many of these clients' training inputs the server has too,
            evenly from all of them; 0: none.

        Raises:
          ValueError: no model, no clients' data, candidates that are not different
            ids of clients, or fewer inputs than the server shall have.
        """
        if not isinstance(model, Model):
            raise ValueError(
                f"model={model!r} must be a fedvi.nn.Model, of fedvi.nn.build or "
                "fedvi.nn.from_flax"
            )
        train = settled_clients(train)
        if not hasattr(getattr(train, "size", None), "shape"):
            raise ValueError(
                f"train={type(train).__name__} must be a fedvi.ClientData of all "
                "clients, or a ClientSource"
            )
        sizes = np.asarray(train.size)
        total, chosen = len(sizes), np.arange(len(sizes))
        if candidates is not None:
            chosen = full(total, candidates).pool
        sizes = sizes[chosen]
        held = sizes[sizes > 0]
        clients, samples = held.size, int(held.sum())
        smallest = int(held.min()) if clients else None
        training = training or LocalTraining()
        finetuning = finetuning or LocalTraining(epochs=5, learning_rate=1e-3)
        given = _inputs(train, chosen, sizes, unlabelled) if unlabelled else None
        return cls(
            model, training, finetuning, clients, samples, smallest, total, given
        )


def _inputs(train: Any, clients: np.ndarray, sizes: np.ndarray, count: int):
    """`[count, ...]` of some clients' training inputs: every k-th of all of them."""
    checks.whole("unlabelled", count)
    ends = np.cumsum(sizes)
    if count > ends[-1]:
        raise ValueError(
            f"unlabelled={count} is more than the {ends[-1]} training examples: give "
            "fewer"
        )
    places = (np.arange(count) * ends[-1]) // count
    owners = np.searchsorted(ends, places, side="right")
    slots = places - (ends - sizes)[owners]
    if hasattr(train, "read"):
        met, rows = np.unique(owners, return_inverse=True)
        return np.asarray(train.read(clients[met]).x)[rows, slots]
    return np.asarray(train.x[clients[owners], slots])


class ClientOutput(NamedTuple):
    """What `client_update` returns.

    Attributes:
      upload: pytree of arrays, all that is sent. A difference to what `broadcast` let
        through, wherever there is something to differ from: near 0 a codec
        (`fedvi.codecs`) loses least, and a bound on it bounds the client's influence.
      weight: scalar, the algorithm's own: the client's size, or 1.
      client: what the client keeps until it is next selected, of the structure
        that `init_client` returned.
      metrics: dict of scalars, averaged over the cohort and logged; () if none.
    """

    upload: Any
    weight: jax.Array | float
    client: Client = ()
    metrics: Mapping[str, jax.Array] | tuple[()] = ()


class Aggregate(NamedTuple):
    """What the server gets of a cohort with `reduce="sum"`.

    Attributes:
      statistics: sum over participants of weight × statistics.
      weight: [] sum of the weights.
      participants: [] N_f, participants whose upload arrived: neither empty nor
        failed. At least 1: without any, or with all weights 0, the server's state
        stays as it is.
      population: N, clients that hold training data and may take part.
    """

    statistics: Any
    weight: jax.Array
    participants: jax.Array
    population: int

    def mean(self):
        """Weighted mean of the statistics over the participants."""
        return jax.tree.map(lambda s: s / self.weight, self.statistics)


class StackedAggregate(NamedTuple):
    """What the server gets of a cohort with `reduce="stack"`: every upload.

    Attributes:
      uploads: leaves `[cohort, ...]`; zeros where `weight` is 0.
      weight: [cohort], 0 for an empty or failed participant.
      client_ids: [cohort] int32.
      participants: [] as in `Aggregate`.
      population: N as in `Aggregate`.
    """

    uploads: Any
    weight: jax.Array
    client_ids: jax.Array
    participants: jax.Array
    population: int

    def noted(self, kept: jax.Array, rows: jax.Array) -> jax.Array:
        """`kept` `[ids, ...]` with the participants' `rows` `[cohort, ...]` in place;
        who is empty or failed keeps its own."""
        # An id out of range is dropped.
        ids = jnp.where(self.weight > 0, self.client_ids, len(kept))
        return kept.at[ids].set(rows, mode="drop")


class Importance(NamedTuple):
    """A measure of how much each client matters in a round, for selection.

    Attributes:
      report: `(key, server, client, data) -> pytree`, what a client tells the server
        before the cohort is chosen; `server` is what `broadcast` lets through.
      score: `(server, reports, counts) -> [clients]` float, from the reports of all
        clients, leaves `[clients, ...]`. `counts` is `[clients]` bool, False for
        an empty client and for one whose report is not finite; its report is zeros
        then, and its score is not looked at.
    """

    report: Callable[..., Any]
    score: Callable[..., jax.Array]


def upload_itself(server: Server, upload: Any) -> Any:
    """The `statistics` of an algorithm whose server sums the uploads as they are."""
    del server
    return upload


def no_client_state(key, server) -> tuple:
    """The `init_client` of an algorithm whose clients keep nothing."""
    del key, server
    return ()


def send_all(server: Server) -> Server:
    """The `broadcast` of an algorithm that sends its whole server state."""
    return server


class Algorithm(NamedTuple):
    """A federated algorithm. `key` is a typed PRNG key, `round_index` a scalar int32.

    Attributes:
      name: for logs and tables.
      init: `(key) -> server`, the global variational parameters.
      client_update: `(key, round_index, server, client, data) -> ClientOutput`;
        `server` is what `broadcast` lets through, `data` one client's padded
        `ClientData`.
      server_update: `(key, round_index, server, aggregate) -> server`.
      global_predictive: `(key, server, x, mask) -> log-probabilities
        [samples, batch, classes]` of the Monte-Carlo samples of the global model;
        x `[batch, ...]` raw, mask `[batch]` bool marks real examples.
      personalise: `(key, server, client, data) -> personal`, what a client adapts
        to its own training data and predicts with.
      personal_predictive: `(key, server, personal, x, mask) ->` as
        `global_predictive`.
      init_client: `(key, server) -> client`, what a client keeps between rounds.
      broadcast: `(server) -> server` with the fields that are not sent emptied;
        its size is the bytes down.
      unicast: optional, `(server, client_id [] int32) -> server`, where the server
        keeps something for each client: what one client gets, of the server's state
        or of what `broadcast` lets through. All functions but `init`, `init_client`
        and `server_update` see that, and its size is the bytes down.
      host: True where `server_update` calls back to Python between rounds
        (`jax.pure_callback`), such as for SciPy's assignment: no accelerator runs the
        rounds alone then, and a CPU runs them as one device.
      importance: measures of the clients' importance by name, for the selections
        that are based on one.
      cohort: clients that take part in a round where the method itself says so: a
        number, or "all" of those that may; None: as many as the user wants.
      assign: optional, for clustered methods, `(key, server, client, data) ->
        (cluster [] int32, server)`: the cluster that a client's training data belong
        to, and that cluster's global model, which `global_predictive` gets as the
        client's `server`.
      statistics: `(server, upload) -> summands`, pytree of floats, of one upload;
        `server` is what `broadcast` lets through. The server gets their weighted sum
        and nothing else, so that they may be made at the client. Centred at the
        broadcast like the upload: sums around 0 would cancel in float32.
      reduce: "sum": the server gets an `Aggregate` of the statistics; "stack": a
        `StackedAggregate` of the uploads, for the few methods that need every one.
      posterior: `(server) -> distrax.Distribution` over the model's parameter tree, the
        global posterior; of a clustered method that of one cluster, as `assign` gives
        it. None: the method has point estimates only.
      personal_posterior: `(server, personal) -> distrax.Distribution`, a client's.
      kept: optional, `(server, client) -> (known [] bool, personal)`, for methods whose
        clients keep what they predict with: whether this client has taken part, and
        what it kept, of the structure that `personalise` returns. Only the others are
        personalised.
      global_model: False: what `global_predictive` predicts with is where clients
        start, in whole or in part trained by nobody (local_only, BPFed), and no model
        of the method. The closing table leaves its figures out.
      population: `Task.population` of the task that it was built for, which a builder
        (`fedvi.algorithms.builder`) notes, and `point_estimate`: a federation of others
        refuses it.
        None: it does not depend on them.
    """

    name: str
    init: Callable[..., Server]
    client_update: Callable[..., ClientOutput]
    server_update: Callable[..., Server]
    global_predictive: Callable[..., jax.Array]
    personalise: Callable[..., Personal]
    personal_predictive: Callable[..., jax.Array]
    init_client: Callable[..., Client] = no_client_state
    broadcast: Callable[[Server], Server] = send_all
    unicast: Callable[[Server, jax.Array], Server] | None = None
    host: bool = False
    importance: Mapping[str, Importance] = MappingProxyType({})
    cohort: int | Literal["all"] | None = None
    assign: Callable[..., tuple[jax.Array, Server]] | None = None
    statistics: Callable[[Server, Any], Any] = upload_itself
    reduce: Literal["sum", "stack"] = "sum"
    posterior: Callable[[Server], Any] | None = None
    personal_posterior: Callable[[Server, Personal], Any] | None = None
    kept: Callable[[Server, Client], tuple[jax.Array, Personal]] | None = None
    global_model: bool = True
    population: tuple[int, int, int | None, int | None] | None = None
