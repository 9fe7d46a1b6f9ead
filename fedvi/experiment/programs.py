"""The compiled programs of a run: every one maps over the seeds."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedvi.data import ClientData
from fedvi.evaluation import Scores, Uncertainty
from fedvi.federation import Federation, RoundMetrics, State
from fedvi.participation import all_finite
from fedvi.placement import replicate, replicated, state_shardings

__all__ = ["Evaluation", "Programs", "state_shapes"]


class Evaluation(NamedTuple):
    """Of the global models of all seeds.

    Attributes:
      scores: leaves `[seeds, clients, ...]`.
      finite: `[seeds]` bool, whether the server's state is finite.
      clusters: `[seeds, clients]` int32, of a clustered method; else None.
    """

    scores: Scores
    finite: jax.Array
    clusters: jax.Array | None


class Programs:
    """A federation's functions for several seeds, each compiled once.

    States have a leading `[seeds]` axis. They lie where `fedvi.placement` says, the
    data whole on every device of the mesh; inside a round the federation spreads the
    cohort.

    Args:
      federation: built with the same mesh, its data placed there.
      mesh: from `fedvi.cohort.clients_mesh`.
      seeds: number of seeds.
      seeds_at_once: seeds in one vmap; 1: one after another inside the call.

    Attributes:
      compile_seconds: spent on tracing and compiling so far.
      run_seconds: how long the last call ran, compiling left out.
    """

    def __init__(
        self, federation: Federation, mesh: Mesh, seeds: int, seeds_at_once: int = 1
    ):
        self.compile_seconds = 0.0
        self.run_seconds = 0.0
        self._federation = federation
        self._seeds = seeds
        self._seeds_at_once = seeds_at_once
        self._mesh = mesh
        self._whole = replicated(mesh)
        self._place = jax.tree.map(
            lambda s: s.sharding, state_shapes(federation, mesh, seeds)
        )
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._train, self._test = federation.train, federation.test

    def init(self, first_seed: int) -> State:
        """The states before the first round, of the seeds first_seed, + 1, ..."""
        seeds = np.arange(first_seed, first_seed + self._seeds, dtype=np.uint32)
        seeds = replicate(self._mesh, seeds)
        program = self._compile(
            "init", partial(_init, self._federation), seeds, out_shardings=self._place
        )
        return self._run(program, seeds)

    def rounds(self, states: State, n: int) -> tuple[State, RoundMetrics]:
        """`n` rounds of every seed, metrics `[seeds, n, ...]`. Donates `states`."""
        return self._run(self.compile_rounds(states, n), states, self._train)

    def evaluate(self, states: State) -> Evaluation:
        """Evaluates the global models."""
        program = self.compile_evaluate(states)
        return self._run(program, states, self._train, self._test)

    def evaluate_personal(self, states: State) -> Scores:
        """Scores `[seeds, clients, ...]` of every client's personalised model."""
        program = self.compile_personal(states)
        return self._run(program, states, self._train, self._test)

    def uncertainty_personal(
        self, states: State, *data_sets: ClientData
    ) -> tuple[Uncertainty, ...]:
        """`[seeds, clients, capacity]` of the personalised models, on each data set."""
        arguments = (states, self._train, *data_sets)
        fn = self._over_seeds(self._federation.pure_uncertainty_personal)
        return self._run(self._compile("uncertainty", fn, *arguments), *arguments)

    # Each is compiled once; `states` may be shapes.

    def compile_rounds(self, states: State, n: int) -> jax.stages.Compiled:
        """The program behind `rounds`."""
        fn = self._over_seeds(partial(self._federation.pure_rounds, n=n))
        return self._compile(
            ("rounds", n),
            fn,
            states,
            self._train,
            donate=True,
            out_shardings=(self._place, self._whole),
        )

    def compile_evaluate(self, states: State) -> jax.stages.Compiled:
        """The program behind `evaluate`."""

        federation = self._federation

        def one(state, train, test):
            clusters = None
            if federation.algorithm.assign is not None:
                clusters = federation.pure_clusters(state, train)
            scores = federation.pure_evaluate(state, train, test)
            return Evaluation(scores, all_finite(state.server), clusters)

        fn = self._over_seeds(one)
        return self._compile("evaluate", fn, states, self._train, self._test)

    def compile_personal(self, states: State) -> jax.stages.Compiled:
        """The program behind `evaluate_personal`."""
        fn = self._over_seeds(self._federation.pure_evaluate_personal)
        return self._compile("personal", fn, states, self._train, self._test)

    def _over_seeds(self, fn: Callable) -> Callable:
        batch_size = self._seeds_at_once if self._seeds_at_once > 1 else None
        return lambda states, *data: jax.lax.map(
            lambda state: fn(state, *data), states, batch_size=batch_size
        )

    def _compile(
        self,
        name: Any,
        fn: Callable,
        *arguments,
        donate: bool = False,
        out_shardings: Any = None,
    ):
        if name not in self._compiled:
            start = time.perf_counter()
            self._compiled[name] = (
                jax.jit(
                    fn,
                    in_shardings=jax.tree.map(lambda a: a.sharding, arguments),
                    out_shardings=out_shardings or self._whole,
                    donate_argnums=0 if donate else (),
                )
                .lower(*arguments)
                .compile()
            )
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[name]

    def _run(self, compiled: jax.stages.Compiled, *arguments) -> Any:
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        self.run_seconds = time.perf_counter() - start
        return result


def state_shapes(federation: Federation, mesh: Mesh, seeds: int) -> State:
    """Shapes of what `Programs.init` returns, without compiling anything."""
    shapes = jax.eval_shape(
        partial(_init, federation), jax.ShapeDtypeStruct((seeds,), jnp.uint32)
    )
    return jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place),
        shapes,
        state_shardings(mesh, shapes, seeds=True),
    )


def _init(federation: Federation, seeds: jax.Array) -> State:
    return jax.lax.map(lambda seed: federation.pure_init(jax.random.key(seed)), seeds)
