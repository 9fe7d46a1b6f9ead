"""Compiles the programs of a run for TPUs, where there is none. Nothing is run.

    pip install -e '.[tpu-compile]'
    python benchmarks/compile_tpu.py --algorithm=all --out=OUT
    python benchmarks/compile_tpu.py --algorithm=fedavg --algorithm=fedhb_niw \
        --model=mobilenet --clients=100 --examples=500 --dtype=bfloat16 --out=OUT

A row for every combination of the flags that may be given several times, printed as it
comes and kept in OUT.json: one that is there already, of the same settings and
versions, is not compiled again (so take another OUT after a change of the code).

XLA's cost analysis counts the body of a loop once, however often it runs. So FLOPs and
bytes are those of one step of the clients that a chip trains at once, with what is done
once a round beside it, over the step's images. Bytes are of padded arrays, and stand
only where the FLOPs are within 10 % of the hand count (`counting.py`), which is of
FedAvg's step for every method.
"""

import itertools
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from report import MIB, describe, page, run, table
from tpu_programs import (
    GIB,
    check_compiler,
    check_topology,
    compile_row,
    one_all_reduce,
)

from fedvi import algorithms

PROGRAMS = ("rounds", "evaluate", "evaluate_personal")

flags.DEFINE_multi_string(
    "algorithm", ["fedavg"], "As for fedvi.algorithms.build; all: every registered one."
)
flags.DEFINE_multi_string("model", ["mlp"], "As for fedvi.nn.build.")
flags.DEFINE_multi_enum("program", ["rounds"], PROGRAMS, "What is compiled.")
flags.DEFINE_multi_string(
    "topology", ["v5e:2x2"], "Generation and chips, such as v5e:16x16."
)
flags.DEFINE_multi_enum(
    "dtype", ["float32"], ["float32", "bfloat16"], "Of the activations."
)
flags.DEFINE_multi_integer("clients", [16], "Number of clients.", lower_bound=1)
flags.DEFINE_multi_integer(
    "participants",
    [0],
    "Clients in a round; 0: all. A method that says how many takes those.",
    lower_bound=0,
)
flags.DEFINE_multi_integer(
    "chunk_size", [0], "Clients that a chip trains at once; 0: all.", lower_bound=0
)
flags.DEFINE_integer("examples", 100, "Training images of a client.", lower_bound=1)
flags.DEFINE_integer("test_examples", 100, "Test images of a client.", lower_bound=1)
flags.DEFINE_list(
    "image_shape", None, "Height, width, channels. Default: 28,28,1 of mlp, 32,32,3."
)
flags.register_validator(
    "image_shape",
    lambda sizes: sizes is None or all(s.isdecimal() and int(s) for s in sizes),
    "must look like 32,32,3",
)
flags.DEFINE_integer("classes", 10, "Of the images.", lower_bound=10)
flags.DEFINE_integer("hidden", 256, "Hidden units of mlp.", lower_bound=1)
flags.DEFINE_integer("batch_size", 50, "Images of a step.", lower_bound=1)
flags.DEFINE_float(
    "learning_rate",
    0.01,
    "Of the clients: some methods refuse one that diverges.",
    lower_bound=0,
)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

AXES = (
    "model",
    "dtype",
    "clients",
    "participants",
    "chunk_size",
    "topology",
    "algorithm",
    "program",
)
COMMON = (
    "examples",
    "test_examples",
    "image_shape",
    "classes",
    "hidden",
    "batch_size",
    "learning_rate",
)
HEADINGS = (
    "method | program | network | clients / together / at once on a chip | chips | "
    "compile s (CPU s) | one program | MFLOP an image, counted / by hand | within 10 % "
    "| MB an image, counted / by hand | custom calls | temporaries, MiB of GiB | "
    "arguments MiB | largest cohort | one all-reduce | collectives"
)
AGREE = 0.1
WORDS = {True: "yes", False: "no", None: "-"}


def broken(rows: list[dict[str, Any]]) -> str | None:
    """One line that names the rounds with more than one all-reduce, if there are."""
    names = [r["settings"]["algorithm"] for r in rows if one_all_reduce(r) is False]
    if not names:
        return None
    return (
        "a round of sums and of clients without a state must have one all-reduce and "
        f"nothing else, and has more with {', '.join(dict.fromkeys(names))}: see the "
        "last column"
    )


# The table.


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    of = row["settings"]
    clients = of["clients"], row.get("cohort", "-"), row.get("together", "-")
    lead = [
        of["algorithm"],
        of["program"],
        f"{of['model']} {of['dtype']}",
        " / ".join(map(str, clients)),
        of["topology"],
    ]
    if row["outcome"] != "compiled":
        blanks = HEADINGS.count("|") - len(lead)
        problem = row["problem"].replace("|", "/")
        return [*lead, f"{row['outcome']}: {problem}", *["-"] * blanks]
    used, memory = row["temporary_bytes"], row["memory_bytes"]
    return [
        *lead,
        f"{row['compile_seconds']:.0f} ({row['compile_cpu_seconds']:.0f})",
        "no, calls Python" if row["host"] else WORDS[row["programs"] == 1],
        _pair(row, "flops"),
        WORDS[agrees(row)],
        _pair(row, "bytes", stands=agrees(row)),
        str(sum(row["custom_calls"].values())),
        row["problem"] or f"{used / MIB:.1f} of {memory // GIB} ({used / memory:.1%})",
        f"{row['argument_bytes'] / MIB:.1f}",
        f"{row['largest_cohort']:,}",
        {True: "ok", False: "not", None: "-"}[one_all_reduce(row)],
        ", ".join(map(_collective, row["collectives"])) or "none",
    ]


def agrees(row: dict[str, Any]) -> bool | None:
    """Whether the FLOPs are near the hand count; None: one of them is not known."""
    counted, by_hand = row["flops_per_image"], row["hand_flops_per_image"]
    if counted is None or by_hand is None:
        return None
    return abs(counted / by_hand - 1) <= AGREE


def _pair(row: dict[str, Any], what: str, stands: bool | None = True) -> str:
    values = row[f"{what}_per_image"], row[f"hand_{what}_per_image"]
    counted, by_hand = ("-" if v is None else f"{v / 1e6:.3g}" for v in values)
    if not stands and counted != "-":
        counted = f"({counted})"
    return f"{counted} / {by_hand}"


def _collective(one: dict[str, Any]) -> str:
    times = f"{one['count']} × " if one["count"] > 1 else ""
    loop = " in a loop" if one["in_loop"] else ""
    return f"{times}{one['kind']} {one['bytes']:,} B{loop}"


def markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown page."""
    work, rows = report["work"], report["rows"]
    calls = Counter()
    for row in rows:
        calls.update(row.get("custom_calls", {}))
    named = ", ".join(f"{name} {n}" for name, n in sorted(calls.items())) or "none"
    return page(
        "Programs compiled for TPUs, without one",
        "**Compiled, not run**: nothing here is a time of a TPU.",
        f"{describe(report)} libtpu {work['libtpu']}. {work['examples']} training and "
        f"{work['test_examples']} test images of a client, a byte a pixel; batch "
        f"{work['batch_size']}, SGD with momentum, {work['classes']} classes.",
        "A loop counts once: FLOPs and bytes are those of one step of the clients that "
        "a chip trains at once (of an evaluation one batch, of a personal one both), "
        "over the step's images, with what is done once a round. By hand: FedAvg's "
        "step, or a forward pass. Bytes, of padded arrays, stand only where the FLOPs "
        f"are within {AGREE:.0%}: others in brackets. -: not known, or negative. "
        f"Custom calls may not be counted; all of them: {named}.",
        "Temporaries, arguments and bytes of collectives (of their results, each "
        "listed once) are of one chip. The largest cohort is an estimate: all of it "
        "trained at once, temporaries linear in it, and the clients' data and states "
        "growing with it, as many clients to a participant as here. One all-reduce: "
        "promised of a round that only sums and of clients without a state. Of methods "
        "that call Python the loop over rounds stays, and all lies in it.",
        table(HEADINGS, map(cells, rows)),
    )


# All rows.


def wanted() -> list[dict[str, Any]]:
    """The settings of every row that the flags ask for.

    Raises:
      ValueError: an unknown topology or method, more participants than clients, no
        compiler.
    """
    for name in FLAGS.topology:
        check_topology(name)
    names = []
    for name in FLAGS.algorithm:
        names += sorted(algorithms.ALGORITHMS) if name == "all" else [name]
    for name in names:
        algorithms.find(name)
    for participants, clients in itertools.product(FLAGS.participants, FLAGS.clients):
        if participants > clients:
            raise ValueError(
                f"participants={participants} is more than clients={clients}: give "
                "fewer, or 0 for all"
            )
    check_compiler()
    common = {key: FLAGS[key].value for key in COMMON}
    common |= {"jax": jax.__version__, "libtpu": version("libtpu")}
    axes = [names if axis == "algorithm" else FLAGS[axis].value for axis in AXES]
    return [common | dict(zip(AXES, point)) for point in itertools.product(*axes)]


def set_up() -> None:
    """JAX's settings, of this process and of those that compile."""
    jax.config.update("jax_platforms", "cpu")
    # What compilation costs is to be seen.
    jax.config.update("jax_enable_compilation_cache", False)


def compile_apart(settings: dict[str, Any]) -> dict[str, Any]:
    """`compile_row` in a process of its own, which libtpu ends where it fails."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=set_up) as pool:
        try:
            return pool.submit(compile_row, settings).result()
        except BrokenProcessPool:
            problem = "libtpu ended the process, with what it printed above"
            return {"outcome": "does not compile", "problem": problem}


def rows_of(
    settings: list[dict[str, Any]],
    known: list[dict[str, Any]],
    keep: Callable = lambda rows: None,
    compile_one: Callable = compile_apart,
) -> list[dict[str, Any]]:
    """All rows, each printed as it comes; those known are not compiled again.

    Args:
      settings: of every row that is wanted.
      known: rows, of these settings or of others, which stay.
      keep: called with all rows after each new one.
      compile_one: `(settings) -> row` without them.
    """
    rows = {json.dumps(row["settings"], sort_keys=True): row for row in known}
    print(f"| {HEADINGS} |", flush=True)
    for one in settings:
        name = json.dumps(one, sort_keys=True)
        if name not in rows:
            rows[name] = {"settings": one, **compile_one(one)}
            keep(list(rows.values()))
        print(f"| {' | '.join(cells(rows[name]))} |", flush=True)
    return list(rows.values())


def read_rows(out: str | None) -> list[dict[str, Any]]:
    """The rows of OUT.json; none where there is no such file."""
    path = Path(f"{out}.json")
    return json.loads(path.read_text())["rows"] if out and path.exists() else []


def check_writable(out: str | None) -> None:
    """Raises `ValueError` where OUT.json cannot be written: before hours of work."""
    try:
        if out:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            with open(f"{out}.part", "w"):
                pass
            Path(f"{out}.part").unlink()
    except OSError as error:
        raise ValueError(f"out={out!r} cannot be written: {error}") from None


def save(report: dict[str, Any], out: str | None) -> None:
    """Writes OUT.json, whole or not at all."""
    if not out:
        return
    path = Path(f"{out}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


def measure() -> dict[str, Any]:
    """All rows, and what is common to them."""
    check_writable(FLAGS.out)
    settings = wanted()
    work = {key: settings[0][key] for key in (*COMMON, "libtpu")}
    rows = rows_of(
        settings,
        read_rows(FLAGS.out),
        lambda rows: save({"work": work, "rows": rows}, FLAGS.out),
    )
    return {"work": work, "rows": rows}


def main(argv):
    set_up()
    machine, found = run(argv, measure)
    report = {"machine": machine, **found}
    save(report, FLAGS.out)
    if FLAGS.out:
        Path(f"{FLAGS.out}.md").write_text(markdown(report))
    print(markdown(report))
    if problem := broken(found["rows"]):
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    app.run(main)
