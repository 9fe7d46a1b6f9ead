"""Bytes up and down of every method, as a Markdown table.

    python benchmarks/communication.py

The MLP 784-100-10, a participant and a round, counted from shapes: nothing is trained.
The table of `docs/communication.md` is this one (`tests/benchmarks` compares them).
"""

import math

import jax
import numpy as np
from absl import app

from fedvi import LocalTraining, Task, algorithms, codecs, contract_checks, nn
from fedvi.data import ClientData
from fedvi.nn import parameter_count

EXAMPLES = 500
WEIGHT = 4  # bytes of a client's weight
KEEP = 0.5  # of sFedBayes' weights
ROWS = {name: (name, {}) for name in algorithms.ALGORITHMS}
ROWS["sfedbayes, keep=0.5"] = ("sfedbayes", {"keep": KEEP})


def row(label: str, name: str, options: dict) -> str:
    """One method: bytes up with each codec, and down."""
    model = nn.build("mlp", classes=10, input_shape=(784,), hidden=(100,))
    training = LocalTraining(epochs=1, batch_size=50, learning_rate=0.01)
    task = Task(model, training, training, clients=100, samples=100 * EXAMPLES)
    task = task._replace(unlabelled=np.zeros((EXAMPLES, 784), np.uint8))
    clients = ClientData(
        jax.ShapeDtypeStruct((100, EXAMPLES, 784), np.uint8),
        jax.ShapeDtypeStruct((100, EXAMPLES), np.int32),
        jax.ShapeDtypeStruct((100,), np.int32),
    )
    sent = contract_checks.check(
        algorithms.build(name, task, **options), clients, clients, 100
    )
    withheld = 0
    if "keep" in options:
        weights = parameter_count(jax.eval_shape(model.init, jax.random.key(0)))
        withheld = 2 * (weights - math.floor(KEEP * weights))  # μ and ρ
    up = [
        codecs.payload_bytes(codec, sent.upload)
        + WEIGHT
        - withheld * codecs.bytes_per_value(codec)
        for codec in codecs.CODECS.values()
    ]
    cells = [f"{number:,}" for number in (*up, codecs.tree_bytes(sent.down))]
    return "| " + " | ".join([label, *cells]) + " |"


def table() -> str:
    """The table, one line a method."""
    names = ", ".join(codecs.CODECS)
    heading = ["method", *(f"up, {name}" for name in names.split(", ")), "down"]
    lines = ["| " + " | ".join(heading) + " |", "|---" * len(heading) + "|"]
    return "\n".join([*lines, *(row(label, *ROWS[label]) for label in sorted(ROWS))])


def main(argv):
    del argv
    print(table())


if __name__ == "__main__":
    app.run(main)
