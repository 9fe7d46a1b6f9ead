"""Times a round whose clients share chunks by size, in turn with chunks by id.

    python benchmarks/chunk_padding.py --out=benchmarks/results/chunk_padding

FedAvg of an MLP, all clients, classes dealt by a Dirichlet distribution, so that sizes
differ widely. All clients of a chunk take as many steps as the largest of them: the
share of padding is that of the steps which are computed and thrown away.
"""

import statistics
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags
from federations import build
from report import cell, describe, page, run, spread, table, write

import fedvi
from fedvi import data, nn
from fedvi.visit_order import padded_share

flags.DEFINE_string("dataset", "fashion_mnist", "As for fedvi.data.load.")
flags.DEFINE_integer("clients", 100, "All of them take part.", lower_bound=2)
flags.DEFINE_float("alpha", 0.1, "Of the Dirichlet distribution.", lower_bound=1e-3)
flags.DEFINE_integer("batch_size", 50, "Examples a step.", lower_bound=1)
flags.DEFINE_integer("hidden", 256, "Hidden units of the MLP.", lower_bound=1)
flags.DEFINE_multi_integer(
    "share_of", [2, 3, 4, 5, 10, 20], "Chunks to tell padding of."
)
flags.DEFINE_multi_integer("chunk_size", [20], "Chunks that are timed.")
flags.DEFINE_integer("seeds", 3, "Deals whose padding is told.", lower_bound=1)
flags.DEFINE_integer("turns", 5, "Rounds that are timed, of the first deal.")
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

WORK = ("dataset", "clients", "alpha", "batch_size", "hidden", "seeds", "turns")


def deal(dataset: data.Dataset, seed: int) -> data.ClientData:
    """Every client's training data."""
    split = data.partition(
        "dirichlet", dataset, clients=FLAGS.clients, alpha=FLAGS.alpha, seed=seed
    )
    return data.federate(dataset, split).train


def shares(sizes: list[np.ndarray]) -> list[dict[str, Any]]:
    """The share of padding of all deals, by chunk."""
    training = fedvi.LocalTraining(batch_size=FLAGS.batch_size)
    return [
        {
            "chunk_size": chunk,
            "by_id": spread(
                [padded_share(s, training, chunk, 1, False) for s in sizes]
            ),
            "by_size": spread([padded_share(s, training, chunk) for s in sizes]),
        }
        for chunk in FLAGS.share_of
    ]


def rounds(train: data.ClientData, chunk: int) -> dict[str, Any]:
    """CPU seconds of a round by id and by size, in turn."""
    shape = train.x.shape[2:]
    model = nn.build("mlp", classes=10, input_shape=shape, hidden=(FLAGS.hidden,))
    training = fedvi.LocalTraining(batch_size=FLAGS.batch_size, learning_rate=0.01)
    by_size = build("fedavg", model, training, train, chunk_size=chunk)
    systems = {"by_id": by_size.variant(sorts_visits=False), "by_size": by_size}
    states = {name: f.init(jax.random.key(0)) for name, f in systems.items()}
    seconds = {name: [] for name in systems}
    for turn in range(1 + FLAGS.turns):  # the first one compiles
        for name, federation in systems.items():
            start = time.process_time()
            states[name], _ = federation.rounds(states[name], 1)
            jax.block_until_ready(states[name].server)
            if turn:
                seconds[name].append(time.process_time() - start)
    ratios = [s / i for i, s in zip(*seconds.values(), strict=True)]
    return {
        "chunk_size": chunk,
        "cpu_seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": spread(ratios),
    }


def measure() -> dict[str, Any]:
    """Shares and times."""
    dataset = data.load(FLAGS.dataset)
    deals = [deal(dataset, seed) for seed in range(FLAGS.seeds)]
    sizes = [np.asarray(train.size) for train in deals]
    return {
        "largest": statistics.median(int(s.max()) for s in sizes),
        "smallest": statistics.median(int(s.min()) for s in sizes),
        "shares": shares(sizes),
        "rounds": [rounds(deals[0], chunk) for chunk in FLAGS.chunk_size],
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    work, found = report["work"], report["results"]

    def percent(values):
        return cell(values, unit=100, digits=1)

    return page(
        "Padding of chunks, by id and by size",
        f"{work['clients']} clients of {work['dataset']}, Dirichlet {work['alpha']}, "
        f"{found['smallest']} to {found['largest']} examples (medians of "
        f"{work['seeds']} deals), batch {work['batch_size']}, MLP with "
        f"{work['hidden']} hidden units, one device.",
        f"{describe(report)} Shares: medians (min to max) of the deals; CPU time: of "
        f"{work['turns']} rounds of the first one, in turn.",
        table(
            "clients in a chunk | padding by id, % | by size, %",
            (
                [str(row["chunk_size"]), percent(row["by_id"]), percent(row["by_size"])]
                for row in found["shares"]
            ),
        ),
        table(
            "clients in a chunk | CPU-s a round by id | by size | by size / by id",
            (
                [
                    str(row["chunk_size"]),
                    *(cell(row["cpu_seconds"][k]) for k in ("by_id", "by_size")),
                    cell(row["ratio"]),
                ]
                for row in found["rounds"]
            ),
        ),
    )


def main(argv):
    machine, results = run(argv, measure, computes=True)
    work = {key: FLAGS[key].value for key in WORK}
    report = {"machine": machine, "work": work, "results": results}
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
