"""Times rounds over a population on disk, in turn with the same in memory.

    python benchmarks/population.py --out=benchmarks/results/population
    python benchmarks/population.py --algorithm=pfedbayes --clients=100000 --memory= \
        --model=mlp --hidden=100 --visit_all --folder=/disk/with/room

Simulated clients of 20 examples with 64 features. Every population is written to a
folder once (deleted at the end), and trained by `StreamedFederation`, one process each;
those of --memory also by `Federation`, with all data and states in arrays, in turn with
the stream. Memory is what a process holds itself (anonymous pages): mapped files, which
the system drops when it needs room, are listed apart.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from report import describe_machine, spread, write
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
SHARD = 10_000  # clients in one file
MIB = 2**20


def write_population(folder: Path, clients: int) -> None:
    """Clients whose examples scatter around one random centre a class."""
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 128, (CLASSES, FLAGS.features), np.uint8)

    def block(count):
        y = rng.integers(0, CLASSES, (count, FLAGS.examples)).astype(np.int32)
        noise = rng.integers(0, 128, (*y.shape, FLAGS.features), np.uint8)
        return ClientData(centres[y] + noise, y, np.full(count, y.shape[1], np.int32))

    starts = range(0, clients, SHARD)
    write_client_files(folder, (block(min(SHARD, clients - s)) for s in starts))


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
    machine, work = report["machine"], report["work"]
    lines = [
        f"# Rounds of {work['participants']:,} clients, out of more than fit",
        "",
        f"{work['algorithm']}, clients of {work['examples']} examples with "
        f"{work['features']} features, batch {work['batch_size']}, one epoch, mlp with "
        f"{work['hidden']} hidden units, blocks of {work['block_size']} clients, chunk "
        f"size {work['chunk_size']}.",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; load "
        f"{machine['load_before']:.2f} before, {machine['load_after']:.2f} after. "
        "Medians (min to max), in turn.",
        "",
        "| model | clients | system | s a round | clients a second | first call s "
        "| own memory MiB | mapped files MiB | states on disk MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["results"]:
        median = float(np.median(row["seconds"]))
        lines.append(
            f"| {row['model']} | {row['clients']:,} | {row['system']} | "
            f"{_times(row['seconds'])} | {work['participants'] / median:,.0f} | "
            f"{row['first_call_seconds']:.2f} | {row['anonymous_bytes'] / MIB:.0f} | "
            f"{row['file_bytes'] / MIB:.0f} | {row['state_bytes'] / MIB:.0f} |"
        )
    for row in report["results"]:
        if row.get("commit_seconds"):
            lines += [
                "",
                f"{row['model']}, {row['clients']:,} clients: {row['visited']:,} have "
                f"a state; committed in {row['commit_seconds']:.1f} s, opened again "
                f"in {row['open_seconds']:.1f} s, the states of "
                f"{row['compared']:,} clients compared after it.",
            ]
    return "\n".join(lines) + "\n"


def _times(seconds: list[float]) -> str:
    parts = spread(seconds)
    return "{median:.3f} ({min:.3f} to {max:.3f})".format(**parts)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag")
    if FLAGS.memory is None:
        FLAGS.memory = [max(FLAGS.clients, key=int)]
    if set(FLAGS.memory) - set(FLAGS.clients):
        raise app.UsageError("--memory must name populations of --clients")
    most = max(map(int, FLAGS.clients))
    if FLAGS.visit_all and most < 2 * FLAGS.participants:
        raise app.UsageError("--visit_all needs at least two rounds of --participants")
    machine = {**describe_machine(), "load_before": os.getloadavg()[0]}
    results = []
    try:
        with tempfile.TemporaryDirectory(dir=FLAGS.folder) as folder:
            for clients in FLAGS.clients:
                start = time.perf_counter()
                write_population(Path(folder) / clients, int(clients))
                print(f"{clients} clients in {time.perf_counter() - start:.1f} s")
            for model in FLAGS.model:
                results += measure(Path(folder), model)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    machine["load_after"] = os.getloadavg()[0]
    work = {k: FLAGS[k].value for k in (*SHARED, "examples", "features")}
    report = {"machine": machine, "work": work, "results": results}
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
