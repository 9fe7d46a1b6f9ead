"""A federation of more clients than fit in memory: a block of them at a time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedvi import checks, client_evaluation, contract
from fedvi.algorithm import Algorithm
from fedvi.client_store import ClientStore
from fedvi.codecs import IDENTITY, Codec
from fedvi.cohort import AXIS, MODEL_AXIS, map_reduce
from fedvi.data.client_files import ClientSource
from fedvi.evaluation import Scores
from fedvi.federation import RoundMetrics, State
from fedvi.keys import Purpose, derive
from fedvi.participation import Call, Visit, next_server, participate
from fedvi.selection import Selection, uniform

__all__ = ["StreamedFederation"]


class StreamedFederation:
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
    `Federation` does, up to the order of float additions. Clients' states
    (`Algorithm.init_client`) are kept in a `ClientStore`, and that of a client that was
    not met before is made when it is; so `State.clients` is ().

    Args:
      algorithm: see `fedvi.algorithm`.
      train: every client's training data.
      test: of the same clients; None: nothing can be evaluated.
      selection: default: all clients.
      store: a folder for the clients' states; None: in memory.
      block_size: clients read at once.
      chunk_size: clients in one vmap, of a block; None: all of it.
      mesh: from `fedvi.cohort.clients_mesh`, to spread a block over devices.
      eval_batch_size: as of `Federation`.
      codec: as of `Federation`.

    Raises:
      ValueError: as `Federation`; a selection by importance, which needs a report of
        every client; several processes; models split over devices; a store of another
        algorithm.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        train: ClientSource,
        test: ClientSource | None = None,
        *,
        selection: Selection | None = None,
        store: str | None = None,
        block_size: int = 256,
        chunk_size: int | None = 1,
        mesh: Mesh | None = None,
        eval_batch_size: int = 128,
        codec: Codec = IDENTITY,
    ):
        for name, source in (("train", train), ("test", test)):
            if source is not None and not hasattr(source, "read"):
                raise ValueError(
                    f"{name}={type(source).__name__} must be a ClientSource: "
                    "ClientFiles(folder), or ClientArrays(data) of arrays"
                )
        checks.at_least("block_size", block_size, 1)
        checks.at_least("eval_batch_size", eval_batch_size, 1)
        if chunk_size is not None:
            checks.at_least("chunk_size", chunk_size, 1)
        self.clients = len(train.size)
        self.algorithm, self.train, self.test = algorithm, train, test
        self.codec = codec
        self.selection = selection or uniform(self.clients, self.clients)
        self._check(mesh)
        candidates = self.selection.candidates
        sizes = train.size if candidates is None else train.size[candidates]
        self.population = int((sizes > 0).sum())
        if self.population == 0:
            raise ValueError("train holds no example of the clients that may take part")
        examples = (test or train).shapes
        contract.check(algorithm, train.shapes, examples, self.population, codec)
        contract.check_selection(algorithm, self.selection)
        self.block_size, self.eval_batch_size = block_size, eval_batch_size
        server = jax.eval_shape(algorithm.init, jax.random.key(0))
        client = jax.eval_shape(algorithm.init_client, jax.random.key(0), server)
        self.store = ClientStore(client, self.clients, store)
        place, spread = None, None
        if mesh is not None:
            place = NamedSharding(mesh, PartitionSpec())
            spread = NamedSharding(mesh, PartitionSpec(AXIS))
        self._devices = 1 if mesh is None else mesh.size
        self._spread = spread
        self._over_clients = partial(map_reduce, chunk_size=chunk_size, mesh=mesh)
        self._start: tuple[str, Any] | None = None
        self._sums: Any = None
        self._at = self._committed_place()
        self._jit_init = jax.jit(self._init, out_shardings=place)
        self._jit_open = jax.jit(self._open_round)
        self._jit_block = jax.jit(self._train_block, donate_argnames="sums")
        self._jit_close = jax.jit(
            self._close_round, donate_argnames="state", out_shardings=place
        )
        self._jit_score = {
            one: jax.jit(partial(self._score_block, one))
            for one in (
                client_evaluation.score_global,
                client_evaluation.score_personal,
            )
        }

    def _check(self, mesh: Mesh | None) -> None:
        if mesh is not None and MODEL_AXIS in mesh.shape:
            raise ValueError(
                "mesh splits models over devices, and a stream keeps them whole: use "
                "Federation, or clients_mesh without model_devices"
            )
        if self.selection.clients != self.clients:
            raise ValueError(
                f"selection chooses from {self.selection.clients} clients, but train "
                f"holds {self.clients}"
            )
        if self.selection.measure is not None:
            raise ValueError(
                f"selection by measure={self.selection.measure!r} needs a report of "
                "all clients in every round: use Federation, or uniform or round_robin"
            )
        if self.test is not None and len(self.test.size) != self.clients:
            raise ValueError(
                f"test holds {len(self.test.size)} clients and train {self.clients}: "
                "they must be the same clients"
            )
        if jax.process_count() > 1:
            raise ValueError(
                f"{jax.process_count()} processes: clients are streamed to the devices "
                "of one process only; use Federation"
            )

    # The user's calls.

    def init(self, key) -> State:
        """The state before the first round, from a typed PRNG key.

        Forgets the clients' states of an earlier run, unless they are committed.

        Raises:
          ValueError: no typed key, or a store that holds a committed run.
        """
        if not jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
            raise ValueError(f"key={key!r} must be a typed key: jax.random.key(seed)")
        self.store.rollback()
        if self.store.visited:
            raise ValueError(
                f"store holds the states of {self.store.visited} clients, committed "
                f"after round {self.store.note.get('round')}: go on with the server's "
                "state of that round, or give another store"
            )
        self._at = None
        return self._jit_init(key)

    def commit(self, state: State) -> None:
        """Makes the clients' states permanent, as those that belong to `state`.

        A later process with the same store goes on from there with the same `state`,
        whose server is the caller's to save, before this call.
        """
        self._check_place(state)
        key, round = self._place(state)
        self.store.commit({"key": key, "round": round})

    def rounds(self, state: State, n: int) -> tuple[State, RoundMetrics]:
        """`n` rounds; metrics `[n, ...]`. Donates `state`."""
        checks.at_least("n", n, 1)
        metrics = []
        for _ in range(n):
            state, one = self.round(state)
            metrics.append(one)
        return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *metrics)

    def round(self, state: State) -> tuple[State, RoundMetrics]:
        """One round. Donates `state`.

        Raises:
          ValueError: the clients' states in the store are not those of this run after
            this round.
        """
        self._check_place(state)
        key, round = self._place(state)
        try:
            state, metrics = self._round(state)
        except BaseException:
            self.store.rollback()
            self._at = self._committed_place()
            raise
        self._at = (key, round + 1)
        return state, metrics

    def _round(self, state: State) -> tuple[State, RoundMetrics]:
        call, ids = self._jit_open(state)
        start = self._initial_server(state)
        ids, sums, parts, trained = np.asarray(ids), None, [], None
        for block_ids, count, train in self._blocks(ids, self.train):
            clients, known = self.store.read(block_ids)
            visits = self._put((block_ids, clients, known, train))
            if sums is None:
                sums = self._no_uploads(call, start, *visits)
            sums, outputs = self._jit_block(call, start, count, sums, *visits)
            # The devices have work: time to keep what came out of the block before.
            if trained is not None:
                parts.append(self._keep(*trained))
            trained = (block_ids[:count], outputs)
        parts.append(self._keep(*trained))
        outputs = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        state, metrics = self._jit_close(state, ids, sums, outputs)
        return state, RoundMetrics(ids, outputs["empty"], outputs["failed"], metrics)

    def evaluate(self, state: State, ids: np.ndarray | None = None) -> Scores:
        """`Federation.evaluate` of some clients (default: all), `[len(ids), ...]`."""
        return self._evaluate(client_evaluation.score_global, state, ids)

    def evaluate_personal(self, state: State, ids: np.ndarray | None = None) -> Scores:
        """`Federation.evaluate_personal` of some clients (default: all)."""
        self._check_place(state)
        return self._evaluate(client_evaluation.score_personal, state, ids)

    # Programs.

    def _init(self, key) -> State:
        server = self.algorithm.init(derive(key, Purpose.INIT))
        return State(server, (), jnp.zeros((), jnp.int32), key)

    def _open_round(self, state: State):
        """(what the participants are told, who they are)."""
        key = derive(state.key, Purpose.SELECT, state.round)
        ids, _ = self.selection.select(key, state.round, None, None)
        message = self.algorithm.broadcast(state.server)
        return Call(state.key, state.round, message), ids

    def _train_block(self, call, start, count, sums, *visits):
        """Adds the uploads of a block's first `count` clients to the sums so far."""
        added, outputs = self._upload_block(call, start, count, *visits)
        return jax.tree.map(jnp.add, sums, added), outputs

    def _upload_block(self, call, start, count, *visits):
        def one(operands, item):
            call, start = operands
            visit = self._visit(call, start, *item)
            return participate(self.algorithm, call, visit, self.codec)

        return self._over_clients(one, (call, start), visits, count=count)

    def _no_uploads(self, call, start, *visits):
        """The sums before the first block."""
        if self._sums is None:
            self._sums = jax.eval_shape(
                lambda *args: self._upload_block(*args)[0], call, start, 0, *visits
            )
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._sums)

    def _close_round(self, state: State, ids, sums, outputs):
        server, metrics = next_server(
            self.algorithm,
            state.key,
            state.round,
            state.server,
            self.population,
            ids,
            sums,
            outputs,
        )
        return State(server, (), state.round + 1, state.key), metrics

    def _score_block(self, one, state, start, *visits):
        def score(operands, item):
            state, start = operands
            *item, test = item
            visit = self._visit(state, start, *item)._replace(others=(test,))
            return (), one(self.algorithm, self.eval_batch_size, state, visit)

        return self._over_clients(score, (state, start), visits)[1]

    def _visit(self, run, start, client_id, client, known, train) -> Visit:
        """The client with its state, made anew if it was never met before."""
        key = derive(run.key, Purpose.INIT_CLIENT, 0, client_id)
        fresh = self.algorithm.init_client(key, start)
        client = jax.tree.map(partial(jnp.where, known), client, fresh)
        return Visit(client_id, client, train)

    # Which run, after which round, the states in the store belong to.

    def _place(self, state: State) -> tuple[str, int]:
        key = np.asarray(jax.random.key_data(state.key)).tobytes().hex()
        return key, int(state.round)

    def _committed_place(self) -> tuple[str, int] | None:
        note = self.store.note
        return (note["key"], note["round"]) if note else None

    def _check_place(self, state: State) -> None:
        if not self.store.keeps:
            return
        here = self._place(state)
        if self._at is None and here[1] > 0:
            raise ValueError(
                f"state is that after round {here[1]}, but the store holds no clients' "
                "states: give the folder that they were committed to"
            )
        if self._at in (None, here):
            return
        run = "this run" if here[0] == self._at[0] else "a run of another key"
        raise ValueError(
            f"state is that after round {here[1]}, but the clients' states in the "
            f"store are those of {run} after round {self._at[1]}: give the state that "
            "belongs to them, or another store"
        )

    # Between programs and files.

    def _initial_server(self, state: State):
        """The server's first state, from which clients' states are made."""
        key, _ = self._place(state)
        if self._start is None or self._start[0] != key:
            self._start = (key, self._jit_init(state.key).server)
        return self._start[1]

    def _blocks(
        self, ids: np.ndarray, *sources: ClientSource
    ) -> Iterator[tuple[Any, ...]]:
        """`(ids, how many count, data of each source)` of equal blocks, read ahead.

        The last block is filled up with copies of the first clients.
        """
        number = -(-len(ids) // self.block_size)
        size = -(-len(ids) // number)
        size += -size % self._devices
        number = -(-len(ids) // size)
        padded = np.resize(ids, number * size).reshape(number, size)

        def read(block):
            return tuple(source.read(block) for source in sources)

        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(read, padded[0])
            for i, block in enumerate(padded):
                data = ahead.result()
                if i + 1 < number:
                    ahead = reader.submit(read, padded[i + 1])
                yield block, min(size, len(ids) - i * size), *data

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._spread)

    def _keep(self, ids: np.ndarray, outputs: dict[str, Any]) -> dict[str, Any]:
        """Keeps the states of a block's clients that count; the rest on the host."""
        outputs = dict(outputs)
        states = outputs.pop("client")
        outputs = jax.tree.map(lambda a: np.asarray(a)[: len(ids)], outputs)
        if jax.tree.leaves(states):
            kept = np.flatnonzero(outputs["counts"])
            self.store.write(ids[kept], jax.tree.map(lambda a: a[kept], states))
        return outputs

    def _evaluate(self, one, state: State, ids: np.ndarray | None) -> Scores:
        if self.test is None:
            raise ValueError("test=None: give the clients' test data to evaluate")
        ids = np.arange(self.clients) if ids is None else np.asarray(ids)
        if not ids.size or ids.min() < 0 or ids.max() >= self.clients:
            raise ValueError(f"ids must be ids of clients, 0 to {self.clients - 1}")
        start, parts = self._initial_server(state), []
        for block_ids, _, train, test in self._blocks(ids, self.train, self.test):
            clients, known = self.store.read(block_ids)
            visits = self._put((block_ids, clients, known, train, test))
            scores = self._jit_score[one](state, start, *visits)
            parts.append(jax.device_get(scores))
        return jax.tree.map(lambda *a: np.concatenate(a)[: len(ids)], *parts)
