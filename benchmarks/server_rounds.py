"""Whole rounds of `server_update.py`: what a method costs over FedAvg."""

from functools import partial
from typing import Any

import federations
import jax
from absl import flags
from federations import CLASSES
from report import cell, spread, table
from worker import timed

from fedvi import LocalTraining, nn, selection

__all__ = [
    "INPUTS",
    "ROUNDS",
    "build",
    "describe_rounds",
    "measure_rounds",
]

flags.DEFINE_integer(
    "rounds", 20, "Rounds that are timed; 0: only updates.", lower_bound=0
)
flags.DEFINE_integer("hidden", 256, "Of the rounds: units of the MLP.", lower_bound=1)
flags.DEFINE_integer("clients", 100, "Of the rounds.", lower_bound=1)
flags.DEFINE_integer("participants", 10, "Of the rounds.", lower_bound=1)
flags.DEFINE_integer("examples", 500, "Of a client.", lower_bound=1)
flags.DEFINE_integer("batch_size", 50, "Examples a step.", lower_bound=1)
flags.DEFINE_integer(
    "chunk_size", 1, "Clients in one vmap; 0: all participants.", lower_bound=0
)
FLAGS = flags.FLAGS

INPUTS = 784
ROUNDS = {
    "fedavg": {},
    "fedbabu": {},
    "fedhb_niw": {},
    "pfedbayes": {"average": "moments", "personal_steps": 1},
}


def build(name: str, options: dict, hidden: int, train, **how):
    """The federation of an algorithm on an MLP with one hidden layer."""
    model = nn.build("mlp", classes=CLASSES, input_shape=(INPUTS,), hidden=(hidden,))
    # The bound of pFedBayes at the benchmark's sizes.
    training = LocalTraining(batch_size=FLAGS.batch_size, learning_rate=1e-4)
    return federations.build(name, model, training, train, options=options, **how)


def measure_rounds(methods: list[str]) -> dict[str, dict[str, Any]]:
    """Seconds a round by method, and over FedAvg's turn by turn."""
    data = federations.random_clients(FLAGS.clients, FLAGS.examples, (INPUTS,))
    systems = {
        name: build(
            name,
            options,
            FLAGS.hidden,
            data,
            selection=selection.uniform(FLAGS.clients, FLAGS.participants),
            chunk_size=FLAGS.chunk_size or None,
        )
        for name, options in ROUNDS.items()
        if name in ("fedavg", *methods)
    }
    states = {name: f.init(jax.random.key(0)) for name, f in systems.items()}
    times = {name: [] for name in systems}
    for _ in range(1 + FLAGS.rounds):
        for name, federation in systems.items():
            round_index = partial(federation.round, states[name])
            (states[name], metrics), taken = timed(
                lambda round_index=round_index: jax.block_until_ready(round_index())
            )
            times[name].append(taken)
            if metrics.failed.any():
                raise RuntimeError(f"{name}: a client's training diverged")
    plain = times["fedavg"][1:]
    found = {}
    for name, (first, *turns) in times.items():
        found[name] = {"first_round_seconds": first["seconds"]}
        for key in ("seconds", "cpu_seconds"):
            ratios = [turn[key] / base[key] for turn, base in zip(turns, plain)]
            found[name][key] = spread([turn[key] for turn in turns])
            found[name][f"{key}_over_fedavg"] = spread(ratios)
    return found


def describe_rounds(rounds: dict[str, Any], work: dict[str, Any]) -> list:
    """The parts of the report's page."""
    if not rounds:
        return []
    return [
        f"Whole rounds, {work['rounds']} of each: MLP {INPUTS}-{work['hidden']}-"
        f"{CLASSES}, {work['participants']} of {work['clients']} clients × "
        f"{work['examples']}, batch {work['batch_size']}, one epoch, chunk size "
        f"{work['chunk_size'] or 'all'}; pFedBayes: one step of q and one of w.",
        table(
            "method | ms a round | over FedAvg, turn by turn | CPU-ms a round | over "
            "FedAvg | first round s",
            (
                [
                    name,
                    cell(row["seconds"], 1e3),
                    cell(row["seconds_over_fedavg"]),
                    cell(row["cpu_seconds"], 1e3),
                    cell(row["cpu_seconds_over_fedavg"]),
                    f"{row['first_round_seconds']:.2f}",
                ]
                for name, row in rounds.items()
            ),
        ),
    ]
