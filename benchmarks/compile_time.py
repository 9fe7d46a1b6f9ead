"""Times what compiling a method costs, beside FedAvg's in the same run.

    python benchmarks/compile_time.py --out=benchmarks/results/compile_time
    python benchmarks/compile_time.py --method=sfedbayes --model=mlp --program=init \
        --program=round --program=evaluate --program=evaluate_personal

One round, or any of a run's programs, with two small clients: their number and size
change no program's length. Every compilation is a fresh one, without a cache on disk;
the methods of a network take turns, and one compilation goes before that nobody times,
as it also starts the compiler.
"""

import dataclasses
from typing import Any

import jax
from absl import app, flags
from federations import (
    CLASSES,
    build,
    compile_round,
    random_clients,
    timed_compilation,
)
from report import cell, describe, page, run, spread, table, write

from fedvi import LocalTraining, algorithms, nn

flags.DEFINE_multi_enum(
    "method", ["pfedbayes"], sorted(algorithms.ALGORITHMS), "Beside FedAvg."
)
flags.DEFINE_multi_enum(
    "model", ["mlp", "lenet", "resnet18"], sorted(nn.MODELS), "Networks."
)
flags.DEFINE_multi_enum(
    "program",
    ["round"],
    ["init", "round", "evaluate", "evaluate_personal"],
    "What to compile.",
)
flags.DEFINE_integer("hidden", 256, "Hidden units of mlp.", lower_bound=1)
flags.DEFINE_enum(
    "optimizer", "adam", ["sgd", "adam"], "Of the methods' clients; FedAvg's is sgd."
)
flags.DEFINE_enum(
    "sampling", "weight", ["weight", "local"], "Of the mean-field methods."
)
flags.DEFINE_integer("compiles", 3, "Compilations that are timed.", lower_bound=1)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

CLIENTS, EXAMPLES, BATCH = 2, 50, 50
KEYS = ("trace_seconds", "compile_seconds", "total_seconds")


def federation(method: str, model: str):
    """Two clients of a method, with images of the network's usual shape."""
    shape = (28, 28, 1) if model == "mlp" else (32, 32, 3)
    hidden = {"hidden": (FLAGS.hidden,)} if model == "mlp" else {}
    network = nn.build(model, classes=CLASSES, input_shape=shape, **hidden)
    optimizer = "sgd" if method == "fedavg" else FLAGS.optimizer
    rate = 0.01 if optimizer == "sgd" else 1e-3
    training = LocalTraining(1, BATCH, rate, optimizer=optimizer)
    data = random_clients(CLIENTS, EXAMPLES, shape)
    known = [field.name for field in dataclasses.fields(algorithms.options_of(method))]
    options = {"sampling": FLAGS.sampling} if "sampling" in known else {}
    return build(method, network, training, data, options=options)


def compile_once(federated, state) -> dict[str, Any]:
    """What every program that is asked for took, and all of them together."""
    found = {}
    for name in FLAGS.program:
        if name == "round":
            _, found[name] = compile_round(federated, state)
            continue
        jax.clear_caches()
        jitted = jax.jit(getattr(federated, f"pure_{name}"))
        data = (state, federated.train, federated.test)
        arguments = (state.key,) if name == "init" else data
        _, found[name] = timed_compilation(jitted, *arguments)
    for program in found.values():
        seconds = program["trace_seconds"] + program["compile_seconds"]
        program["total_seconds"] = seconds
    if len(found) > 1:
        keys = next(iter(found.values()))
        found["all"] = {key: sum(p[key] for p in found.values()) for key in keys}
    return found


def measure() -> list[dict[str, Any]]:
    """A row for each network, program and method, FedAvg first."""
    methods = list(dict.fromkeys(["fedavg", *FLAGS.method]))
    rows, warm = [], False
    for model in FLAGS.model:
        systems = {method: federation(method, model) for method in methods}
        states = {m: f.init(jax.random.key(0)) for m, f in systems.items()}
        if not warm:
            compile_once(systems["fedavg"], states["fedavg"])
            warm = True
        turns = [
            {m: compile_once(f, states[m]) for m, f in systems.items()}
            for _ in range(FLAGS.compiles)
        ]
        for program in turns[0]["fedavg"]:
            for method in methods:
                found = [turn[method][program] for turn in turns]
                plain = [turn["fedavg"][program] for turn in turns]
                ratios = [
                    f["total_seconds"] / p["total_seconds"]
                    for f, p in zip(found, plain)
                ]
                rows.append(
                    {
                        "model": model,
                        "program": program,
                        "method": method,
                        **{key: spread([f[key] for f in found]) for key in KEYS},
                        "over_fedavg": spread(ratios),
                        "lines": found[0]["lines"],
                        "lines_over_fedavg": found[0]["lines"] / plain[0]["lines"],
                    }
                )
    return rows


def markdown(report: dict) -> str:
    """The report as a Markdown page."""
    work = report["work"]
    return page(
        "Compiling a method, beside FedAvg",
        f"{describe(report)} Medians (min to max) of {work['compiles']} compilations, "
        f"the methods of a network in turn; over FedAvg: trace and compilation, turn "
        f"by turn. {CLIENTS} clients × {EXAMPLES}; {work['optimizer']}, FedAvg with "
        f"SGD; mlp: 784-{work['hidden']}-{CLASSES}.",
        table(
            "network | program | method | trace s | compile s | over FedAvg | lines of "
            "StableHLO | over FedAvg",
            (
                [
                    row["model"],
                    row["program"],
                    row["method"],
                    cell(row["trace_seconds"], digits=2),
                    cell(row["compile_seconds"], digits=2),
                    cell(row["over_fedavg"], digits=2),
                    f"{row['lines']:,}",
                    f"{row['lines_over_fedavg']:.2f}",
                ]
                for row in report["programs"]
            ),
        ),
    )


def main(argv):
    # What compilation costs is to be seen.
    jax.config.update("jax_enable_compilation_cache", False)
    machine, programs = run(argv, measure)
    work = {key: FLAGS[key].value for key in ("compiles", "optimizer", "hidden")}
    report = {"machine": machine, "work": work, "programs": programs}
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
