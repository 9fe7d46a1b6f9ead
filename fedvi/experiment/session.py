"""Rounds and evaluations of runs that share one compiled program."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedvi.experiment import recorder
from fedvi.experiment.checkpoint import Kept
from fedvi.experiment.config import RunOptions
from fedvi.experiment.display import RunProgress
from fedvi.experiment.recorder import Evaluation, Recorder
from fedvi.experiment.setup import Experiment
from fedvi.federation import BaseFederation, RoundMetrics, State
from fedvi.keys import root_key

__all__ = ["Session"]


class Session:
    """Drives one run, or several that differ in numbers of their formulas only.

    All seeds of all runs are one state of `[runs x seeds]`. Each run has its own
    folder and checkpoint, as if it were alone.

    Args:
      runs: what is run, and where and how.
      federation: that runs all of them, grouped as planned.
      settings: per run, what its algorithm is built from; () of a single one.
      restored: per run, where to go on, all after the same round; None: all begin.
    """

    def __init__(
        self,
        runs: Sequence[tuple[Experiment, RunOptions]],
        federation: BaseFederation,
        settings: Sequence[Any],
        restored: Sequence[Kept] | None = None,
    ):
        self.config = runs[0][0].config
        self.federation = federation
        self.recorders = [
            Recorder(experiment, options, federation, kept)
            for (experiment, options), kept in zip(
                runs, restored or [None] * len(runs), strict=True
            )
        ]
        ends = np.cumsum([len(one.seeds) for one in self.recorders]).tolist()
        self._parts = [
            slice(end - len(one.seeds), end) for one, end in zip(self.recorders, ends)
        ]
        self.round = 0 if restored is None else restored[0].round
        self.evaluation: Evaluation | None = None
        self.states = self._states(settings, restored)
        if restored is not None:
            print(f"resumed after round {self.round} of {self.config.rounds}")

    def _states(
        self, settings: Sequence[Any], restored: Sequence[Kept] | None
    ) -> State:
        several = [
            jax.tree.map(lambda s, one=one: jnp.full(len(one.seeds), s), own)
            for one, own in zip(self.recorders, settings)
        ]
        settings = jax.tree.map(lambda *own: jnp.concatenate(own), *several)
        traced = bool(jax.tree.leaves(settings))
        if restored is None:
            seeds = [seed for one in self.recorders for seed in one.seeds]
            keys = jax.vmap(root_key)(np.array(seeds, np.uint32))
            own = (settings,) if traced else ()
            return self.federation.init(keys, *own)
        states = restored[0].states
        if not traced:  # a single run
            return states
        if len(restored) > 1:
            states = jax.tree.map(
                lambda *own: jnp.concatenate(own), *(kept.states for kept in restored)
            )
        states = states._replace(settings=settings)
        places = self.federation.shapes(len(states.key))
        return jax.tree.map(lambda s, p: jax.device_put(s, p.sharding), states, places)

    def _part(self, tree: Any, which: int) -> Any:
        """The leaves `[runs x seeds, ...]` of one run."""
        if len(self.recorders) == 1:
            return tree
        return jax.tree.map(lambda leaf: leaf[self._parts[which]], tree)

    def compile(self) -> None:
        """Compiles what is left of the runs, so that nothing waits in the middle."""
        for n in sorted(set(self.config.blocks(self.round))):
            self.federation.compile("rounds", self.states, n=n)
        self.federation.compile("evaluate", self.states)
        self.federation.compile("evaluate_personal", self.states)
        print(f"compiled in {self.federation.compile_seconds:.1f} s")

    def train(self) -> None:
        """Blocks of rounds, each with its evaluation, until all rounds are done."""
        config = self.config
        every = self.recorders[0].options.checkpoint_every
        with contextlib.ExitStack() as stack:
            for one in self.recorders:
                stack.enter_context(one.writing(self.round))
            progress = stack.enter_context(
                RunProgress(config.method, config.rounds, self.round)
            )
            if self.round == 0:
                self._evaluate(personal=config.personal_every > 0)
                self._write(progress, 0)
            saved = True
            for evaluations, n in enumerate(config.blocks(self.round), 1):
                metrics, seconds = self._rounds(n)
                self._evaluate(personal=config.personal_too(self.round))
                self._write(progress, n, metrics, seconds)
                if saved := evaluations % every == 0:
                    self._save()
            if not saved:
                self._save()
            if self.evaluation is None:  # resumed after the last round
                self._evaluate(personal=True)

    def _rounds(self, n: int) -> tuple[RoundMetrics, float]:
        """`n` rounds: their metrics, numpy, and the seconds of one of one seed."""
        compiled, start = self.federation.compile_seconds, time.perf_counter()
        self.states, metrics = jax.block_until_ready(
            self.federation.rounds(self.states, n)
        )
        seconds = time.perf_counter() - start
        seconds -= self.federation.compile_seconds - compiled
        self.round += n
        return jax.tree.map(np.asarray, metrics), seconds / n / len(self.states.key)

    def _evaluate(self, personal: bool) -> None:
        federation, states = self.federation, self.states
        scores = {"global": jax.device_get(federation.evaluate(states))}
        clusters = None
        if federation.algorithm.assign is not None:
            clusters = jax.device_get(federation.clusters(states))
        if personal:
            of_clients = federation.evaluate_personal(states)
            scores["personal"] = jax.device_get(of_clients)
        finite = jax.device_get(federation.finite(states))
        self.evaluation = Evaluation(scores, finite, clusters)

    def _write(
        self,
        progress: RunProgress,
        n: int,
        metrics: RoundMetrics | None = None,
        seconds: float | None = None,
    ) -> None:
        written = []
        for i, one in enumerate(self.recorders):
            own = self._part((self.evaluation, metrics), i)
            rows, lines = one.write(self.round, *own, seconds)
            written += rows
            for line in lines:
                where = f"{one.run_dir}: " if len(self.recorders) > 1 else ""
                progress.print(f"{where}{line}")
        progress.advance(n, recorder.status(self.recorders, written, self.round))

    def _save(self) -> None:
        for i, one in enumerate(self.recorders):
            one.save(self._own_states(i), self.round)

    def _own_states(self, which: int) -> State:
        """The states of one run as if it had been alone."""
        return self._part(self.states, which)._replace(settings=())

    def finish(self, plan: str) -> list[dict[str, Any]]:
        """What is measured once, plots and `summary.json` of every run."""
        summaries = []
        for i, one in enumerate(self.recorders):
            if len(self.recorders) > 1 and one.config.measured_after:
                print(f"{one.run_dir}:")
            own = self._part((self.states, self.evaluation), i)
            summaries.append(one.finish(*own, plan))
        return summaries
