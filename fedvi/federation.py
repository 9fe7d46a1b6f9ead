"""The federated round: the only place that knows that there are many clients."""

import numbers
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedvi import checks, client_evaluation, contract
from fedvi.algorithm import Algorithm
from fedvi.codecs import IDENTITY, Codec
from fedvi.cohort import MODEL_AXIS, map_reduce
from fedvi.data import ClientData
from fedvi.evaluation import Scores, Uncertainty
from fedvi.keys import Purpose, derive
from fedvi.participation import Call, Visit, next_server, participate, report
from fedvi.placement import replicate, replicated, state_shardings
from fedvi.selection import Choice, Selection, full

__all__ = ["Federation", "RoundMetrics", "State"]


class State(NamedTuple):
    """All that a run consists of; a checkpoint of it continues bit for bit.

    Attributes:
      server: the algorithm's server state.
      clients: the algorithm's client states, leaves `[clients, ...]`.
      round: [] int32, rounds done.
      key: [] typed PRNG key, the run's root; never changes.
    """

    server: Any
    clients: Any
    round: jax.Array
    key: jax.Array


class RoundMetrics(NamedTuple):
    """What a round tells about itself; `rounds` stacks them, `[rounds, ...]`.

    Attributes:
      client_ids: [cohort] int32.
      empty: [cohort] bool, the client holds no data.
      failed: [cohort] bool, the client returned a NaN or an infinity: its upload was
        left out and its own state kept.
      metrics: dict of scalars, means over the participants that counted.
      choice: how a selection by importance came to this cohort; () for others.
    """

    client_ids: jax.Array
    empty: jax.Array
    failed: jax.Array
    metrics: dict[str, jax.Array]
    choice: Choice | tuple[()] = ()


class Federation:
    """An algorithm, its clients' data and the way to run them.

    ```
    federation = Federation(algorithm, data.train, data.test)
    state = federation.init(jax.random.key(0))
    state, metrics = federation.rounds(state, 100)
    scores = federation.evaluate(state)
    ```

    `round` and `rounds` are one jitted call each and donate `state`: use the state
    that they return. `pure_init`, `pure_rounds`, `pure_evaluate` and so on are the
    same without `jit`, to build larger programs from, such as a `vmap` over seeds.

    Args:
      algorithm: see `fedvi.algorithm`.
      train: `ClientData` with leaves `[clients, ...]`: every client's training data.
      test: `ClientData` of the same clients, for evaluation.
      selection: default full participation.
      chunk_size: clients in one vmap; None: the whole cohort. The default 1 is right
        on CPU; `fedvi.experiment.plan` chooses for any device.
      mesh: from `fedvi.cohort.clients_mesh`, to spread the cohort over devices, and
        with `model_devices` the states too.
      eval_batch_size: most test examples in one forward pass. FedBABU's 128: with
        batch statistics the figure matters.
      codec: of the uploads, from `fedvi.codecs`; default: they arrive as they are.

    Raises:
      ValueError: a selection for another number of clients, of a cohort that the
        algorithm does not take or by a measure that it does not have; train and test
        of different numbers of clients, no training example at all, a size below 1,
        or an algorithm that breaks the contract (`fedvi.contract`).
    """

    def __init__(
        self,
        algorithm: Algorithm,
        train: ClientData,
        test: ClientData,
        *,
        selection: Selection | None = None,
        chunk_size: int | None = 1,
        mesh: Mesh | None = None,
        eval_batch_size: int = 128,
        codec: Codec = IDENTITY,
    ):
        clients = train.size.shape[0]
        if test.size.shape[0] != clients:
            raise ValueError(
                f"test holds {test.size.shape[0]} clients and train {clients}: they "
                "must be the same clients"
            )
        if chunk_size is not None:
            checks.at_least("chunk_size", chunk_size, 1)
        checks.at_least("eval_batch_size", eval_batch_size, 1)
        self.clients = clients
        self.algorithm = algorithm
        self.codec = codec
        self.selection = selection or full(clients)
        if self.selection.clients != clients:
            raise ValueError(
                f"selection chooses from {self.selection.clients} clients, but train "
                f"holds {clients}"
            )
        candidates = self.selection.candidates
        sizes = np.asarray(train.size)
        sizes = sizes if candidates is None else sizes[candidates]
        self.population = int((sizes > 0).sum())
        if self.population == 0:
            raise ValueError(
                "train holds no example: every client is empty, or every one that "
                "selection may pick"
            )
        contract.check(algorithm, train, test, self.population, codec)
        contract.check_selection(algorithm, self.selection)
        self.eval_batch_size = eval_batch_size
        self._over_clients = partial(map_reduce, chunk_size=chunk_size, mesh=mesh)
        # The state stays where it is first put: else the second call compiles again.
        whole, place = None, None
        if mesh is None:
            self.train, self.test = jax.device_put((train, test))
        else:
            self.train, self.test = replicate(mesh, (train, test))
            whole = replicated(mesh)
            shapes = jax.eval_shape(self.pure_init, jax.random.key(0))
            place = state_shardings(mesh, shapes)
        split = mesh is not None and MODEL_AXIS in mesh.shape
        self._server_place = place.server if split else None
        self._jit_init = jax.jit(self.pure_init, out_shardings=place)
        self._jit_rounds = jax.jit(
            self.pure_rounds,
            static_argnames="n",
            donate_argnames="state",
            out_shardings=None if mesh is None else (place, whole),
        )
        self._jit_run = jax.jit(
            self.pure_run,
            static_argnames=("evaluations", "eval_every", "personal"),
            donate_argnames="state",
            out_shardings=None if mesh is None else (place, whole, whole),
        )
        self._jit_evaluate = jax.jit(self.pure_evaluate)
        self._jit_evaluate_personal = jax.jit(self.pure_evaluate_personal)
        self._jit_uncertainty_personal = jax.jit(self.pure_uncertainty_personal)
        self._jit_clusters = jax.jit(self.pure_clusters)

    # The user's calls.

    def init(self, key) -> State:
        """The state before the first round, from a typed PRNG key."""
        if not jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
            raise ValueError(f"key={key!r} must be a typed key: jax.random.key(seed)")
        return self._jit_init(key)

    def round(self, state: State) -> tuple[State, RoundMetrics]:
        """One round, one jitted call. Donates `state`."""
        state, metrics = self.rounds(state, 1)
        return state, take(metrics, 0)

    def rounds(self, state: State, n: int) -> tuple[State, RoundMetrics]:
        """`n` rounds as one jitted scan; metrics `[n, ...]`. Donates `state`."""
        if not isinstance(n, numbers.Integral) or n < 1:
            raise ValueError(f"n={n!r} must be a whole number of rounds, at least 1")
        return self._jit_rounds(state, self.train, n=n)

    def run(
        self, state: State, rounds: int, eval_every: int = 1, personal: bool = False
    ) -> tuple[State, RoundMetrics, Scores]:
        """A whole run as one jitted call: rounds, and evaluations among them.

        Donates `state`. For several seeds at once, `vmap` `pure_init` and `pure_run`.

        Args:
          state: where to begin.
          rounds: number of rounds, a multiple of `eval_every`.
          eval_every: rounds between evaluations.
          personal: evaluates the personalised models instead of the global one.

        Returns:
          (state, metrics `[rounds, ...]`, scores `[rounds / eval_every, clients,
          ...]`, of `evaluate` or `evaluate_personal`).

        Raises:
          ValueError: numbers below 1, or rounds that are no multiple of `eval_every`.
        """
        for name, value in (("rounds", rounds), ("eval_every", eval_every)):
            if not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
        if rounds % eval_every:
            raise ValueError(
                f"rounds={rounds} must be a multiple of eval_every={eval_every}"
            )
        evaluations = rounds // eval_every
        return self._jit_run(
            state, self.train, self.test, evaluations, eval_every, personal
        )

    def evaluate(self, state: State) -> Scores:
        """Scores `[clients, ...]` of the global model on every client's test data.

        Where the algorithm has an `assign`, of the client's own global model.
        """
        return self._jit_evaluate(state, self.train, self.test)

    def evaluate_personal(self, state: State) -> Scores:
        """Scores `[clients, ...]` of each client's personalised model on its test data.

        Every client, a participant so far or not, adapts to its training data first.
        """
        return self._jit_evaluate_personal(state, self.train, self.test)

    def uncertainty_personal(
        self, state: State, *data_sets: ClientData
    ) -> tuple[Uncertainty, ...]:
        """Entropy and mutual information, example by example, of the personal models.

        Args:
          state: as for `evaluate_personal`, whose models and draws these are.
          data_sets: `ClientData` of the same clients, leaves `[clients, ...]`, for
            instance the test data and out-of-distribution inputs.

        Returns:
          One `Uncertainty` with leaves `[clients, capacity]` for each.
        """
        return self._jit_uncertainty_personal(state, self.train, *data_sets)

    def clusters(self, state: State) -> jax.Array:
        """`[clients]` int32, the cluster of every client by `Algorithm.assign`.

        Raises:
          ValueError: the algorithm has none.
        """
        return self._jit_clusters(state, self.train)

    # The same as pure functions.

    def pure_init(self, key) -> State:
        """`init` without `jit`."""
        algorithm = self.algorithm
        server = algorithm.init(derive(key, Purpose.INIT))
        clients = jax.vmap(
            lambda i: algorithm.init_client(
                derive(key, Purpose.INIT_CLIENT, 0, i), server
            )
        )(jnp.arange(self.clients))
        return State(server, clients, jnp.zeros((), jnp.int32), key)

    def pure_rounds(self, state: State, train: ClientData, n: int):
        """`rounds` without `jit`, on `train` data of the same shapes."""
        return jax.lax.scan(lambda state, _: self._round(state, train), state, length=n)

    def pure_run(
        self, state: State, train, test, evaluations, eval_every, personal=False
    ):
        """`run` without `jit`: `evaluations` times `eval_every` rounds."""
        evaluate = self.pure_evaluate_personal if personal else self.pure_evaluate

        def block(state, _):
            state, metrics = self.pure_rounds(state, train, eval_every)
            return state, (metrics, evaluate(state, train, test))

        state, (metrics, scores) = jax.lax.scan(block, state, length=evaluations)
        metrics = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), metrics)
        return state, metrics, scores

    def _round(self, state: State, train: ClientData):
        """Selects, trains the cohort, aggregates, updates the server."""
        algorithm, round = self.algorithm, state.round
        call = Call(state.key, round, algorithm.broadcast(state.server))
        ids, choice = self._select(state, call, train)
        sums, outputs = self._over_clients(
            partial(self._visit, partial(participate, algorithm, codec=self.codec)),
            (call, state.clients, train),
            ids,
        )
        server, metrics = next_server(
            algorithm,
            state.key,
            round,
            state.server,
            self.population,
            ids,
            sums,
            outputs,
        )
        if self._server_place is not None:  # between the rounds of a scan too
            server = jax.lax.with_sharding_constraint(server, self._server_place)
        # Out-of-range ids are dropped: empty and failed clients keep their state.
        written = jnp.where(outputs["counts"], ids, self.clients)
        clients = jax.tree.map(
            lambda old, new: old.at[written].set(new, mode="drop"),
            state.clients,
            outputs["client"],
        )
        info = RoundMetrics(ids, outputs["empty"], outputs["failed"], metrics, choice)
        return State(server, clients, round + 1, state.key), info

    @staticmethod
    def _visit(one: Callable, operands, client_id):
        """Calls `one(shared, Visit)`; operands: shared, clients, train, others."""
        shared, clients, train, *others = operands
        client, train, others = take((clients, train, tuple(others)), client_id)
        return one(shared, Visit(client_id, client, train, others))

    def _select(self, state: State, call: Call, train: ClientData):
        """(ids of the cohort, how they were chosen)."""
        scores, counts = None, None
        if self.selection.measure is not None:
            scores, counts = self._scores(state, call, train)
        key = derive(state.key, Purpose.SELECT, state.round)
        return self.selection.select(key, state.round, scores, counts)

    def _scores(self, state: State, call: Call, train: ClientData):
        """`[clients]` scores of the candidates, and who of all holds data."""
        measure = self.algorithm.importance[self.selection.measure]
        candidates = self.selection.candidates
        ids = jnp.arange(self.clients) if candidates is None else candidates
        _, (reports, finite) = self._over_clients(
            partial(self._visit, partial(report, measure)),
            (call, state.clients, train),
            jnp.asarray(ids),
        )
        holds_data = train.size[ids] > 0
        scores = measure.score(state.server, reports, finite & holds_data)
        scores = jnp.where(finite, scores, jnp.nan)
        everyone = jnp.zeros(self.clients, scores.dtype).at[ids].set(scores)
        return everyone, train.size > 0

    def pure_evaluate(self, state: State, train: ClientData, test) -> Scores:
        """`evaluate` without `jit`; with `Algorithm.assign` it needs the train data."""
        return self._evaluate_each(client_evaluation.score_global, state, train, test)

    def pure_evaluate_personal(self, state: State, train: ClientData, test) -> Scores:
        """`evaluate_personal` without `jit`."""
        return self._evaluate_each(client_evaluation.score_personal, state, train, test)

    def pure_uncertainty_personal(
        self, state: State, train: ClientData, *data_sets: ClientData
    ) -> tuple[Uncertainty, ...]:
        """`uncertainty_personal` without `jit`."""
        one = client_evaluation.personal_uncertainty
        return self._evaluate_each(one, state, train, *data_sets)

    def pure_clusters(self, state: State, train: ClientData) -> jax.Array:
        """`clusters` without `jit`."""
        if self.algorithm.assign is None:
            raise ValueError(
                f"algorithm={self.algorithm.name} knows no clusters: it has no assign"
            )
        return self._evaluate_each(client_evaluation.assign_cluster, state, train)

    def _evaluate_each(self, one: Callable, state: State, *data_sets: ClientData):
        """`[clients, ...]` of a function of `client_evaluation`."""

        def score(state, visit):
            return (), one(self.algorithm, self.eval_batch_size, state, visit)

        return self._over_clients(
            partial(self._visit, score),
            (state._replace(clients=()), state.clients, *data_sets),
            jnp.arange(self.clients),
        )[1]


def take(tree, index):
    """One entry of every leaf's leading axis."""
    return jax.tree.map(lambda leaf: leaf[index], tree)
