"""A run's programs, compiled for TPUs that are not there, and what XLA says of them."""

import importlib.util
import math
import os
import re
import time
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import counting
import jax
import numpy as np
from federations import random_clients
from hlo import collectives, custom_calls
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fedvi
from fedvi import algorithms, nn, selection
from fedvi.client_map import AXIS, layout
from fedvi.experiment.chunking import temporary_bytes
from fedvi.placement import places, resized

__all__ = [
    "backend",
    "build_model",
    "check_compiler",
    "check_topology",
    "chips",
    "compile_row",
    "failure",
    "hand_count",
    "image_shape",
    "largest_cohort",
    "mesh_of",
    "one_all_reduce",
    "together",
]

GIB = 2**30
EVAL_BATCH = 128  # `Federation`'s default
MOMENTS = 1  # SGD with momentum, `LocalTraining`'s default
# XLA joins all-reduces up to a size: 89 MB became one, 134 MB two.
JOINED = 100e6
UNLABELLED = 1000  # inputs that the server has, which FedBE alone reads


class Generation(NamedTuple):
    """One kind of TPU.

    Attributes:
      memory: bytes of a chip.
      config: libtpu's name of how a chip is used; megacore: its two cores as one.
      layouts: of 1, 4, 8 and 256 chips.
    """

    memory: int
    config: str
    layouts: tuple[str, ...]


GENERATIONS = {
    "v4": Generation(32 * GIB, "megacore", ("1x1x1", "2x2x1", "2x2x2", "4x8x8")),
    "v5e": Generation(16 * GIB, "default", ("1x1", "2x2", "2x4", "16x16")),
    "v6e": Generation(32 * GIB, "default", ("1x1", "2x2", "2x4", "16x16")),
}


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


def chips(topology: str) -> int:
    """How many a topology has."""
    return math.prod(map(int, topology.partition(":")[2].split("x")))


def check_compiler() -> None:
    """Raises `ValueError` where there is no compiler for TPUs."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "compiling for TPUs needs libtpu: pip install 'fedvi[tpu-compile]'"
        )


def backend(name: str) -> AbstractContextManager:
    """Inside it `fedvi` traces what it computes on a "cpu", a "gpu" or a "tpu"."""
    return mock.patch.object(jax, "default_backend", lambda: name)


def mesh_of(topology: str) -> Mesh:
    """A mesh over the chips of a topology, which need not exist."""
    # Else libtpu asks the network which machine this is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    # A TPU belongs to one process; a compiler may have several.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # It ends the process at a flag of CPUs; those of its own are in LIBTPU_INIT_ARGS.
    os.environ.pop("XLA_FLAGS", None)
    config = check_topology(topology).config
    found = topologies.get_topology_desc(topology, "tpu", chip_config_name=config)
    return Mesh(np.array(found.devices).reshape(-1), (AXIS,))


def placed(mesh: Mesh, data: Any) -> Any:
    """Shapes and places of clients' data: a part of the clients on each chip."""
    part = NamedSharding(mesh, PartitionSpec(AXIS))
    shapes = jax.eval_shape(lambda: data)
    shapes = resized(shapes, 0, places(mesh, len(data.size)))
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=part), shapes
    )


def image_shape(settings: dict[str, Any]) -> tuple[int, ...]:
    """Of one raw image."""
    if settings["image_shape"]:
        return tuple(map(int, settings["image_shape"]))
    return (28, 28, 1) if settings["model"] == "mlp" else (32, 32, 3)


def images(clients: int, examples: int, shape: tuple[int, ...]) -> fedvi.ClientData:
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
    """A federation whose data are shapes on the chips of the mesh.

    Raises:
      ValueError: the method or the network refuses the settings.
    """
    clients, shape = settings["clients"], image_shape(settings)
    train = images(clients, settings["examples"], shape)
    test = images(clients, settings["test_examples"], shape)
    training = fedvi.LocalTraining(1, settings["batch_size"], settings["learning_rate"])
    given = min(UNLABELLED, clients * settings["examples"])
    task = fedvi.Task.of(
        build_model(settings), train, training, training, unlabelled=given
    )
    method = algorithms.build(settings["algorithm"], task)
    asked = {"all": clients, None: settings["participants"] or clients}
    cohort = asked.get(method.cohort, method.cohort)
    federation = fedvi.Federation(
        method,
        train,
        test,
        selection=selection.uniform(clients, cohort) if cohort < clients else None,
        chunk_size=settings["chunk_size"] or None,
    )
    return federation.variant(
        mesh=mesh,
        homes=mesh if mesh.size > 1 else None,
        places=places(mesh, clients),
        train=placed(mesh, train),
        test=placed(mesh, test),
    )


def together(cohort: int, chips: int, chunk_size: int | None) -> int:
    """Clients that a chip trains at once, as `fedvi.client_map.map_reduce` has it."""
    return layout(cohort, chunk_size, chips)[1]


def hand_count(settings: dict[str, Any]) -> tuple[int, counting.Work | None]:
    """Images of one client's step, and the least work of it.

    Of a personal evaluation the work is a training step's and a forward pass's, the
    images the training step's. None of a network that `counting` does not know.
    """
    sizes = {
        "activation_bytes": jax.numpy.dtype(settings["dtype"]).itemsize,
        "input_bytes": 1,
    }
    batch = min(settings["batch_size"], settings["examples"])
    tested = min(EVAL_BATCH, settings["test_examples"])
    number = tested if settings["program"] == "evaluate" else batch
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
    memory: int, arguments: int, growing: int, temporaries: float, cohort: int
) -> int:
    """Clients of a round, all trained at once, that fill a chip's memory: an estimate.

    Args:
      memory: bytes of a chip, as are the next three.
      arguments: of the program.
      growing: of them the clients' data and states, which are taken as linear in the
        cohort: there are as many clients to a participant as now.
      temporaries: of the cohort trained at once, taken as linear in it.
      cohort: clients of a round.
    """
    fixed = max(arguments - growing, 0)
    return int((memory - fixed) * cohort / (growing + temporaries))


class Compilations:
    """How many programs XLA compiles inside a `with`."""

    count = 0

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, *_, **__) -> None:
        self.count += event.endswith("backend_compile_duration")


def compile_row(settings: dict[str, Any]) -> dict[str, Any]:
    """Compiles one program.

    Args:
      settings: what `compile_tpu.py` has flags for, one value each.

    Returns:
      A row of the report: `outcome` is "compiled", "refused" by the method or the
      network, "does not fit" or "does not compile"; `problem` says what is wrong, also
      of a program that compiles and is too large with its arguments.
    """
    jax.clear_caches()
    with backend("tpu"):
        return _compile_row(settings)


def _compile_row(settings: dict[str, Any]) -> dict[str, Any]:
    mesh = mesh_of(settings["topology"])
    try:
        federation = federation_of(settings, mesh)
        state = federation.shapes()
    except ValueError as error:
        return {"outcome": "refused", "problem": _first_line(error)}
    algorithm, name = federation.algorithm, settings["program"]
    cohort = federation.selection.size if name == "rounds" else federation.clients
    data = (federation.train, federation.test)[: 1 if name == "rounds" else 2]
    row = {
        "host": algorithm.host,
        "sums_only": algorithm.reduce == "sum" and not jax.tree.leaves(state.clients),
        "cohort": cohort,
        "together": together(cohort, mesh.size, federation.chunk_size),
        "memory_bytes": check_topology(settings["topology"]).memory,
        "argument_bytes": bytes_a_chip((state, data)),
        "growing_bytes": bytes_a_chip((state.clients, data)),
    }
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        with Compilations() as made:
            program = federation.compile(
                name, state, **{"n": 1} if name == "rounds" else {}
            )
    except Exception as error:  # XLA's, of whatever kind: a row of the table
        return row | failure(error, row)
    row |= {
        "outcome": "compiled",
        "compile_seconds": time.perf_counter() - wall,
        "compile_cpu_seconds": time.process_time() - cpu,
        "programs": made.count,
    }
    return row | _told(program, row, settings)


def _told(program: Any, row: dict[str, Any], settings: dict[str, Any]):
    """What a compiled program says of its work, memory and messages."""
    text, cost = program.as_text(), program.cost_analysis() or {}
    number, work = hand_count(settings)
    memory, temporaries = row["memory_bytes"], temporary_bytes(program)
    arguments = program.memory_analysis().argument_size_in_bytes
    fits = arguments + temporaries <= memory
    at_once = together(row["cohort"], chips(settings["topology"]), None)
    found = Counter(collectives(text))

    def an_image(name):
        value = cost.get(name, -1)
        return value / (row["together"] * number) if value > 0 else None

    return {
        "argument_bytes": arguments,
        "temporary_bytes": temporaries,
        "problem": None
        if fits
        else _too_large(temporaries, memory, arguments, row["together"]),
        "largest_cohort": largest_cohort(
            memory,
            arguments,
            row["growing_bytes"],
            temporaries * at_once / row["together"],
            row["cohort"],
        ),
        "flops_per_image": an_image("flops"),
        "bytes_per_image": an_image("bytes accessed"),
        "hand_flops_per_image": work and work.flops / number,
        "hand_bytes_per_image": work and work.bytes / number,
        "custom_calls": custom_calls(text),
        "collectives": [one._asdict() | {"count": n} for one, n in found.items()],
    }


# XLA's two ways to say so.
_TOO_LARGE = re.compile(
    r"\((?P<used>[\d.]+[KMGT]?)\) exceeds available HBM \((?P<limit>[\d.]+[KMGT]?)\)"
    r"|Used (?P<used_>[\d.]+[KMGT]?) of (?P<limit_>[\d.]+[KMGT]?) hbm"
)


def failure(error: Exception | str, row: dict[str, Any]) -> dict[str, Any]:
    """Outcome and problem of a program that did not compile."""
    text = str(error)
    needed = _TOO_LARGE.search(text)
    if needed is None:
        why = "it calls Python between rounds: " if row["host"] else ""
        return {"outcome": "does not compile", "problem": why + _first_line(error)}
    used = _size(needed["used"] or needed["used_"])
    limit = _size(needed["limit"] or needed["limit_"])
    return {
        "outcome": "does not fit",
        "problem": _too_large(used, limit, row["argument_bytes"], row["together"]),
    }


def _size(text: str) -> float:
    unit = text.lstrip("0123456789.")
    return float(text.removesuffix(unit)) * 1024 ** ("KMGT".find(unit or " ") + 1)


def _too_large(used: float, limit: float, arguments: float, at_once: int) -> str:
    """One line: what a program needs, what there is, and which chunk would fit."""
    line = (
        f"chunk_size={at_once} needs {used / GIB:.2f} GiB of temporaries beside "
        f"{arguments / GIB:.2f} GiB of arguments, of {limit / GIB:.2f} GiB: "
    )
    if arguments >= limit:
        return line + "take fewer clients, or fewer images of each"
    # One less at least: temporaries have a part that does not grow with the clients.
    fits = min(at_once - 1, int(at_once * (limit - arguments) / used))
    if fits < 1:
        return line + "not one client fits; take a smaller model or batch_size"
    return line + f"about chunk_size={fits} would fit"


def _first_line(error: Exception | str) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else repr(error)


def one_all_reduce(row: dict[str, Any]) -> bool | None:
    """Whether a round has one all-reduce and no other collective.

    What is larger than XLA joins may be several. None of a program of which that is not
    promised: evaluations, clients that keep a state, servers that get every upload, a
    part of the clients, a single chip.
    """
    of = row["settings"]
    promised = of["program"] == "rounds" and row.get("sums_only")
    promised = promised and row.get("cohort") == of["clients"]
    if not promised or row["outcome"] != "compiled" or chips(of["topology"]) == 1:
        return None
    found = row["collectives"]
    times = sum(c["count"] for c in found)
    large = sum(c["count"] * c["bytes"] for c in found) > JOINED
    return {c["kind"] for c in found} == {"all-reduce"} and (times == 1 or large)
