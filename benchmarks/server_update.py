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

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from counting import Work, moved_bytes
from floors import describe_peaks, floors_of, measure_peaks, over_floor
from report import describe_machine, spread, write
from server_rounds import (
    CLASSES,
    INPUTS,
    ROUNDS,
    build,
    cell,
    describe_rounds,
    measure_rounds,
)

from fedvi import ClientData
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
    algorithm = build(name, options, hidden)
    key = jax.random.key(0)
    server = algorithm.init(key)
    data = ClientData(
        jnp.zeros((FLAGS.batch_size, INPUTS)),
        jnp.zeros(FLAGS.batch_size, jnp.int32),
        jnp.array(FLAGS.batch_size),
    )
    shapes = jax.eval_shape(
        lambda: (
            algorithm.client_update(
                key,
                0,
                algorithm.broadcast(server),
                algorithm.init_client(key, server),
                data,
            ).statistics
        )
    )
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
    machine, work = report["machine"], report["work"]
    lines = [
        "# Server updates, and what a round costs over FedAvg's",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; load "
        f"{machine['load_before']:.2f} before, {machine['load_after']:.2f} after; jax "
        f"{work['jax']}, {work['backend']}. Medians (min to max), the methods in turn.",
        "",
        describe_peaks(report["peaks"]) if report["peaks"] else "No peaks measured.",
        "",
        f"One server update, {work['calls']} calls. Bytes: state and aggregate that "
        "are read, state that is written; what fits in the caches can be below the "
        "floor, which is memory's.",
        "",
        "| method | parameters | MB that must move | ms | floor ms | measured / floor "
        "| temporaries MB | compile s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["updates"]:
        floor = f"{1e3 * row['floor_seconds']:.3f}" if "over_floor" in row else "-"
        cells = [
            row["method"],
            f"{row['parameters']:,}",
            f"{row['bytes'] / 1e6:.2f}",
            cell(row["seconds"], 1e3),
            floor,
            f"{row['over_floor']:.1f}" if "over_floor" in row else "-",
            f"{row['temporary_bytes'] / 1e6:.2f}",
            f"{row['compile_seconds']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += describe_rounds(report["rounds"], work)
    return "\n".join(lines) + "\n"


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag")
    # What compilation costs is to be seen.
    jax.config.update("jax_enable_compilation_cache", False)
    machine = {**describe_machine(), "load_before": os.getloadavg()[0]}
    sizes = FLAGS.size if FLAGS.calls else []
    try:
        peaks = measure_peaks() if FLAGS.peak else None
        updates = [row for size in sizes for row in measure_updates(int(size), peaks)]
        rounds = measure_rounds(FLAGS.method) if FLAGS.rounds else {}
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    machine["load_after"] = os.getloadavg()[0]
    keys = ("calls", "rounds", "hidden", "clients", "participants", "examples")
    report = {
        "machine": machine,
        "work": {
            **{key: FLAGS[key].value for key in (*keys, "batch_size", "chunk_size")},
            "jax": jax.__version__,
            "backend": jax.default_backend(),
        },
        "peaks": peaks,
        "updates": updates,
        "rounds": rounds,
    }
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
