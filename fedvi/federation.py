"""The federated round: the only place that knows that there are many clients."""

import copy
import functools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedvi import checks, contract_checks, visit
from fedvi.algorithm import Aggregate, Algorithm, StackedAggregate, own_settings
from fedvi.client_map import (
    AXIS,
    MODEL_AXIS,
    brought,
    devices_of,
    map_reduce,
    taken_back,
)
from fedvi.codecs import IDENTITY, Codec
from fedvi.data import ClientData, settled_clients
from fedvi.evaluation import BINS, Predictions, Scores
from fedvi.flat import has_flats
from fedvi.keys import GENERATOR, Purpose, derive, is_key, root_key
from fedvi.placement import (
    places,
    put,
    replicate,
    replicated,
    resized,
    spread,
    state_shardings,
)
from fedvi.selection import Choice, Selection, full
from fedvi.visit import Call, Visit
from fedvi.visit_order import VisitOrder, by_size

__all__ = [
    "BaseFederation",
    "Federation",
    "RoundMetrics",
    "State",
    "repeated",
    "strong",
    "take",
]


class State(NamedTuple):
    """All that a run consists of; a checkpoint of it continues bit for bit.

    The state of several runs, such as seeds, has all leaves stacked, `[runs, ...]`.

    Attributes:
      server: the algorithm's server state.
      clients: the algorithm's client states, leaves `[clients, ...]`, over several
        devices with as many more, of no client, as make them divide; () where they are
        kept on disk.
      round: [] int32, rounds done.
      key: [] typed PRNG key, the run's root; never changes.
      settings: numbers that the run's algorithm is built from, where runs differ in
        them (`Federation`); else (). Never changes.
    """

    server: Any
    clients: Any
    round: jax.Array
    key: jax.Array
    settings: Any = ()


class RoundMetrics(NamedTuple):
    """What a round tells about itself; `rounds` stacks them, `[rounds, ...]`.

    Attributes:
      client_ids: [cohort] int32.
      empty: [cohort] bool, the client holds no data.
      failed: [cohort] bool, the client returned a NaN, an infinity or, in its upload, a
        number beyond `fedvi.visit.ABSURD`: its upload was left out and its own state
        kept.
      metrics: dict of scalars, means over the participants that counted.
      choice: how a selection by importance came to this cohort; () for others.
    """

    client_ids: jax.Array
    empty: jax.Array
    failed: jax.Array
    metrics: dict[str, jax.Array]
    choice: Choice | tuple[()] = ()


EVALUATIONS: dict[str, Callable] = {
    "evaluate": visit.score_global,
    "evaluate_personal": visit.score_personal,
    "predictions": visit.predictions_global,
    "predictions_personal": visit.predictions_personal,
    "clusters": visit.cluster,
}
"""What each evaluation does with one client."""

PREDICTIVES = {
    "evaluate": "global_predictive",
    "evaluate_personal": "personal_predictive",
    "predictions": "global_predictive",
    "predictions_personal": "personal_predictive",
}
"""Whose predictions an evaluation is of."""


class BaseFederation:
    """What federations of clients in memory and on disk share: checks, compiled
    programs and the calls that do not depend on where clients are.

    Args:
      algorithm: see `fedvi.algorithm`.
      sizes: `[clients]`, numbers of training examples.
      train: stacked `ClientData` of any number of clients: its shapes are looked at.
      test: the same, of what is evaluated on.
      selection: None: full participation.
      chunk_size, mesh, eval_batch_size, calibration_bins, codec: as of `Federation`.

    Attributes:
      clients: number of clients.
      population: N, those with data that the selection may pick.
      homes: mesh over whose devices clients are spread; None: all lie everywhere.
      places: length of arrays of all clients, which those devices divide.
      messages: what is sent, `fedvi.contract_checks.Messages`.
      sorts_visits: whether clients of like sizes share a chunk (`fedvi.visit_order`):
        where sizes differ.
      compile_seconds: spent on tracing and compiling so far.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        sizes: np.ndarray,
        train: ClientData,
        test: ClientData,
        *,
        selection: Selection | None,
        chunk_size: int | None,
        mesh: Mesh | None,
        eval_batch_size: int,
        calibration_bins: int,
        codec: Codec,
    ):
        if chunk_size is not None:
            checks.whole("chunk_size", chunk_size)
        checks.whole("eval_batch_size", eval_batch_size)
        checks.whole("calibration_bins", calibration_bins)
        if mesh is not None and AXIS not in getattr(mesh, "axis_names", ()):
            raise ValueError(
                f"mesh={mesh!r} must be one over clients: fedvi.clients_mesh(devices)"
            )
        if algorithm.host and mesh is not None and mesh.size > 1:
            # Its sums over devices and the call to Python wait for the same threads.
            if _platform(mesh) == "cpu":
                raise ValueError(
                    f"algorithm={algorithm.name} calls Python between rounds, for "
                    f"which the {mesh.size} devices of a CPU may wait for ever: use "
                    "one (devices=1)"
                )
        if train.x.shape[2:] != test.x.shape[2:]:
            raise ValueError(
                f"test.x has examples of shape {test.x.shape[2:]} and train.x of "
                f"{train.x.shape[2:]}: they must be the same"
            )
        if train.x.dtype != test.x.dtype:
            raise ValueError(
                f"train.x is {train.x.dtype} and test.x {test.x.dtype}, which a model "
                "scales differently: give both in one type"
            )
        self.clients = len(sizes)
        self.homes: Mesh | None = None
        self.places = self.clients
        if selection is not None and not isinstance(selection, Selection):
            raise ValueError(
                f"selection={selection!r} must be a fedvi.selection.Selection, such as "
                f"fedvi.selection.uniform({self.clients}, participants)"
            )
        self.selection = selection or full(self.clients)
        if self.selection.clients != self.clients:
            raise ValueError(
                f"selection chooses from {self.selection.clients} clients, but train "
                f"holds {self.clients}"
            )
        candidates = self.selection.candidates
        sizes = np.asarray(sizes) if candidates is None else sizes[candidates]
        self.population = int((sizes > 0).sum())
        self.sorts_visits = bool((sizes != sizes[:1]).any())
        if self.population == 0:
            raise ValueError(
                "train holds no example: every client is empty, or every one that "
                "selection may pick"
            )
        self.messages = contract_checks.check(
            algorithm, train, test, self.population, codec
        )
        contract_checks.check_selection(algorithm, self.selection)
        contract_checks.check_population(algorithm, sizes, self.clients)
        self.algorithm, self.codec = algorithm, codec
        self.settings: Any = ()
        self.chunk_size, self.mesh = chunk_size, mesh
        self.eval_batch_size = eval_batch_size
        self.calibration_bins = calibration_bins
        self._inputs = jax.ShapeDtypeStruct(test.x.shape[1:], test.x.dtype)
        self._fresh()

    def _fresh(self) -> None:
        self.compile_seconds = 0.0
        self._jits: dict[Any, Any] = {}
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._normalised: set[str] = set()  # the evaluations that are known to be

    def variant(self, **changes):
        """The same federation with other attributes, checked before: its clients in
        other groups (`chunk_size`, `runs_at_once`), or an `algorithm` that differs in
        personalisation only, then of all runs. Its programs are compiled anew."""
        other = copy.copy(self)
        if "algorithm" in changes:
            changes["_build"] = None
        other.__dict__ |= changes
        other._fresh()
        return other

    # Programs.

    @property
    def _evaluation(self) -> visit.Evaluation:
        return visit.Evaluation(self.eval_batch_size, self.calibration_bins)

    def _jit(self, name: Any, function: Callable, **options) -> Callable:
        if name not in self._jits:
            self._jits[name] = jax.jit(function, **options)
        return self._jits[name]

    def _compile(self, name: Any, jitted, *arguments, **static) -> jax.stages.Compiled:
        """Ahead of time; the next call of `jitted` finds what was compiled."""
        name = (name, *static.items())
        if name not in self._compiled:
            start = time.perf_counter()
            self._compiled[name] = jitted.lower(*arguments, **static).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[name]

    def _call(self, name: Any, jitted: Callable, *arguments, **static) -> Any:
        self._compile(name, jitted, *arguments, **static)
        return jitted(*arguments, **static)

    def _evaluated(self, name: str, results: Any) -> Any:
        """What an evaluation gave, its first one's predictions checked.

        Only the first: to look at them waits for them.
        """
        predictive = PREDICTIVES.get(name)
        if predictive is not None and name not in self._normalised:
            contract_checks.check_normalised(predictive, results)
            self._normalised.add(name)
        return results

    @property
    def _devices(self) -> int:
        """Over which clients are spread."""
        return devices_of(self.mesh)

    def _over_clients(self, function: Callable, operands, items, **options):
        return map_reduce(
            function,
            operands,
            items,
            chunk_size=self.chunk_size,
            mesh=self.mesh,
            **options,
        )

    # The user's calls that are the same wherever clients are.

    def round(self, state: State) -> tuple[State, RoundMetrics]:
        """One round. Donates `state`."""
        state, metrics = self.rounds(state, 1)
        lead = state.key.ndim
        return state, jax.tree.map(lambda leaf: leaf.squeeze(lead), metrics)

    def evaluate(self, state: State) -> Scores:
        """Scores `[clients, ...]` of the global model on every client's test data.

        Where the algorithm has an `assign`, of the client's own global model.
        """
        return self._evaluate("evaluate", state, self._tested())

    def evaluate_personal(self, state: State) -> Scores:
        """Scores `[clients, ...]` of each client's personalised model on its test data.

        Every client, a participant so far or not, adapts to its training data first.
        """
        return self._evaluate("evaluate_personal", state, self._tested())

    def predictions(self, state: State, *data_sets: Any) -> tuple[Predictions, ...]:
        """Log-probabilities and uncertainty, example by example, of the global model.

        Args:
          state: as for `evaluate`, whose models these are; of the first data set the
            draws too.
          data_sets: of the same clients, given as the training data are: for instance
            the test data, out-of-distribution inputs, calibration data.

        Returns:
          `Predictions` with leaves `[clients, capacity, ...]`, one of each data set.
        """
        return self._evaluate("predictions", state, *data_sets)

    def predictions_personal(
        self, state: State, *data_sets: Any
    ) -> tuple[Predictions, ...]:
        """The same of the personal models, those of `evaluate_personal`."""
        return self._evaluate("predictions_personal", state, *data_sets)

    def clusters(self, state: State) -> jax.Array:
        """`[clients]` int32, the cluster of every client by `Algorithm.assign`.

        Raises:
          ValueError: the algorithm has none.
        """
        if self.algorithm.assign is None:
            raise ValueError(
                f"algorithm={self.algorithm.name} knows no clusters: it has no assign"
            )
        return self._evaluate("clusters", state)

    @own_settings()
    def finite(self, state: State) -> jax.Array:
        """Whether the server's state is finite: [] bool, of several runs `[runs]`."""
        self._check_state(state)
        several = state.key.ndim > 0
        jitted = self._jit(
            ("finite", several),
            jax.vmap(visit.all_finite) if several else visit.all_finite,
            out_shardings=None if self.mesh is None else replicated(self.mesh),
        )
        return self._call(("finite", several), jitted, state.server)

    def posterior(self, state: State, client: int | None = None):
        """A posterior over the model's parameter tree.

        Args:
          state: of one run.
          client: whose; one that keeps no posterior of its own (`kept`) adapts to its
            training data first, with the same random numbers as in
            `evaluate_personal`. None: the global posterior.

        Returns:
          A `distrax.Distribution`, from `Algorithm.posterior` or `personal_posterior`.

        Raises:
          ValueError: the algorithm has none, or several global ones; no such client;
            a state of several runs.
        """
        self._check_single(state)
        algorithm = self._of(state).algorithm
        which = "posterior" if client is None else "personal_posterior"
        posterior = getattr(algorithm, which)
        if posterior is None:
            whose = "" if client is None else " of a client"
            raise ValueError(
                f"algorithm={algorithm.name} has no posterior{whose}: its models are "
                "point estimates"
            )
        if client is None:
            _refuse_several(algorithm, "posteriors")
            return _distribution("posterior", posterior(state.server))
        personal = self._own_model(state, client)
        server = self._server_of(algorithm, state, client)
        return _distribution("personal_posterior", posterior(server, personal))

    @own_settings()
    def predict(
        self, state: State, x: jax.typing.ArrayLike, client: int | None = None
    ) -> Predictions:
        """One model's predictions for any examples.

        With the keys of `predictions`: for no more examples than a client has room for
        in `test`, those of its own test data are what `evaluate_personal` looks at.

        Args:
          state: of one run.
          x: `[n, ...]` of the shape and type of the training data.
          client: whose model, as of `posterior`; None: the global one, with the keys of
            client 0.

        Returns:
          `Predictions` with leaves `[n, ...]`.

        Raises:
          ValueError: examples of another shape or type, or that are not finite; several
            global models; no such client; a state of several runs.
        """
        self._check_single(state)
        if client is None:
            _refuse_several(self.algorithm, "models")
        data = self._padded(x)
        name, personal = "predictions", ()
        if client is not None:
            name, personal = "predictions_personal", self._own_model(state, client)

        def predictions(state, number, personal, data):
            given = self._of(state).algorithm
            given = given._replace(kept=None, personalise=lambda *_: personal)
            call = Call(state.key, state.round, state.server)
            call = visit.told(given, call, number)
            visited = Visit(number, (), (), (data,))
            return EVALUATIONS[name](given, self._evaluation, call, visited)

        jitted = self._jit(("predict", name), predictions)
        number = np.int32(0 if client is None else client)
        state = state._replace(clients=())
        [found] = self._evaluated(name, jitted(state, number, personal, data))
        return take(found, slice(int(data.size)))

    def _padded(self, x: jax.typing.ArrayLike) -> ClientData:
        """Examples as one client's data, checked: of the test data's capacity, or of
        that doubled until there is room, so that few programs are compiled."""
        like, x = self._inputs, np.asarray(x)
        if x.shape[1:] != like.shape[1:] or not x.ndim:
            shape = ", ".join(["n", *map(str, like.shape[1:])])
            raise ValueError(f"x has shape {x.shape}: it must be ({shape})")
        floats = jnp.issubdtype(like.dtype, jnp.floating)
        fits = floats == jnp.issubdtype(x.dtype, jnp.floating)
        if not fits or not (floats or (x.astype(like.dtype) == x).all()):
            raise ValueError(
                f"x is {x.dtype} and the training inputs {like.dtype}, which a model "
                "scales differently: give both in one type"
            )
        if floats and not np.isfinite(x).all():
            raise ValueError("x is not finite: remove or repair those examples")
        n, capacity = len(x), like.shape[0]
        while capacity < n:
            capacity *= 2
        padded = np.zeros((capacity, *x.shape[1:]), like.dtype)
        padded[:n] = x
        return ClientData(padded, np.zeros(capacity, np.int32), np.int32(n))

    def _own_model(self, state: State, client: int) -> Any:
        """What a client predicts with: what it kept, or what it adapts to."""
        client = checks.index("client", client, self.clients)
        known, personal = self.kept(state, client)
        return personal if known else self._personal_model(state, client)

    @staticmethod
    def _server_of(algorithm: Algorithm, state: State, client: int) -> Any:
        """The server's state as one client sees it in an evaluation."""
        call = Call(state.key, state.round, state.server)
        return visit.told(algorithm, call, jnp.int32(client)).server

    def _check_single(self, state: State) -> None:
        self._check_state(state)
        if state.key.ndim:
            raise ValueError(
                f"state is that of {len(state.key)} runs: give one of them, such as "
                "fedvi.federation.take(state, 0)"
            )

    @own_settings()
    def kept(self, state: State, client: int) -> tuple[bool, Any]:
        """Whether a client has kept what it predicts with, and that; None if not.

        Args:
          state: of one run.
          client: whose.
        """
        algorithm = self._of(state).algorithm
        if algorithm.kept is None:
            return False, None
        server = self._server_of(algorithm, state, client)
        known, own = algorithm.kept(server, self._client_state(state, client))
        return (True, own) if known else (False, None)

    def commit(self, state: State, save: Callable[[], Any] = lambda: None) -> None:
        """Makes what clients keep on disk permanent, together with what `save` writes.

        A process that is killed leaves all of an earlier commit or all of this one.

        Args:
          state: that clients' states belong to.
          save: writes the state, in one atomic step.
        """
        del state
        save()

    def portable(self, state: State) -> State:
        """A state, or its shapes, as on one device: without places of no client."""
        clients = resized(state.clients, state.key.ndim, self.clients)
        return state._replace(clients=clients)

    def placed(self, state: State) -> State:
        """The way back of `portable`, onto the devices of a mesh."""
        clients = resized(state.clients, state.key.ndim, self.places)
        state, settings = state._replace(clients=clients, settings=()), state.settings
        if self.mesh is not None:
            where = self.shapes(len(state.key) if state.key.ndim else None)
            where = where._replace(settings=())
            state = jax.tree.map(lambda s, p: put(s, p.sharding), state, where)
            settings = replicate(self.mesh, settings)
        return state._replace(settings=settings)

    def _check_key(self, key) -> None:
        if not is_key(key):
            raise ValueError(
                f"key={key!r} must be a typed key: jax.random.key(seed), or several, "
                "one a run"
            )
        generator = str(jax.random.key_impl(key))
        if generator != GENERATOR:
            raise ValueError(
                f"key is of the generator {generator!r}, with which results would "
                "depend on chunk_size and devices: give "
                f"jax.random.key(seed, impl={GENERATOR!r})"
            )

    def _of(self, state: State) -> "BaseFederation":
        """This federation, with the algorithm of the run whose state it is."""
        return self

    def _clients_in_state(self) -> Any:
        """The shapes of what `State.clients` holds of each client."""
        return self.messages.client

    def _check_state(self, state: Any) -> None:
        """Raises `ValueError` unless `state` is one of this federation's, still there.

        Without it the mistake shows deep inside a traced function.
        """
        if not isinstance(state, State):
            raise ValueError(
                f"state={type(state).__name__} must be a fedvi.State, what init(key) "
                "and rounds return"
            )
        leaves = jax.tree.leaves(state)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise ValueError(
                "state was given to round, rounds or run before, which reuse its "
                "memory: go on with the state that they returned"
            )
        self._check_key(state.key)
        lead = state.key.shape

        def stacked(tree, *axes):
            return jax.tree.map(
                lambda s: jax.ShapeDtypeStruct((*lead, *axes, *s.shape), s.dtype), tree
            )

        expected = State(
            stacked(self.messages.server),
            stacked(self._clients_in_state(), self.places),
            stacked(jax.ShapeDtypeStruct((), jnp.int32)),
            state.key,
            stacked(self.settings),
        )
        found = jax.tree.map(
            lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), state
        )
        if problem := contract_checks.difference(expected, found):
            raise ValueError(f"state is none of this federation's: {problem}")

    @staticmethod
    def _check_run(rounds: int, eval_every: int) -> None:
        checks.whole("rounds", rounds)
        checks.whole("eval_every", eval_every)
        if rounds % eval_every:
            raise ValueError(
                f"rounds={rounds} must be a multiple of eval_every={eval_every}"
            )

    # A round's ends.

    def _next_server(self, state: State, ids, sums, outputs):
        """The server's state after a round, and the participants' mean metrics.

        Args:
          state: before the round.
          ids: [cohort] int32.
          sums: of `visit.participate`, over the cohort.
          outputs: of `visit.participate`, leaves `[cohort, ...]`.
        """
        algorithm, weight = self.algorithm, sums["weight"]
        participants = sums["participants"]
        common = participants, self.population
        if algorithm.reduce == "stack":
            aggregate = StackedAggregate(
                outputs["uploads"], outputs["weight"], ids, *common
            )
        else:
            aggregate = Aggregate(sums["statistics"], weight, *common)
        key = derive(state.key, Purpose.SERVER_UPDATE, state.round)
        server = jax.lax.cond(
            weight > 0,
            lambda: algorithm.server_update(key, state.round, state.server, aggregate),
            lambda: state.server,
        )
        counted = jnp.maximum(participants, 1)
        return server, jax.tree.map(lambda m: m / counted, sums["metrics"])


class Federation(BaseFederation):
    """An algorithm, its clients' data and the way to run them.

    ```
    federation = Federation(algorithm, data.train, data.test)
    state = federation.init(jax.random.key(0))
    state, metrics = federation.rounds(state, 100)
    scores = federation.evaluate(state)
    ```

    Every call is one jitted program. `round`, `rounds` and `run` donate `state`: use
    the state that they return. From several keys `init` makes the state of several
    runs, and every call then runs all of them: what it returns has a leading `[runs]`
    axis. `pure_init`, `pure_rounds`, `pure_evaluate` and so on are the same, of one
    run and without `jit`, to build larger programs from.

    Runs may differ in numbers that are traced (`fedvi.option(traced=True)`, the local
    training's learning rate and momentum), and share one program all the same:

    ```
    federation = Federation(
        lambda s: algorithms.fedprox(task, mu=s["mu"]), train, test,
        settings={"mu": 0.1},
    )
    keys = fedvi.federation.repeated(jax.random.key(0), 3)
    state = federation.init(keys, {"mu": jnp.array([0.01, 0.1, 1.0])})
    ```

    Args:
      algorithm: see `fedvi.algorithm`; with `settings` a function of them that builds
        one, the same but for the numbers.
      train: `ClientData` with leaves `[clients, ...]`: every client's training data.
      test: `ClientData` of the same clients, for evaluation.
      selection: default full participation.
      chunk_size: clients in one vmap, of like numbers of examples; None: the whole
        cohort. The default 1 is right on CPU; `fedvi.experiment` chooses for any
        device.
      mesh: from `fedvi.clients_mesh`, to spread the cohort over devices, and with
        `model_devices` the states of a model of `fedvi.placement.layered` too.
      eval_batch_size: most test examples in one forward pass. FedBABU's 128: with
        batch statistics the figure matters.
      calibration_bins: of confidence, equally wide, for ECE and MCE.
      codec: of the uploads, from `fedvi.codecs`; default: they arrive as they are.
      runs_at_once: of several runs, those in one vmap; 1: one after another.
      settings: pytree of numbers, those of a run that names none.
      spread_clients: over several devices, whether the data and states of a client lie
        on one of them, or on all. None: not on CPU, whose devices share one memory (an
        MLP's round of 10 of 100 clients takes 1.07 to 1.18 of the time if spread).

    Raises:
      ValueError: a function in place of an algorithm without settings, or the other
        way round; a selection for another number of clients, of a cohort that the
        algorithm does not take or by a measure that it does not have; train and test
        of different numbers of clients, no training example at all, data whose arrays
        do not fit each other, a label of a real example outside the model's classes, a
        size below 1, an algorithm that breaks the contract (`fedvi.contract_checks`)
        or was built for other numbers of clients or examples. Every call: a state of
        another federation, or one that a round used up. The first evaluation of each
        kind: predictions that are no log-probabilities.
    """

    @own_settings()
    def __init__(
        self,
        algorithm: Algorithm | Callable[[Any], Algorithm],
        train: ClientData,
        test: ClientData,
        *,
        selection: Selection | None = None,
        chunk_size: int | None = 1,
        mesh: Mesh | None = None,
        eval_batch_size: int = 128,
        calibration_bins: int = BINS,
        codec: Codec = IDENTITY,
        runs_at_once: int = 1,
        settings: Any = (),
        spread_clients: bool | None = None,
    ):
        if bool(jax.tree.leaves(settings)) != callable(algorithm):
            raise ValueError(
                f"algorithm={getattr(algorithm, 'name', algorithm)!r} and settings="
                f"{settings!r}: give a function of settings that builds the algorithm, "
                "and settings; or an algorithm alone"
            )
        settings = jax.tree.map(_number, settings)
        self._build = algorithm if callable(algorithm) else None
        if self._build is not None:
            # NumPy's numbers, which can be looked at inside a trace too.
            algorithm = self._build(jax.tree.map(_on_host, settings))
        train, test = settled_clients(train), settled_clients(test)
        for name, data in (("train", train), ("test", test)):
            checks.client_data(name, data)
        checks.same_clients(train.size.shape[0], test.size.shape[0])
        checks.whole("runs_at_once", runs_at_once)
        super().__init__(
            algorithm,
            np.asarray(train.size),
            train,
            test,
            selection=selection,
            chunk_size=chunk_size,
            mesh=mesh,
            eval_batch_size=eval_batch_size,
            calibration_bins=calibration_bins,
            codec=codec,
        )
        for name, data in (("train", train), ("test", test)):
            contract_checks.check_labels(name, data, self.messages.classes)
        self.settings = settings
        # A client that trains on a NaN is left out and reported, round by round.
        checks.finite_inputs("test", test)
        self.runs_at_once = runs_at_once
        self._split = mesh is not None and MODEL_AXIS in mesh.shape
        if self._split and has_flats(self.messages):
            raise ValueError(
                f"mesh splits models over devices, and algorithm={algorithm.name} has "
                "vectors, which no layer's axis divides: build it for the model that "
                "fedvi.placement.layered(model) returns"
            )
        if spread_clients not in (None, True, False):
            raise ValueError(
                f"spread_clients={spread_clients!r} must be True, False or None"
            )
        if spread_clients is None:
            spread_clients = mesh is not None and _platform(mesh) != "cpu"
        self.homes = mesh if spread_clients and self._devices > 1 else None
        self.places = places(self.homes, self.clients)
        self.train, self.test = self._at_home((train, test))

    def _on_devices(self, tree: Any) -> Any:
        if self.mesh is None:
            return jax.device_put(tree)
        return replicate(self.mesh, tree)

    def _at_home(self, tree: Any) -> Any:
        """Clients' arrays `[clients, ...]` where they belong."""
        if self.homes is None:
            return self._on_devices(tree)
        return spread(self.homes, resized(tree, 0, self.places))

    # The user's calls.

    def init(self, key, settings: Any = None) -> State:
        """The state before the first round.

        Args:
          key: typed PRNG key; `[runs]` of them for as many runs.
          settings: of each run, leaves `[runs]`; default: those of the federation.

        Raises:
          ValueError: no typed key, or one of another generator than Threefry; settings
            of another structure or number of runs.
        """
        self._check_key(key)
        if settings is None:
            settings = jax.tree.map(
                lambda s: jnp.broadcast_to(s, key.shape), self.settings
            )
        settings = jax.tree.map(_number, settings)
        wanted = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(key.shape, s.dtype), self.settings
        )
        if problem := contract_checks.difference(wanted, settings):
            raise ValueError(f"settings are none of this federation's: {problem}")
        start = State((), (), jnp.zeros(key.shape, jnp.int32), key, settings)
        start = self._on_devices(start) if self.mesh is not None else start
        return self._program("init", start)

    def rounds(self, state: State, n: int) -> tuple[State, RoundMetrics]:
        """`n` rounds as one jitted scan; metrics `[n, ...]`. Donates `state`."""
        checks.whole("n", n)
        self._check_state(state)
        return self._program("rounds", state, self.train, n=n)

    def run(
        self, state: State, rounds: int, eval_every: int = 1, personal: bool = False
    ) -> tuple[State, RoundMetrics, Scores]:
        """A whole run as one jitted call: rounds, and evaluations among them.

        Donates `state`.

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
        self._check_run(rounds, eval_every)
        self._check_state(state)
        state, metrics, scores = self._program(
            "run",
            state,
            self.train,
            self.test,
            evaluations=rounds // eval_every,
            eval_every=eval_every,
            personal=personal,
        )
        name = "evaluate_personal" if personal else "evaluate"
        return state, metrics, self._evaluated(name, scores)

    def _tested(self) -> Any:
        return self.test

    @own_settings()
    def _evaluate(self, name: str, state: State, *data_sets: ClientData) -> Any:
        self._check_state(state)
        for i, data in enumerate(data_sets):
            if data is not self.test and data is not self.train:
                checks.client_data(f"data_sets[{i}]", data)
                checks.same_clients(self.clients, len(data.size), f"data_sets[{i}]")
        data_sets = tuple(
            data if data is self.test or data is self.train else self._at_home(data)
            for data in data_sets
        )
        results = self._program(name, state, self.train, *data_sets)
        return self._evaluated(name, results)

    @own_settings()
    def _personal_model(self, state: State, client: int):
        client = self._on_devices(jnp.int32(client))
        return self._program("personal_model", state, self.train, client)

    def _client_state(self, state: State, client: int):
        return take(state.clients, client)

    # Ahead of time.

    @own_settings()
    def compile(self, name: str, state: State, **static) -> jax.stages.Compiled:
        """Compiles what a call of that name runs.

        Args:
          name: `rounds`, `evaluate`, `evaluate_personal` or `clusters`.
          state: a state or its `shapes`.
          **static: `n`, of `rounds`.
        """
        data = () if name in ("rounds", "clusters") else (self.test,)
        several = state.key.ndim > 0
        jitted = self._jitted(name, several, static)
        return self._compile(
            (name, several), jitted, state, self.train, *data, **static
        )

    @own_settings()
    def shapes(self, runs: int | None = None) -> State:
        """Shapes, types and places of a state; nothing is compiled.

        Args:
          runs: how many; None: of a single one.
        """
        lead = () if runs is None else (runs,)
        start = State((), (), jnp.int32(0), jax.eval_shape(root_key, 0), self.settings)
        start = jax.tree.map(lambda s: jax.ShapeDtypeStruct(lead, s.dtype), start)
        shapes = jax.eval_shape(self._over_runs("init"), start)
        if self.mesh is None:
            return shapes
        return jax.tree.map(
            lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place),
            shapes,
            self._state_shardings(shapes, runs=runs is not None),
        )

    # The same as pure functions of one run.

    def pure_init(self, key) -> State:
        """`init` without `jit`."""
        algorithm = self.algorithm
        server = algorithm.init(derive(key, Purpose.INIT))
        clients = jax.vmap(
            lambda i: algorithm.init_client(
                derive(key, Purpose.INIT_CLIENT, 0, i), server
            )
        )(jnp.arange(self.places))
        server, clients = jax.tree.map(strong, (server, clients))
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
        rounds = evaluations * eval_every
        metrics = jax.tree.map(lambda a: a.reshape(rounds, *a.shape[2:]), metrics)
        return state, metrics, scores

    def pure_evaluate(self, state: State, train: ClientData, test) -> Scores:
        """`evaluate` without `jit`; with `Algorithm.assign` it needs the train data."""
        return self._each_client("evaluate", state, train, test)

    def pure_evaluate_personal(self, state: State, train: ClientData, test) -> Scores:
        """`evaluate_personal` without `jit`."""
        return self._each_client("evaluate_personal", state, train, test)

    def pure_predictions(
        self, state: State, train: ClientData, *data_sets: ClientData
    ) -> tuple[Predictions, ...]:
        """`predictions` without `jit`."""
        return self._each_client("predictions", state, train, *data_sets)

    def pure_predictions_personal(
        self, state: State, train: ClientData, *data_sets: ClientData
    ) -> tuple[Predictions, ...]:
        """`predictions_personal` without `jit`."""
        return self._each_client("predictions_personal", state, train, *data_sets)

    def pure_clusters(self, state: State, train: ClientData) -> jax.Array:
        """`clusters` without `jit`."""
        return self._each_client("clusters", state, train)

    def pure_personal_model(self, state: State, train: ClientData, client):
        """What `client` predicts with, by `Algorithm.personalise`."""
        call = Call(state.key, state.round, state.server)
        residents = state.clients, train
        if self.homes is None:
            one = self._visit(residents, client)
        else:  # one row to each device, and not all rows to all of them
            asked = jnp.full(self._devices, client)
            rows = brought(residents, asked, self.homes, here=False)
            one = self._visit(rows, 0)._replace(id=client)
        call = visit.told(self.algorithm, call, client)
        return visit.personal_model(self.algorithm, self._evaluation, call, one)

    # Programs over one run or several.

    @own_settings()
    def _program(self, name: str, state: State, *data, **static) -> Any:
        """Calls `pure_{name}` over the runs of a state."""
        several = state.key.ndim > 0
        jitted = self._jitted(name, several, static)
        return self._call((name, several), jitted, state, *data, **static)

    def _state_shardings(self, state: State, runs: bool = False) -> State:
        homes = self.homes is not None
        return state_shardings(self.mesh, state, runs, spread_clients=homes)

    def _jitted(self, name: str, several: bool, static: dict[str, Any]) -> Callable:
        if (name, several) in self._jits:
            return self._jits[name, several]
        advances = name in ("rounds", "run")
        place = None
        if self.mesh is not None:
            # The state stays where it is first put: else the second call compiles again
            place = replicated(self.mesh)
            states = self.shapes(1 if several else None)
            states = jax.tree.map(lambda s: s.sharding, states)
            if name == "init":
                place = states
            elif advances:
                place = (states, place) if name == "rounds" else (states, place, place)
        return self._jit(
            (name, several),
            self._over_runs(name),
            static_argnames=tuple(static),
            donate_argnums=0 if advances else (),
            out_shardings=place,
        )

    def _over_runs(self, name: str) -> Callable:
        """`pure_{name}` of a state, over a leading axis of runs if it has one; "init"
        of a state of which only key and settings are known."""

        def one(state, *data, **static):
            own = self._of(state)
            if name == "init":
                return own.pure_init(state.key)._replace(settings=state.settings)
            return getattr(own, f"pure_{name}")(state, *data, **static)

        @functools.wraps(getattr(self, f"pure_{name}"))
        def over_runs(state, *data, **static):
            if state.key.ndim == 0:
                return one(state, *data, **static)
            at_once = self.runs_at_once
            return jax.lax.map(
                lambda state: one(state, *data, **static),
                state,
                batch_size=at_once if at_once > 1 else None,
            )

        return over_runs

    def _of(self, state: State) -> "Federation":
        if self._build is None:
            return self
        return self.variant(algorithm=self._build(state.settings))

    # A round.

    def _round(self, state: State, train: ClientData):
        """Selects, trains the cohort, aggregates, updates the server."""
        call = Call(state.key, state.round, self.algorithm.broadcast(state.server))
        ids, choice = self._select(state, call, train)
        everyone = self.selection.strata == self.clients
        one = partial(visit.participate, self.algorithm, codec=self.codec)
        cohort = self._cohort(None if everyone else ids, train.size)
        sums, outputs = self._visits(one, call, cohort, state.clients, train)
        client = outputs.pop("client")  # not put back in order: that would copy them
        clients = self._written(state.clients, cohort, client, outputs["counts"])
        outputs = cohort.in_order(outputs)
        server, metrics = self._next_server(state, ids, sums, outputs)
        if self._split:  # between the rounds of a scan too
            place = self._state_shardings(state).server
            server = jax.lax.with_sharding_constraint(server, place)
        info = RoundMetrics(ids, outputs["empty"], outputs["failed"], metrics, choice)
        after = state._replace(server=server, clients=clients, round=state.round + 1)
        return after, info

    @property
    def stays_home(self) -> bool:
        """Whether a round's participants train on the devices that hold their data."""
        strata = self.selection.strata or 1
        return strata == self.clients or strata % self._devices == 0

    def _cohort(self, ids: jax.Array | None, sizes: Any = None) -> "_Cohort":
        """Clients to visit, those of like sizes together where they can be moved.

        Args:
          ids: `[n]` int32; None: all, in order of id.
          sizes: `[places]` numbers of examples; None: in the order of `ids`.
        """
        everyone = ids is None
        count = self.clients if everyone else len(ids)
        if everyone:
            ids = jnp.arange(self.places)
        here = everyone or self.stays_home
        order = VisitOrder()
        if sizes is not None and self.sorts_visits and (self.homes is None or not here):
            own = jnp.asarray(sizes)[ids]  # of pure_rounds, whose data may be NumPy's
            order = by_size(own, self.chunk_size, self._devices)
            ids = order.of_visits(ids)
        if self.homes is not None and not everyone:
            slots = jnp.arange(places(self.homes, count))
            ids = ids[jnp.minimum(slots, count - 1)]
            # Else the draw is spread, and put together again.
            ids = jax.lax.with_sharding_constraint(ids, replicated(self.mesh))
        return _Cohort(ids, count, everyone, here, order)

    def _visits(self, one: Callable, call: Call, cohort: "_Cohort", *residents):
        """Maps `one(call, Visit) -> (sums, outputs)` over clients of arrays.

        Args:
          one: what is done with a client.
          call: what all are told.
          cohort: who is visited.
          *residents: states, training data and other data of all, `[places, ...]`.

        Returns:
          (sums, outputs `[slots, ...]`).
        """

        def meet(call, visited):
            return one(visit.told(self.algorithm, call, visited.id), visited)

        def look_up(operands, client_id):
            return meet(operands[0], self._visit(operands[1:], client_id))

        if self.homes is None:  # no copy of the cohort's data
            return self._over_clients(look_up, (call, *residents), cohort.ids)
        if not cohort.everyone:
            residents = brought(residents, cohort.ids, self.homes, cohort.here)
        client, train, *others = residents
        visits = Visit(cohort.ids, client, train, tuple(others))
        return self._over_clients(meet, call, visits, count=cohort.count)

    def _written(self, clients, cohort: "_Cohort", new, counts):
        """All clients' states, those of participants that count replaced.

        Args:
          clients: leaves `[places, ...]`.
          cohort: the participants.
          new: their states, leaves `[slots, ...]`.
          counts: `[slots]` bool.
        """
        counts &= jnp.arange(len(cohort.ids)) < cohort.count
        # Out-of-range ids are dropped: empty and failed clients keep their state.
        ids = jnp.where(counts, cohort.ids, self.places)
        if self.homes is not None:
            return taken_back(clients, ids, new, self.homes, cohort.here)
        return jax.tree.map(
            lambda old, row: old.at[ids].set(row, mode="drop"), clients, new
        )

    def _visit(self, operands, client_id) -> Visit:
        client, train, *others = take(operands, client_id)
        return Visit(client_id, client, train, tuple(others))

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
        ids = self.selection.candidates
        cohort = self._cohort(ids if ids is None else jnp.asarray(ids))
        _, told = self._visits(
            partial(visit.report, measure), call, cohort, state.clients, train
        )
        reports, finite = cohort.in_order(told)
        ids = cohort.ids[: cohort.count]
        holds_data = train.size[ids] > 0
        scores = measure.score(state.server, reports, finite & holds_data)
        scores = jnp.where(finite, scores, jnp.nan)
        everyone = jnp.zeros(self.clients, scores.dtype).at[ids].set(scores)
        return everyone, train.size[: self.clients] > 0

    def _each_client(self, name: str, state: State, *data_sets: ClientData):
        """`[clients, ...]` of an evaluation."""
        one = EVALUATIONS[name]
        call = Call(state.key, state.round, state.server)

        def score(call, visited):
            return (), one(self.algorithm, self._evaluation, call, visited)

        # Training data, then what is looked at: the one is read where models adapt.
        looked_at = data_sets[1:] if name in ("evaluate", "predictions") else ()
        sizes = (looked_at or data_sets)[0].size
        cohort = self._cohort(None, sizes)
        found = self._visits(score, call, cohort, state.clients, *data_sets)[1]
        return cohort.in_order(found)


class _Cohort(NamedTuple):
    """Clients to visit.

    Attributes:
      ids: `[slots]` int32, as many as the devices divide, in the order of the visits.
      count: how many of them are visited, the first ones.
      everyone: they are all clients, in order of id.
      here: every device's part of them lives there.
      order: of the visits.
    """

    ids: jax.Array
    count: int
    everyone: bool
    here: bool
    order: VisitOrder = VisitOrder()

    def in_order(self, outputs: Any) -> Any:
        """What visits gave, leaves `[slots, ...]`, in the order that was asked for."""
        return self.order.of_cohort(take(outputs, slice(self.count)))


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def _refuse_several(algorithm: Algorithm, what: str) -> None:
    """Raises `ValueError` where not all clients have the same global model."""
    if algorithm.assign is not None or algorithm.unicast is not None:
        raise ValueError(
            f"algorithm={algorithm.name} has several global {what}, of clusters or of "
            "clients: give client"
        )


def _distribution(function: str, found: Any) -> Any:
    if not isinstance(found, distrax.Distribution):
        raise ValueError(
            f"{function} returns {type(found).__name__}: it must return a "
            "distrax.Distribution over the model's parameter tree"
        )
    return found


def _number(value: Any) -> jax.Array:
    """A setting: float32, or int32 of a whole number."""
    value = jnp.asarray(value)
    whole = jnp.issubdtype(value.dtype, jnp.integer)
    return value.astype(jnp.int32 if whole else jnp.float32)


def strong(leaf: jax.Array) -> jax.Array:
    """Without JAX's weak type of Python's own numbers, which `eval_shape` does not tell
    and a round does not give back: each would be compiled for by itself."""
    return leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype)


def _on_host(number: jax.Array) -> Any:
    return number if number.ndim else np.asarray(number)[()]


def repeated(key, runs: int):
    """`[runs]` times one key: runs that differ in their settings only."""
    return jnp.broadcast_to(key, (runs,))


def take(tree, index):
    """One entry of every leaf's leading axis: a run of several, a client of all."""
    return jax.tree.map(lambda leaf: leaf[index], tree)
