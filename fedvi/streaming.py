"""A federation of more clients than fit in memory: a block of them at a time."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedvi import checks, contract_checks, visit
from fedvi.algorithm import Algorithm, own_settings
from fedvi.client_map import AXIS, MODEL_AXIS
from fedvi.client_store import ClientStore
from fedvi.codecs import IDENTITY, Codec
from fedvi.data import ClientData
from fedvi.data.client_files import ClientSource
from fedvi.evaluation import BINS, Scores
from fedvi.federation import (
    EVALUATIONS,
    BaseFederation,
    RoundMetrics,
    State,
    strong,
    take,
)
from fedvi.keys import Purpose, derive, root_key
from fedvi.placement import replicated
from fedvi.selection import Selection
from fedvi.visit import Call, Visit
from fedvi.visit_order import ranks

__all__ = ["StreamedFederation"]

_VISITS = EVALUATIONS | {"personal_model": visit.personal_model}


class StreamedFederation(BaseFederation):
    """A `Federation` of clients on disk: the same rounds, a block of clients at a time.

    ```
    federation = StreamedFederation(
        algorithm, ClientFiles("train"), ClientFiles("test"),
        selection=selection.uniform(1_000_000, 10_000), store="states",
    )
    state = federation.init(jax.random.key(0))
    state, metrics = federation.rounds(state, 100)
    ```

    While the devices train a block of clients, a thread reads the next block: memory
    holds two or three blocks, the server's state and a few numbers a client, whatever
    the population (and with `reduce="stack"` the uploads of a cohort). A round is one
    jitted call a block, and one for the server; with one block it computes what
    `Federation` does, up to the order of float additions. Several runs go one after
    another. Clients' states (`Algorithm.init_client`) are kept in a `ClientStore`, and
    that of a client that was not met before is made when it is; so `State.clients` is
    ().

    Args:
      algorithm: see `fedvi.algorithm`.
      train: every client's training data.
      test: of the same clients; None: nothing can be evaluated.
      selection: default: all clients.
      store: a folder for the clients' states; None: in memory.
      read_only: looks at what lies in `store` and changes nothing there.
      block_size: clients read at once.
      chunk_size: clients in one vmap, of a block; None: all of it.
      mesh: from `fedvi.clients_mesh`, to spread a block over devices.
      eval_batch_size, calibration_bins: as of `Federation`.
      codec: as of `Federation`.

    Raises:
      ValueError: as `Federation`; a selection by importance, which needs a report of
        every client; several processes; models split over devices; a store of another
        algorithm.
    """

    @own_settings()
    def __init__(
        self,
        algorithm: Algorithm,
        train: ClientSource,
        test: ClientSource | None = None,
        *,
        selection: Selection | None = None,
        store: str | Path | None = None,
        read_only: bool = False,
        block_size: int = 256,
        chunk_size: int | None = 1,
        mesh: Mesh | None = None,
        eval_batch_size: int = 128,
        calibration_bins: int = BINS,
        codec: Codec = IDENTITY,
    ):
        for name, source in (("train", train), ("test", test)):
            if source is not None and not hasattr(source, "read"):
                raise ValueError(
                    f"{name}={type(source).__name__} must be a ClientSource: "
                    "ClientFiles(folder), or ClientArrays(data) of arrays"
                )
            if source is not None:
                checks.client_data(f"{name}.shapes", source.shapes)
                checks.sizes(f"{name}.size", source.size, source.shapes.y.shape[1])
        checks.whole("block_size", block_size)
        if test is not None:
            checks.same_clients(len(train.size), len(test.size))
        if mesh is not None and MODEL_AXIS in mesh.shape:
            raise ValueError(
                "mesh splits models over devices, and a stream keeps them whole: use "
                "Federation (run without --stream), or clients_mesh without "
                "model_devices"
            )
        if jax.process_count() > 1:
            raise ValueError(
                f"{jax.process_count()} processes: clients are streamed to the devices "
                "of one process only; use Federation (run without --stream)"
            )
        if selection is not None and selection.measure is not None:
            raise ValueError(
                f"selection by measure={selection.measure!r} needs a report of "
                "all clients in every round: use Federation (run without --stream), or "
                "uniform, stratified or round_robin"
            )
        super().__init__(
            algorithm,
            train.size,
            train.shapes,
            (test or train).shapes,
            selection=selection,
            chunk_size=chunk_size,
            mesh=mesh,
            eval_batch_size=eval_batch_size,
            calibration_bins=calibration_bins,
            codec=codec,
        )
        self.train, self.test, self.block_size = train, test, block_size
        self._folder = None if store is None else Path(store)
        self._read_only = read_only
        self._kept: dict[int | None, _Kept] = {}
        self._whole, self._spread = None, None
        if mesh is not None:
            self._whole = replicated(mesh)
            self._spread = NamedSharding(mesh, PartitionSpec(AXIS))
        self._kept_of(None)  # a folder of another algorithm is an error now
        if read_only:
            for run in range(len(list(self._folder.glob("run_*")))):
                self._kept_of(run)

    @property
    def store(self) -> ClientStore:
        """The clients' states of a single run."""
        return self._kept_of(None).store

    # The user's calls.

    def init(self, key) -> State:
        """The state before the first round.

        Forgets the clients' states of an earlier run, unless they are committed.

        Args:
          key: typed PRNG key; `[runs]` of them for as many runs.

        Raises:
          ValueError: no typed key, or a store that holds a committed run.
        """
        self._check_key(key)
        state = State((), (), jnp.zeros(key.shape, jnp.int32), key)
        return self._each_run(state, self._init)

    def rounds(self, state: State, n: int) -> tuple[State, RoundMetrics]:
        """`n` rounds; metrics `[n, ...]`. Donates `state`.

        Raises:
          ValueError: the clients' states in the store are not those of this run after
            this round.
        """
        checks.whole("n", n)
        self._check_state(state)

        def run(kept: _Kept, state: State):
            metrics = []
            for _ in range(n):
                kept.check(state)
                try:
                    state, one = self._round(kept, state)
                except BaseException:
                    kept.rollback()
                    raise
                kept.at = _place(state)
                metrics.append(one)
            return state, _stack(metrics)

        return self._each_run(state, run)

    def run(
        self, state: State, rounds: int, eval_every: int = 1, personal: bool = False
    ) -> tuple[State, RoundMetrics, Scores]:
        """As `Federation.run`."""
        self._check_run(rounds, eval_every)
        evaluate = self.evaluate_personal if personal else self.evaluate
        axis, metrics, scores = state.key.ndim, [], []
        for _ in range(rounds // eval_every):
            state, block = self.rounds(state, eval_every)
            metrics.append(block)
            scores.append(evaluate(state))
        return state, _join(metrics, axis), _stack(scores, axis)

    def evaluate(self, state: State, ids: np.ndarray | None = None) -> Scores:
        """`Federation.evaluate` of some clients (default: all), `[len(ids), ...]`."""
        return self._evaluate("evaluate", state, self._tested(), ids=ids)

    def evaluate_personal(self, state: State, ids: np.ndarray | None = None) -> Scores:
        """`Federation.evaluate_personal` of some clients (default: all)."""
        return self._evaluate("evaluate_personal", state, self._tested(), ids=ids)

    def commit(self, state: State, save: Callable[[], Any] = lambda: None) -> None:
        """Makes the clients' states permanent, as those that belong to `state`.

        A later process with the same store goes on from there with the same `state`,
        whose server `save` writes, in one atomic step; killed at any moment, this one
        leaves what belongs to the state that was saved last.
        """
        self._check_state(state)
        everyone = []

        def commit(kept: _Kept, state: State):
            kept.check(state)
            key, round_index = _place(state)
            kept.store.commit({"key": key, "round": round_index})
            everyone.append(kept.store)
            return ()

        self._each_run(state, commit)
        save()
        for store in everyone:
            store.settle()

    def compile(self, name: str, state: State, **static) -> None:
        """Nothing: programs of a stream are compiled with their first block."""

    def shapes(self, runs: int | None = None) -> State:
        """Shapes and types of a state; nothing is compiled."""
        lead = () if runs is None else (runs,)
        key = jax.ShapeDtypeStruct(lead, jax.eval_shape(root_key, 0).dtype)
        round_index = jax.ShapeDtypeStruct(lead, jnp.int32)
        server = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((*lead, *s.shape), s.dtype),
            self.messages.server,
        )
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self._whole),
            State(server, (), round_index, key),
        )

    def _clients_in_state(self) -> tuple[()]:
        return ()  # they are in the store

    # One run.

    def _kept_of(self, run: int | None) -> "_Kept":
        if run not in self._kept:
            folder = self._folder
            if folder is not None and run is not None:
                folder = folder / f"run_{run:03d}"
            like, only = self.messages.client, self._read_only
            self._kept[run] = _Kept(ClientStore(like, self.clients, folder, only))
        return self._kept[run]

    def _kept_for(self, state: State) -> "_Kept":
        """Of a single run, or of the one of several that the state was taken from."""
        key, _ = _place(state)
        found = (one for one in self._kept.values() if one.at and one.at[0] == key)
        return next(found, self._kept_of(None))

    @own_settings()
    def _each_run(self, state: State, function: Callable) -> Any:
        """`function(kept, state)` of every run, stacked."""
        if state.key.ndim == 0:
            return function(self._kept_for(state), state)
        runs = range(len(state.key))
        return _stack([function(self._kept_of(i), take(state, i)) for i in runs])

    def _init(self, kept: "_Kept", state: State) -> State:
        kept.store.rollback()
        if kept.store.visited:
            raise ValueError(
                f"store holds the states of {kept.store.visited} clients, committed "
                f"after round {kept.store.note.get('round')}: go on with the server's "
                "state of that round, or give another store"
            )
        kept.at = None
        first = self._first_server(kept, state)
        # A copy, since rounds donate the state.
        return state._replace(server=jax.tree.map(jnp.copy, first))

    def _first_server(self, kept: "_Kept", state: State):
        """The server's first state, from which clients' states are made."""
        key, _ = _place(state)
        if kept.first is None or kept.first[0] != key:
            jitted = self._jit(
                "first_server",
                lambda key: jax.tree.map(
                    strong, self.algorithm.init(derive(key, Purpose.INIT))
                ),
                out_shardings=self._whole,
            )
            kept.first = (key, self._call("first_server", jitted, state.key))
        return kept.first[1]

    def _round(self, kept: "_Kept", state: State) -> tuple[State, RoundMetrics]:
        open_round = self._jit("open", self._open_round)
        train_block = self._jit("block", self._train_block, donate_argnums=3)
        close_round = self._jit(
            "close", self._close_round, donate_argnums=0, out_shardings=self._whole
        )
        call, ids = self._call("open", open_round, state)
        first = self._first_server(kept, state)
        ids, sums, parts, trained = np.asarray(ids), None, [], None
        order = self._order(ids)
        for block_ids, count, train in self._blocks(ids[order], self.train):
            clients, known = kept.store.read(block_ids)
            visits = self._put((block_ids, clients, known, train))
            if sums is None:
                sums = self._no_uploads(call, first, *visits)
            sums, outputs = self._call(
                "block", train_block, call, first, count, sums, *visits
            )
            # The devices have work: time to keep what came out of the block before.
            if trained is not None:
                parts.append(self._keep(kept, *trained))
            trained = (block_ids[:count], outputs)
        parts.append(self._keep(kept, *trained))
        back = np.argsort(order)
        outputs = jax.tree.map(lambda leaf: leaf[back], _join(parts))
        state, metrics = self._call("close", close_round, state, ids, sums, outputs)
        return state, RoundMetrics(ids, outputs["empty"], outputs["failed"], metrics)

    def _open_round(self, state: State):
        """(what the participants are told, who they are)."""
        key = derive(state.key, Purpose.SELECT, state.round)
        ids, _ = self.selection.select(key, state.round, None, None)
        return Call(state.key, state.round, self.algorithm.broadcast(state.server)), ids

    def _train_block(self, call, first, count, sums, *visits):
        """Adds the uploads of a block's first `count` clients to the sums so far."""
        added, outputs = self._upload_block(call, first, count, *visits)
        return jax.tree.map(jnp.add, sums, added), outputs

    def _upload_block(self, call, first, count, *visits):
        def one(operands, item):
            call, first = operands
            visited = self._visit(call.key, first, *item)
            call = visit.told(self.algorithm, call, visited.id)
            return visit.participate(self.algorithm, call, visited, self.codec)

        return self._over_clients(one, (call, first), visits, count=count)

    def _no_uploads(self, *block):
        """The sums before the first block."""
        if "sums" not in self._jits:
            self._jits["sums"] = jax.eval_shape(
                lambda call, first, *visits: self._upload_block(
                    call, first, 0, *visits
                )[0],
                *block,
            )
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._jits["sums"])

    def _close_round(self, state: State, ids, sums, outputs):
        server, metrics = self._next_server(state, ids, sums, outputs)
        return State(server, (), state.round + 1, state.key), metrics

    def _visit(self, key, first, client_id, client, known, train, *others) -> Visit:
        """The client with its state, made anew if it was never met before."""
        key = derive(key, Purpose.INIT_CLIENT, 0, client_id)
        fresh = self.algorithm.init_client(key, first)
        client = jax.tree.map(partial(jnp.where, known), client, fresh)
        return Visit(client_id, client, train, others)

    # Evaluation.

    def _tested(self) -> ClientSource:
        if self.test is None:
            raise ValueError("test=None: give the clients' test data to evaluate")
        return self.test

    def _evaluate(
        self,
        name: str,
        state: State,
        *sources: ClientSource,
        ids: np.ndarray | None = None,
    ) -> Any:
        self._check_state(state)
        ids = np.arange(self.clients) if ids is None else np.asarray(ids)
        whole = np.issubdtype(ids.dtype, np.integer)
        if not whole or not ids.size or ids.min() < 0 or ids.max() >= self.clients:
            raise ValueError(f"ids must be ids of clients, 0 to {self.clients - 1}")
        jitted = self._jit(name, partial(self._score_block, _VISITS[name]))

        def run(kept: _Kept, state: State):
            kept.check(state)
            first, parts = self._first_server(kept, state), []
            for block_ids, _, train, *others in self._blocks(ids, self.train, *sources):
                clients, known = kept.store.read(block_ids)
                visits = self._put((block_ids, clients, known, train, *others))
                scores = self._call(name, jitted, state, first, *visits)
                parts.append(jax.device_get(scores))
            return jax.tree.map(lambda leaf: leaf[: len(ids)], _join(parts))

        return self._evaluated(name, self._each_run(state, run))

    def _score_block(self, one, state: State, first, *visits):
        def score(operands, item):
            call, first = operands
            visited = self._visit(call.key, first, *item)
            call = visit.told(self.algorithm, call, visited.id)
            return (), one(self.algorithm, self._evaluation, call, visited)

        call = Call(state.key, state.round, state.server)
        return self._over_clients(score, (call, first), visits)[1]

    def _personal_model(self, state: State, client: int):
        models = self._evaluate("personal_model", state, ids=np.array([client]))
        return take(models, 0)

    def _client_state(self, state: State, client: int):
        """Zeros for one that was never met: it has taken part in nothing."""
        clients, _ = self._each_run(state, lambda kept, _: kept.store.read([client]))
        return take(clients, 0)

    # Between programs and files.

    def _order(self, ids: np.ndarray) -> np.ndarray:
        """`[len(ids)]` places in which a round visits them: clients of like sizes in a
        block, and in it in a chunk. Evaluations do not: files are read best by id."""
        if not self.sorts_visits or self.chunk_size == 1:
            return np.arange(len(ids))
        size = self._size_of_blocks(len(ids))
        largest_first = np.argsort(-self.train.size[ids], kind="stable")
        starts = range(0, len(ids), size)
        blocks = [largest_first[start : start + size] for start in starts]
        how = size, self.chunk_size, self._devices
        return np.concatenate([block[ranks(*how, len(block))] for block in blocks])

    def _size_of_blocks(self, clients: int) -> int:
        size = -(-clients // -(-clients // self.block_size))
        return size + -size % self._devices

    def _blocks(
        self, ids: np.ndarray, *sources: ClientSource
    ) -> Iterator[tuple[Any, ...]]:
        """`(ids, how many count, data of each source)` of equal blocks, read ahead.

        The last block is filled up with copies of the last client.
        """
        size = self._size_of_blocks(len(ids))
        number = -(-len(ids) // size)
        slots = np.arange(number * size).reshape(number, size)
        padded = ids[np.minimum(slots, len(ids) - 1)]

        def read(block):
            return tuple(self._read(source, block) for source in sources)

        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(read, padded[0])
            for i, block in enumerate(padded):
                data = ahead.result()
                if i + 1 < number:
                    ahead = reader.submit(read, padded[i + 1])
                yield block, min(size, len(ids) - i * size), *data

    def _read(self, source: ClientSource, ids: np.ndarray) -> ClientData:
        """Some clients' data; their labels are looked at as they come."""
        data = source.read(ids)
        for name in ("train", "test"):
            if source is getattr(self, name):
                where = f"{name}.read({ids[0]}..{ids[-1]})"
                contract_checks.check_labels(where, data, self.messages.classes)
        return data

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._spread)

    def _keep(self, kept: "_Kept", ids: np.ndarray, outputs: dict[str, Any]):
        """Keeps the states of a block's clients that count; the rest on the host."""
        outputs = dict(outputs)
        states = outputs.pop("client")
        outputs = jax.tree.map(lambda a: np.asarray(a)[: len(ids)], outputs)
        if jax.tree.leaves(states):
            counted = np.flatnonzero(outputs["counts"])
            kept.store.write(ids[counted], states, counted)
        return outputs


class _Kept:
    """The clients' states of one run, and which run and round they belong to.

    Attributes:
      store: holds them.
      first: (the run's key, the server's first state).
      at: (the run's key, round) of the states in the store; None: of no run yet.
    """

    def __init__(self, store: ClientStore):
        self.store = store
        self.first: tuple[str, Any] | None = None
        self.at = self._committed()

    def _committed(self) -> tuple[str, int] | None:
        note = self.store.note
        return (note["key"], note["round"]) if note else None

    def rollback(self) -> None:
        """Goes back to the last commit."""
        self.store.rollback()
        self.at = self._committed()

    def check(self, state: State) -> None:
        """Raises `ValueError` unless the states in the store belong to `state`."""
        if not self.store.keeps:
            return
        key, round_index = _place(state)
        if self.store.pick({"key": key, "round": round_index}):
            self.at = key, round_index
        if self.at is None and round_index > 0:
            raise ValueError(
                f"state is that after round {round_index}, but the store holds no "
                "clients' states: give the folder that they were committed to"
            )
        if self.at in (None, (key, round_index)):
            return
        run = "this run" if key == self.at[0] else "a run of another key"
        raise ValueError(
            f"state is that after round {round_index}, but the clients' states in the "
            f"store are those of {run} after round {self.at[1]}: give the state that "
            "belongs to them, or another store"
        )


def _place(state: State) -> tuple[str, int]:
    key = np.asarray(jax.random.key_data(state.key)).tobytes().hex()
    return key, int(state.round)


def _stack(trees: list[Any], axis: int = 0) -> Any:
    return jax.tree.map(lambda *a: _numpy_of(a).stack(a, axis), *trees)


def _join(trees: list[Any], axis: int = 0) -> Any:
    return jax.tree.map(lambda *a: _numpy_of(a).concatenate(a, axis), *trees)


def _numpy_of(leaves: tuple[Any, ...]) -> Any:
    return np if isinstance(leaves[0], np.ndarray) else jnp
