"""Times a round, its compilation and its memory over four axes.

    python benchmarks/scaling.py --out=benchmarks/results/scaling
    python benchmarks/scaling.py --clients= --devices= --parameters=

An empty list leaves an axis out, so the second line is compile time alone. An MLP with
two hidden layers on random data, all clients in every round. Every point has a process
of its own, so that its peak memory and its number of devices are its own; the points
of an axis take turns. On CPU the devices are fake ones that share the cores.
"""

import os
import time
from typing import Any, NamedTuple

from absl import app, flags
from report import cell, describe, mebibytes, page, run, spread, table, write
from worker import Worker

AXES = ("clients", "devices", "parameters", "compile_clients")

flags.DEFINE_list("clients", ["10", "100", "1000", "10000"], "Clients in a cohort.")
flags.DEFINE_list("devices", ["1", "2", "4", "8"], "Devices that share the cohort.")
flags.DEFINE_list("parameters", ["1e4", "1e5", "1e6", "1e7"], "Of the network, about.")
flags.DEFINE_list(
    "compile_clients", ["2", "20", "200"], "Clients of rounds that are only compiled."
)
flags.DEFINE_string("algorithm", "fedavg", "As for fedvi.algorithms.build.")
flags.DEFINE_integer(
    "chunk_size",
    1,
    "Clients in one vmap on a device; 0: all of them.",
    lower_bound=0,
)
flags.DEFINE_integer("examples", 20, "Of a client.", lower_bound=1)
flags.DEFINE_integer("features", 64, "Of an example.", lower_bound=1)
flags.DEFINE_integer("batch_size", 10, "Examples a step.", lower_bound=1)
flags.DEFINE_integer("rounds", 7, "Rounds that are timed.", lower_bound=1)
flags.DEFINE_integer(
    "compiles", 3, "Compilations that are timed, of compile_clients.", lower_bound=1
)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

# Lets the threads of one process go to sleep before the next one's turn.
PAUSE_SECONDS = 0.02


class Point(NamedTuple):
    """What a process is told, beside the flags that all of them share."""

    clients: int
    devices: int
    parameters: int
    chunk_size: int


def points(axis: str, value: int) -> list[Point]:
    """The points of an axis at one of its values.

    A small network where clients are many, and a large one where devices share the
    work: else nothing but what a round costs beside its training would be seen.
    Compilation is timed for a loop over the clients and for a vmap over all.
    """
    chunk = FLAGS.chunk_size
    if axis == "clients":
        return [Point(value, 1, 10_000, chunk)]
    if axis == "devices":
        return [Point(32, value, 1_000_000, chunk)]
    if axis == "parameters":
        return [Point(4, 1, value, chunk)]
    return [Point(value, 1, 10_000, 1), Point(value, 1, 10_000, 0)]


def read_values(axis: str) -> list[int]:
    """The values of an axis as its flag gives them."""
    values = []
    for text in FLAGS[axis].value:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if number < 1 or number != int(number):
            raise app.UsageError(f"--{axis}={text} must be a whole number, such as 1e4")
        values.append(int(number))
    return values


def start(point: Point) -> Worker:
    """A process with the point's devices; XLA reads their number when it starts."""
    flag = f"--xla_force_host_platform_device_count={point.devices}"
    environment = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip(),
        # Several processes share an accelerator.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return Worker(None, "scaling_rounds.py", environment)


def measure(axis: str, values: list[int]) -> list[dict[str, Any]]:
    """What every point of an axis took, in turn."""
    shared = {
        key: FLAGS[key].value
        for key in ("algorithm", "examples", "features", "batch_size")
    }
    todo = [point for value in values for point in points(axis, value)]
    workers = [start(point) for point in todo]
    try:
        loaded = [w("load", **p._asdict(), **shared) for w, p in zip(workers, todo)]
        only_compiles = axis == "compile_clients"
        # The first compilation of a process also starts the compiler.
        compilations = FLAGS.compiles if only_compiles else 1
        compiled = take_turns(workers, "compile", compilations)
        rounds = [] if only_compiles else take_turns(workers, "round", FLAGS.rounds)
        endings = [worker("finish") for worker in workers]
    finally:
        for worker in workers:
            worker.close()
    rows = []
    for i, point in enumerate(todo):
        row = {**point._asdict(), **loaded[i], **endings[i]}
        for key in ("trace_seconds", "compile_seconds"):
            row[key] = spread([turn[key] for turn in compiled[i]])
        if rounds:
            row["seconds"] = spread([turn["seconds"] for turn in rounds[i]])
        rows.append(row)
    return rows


def take_turns(workers: list[Worker], method: str, turns: int) -> list[list[dict]]:
    """What the workers reply, by worker, the first turn left out."""
    replies = [[] for _ in workers]
    for turn in range(1 + turns):
        for worker, found in zip(workers, replies):
            time.sleep(PAUSE_SECONDS)
            reply = worker(method)
            if turn:
                found.append(reply)
    return replies


def compile_ratios(rows: list[dict]) -> dict[str, float]:
    """Most over least seconds from trace to program, by chunk size."""
    by_chunk: dict[str, list[float]] = {}
    for row in rows:
        seconds = row["trace_seconds"]["median"] + row["compile_seconds"]["median"]
        by_chunk.setdefault(str(row["chunk_size"]), []).append(seconds)
    return {chunk: max(times) / min(times) for chunk, times in by_chunk.items()}


def markdown(report: dict) -> str:
    """The report as a Markdown page."""
    work, parts = report["work"], []
    for axis, rows in report["axes"].items():
        parts += [f"## {axis.replace('_', ' ')}", _table(rows)]
        if axis == "compile_clients":
            found = (
                f"{'a vmap over all' if chunk == '0' else 'a loop over clients'}: "
                f"{ratio:.2f}"
                for chunk, ratio in report["compile_ratios"].items()
            )
            parts.append(f"Most / least, trace and compilation: {', '.join(found)}.")
    return page(
        f"How a round of {work['algorithm']} scales",
        f"{describe(report)} "
        f"Medians (min to max) of {work['rounds']} rounds after the first and, where "
        f"nothing else is, of {work['compiles']} compilations; the points of a table "
        "in turn, each in a process of its own. Clients of "
        f"{work['examples']} examples with {work['features']} features, batch "
        f"{work['batch_size']}, one epoch; all take part. Memory: XLA's temporaries of "
        "the round, the device's peak, and how far the process rose above what it held "
        "before the data.",
        *parts,
    )


def _table(rows: list[dict]) -> list[str]:
    def cells(row):
        seconds = row.get("seconds")
        return [
            f"{row['clients']:,}",
            row["devices"],
            f"{row['parameters']:,}",
            row["chunk_size"] or "all",
            cell(seconds),
            f"{1e3 * seconds['median'] / row['clients']:.3f}" if seconds else "-",
            cell(row["trace_seconds"]),
            cell(row["compile_seconds"]),
            mebibytes(row["xla_temporary_bytes"]),
            mebibytes(row["device_peak_bytes"]),
            mebibytes(row["above_before_data_bytes"]),
        ]

    return table(
        "clients | devices | parameters | chunk | s a round | ms a client | trace s | "
        "compile s | temporaries MiB | device peak MiB | process MiB",
        map(cells, rows),
    )


def main(argv):
    values = {axis: read_values(axis) for axis in AXES}
    machine, axes = run(
        argv, lambda: {axis: measure(axis, v) for axis, v in values.items() if v}, False
    )
    keys = ("algorithm", "examples", "features", "batch_size", "rounds", "compiles")
    report = {
        "machine": machine,
        "work": {key: FLAGS[key].value for key in keys},
        "axes": axes,
        "compile_ratios": compile_ratios(axes.get("compile_clients", [])),
    }
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
