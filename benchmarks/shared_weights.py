"""Times programs whose clients share weights: natively convolved, in turn with patches.

    python benchmarks/shared_weights.py --out=benchmarks/results/shared_weights

On CPU a convolution whose kernel all clients share, and through which nothing is
differentiated, is XLA's own (`fedvi.nn.layers`): evaluations of a global model, a body
under a head that is fine-tuned or trained alone. Gradients, and kernels of clients of
their own, go by patches.
"""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from absl import app, flags
from federations import CLASSES, build, random_clients
from report import cell, describe, page, run, spread, table, write

import fedvi
from fedvi import nn
from fedvi.nn import layers

PROGRAMS = {
    "evaluate": lambda federation, state: federation.evaluate(state),
    "evaluate_personal": lambda federation, state: federation.evaluate_personal(state),
    "round": lambda federation, state: federation.rounds(state, 1)[1],
}

flags.DEFINE_multi_string(
    "case",
    [
        "vgg fedavg evaluate",
        "fedrep_cnn fedavg evaluate",
        "resnet18 fedavg evaluate",
        "mobilenet fedavg evaluate",
        "vgg fedper evaluate_personal",
        "fedrep_cnn fedper evaluate_personal",
        "resnet18 fedper evaluate_personal",
        "fedrep_cnn pfedgp evaluate_personal",
        "vgg fedrep round",
        "fedrep_cnn fedbabu round",
    ],
    f"Network, method and one of {', '.join(PROGRAMS)}.",
)
flags.DEFINE_integer("clients", 2, "Visited one after another.", lower_bound=1)
flags.DEFINE_integer(
    "examples", 50, "Of a client, to train and to test.", lower_bound=1
)
flags.DEFINE_integer("turns", 5, "After one that compiles.", lower_bound=1)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

SHAPE = (32, 32, 3)
WORK = ("clients", "examples", "turns")


def caller(network: str, method: str, program: str, natively: bool) -> Callable:
    """Calls a program, compiled here; a round's state is as it was the last time."""
    data = random_clients(FLAGS.clients, FLAGS.examples, SHAPE)
    model = nn.build(network, classes=CLASSES, input_shape=SHAPE)
    training = fedvi.LocalTraining(batch_size=FLAGS.examples, learning_rate=0.01)
    federation = build(method, model, training, data, data, chunk_size=1)
    start = federation.init(jax.random.key(0))

    def call():
        state = jax.tree.map(jax.numpy.copy, start)  # which a round donates
        jax.block_until_ready(state)
        seconds = time.process_time()
        jax.block_until_ready(PROGRAMS[program](federation, state))
        return time.process_time() - seconds

    way = layers._shared_natively if natively else layers._by_patches
    with mock.patch.object(layers, "_shared_natively", way):
        call()
    return call


def compared(case: str) -> dict[str, Any]:
    """CPU seconds of both ways, in turn."""
    jax.clear_caches()  # not between the two: that would compile the first anew
    ways = {name: caller(*case.split(), name == "native") for name in BOTH}
    seconds = {name: [] for name in ways}
    for _ in range(FLAGS.turns):
        for name, call in ways.items():
            seconds[name].append(call())
    ratios = [n / p for p, n in zip(*seconds.values(), strict=True)]
    found = {name: spread(values) for name, values in seconds.items()}
    return {"case": case, "cpu_seconds": found, "ratio": spread(ratios)}


BOTH = ("patches", "native")


def measure() -> dict[str, Any]:
    """All cases."""
    for case in FLAGS.case:
        if len(case.split()) != 3 or case.split()[2] not in PROGRAMS:
            raise ValueError(
                f"case={case!r} must be a network, a method and one of "
                f"{', '.join(PROGRAMS)}, such as 'vgg fedavg evaluate'"
            )
    work = {key: FLAGS[key].value for key in WORK}
    return {"work": work, "rows": [compared(case) for case in FLAGS.case]}


def markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown page."""
    work = report["work"]
    rows = [
        [
            *row["case"].split(),
            *(cell(row["cpu_seconds"][way]) for way in BOTH),
            cell(row["ratio"], digits=2),
        ]
        for row in report["rows"]
    ]
    headings = "network | method | program | by patches, CPU s | native, CPU s | ratio"
    return page(
        "Convolutions with weights that clients share",
        describe(report),
        f"{work['clients']} clients of {work['examples']} images, one after another, "
        f"in one batch each; medians (min to max) of {work['turns']} turns.",
        table(headings, rows),
    )


def main(argv):
    jax.config.update("jax_enable_compilation_cache", False)
    machine, found = run(argv, measure)
    report = {"machine": machine, **found}
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
