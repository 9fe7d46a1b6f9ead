"""Compiles the programs of a run for TPUs, where there is none. Nothing is run.

    pip install -e '.[tpu-compile]'
    python benchmarks/compile_tpu.py --algorithm=all --out=OUT
    python benchmarks/compile_tpu.py --algorithm=fedavg --algorithm=fedhb_niw \
        --model=mobilenet --clients=100 --examples=500 --dtype=bfloat16 --out=OUT

A row for every combination of the flags that may be given several times, printed as it
comes and kept in OUT.json: a row that is there already, of the same settings and
versions, is not compiled again (take another OUT after a change of the code).

XLA's cost analysis counts the body of a loop once, however often it runs, and of
padded arrays the padding. So FLOPs and bytes are those of one step of the clients that
a chip trains at once, with what is done once a round beside them, over the step's
images. The bytes stand only where the FLOPs are within 10 % of the hand count
(`counting.py`), which is of FedAvg's step for every method.
"""

import importlib.util
import itertools
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import counting
import jax
import numpy as np
from absl import app, flags
from federations import random_clients
from hlo import collectives, custom_calls
from jax.experimental import topologies
from jax.sharding import Mesh
from report import MIB, describe, page, run, table

import fedvi
from fedvi import algorithms, nn, selection
from fedvi.client_map import AXIS
from fedvi.experiment.chunking import temporary_bytes
from fedvi.placement import replicated

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
flags.DEFINE_integer("classes", 10, "Of the images.", lower_bound=2)
flags.DEFINE_integer("hidden", 256, "Hidden units of mlp.", lower_bound=1)
flags.DEFINE_integer("batch_size", 50, "Images of a step.", lower_bound=1)
flags.DEFINE_float(
    "learning_rate",
    0.01,
    "Of the clients; some methods refuse one that diverges.",
    lower_bound=0,
)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

AXES = (
    "algorithm",
    "model",
    "dtype",
    "clients",
    "participants",
    "chunk_size",
    "topology",
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
GIB = 2**30
EVAL_BATCH = 128  # `Federation`'s default
MOMENTS = 1  # SGD with momentum, `LocalTraining`'s default
AGREE = 0.1


class Generation(NamedTuple):
    """TPUs of one kind: memory of a chip, how they are named, of 1, 4, 8, 256 chips."""

    memory: int
    config: str  # megacore: both cores of a chip are one device
    layouts: tuple[str, ...]


GENERATIONS = {
    "v4": Generation(32 * GIB, "megacore", ("1x1x1", "2x2x1", "2x2x2", "4x8x8")),
    "v5e": Generation(16 * GIB, "default", ("1x1", "2x2", "2x4", "16x16")),
    "v6e": Generation(32 * GIB, "default", ("1x1", "2x2", "2x4", "16x16")),
}


# Where and what.


def check_topology(name: str) -> Generation:
    """The generation of a topology.

    Raises:
      ValueError: it is not known.
    """
    kind, _, layout = name.partition(":")
    if kind in GENERATIONS and layout in GENERATIONS[kind].layouts:
        return GENERATIONS[kind]
    known = (f"{g}:{layout}" for g, of in GENERATIONS.items() for layout in of.layouts)
    raise ValueError(f"topology={name!r} is not known: choose from {', '.join(known)}")


def check_compiler() -> None:
    """Raises `ValueError` where there is no compiler for TPUs."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "compiling for TPUs needs libtpu: pip install 'fedvi[tpu-compile]'"
        )


def mesh_of(topology: str) -> Mesh:
    """A mesh over the chips of a topology, which need not exist."""
    # Else libtpu asks the network which machine this is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    config = check_topology(topology).config
    found = topologies.get_topology_desc(topology, "tpu", chip_config_name=config)
    return Mesh(np.array(found.devices).reshape(-1), (AXIS,))


def placed(mesh: Mesh, data: Any) -> Any:
    """Shapes and places of clients' data: whole on every chip."""
    whole = replicated(mesh)
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), data
    )


def image_shape(settings: dict[str, Any]) -> tuple[int, ...]:
    """Of one raw image."""
    if settings["image_shape"]:
        return tuple(map(int, settings["image_shape"]))
    return (28, 28, 1) if settings["model"] == "mlp" else (32, 32, 3)


def images(clients: int, examples: int, shape: tuple[int, ...]):
    """Random `ClientData` of a byte a pixel, as images come."""
    labels = random_clients(clients, examples, ())
    pixels = np.random.default_rng(1).bytes(clients * examples * math.prod(shape))
    x = np.frombuffer(pixels, np.uint8).reshape(clients, examples, *shape)
    return labels._replace(x=x)


def build_model(settings: dict[str, Any]) -> nn.Model:
    """The network."""
    hidden = {"hidden": (settings["hidden"],)} if settings["model"] == "mlp" else {}
    return nn.build(
        settings["model"],
        classes=settings["classes"],
        input_shape=image_shape(settings),
        dtype=settings["dtype"],
        **hidden,
    )


def federation_of(settings: dict[str, Any], mesh: Mesh) -> fedvi.Federation:
    """A federation whose data are shapes on the chips of the mesh."""
    clients, shape = settings["clients"], image_shape(settings)
    train = images(clients, settings["examples"], shape)
    test = images(clients, settings["test_examples"], shape)
    training = fedvi.LocalTraining(1, settings["batch_size"], settings["learning_rate"])
    given = min(1000, clients * settings["examples"])  # read by FedBE alone
    task = fedvi.Task.of(
        build_model(settings), train, training, training, unlabelled=given
    )
    method = algorithms.build(settings["algorithm"], task)
    fixed = {"all": clients, None: settings["participants"] or clients}
    cohort = fixed.get(method.cohort, method.cohort)
    federation = fedvi.Federation(
        method,
        train,
        test,
        selection=selection.uniform(clients, cohort) if cohort < clients else None,
        chunk_size=settings["chunk_size"] or None,
    )
    return federation.variant(
        mesh=mesh, train=placed(mesh, train), test=placed(mesh, test)
    )


# What is expected.


def together(cohort: int, chips: int, chunk_size: int | None) -> int:
    """Clients that a chip trains at once, as `fedvi.client_map.map_reduce` has it."""
    each = -(-cohort // chips)
    chunks = -(-each // min(chunk_size or each, each))
    return -(-each // chunks)


def hand_count(settings: dict[str, Any]) -> tuple[int, counting.Work | None]:
    """Images of one client's step, and the least work of it.

    Of a personal evaluation a training step and a forward pass, over the images of the
    training step. None of a network whose layers `counting` does not know.
    """
    sizes = {
        "activation_bytes": np.dtype(jax.numpy.dtype(settings["dtype"])).itemsize,
        "input_bytes": 1,
    }
    batch = min(settings["batch_size"], settings["examples"])
    tested = min(EVAL_BATCH, settings["test_examples"])
    evaluates = settings["program"] == "evaluate"
    number = tested if evaluates else batch
    try:
        layers = counting.layers_of(build_model(settings), image_shape(settings))
    except ValueError:
        return number, None
    step = counting.least_step(layers, batch, moments=MOMENTS, **sizes)
    forward = counting.least_forward(layers, tested, **sizes)
    work = {"rounds": step, "evaluate": forward, "evaluate_personal": step + forward}
    return number, work[settings["program"]]


def bytes_a_chip(tree: Any) -> int:
    """Of shapes with their places, on one chip."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def largest_cohort(
    memory: int, arguments: int, growing: int, temporaries: int, cohort: int
) -> int:
    """Clients of a round, trained at once, that fill a chip's memory: an estimate.

    Temporaries are taken as linear in the clients of a chip, and the clients' data and
    states (`growing`, bytes of a chip) as growing with the cohort, since there are as
    many clients to a participant as now. Not a multiple of the chips.
    """
    return int((memory - arguments + growing) * cohort / (growing + temporaries))


# What comes out.


class Counted:
    """Counts the programs that XLA compiles, inside a `with`."""

    count = 0

    def __enter__(self) -> "Counted":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, *_, **__) -> None:
        self.count += event.endswith("backend_compile_duration")


def compile_row(settings: dict[str, Any]) -> dict[str, Any]:
    """Compiles one program, and tells what XLA says of it."""
    jax.clear_caches()
    mesh = mesh_of(settings["topology"])
    try:
        federation = federation_of(settings, mesh)
        state = federation.shapes()
    except ValueError as error:
        return {"outcome": "refused", "problem": _first_line(error)}
    evaluates = settings["program"] != "rounds"
    cohort = federation.clients if evaluates else federation.selection.size
    at_once = together(cohort, mesh.size, federation.chunk_size)
    data = federation.train, federation.test
    row = {
        "host": federation.algorithm.host,
        "sums_only": federation.algorithm.reduce == "sum"
        and not jax.tree.leaves(state.clients),
        "participants": cohort,
        "together": at_once,
        "memory_bytes": check_topology(settings["topology"]).memory,
        "argument_bytes": bytes_a_chip((state, data if evaluates else data[0])),
        "growing_bytes": bytes_a_chip((state.clients, data)),
    }
    static = {} if evaluates else {"n": 1}
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        with Counted() as compiled:
            program = federation.compile(settings["program"], state, **static)
    except Exception as error:  # XLA's, of whatever kind: a row of the table
        return row | failure(error, row)
    row |= {
        "outcome": "compiled",
        "compile_seconds": time.perf_counter() - wall,
        "compile_cpu_seconds": time.process_time() - cpu,
        "programs": compiled.count,
    }
    return row | told(program, row, settings)


def told(program: Any, row: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What a compiled program says of its work, memory and messages."""
    text = program.as_text()
    cost = program.cost_analysis() or {}
    number, work = hand_count(settings)
    counted = {
        key: per_image(cost.get(name), row["together"] * number)
        for key, name in (("flops", "flops"), ("bytes", "bytes accessed"))
    }
    arguments = program.memory_analysis().argument_size_in_bytes
    temporaries = temporary_bytes(program)
    kinds = Counter(collectives(text))
    needed = arguments + temporaries
    return {
        "argument_bytes": arguments,
        "temporary_bytes": temporaries,
        "fits": needed <= row["memory_bytes"],
        "largest_cohort": largest_cohort(
            row["memory_bytes"],
            arguments,
            row["growing_bytes"],
            # What the whole cohort would take in one chunk.
            temporaries
            * together(row["participants"], chips(settings), None)
            / row["together"],
            row["participants"],
        ),
        "flops_per_image": counted["flops"],
        "bytes_per_image": counted["bytes"],
        "hand_flops_per_image": work and work.flops / number,
        "hand_bytes_per_image": work and work.bytes / number,
        "custom_calls": custom_calls(text),
        "collectives": [one._asdict() | {"count": n} for one, n in kinds.items()],
    }


def chips(settings: dict[str, Any]) -> int:
    """Of a row's topology."""
    layout = settings["topology"].partition(":")[2]
    return math.prod(map(int, layout.split("x")))


def per_image(value: float | None, number: int) -> float | None:
    """None where XLA gives no figure, or none that can be one."""
    if value is None or not value > 0:
        return None
    return value / number


def failure(error: Exception, row: dict[str, Any]) -> dict[str, Any]:
    """Outcome and problem of a program that did not compile."""
    text = str(error)
    needed = re.search(
        r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"
        r"|Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
        text,
    )
    if "RESOURCE_EXHAUSTED" not in text or not needed:
        if row["host"]:
            text = f"it calls Python between rounds: {text}"
        return {"outcome": "does not compile", "problem": _first_line(text)}
    numbers = [part for part in needed.groups() if part is not None]
    used, limit = (
        float(value) * 1024.0 ** " KMGT".index(unit or " ")
        for value, unit in (numbers[:2], numbers[2:])
    )
    return {
        "outcome": "does not fit",
        "problem": too_large(used, limit, row["argument_bytes"], row["together"]),
        "temporary_bytes": used,
        "fits": False,
    }


def too_large(used: float, limit: float, arguments: float, at_once: int) -> str:
    """One line: what a program needs, what there is, and which chunk would fit."""
    line = (
        f"chunk_size={at_once} needs {used / GIB:.2f} GiB of temporaries beside "
        f"{arguments / GIB:.2f} GiB of arguments, of {limit / GIB:.2f} GiB: "
    )
    fits = int(at_once * (limit - arguments) / used)
    if fits < 1:
        return line + "not even one client fits; take a smaller model or batch_size"
    # Temporaries that do not grow with the clients can make that one too many.
    return line + f"about chunk_size={min(fits, at_once - 1)} would fit"


def _first_line(error: Exception | str) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else repr(error)


def one_all_reduce(row: dict[str, Any]) -> bool | None:
    """Whether a round has one all-reduce and no other collective.

    None of a program of which that is not promised: evaluations, clients that keep a
    state, servers that get every upload, a single chip.
    """
    promised = row["settings"]["program"] == "rounds" and row.get("sums_only")
    if not promised or row["outcome"] != "compiled" or chips(row["settings"]) == 1:
        return None
    kinds = [(one["kind"], one["count"]) for one in row["collectives"]]
    return kinds == [("all-reduce", 1)]


def broken(rows: list[dict[str, Any]]) -> str | None:
    """One line that names the rounds with more than one all-reduce; None: there are
    none."""
    names = [r["settings"]["algorithm"] for r in rows if one_all_reduce(r) is False]
    if not names:
        return None
    return (
        f"a round without client states must have one all-reduce and nothing else: "
        f"{', '.join(dict.fromkeys(names))} do more, as the table's last column lists"
    )


# The table.

HEADINGS = (
    "method | program | network | clients / a round / at once | chips | compile s (CPU "
    "s) | one program | MFLOP an image, counted / by hand | within 10 % | MB an image, "
    "counted / by hand | custom calls | temporaries, MiB of GiB | arguments MiB | "
    "largest cohort | one all-reduce | collectives"
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    of = row["settings"]
    clients = [of["clients"], row.get("participants", "-"), row.get("together", "-")]
    lead = [
        of["algorithm"],
        of["program"],
        f"{of['model']} {of['dtype']}",
        " / ".join(map(str, clients)),
        of["topology"],
    ]
    if row["outcome"] != "compiled":
        blanks = HEADINGS.count("|") - len(lead)
        return [*lead, f"{row['outcome']}: {row['problem']}", *["-"] * blanks]
    used, memory = row["temporary_bytes"], row["memory_bytes"]
    return [
        *lead,
        f"{row['compile_seconds']:.0f} ({row['compile_cpu_seconds']:.0f})",
        "yes" if row["programs"] == 1 and not row["host"] else "no",
        _pair(row, "flops"),
        {True: "yes", False: "no", None: "-"}[agrees(row)],
        _pair(row, "bytes"),
        str(sum(row["custom_calls"].values())),
        f"{used / MIB:.1f} of {memory // GIB} ({100 * used / memory:.1f} %)"
        + ("" if row["fits"] else ", does not fit"),
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


def _pair(row: dict[str, Any], what: str) -> str:
    values = (row[f"{what}_per_image"], row[f"hand_{what}_per_image"])
    return " / ".join("-" if v is None else f"{v / 1e6:.3g}" for v in values)


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
        f"are within {AGREE:.0%}; -: not known, or negative. Custom calls may not be "
        f"counted; all of them: {named}.",
        "Temporaries, arguments and bytes of collectives (results, each listed once) "
        "are of one chip. The largest cohort is an estimate: all of it trained at once, "
        "temporaries linear in the clients of a chip, and the clients' data and states "
        "growing with it, as many clients to a participant as here. One all-reduce: "
        "promised of a round that only sums and of clients without a state.",
        table(HEADINGS, map(cells, rows)),
    )


# All of them.


def wanted() -> list[dict[str, Any]]:
    """The settings of every row that the flags ask for, checked."""
    check_compiler()
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
    common = {key: FLAGS[key].value for key in COMMON}
    common |= {"jax": jax.__version__, "libtpu": version("libtpu")}
    axes = [names if axis == "algorithm" else FLAGS[axis].value for axis in AXES]
    return [common | dict(zip(AXES, point)) for point in itertools.product(*axes)]


def rows_of(
    settings: list[dict[str, Any]],
    known: list[dict[str, Any]],
    compile_one: Callable = compile_row,
    keep: Callable = lambda rows: None,
) -> list[dict[str, Any]]:
    """A row for each of the settings; those known already are not compiled again.

    Args:
      settings: of every row that is wanted.
      known: rows, of these settings or of others, which stay.
      compile_one: `(settings) -> row` without them.
      keep: called with all rows after each new one.
    """
    rows = list(known)
    print("| " + HEADINGS + " |", flush=True)
    for one in settings:
        found = [row for row in rows if row["settings"] == one]
        if not found:
            rows.append({"settings": one, **compile_one(one)})
            keep(rows)
        print("| " + " | ".join(cells((found or rows[-1:])[0])) + " |", flush=True)
    return rows


def read_rows(out: str | None) -> list[dict[str, Any]]:
    """The rows of OUT.json; none where there is no such file."""
    path = Path(f"{out}.json")
    return json.loads(path.read_text())["rows"] if out and path.exists() else []


def save(out: str | None, report: dict[str, Any]) -> None:
    """Writes OUT.json, whole or not at all, and OUT.md where the machine is known."""
    if not out:
        return
    path = Path(f"{out}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)
    if "machine" in report:
        path.with_suffix(".md").write_text(markdown(report))


def measure() -> dict[str, Any]:
    """All rows, and what is common to them."""
    settings = wanted()
    work = {key: settings[0][key] for key in (*COMMON, "libtpu")}
    rows = rows_of(
        settings,
        read_rows(FLAGS.out),
        keep=lambda rows: save(FLAGS.out, {"work": work, "rows": rows}),
    )
    return {"work": work, "rows": rows}


def main(argv):
    jax.config.update("jax_platforms", "cpu")
    # What compilation costs is to be seen.
    jax.config.update("jax_enable_compilation_cache", False)
    machine, found = run(argv, measure)
    report = {"machine": machine, **found}
    save(FLAGS.out, report)
    print(markdown(report))
    if problem := broken(found["rows"]):
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    app.run(main)
