"""Times the servers' updates, and the rounds around them, beside FedAvg's.

    python benchmarks/server_update.py --out=benchmarks/results/server_update
    python benchmarks/server_update.py --size=1e6 --rounds=0
    python benchmarks/server_update.py --calls=0 --method=fedhb_niw --rounds=100

First one server update alone: seconds against the bytes of state and aggregate that
must be read and of state that must be written, at the bandwidth that is measured in the
same run. Then whole rounds on the same network and data (Fashion-MNIST's shape, random
images), which tells what a method's penalty and server cost over FedAvg: FedBABU trains
the body alone as FedHB does, without penalty. The methods take turns in both.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from counting import Work, moved_bytes
from federations import CLASSES, random_clients
from floors import describe_peaks, floors_of, measure_peaks, over_floor
from report import cell, describe, page, run, spread, table, write
from server_rounds import INPUTS, ROUNDS, build, describe_rounds, measure_rounds

from fedvi.algorithm import Aggregate

flags.DEFINE_multi_float("size", [1e5, 1e6, 3.3e6], "Parameters, about.", lower_bound=1)
flags.DEFINE_integer(
    "calls", 20, "Updates that are timed; 0: only whole rounds.", lower_bound=0
)
flags.DEFINE_multi_enum(
    "method", list(ROUNDS), list(ROUNDS), "Whose whole rounds; fedavg's always too."
)
flags.DEFINE_boolean(
    "peak", True, "Measure the matrix rate and the bandwidth, and print the floors."
)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

SERVERS = {
    "fedavg": {},
    "fedhb_niw": {},
    "fedhb_mixture": {},
    "pfedbayes": {"average": "moments"},
}


def server_step(name: str, options: dict, hidden: int) -> tuple[Callable, Any, Any]:
    """`(server, aggregate) -> server`, and its two arguments to start with."""
    train = random_clients(1, FLAGS.batch_size, (INPUTS,))
    algorithm = build(name, options, hidden, train).algorithm
    key = jax.random.key(0)
    server = algorithm.init(key)

    def summands(data):
        sent = algorithm.broadcast(server)
        client = algorithm.init_client(key, server)
        upload = algorithm.client_update(key, 0, sent, client, data).upload
        return algorithm.statistics(sent, upload)

    shapes = jax.eval_shape(summands, jax.tree.map(lambda leaf: leaf[0], train))
    participants = jnp.array(float(FLAGS.participants))
    # The time does not depend on the values.
    statistics = jax.tree.map(lambda s: participants * jnp.ones(s.shape), shapes)
    weight = participants

    def step(server, statistics):
        aggregate = Aggregate(statistics, weight, participants, FLAGS.clients)
        return algorithm.server_update(key, 0, server, aggregate)

    return step, server, statistics


def measure_updates(size: int, peaks: dict | None) -> list[dict[str, Any]]:
    """One row for each method at a number of parameters."""
    hidden = max(1, round((size - CLASSES) / (INPUTS + CLASSES + 1)))
    rows, calls, states = {}, {}, {}
    for name, options in SERVERS.items():
        step, server, aggregate = server_step(name, options, hidden)
        count = moved_bytes(step, server, aggregate)
        start = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=0).lower(server, aggregate).compile()
        rows[name] = {
            "method": name,
            "parameters": hidden * (INPUTS + CLASSES + 1) + CLASSES,
            "bytes": count,
            "compile_seconds": time.perf_counter() - start,
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        }
        calls[name], states[name] = compiled, (server, aggregate)
    times = {name: [] for name in calls}
    for call in range(1 + FLAGS.calls):
        for name, compiled in calls.items():
            server, aggregate = states[name]
            start = time.perf_counter()
            server = jax.block_until_ready(compiled(server, aggregate))
            if call:
                times[name].append(time.perf_counter() - start)
            states[name] = server, aggregate
    for name, row in rows.items():
        row["seconds"] = spread(times[name])
        if peaks:
            floor = floors_of(Work(0, 0, row["bytes"]), peaks)
            row["floor_seconds"] = floor["bytes_seconds"]
            row["over_floor"] = over_floor(row["seconds"]["median"], floor)
    return list(rows.values())


def markdown(report: dict) -> str:
    """The report as a Markdown page."""
    work = report["work"]

    def cells(row):
        known = "over_floor" in row
        return [
            row["method"],
            f"{row['parameters']:,}",
            f"{row['bytes'] / 1e6:.2f}",
            cell(row["seconds"], 1e3),
            f"{1e3 * row['floor_seconds']:.3f}" if known else "-",
            f"{row['over_floor']:.1f}" if known else "-",
            f"{row['temporary_bytes'] / 1e6:.2f}",
            f"{row['compile_seconds']:.2f}",
        ]

    return page(
        "Server updates, and what a round costs over FedAvg's",
        f"{describe(report)} Medians (min to max), the methods in turn.",
        describe_peaks(report["peaks"]),
        f"One server update, {work['calls']} calls. Bytes: state and aggregate that "
        "are read, state that is written; what fits in the caches can be below the "
        "floor, which is memory's.",
        table(
            "method | parameters | MB that must move | ms | floor ms | measured / "
            "floor | temporaries MB | compile s",
            map(cells, report["updates"]),
        ),
        *describe_rounds(report["rounds"], work),
    )


def measure() -> dict[str, Any]:
    """The peaks, the updates and the rounds."""
    peaks = measure_peaks() if FLAGS.peak else None
    sizes = FLAGS.size if FLAGS.calls else []
    return {
        "peaks": peaks,
        "updates": [row for size in sizes for row in measure_updates(int(size), peaks)],
        "rounds": measure_rounds(FLAGS.method) if FLAGS.rounds else {},
    }


def main(argv):
    # What compilation costs is to be seen.
    jax.config.update("jax_enable_compilation_cache", False)
    machine, found = run(argv, measure)
    keys = ("calls", "rounds", "hidden", "clients", "participants", "examples")
    work = {key: FLAGS[key].value for key in (*keys, "batch_size", "chunk_size")}
    report = {"machine": machine, "work": work, **found}
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
