"""Times rounds over a population on disk, in turn with the same in memory.

    python benchmarks/population.py --out=benchmarks/results/population
    python benchmarks/population.py --clients=10000000 --examples=2 --features=8
    python benchmarks/population.py --algorithm=pfedbayes --clients=100000 --memory= \
        --model=mlp --hidden=100 --visit_all --folder=/disk/with/room

Simulated clients of 20 examples with 64 features. Every population is written to a
folder once (deleted at the end), and trained by `StreamedFederation`, one process each;
those of --memory also by `Federation`, with all data and states in arrays, in turn with
the stream. Memory is what a process holds itself (anonymous pages): mapped files, which
the system drops when it needs room, are listed apart.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from report import cell, describe, page, run, spread, table, write
from worker import Worker

from fedvi.data import ClientData, write_client_files

flags.DEFINE_list("clients", ["10000", "100000", "1000000"], "Populations on disk.")
flags.DEFINE_list(
    "memory", None, "Those of them to train in memory too. Default: the largest."
)
flags.DEFINE_integer("participants", 10_000, "Clients in a round.", lower_bound=1)
flags.DEFINE_integer("examples", 20, "Of a client.", lower_bound=1)
flags.DEFINE_integer("features", 64, "Of an example, one byte each.", lower_bound=1)
flags.DEFINE_string("algorithm", "fedavg", "As for fedvi.algorithms.build.")
flags.DEFINE_list("model", ["logistic", "mlp"], "logistic, mlp or both.")
flags.DEFINE_integer("hidden", 32, "Hidden units of mlp.", lower_bound=1)
flags.DEFINE_integer("batch_size", 20, "Examples a step.", lower_bound=1)
flags.DEFINE_integer("block_size", 1000, "Clients read at once.", lower_bound=1)
flags.DEFINE_integer("chunk_size", 1, "Clients in one vmap; 0: all.", lower_bound=0)
flags.DEFINE_integer("rounds", 5, "Turns that are timed.", lower_bound=1)
flags.DEFINE_boolean(
    "visit_all",
    False,
    "Every client once, in order, and their states on disk, committed at the end.",
)
flags.DEFINE_string("folder", None, "Where the files lie meanwhile.")
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

SHARED = (
    "algorithm",
    "participants",
    "hidden",
    "batch_size",
    "block_size",
    "chunk_size",
    "visit_all",
)
CLASSES = 10
SHARDS = 100  # files of a population, at most: each one that a read meets takes 8 µs
SHARD = 10_000  # clients in one file, at least
MIB = 2**20


def write_population(folder: Path, clients: int) -> None:
    """Clients whose examples scatter around one random centre a class."""
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 128, (CLASSES, FLAGS.features), np.uint8)

    def block(count):
        y = rng.integers(0, CLASSES, (count, FLAGS.examples)).astype(np.int32)
        noise = rng.integers(0, 128, (*y.shape, FLAGS.features), np.uint8)
        return ClientData(centres[y] + noise, y, np.full(count, y.shape[1], np.int32))

    shard = max(SHARD, -(-clients // SHARDS))
    starts = range(0, clients, shard)
    write_client_files(folder, (block(min(shard, clients - s)) for s in starts))


def measure(folder: Path, model: str) -> list[dict[str, Any]]:
    """What the systems of one model took, in turn."""
    systems = [(True, int(n)) for n in FLAGS.clients]
    systems += [(False, int(n)) for n in FLAGS.memory]
    shared = {key: FLAGS[key].value for key in SHARED} | {"model": model}
    workers = [Worker(None, "population_rounds.py", {}) for _ in systems]
    rounds = FLAGS.rounds
    if FLAGS.visit_all:
        rounds = max(n for _, n in systems) // FLAGS.participants
    try:
        for worker, (streamed, clients) in zip(workers, systems):
            worker(
                "load",
                folder=str(folder / str(clients)),
                store=str(folder / f"states_{model}_{clients}"),
                streamed=streamed,
                **shared,
            )
        first = [worker("round") for worker in workers]
        turns = [[] for _ in workers]
        for _ in range(rounds - FLAGS.visit_all):
            for worker, results in zip(workers, turns):
                time.sleep(0.02)
                results.append(worker("round"))
        endings = [worker("finish") for worker in workers]
    finally:
        for worker in workers:
            worker.close()
    return [
        {
            "model": model,
            "system": "stream" if streamed else "in memory",
            "clients": clients,
            "first_call_seconds": start["seconds"],
            "seconds": [result["seconds"] for result in results],
            "anonymous_bytes": max(r["anonymous_bytes"] for r in results),
            "file_bytes": max(r["file_bytes"] for r in results),
            **ending,
        }
        for (streamed, clients), start, results, ending in zip(
            systems, first, turns, endings
        )
    ]


def markdown(report: dict[str, Any]) -> str:
    """The report as one table."""
    work = report["work"]

    def cells(row):
        median = float(np.median(row["seconds"]))
        return [
            row["model"],
            f"{row['clients']:,}",
            row["system"],
            cell(spread(row["seconds"])),
            f"{work['participants'] / median:,.0f}",
            f"{row['first_call_seconds']:.2f}",
            *(f"{row[f'{k}_bytes'] / MIB:.0f}" for k in ("anonymous", "file", "state")),
        ]

    return page(
        f"Rounds of {work['participants']:,} clients, out of more than fit",
        f"{work['algorithm']}, clients of {work['examples']} examples with "
        f"{work['features']} features, batch {work['batch_size']}, one epoch, mlp with "
        f"{work['hidden']} hidden units, blocks of {work['block_size']} clients, chunk "
        f"size {work['chunk_size']}.",
        f"{describe(report)} Medians (min to max), in turn.",
        table(
            "model | clients | system | s a round | clients a second | first call s | "
            "own memory MiB | mapped files MiB | states on disk MiB",
            map(cells, report["results"]),
        ),
        *(
            f"{row['model']}, {row['clients']:,} clients: {row['visited']:,} have a "
            f"state; committed in {row['commit_seconds']:.1f} s, opened again in "
            f"{row['open_seconds']:.1f} s, the states of {row['compared']:,} clients "
            "compared after it."
            for row in report["results"]
            if row.get("commit_seconds")
        ),
    )


def measure_all() -> list[dict[str, Any]]:
    """Writes the populations, and measures every model on them."""
    with tempfile.TemporaryDirectory(dir=FLAGS.folder) as folder:
        for clients in FLAGS.clients:
            start = time.perf_counter()
            write_population(Path(folder) / clients, int(clients))
            print(f"{clients} clients in {time.perf_counter() - start:.1f} s")
        return [row for model in FLAGS.model for row in measure(Path(folder), model)]


def main(argv):
    if FLAGS.memory is None:
        FLAGS.memory = [max(FLAGS.clients, key=int)]
    if set(FLAGS.memory) - set(FLAGS.clients):
        raise app.UsageError("--memory must name populations of --clients")
    most = max(map(int, FLAGS.clients))
    if FLAGS.visit_all and most < 2 * FLAGS.participants:
        raise app.UsageError("--visit_all needs at least two rounds of --participants")
    machine, results = run(argv, measure_all, computes=False)
    work = {k: FLAGS[k].value for k in (*SHARED, "examples", "features")}
    report = {"machine": machine, "work": work, "results": results}
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
