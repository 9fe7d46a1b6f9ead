"""The rounds that `population.py` times, in memory or from files."""

import threading
from pathlib import Path

import jax
import numpy as np
from federations import first_examples
from worker import serve, timed

import fedvi
from fedvi import algorithms, nn, selection
from fedvi.data import ClientFiles, standardise

COMPARED = 1000  # clients whose states are read again after a commit


class PopulationRounds:
    """A federation that does one round a request."""

    def load(
        self,
        folder,
        store,
        streamed,
        algorithm,
        model,
        hidden,
        participants,
        batch_size,
        block_size,
        chunk_size,
        visit_all,
    ):
        """Opens the clients in `folder`."""
        jax.config.update("jax_enable_compilation_cache", False)
        self._files = ClientFiles(folder)
        self._clients = len(self._files.size)
        mean, std = np.float32([0.5]), np.float32([0.25])
        network = nn.build(
            model,
            classes=10,
            input_shape=self._files.shapes.x.shape[2:],
            preprocess=standardise(mean, std),
            **({"hidden": (hidden,)} if model == "mlp" else {}),
        )
        training = fedvi.LocalTraining(1, batch_size, 0.01, 0.0)
        samples = int(self._files.size.sum())
        task = fedvi.Task(network, training, training, self._clients, samples)
        build = selection.round_robin if visit_all else selection.uniform
        options = {
            "selection": build(self._clients, min(participants, self._clients)),
            "chunk_size": chunk_size or None,
        }
        self._store = store if visit_all else None
        self._method = algorithms.build(algorithm, task)
        self._options = {**options, "block_size": block_size}
        if streamed:
            self._federation = self._open()
        else:
            data = self._files.read(np.arange(self._clients))
            one_each = first_examples(data)
            self._federation = fedvi.Federation(self._method, data, one_each, **options)
            del data
        self._streamed = streamed
        self._state = self._federation.init(jax.random.key(0))
        return {}

    def _open(self):
        return fedvi.StreamedFederation(
            self._method, self._files, store=self._store, **self._options
        )

    def round(self):
        """One round; the most memory in it, in bytes."""

        def run():
            return jax.block_until_ready(self._federation.rounds(self._state, 1))

        with PeakMemory() as peak:
            (self._state, metrics), times = timed(run)
        if np.asarray(metrics.failed).any():
            raise RuntimeError("a client's training diverged")
        return {**times, **peak.bytes}

    def finish(self):
        """Bytes of the clients' states, and what keeping them took."""
        if not self._streamed:
            leaves = jax.tree.leaves(self._state.clients)
            return {"state_bytes": sum(leaf.nbytes for leaf in leaves)}
        store = self._federation.store
        result = {"state_bytes": store.bytes, "visited": store.visited}
        if not self._store:
            return result
        ids = np.random.default_rng(0).choice(
            self._clients, min(COMPARED, self._clients), replace=False
        )
        before = store.read(ids)
        _, committed = timed(lambda: self._federation.commit(self._state))
        again, opened = timed(lambda: self._open().store)
        same = jax.tree.map(np.array_equal, before, again.read(ids))
        if not all(jax.tree.leaves(same)):
            raise RuntimeError("states differ after a commit")
        files = Path(self._store).iterdir()
        result["state_bytes"] = sum(512 * file.stat().st_blocks for file in files)
        return result | {
            "commit_seconds": committed["seconds"],
            "open_seconds": opened["seconds"],
            "compared": len(ids),
        }


class PeakMemory(threading.Thread):
    """The most memory of this process, looked at every 10 ms."""

    def __enter__(self):
        self.bytes, self._ended = memory(), threading.Event()
        self.start()
        return self

    def run(self):
        """Looks until the end."""
        while not self._ended.wait(0.01):
            self._look()

    def __exit__(self, *_):
        self._ended.set()
        self.join()
        self._look()

    def _look(self):
        self.bytes = {k: max(v, self.bytes[k]) for k, v in memory().items()}


def memory():
    """Of this process: its own pages, and pages of mapped files. Linux only."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")}
    return {
        "anonymous_bytes": 1024 * kib["RssAnon"],
        "file_bytes": 1024 * kib["RssFile"],
    }


if __name__ == "__main__":
    serve(PopulationRounds())
