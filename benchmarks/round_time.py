"""Times a federated round of fedvi, in turn with the same work in plain PyTorch.

    python benchmarks/round_time.py --torch_python=/path/to/python/with/torch

Every system has a process and an interpreter of its own. In every turn each does one
round, so what slows the machine down slows all of them, and the ratio of a turn means
more than any time. All start from the same weights and train the same participants;
only their shuffles and noise differ. Without --torch_python only fedvi is timed. The
defaults are FedHB's Fashion-MNIST (appendix H) without its learning-rate decay;
--synthetic takes random images of that shape. pFedBayes, all 100 clients a round:

    python benchmarks/round_time.py --flagfile=benchmarks/flagfiles/pfedbayes_sgd.flags
    python benchmarks/round_time.py --flagfile=benchmarks/flagfiles/pfedbayes_adam.flags

--torch_gradients=hand,autograd takes turns with both of its peers.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import workload
from absl import app, flags
from report import describe_machine, markdown, summarise, write
from worker import Worker

# Lets the threads of one system go to sleep before the next one's turn.
PAUSE_SECONDS = 0.02

PEERS = {"fedavg": "peers/torch_loop.py", "pfedbayes": "peers/torch_pfedbayes.py"}

flags.DEFINE_integer("rounds", 30, "Turns that are timed.", lower_bound=1)
flags.DEFINE_integer(
    "warmup", 3, "Turns before them; the first one compiles.", lower_bound=1
)
flags.DEFINE_string("torch_python", None, "Interpreter that has PyTorch.")
flags.DEFINE_list(
    "torch_threads",
    ["1", "2"],
    "PyTorch's thread counts to try. On a busy machine more than 1 may never end.",
)
flags.DEFINE_list(
    "torch_gradients",
    ["hand"],
    "Of pfedbayes: how PyTorch's gradients are made: hand, autograd or both.",
)
flags.register_validator(
    "torch_gradients",
    lambda names: names and set(names) <= {"hand", "autograd"},
    "must be hand, autograd or hand,autograd",
)
flags.DEFINE_list(
    "torch_clients",
    ["2"],
    "Of pfedbayes: also try PyTorch with so many clients at once, a thread each.",
)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS


def start_workers(data_file: Path, classes: int) -> tuple[dict, dict]:
    """The systems by name, fedvi first, and the versions that each runs on."""
    work = workload.shared() | {"data_file": str(data_file), "classes": classes}
    options = workload.options()
    fedvi = Worker(None, "fedvi_rounds.py", device_flags())
    workers = {"fedvi": fedvi}
    own = workload.fedvi_only()
    versions = {"fedvi": fedvi("load", **work, **own, options=options)}
    if not FLAGS.torch_python:
        return workers, versions
    work["params_file"] = str(data_file.with_name("params.npz"))
    fedvi("save_params", params_file=work["params_file"])
    if FLAGS.algorithm == "fedavg":
        del work["optimizer"]
    options.pop("rho", None)  # the weights' file holds it
    for name, threads, several in peer_set_ups():
        workers[name] = Worker(
            FLAGS.torch_python,
            PEERS[FLAGS.algorithm],
            {"OMP_NUM_THREADS": str(threads)},
        )
        arguments = {**work, **options, **several, "threads": threads}
        versions[name] = workers[name]("load", **arguments)
    return workers, versions


def device_flags() -> dict[str, str]:
    """The variables that give fedvi's process its CPU devices."""
    if FLAGS.devices == 1:
        return {}
    flag = f"--xla_force_host_platform_device_count={FLAGS.devices}"
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}


def peer_set_ups() -> list[tuple[str, int, dict]]:
    """PyTorch's `(name, threads, further arguments)` to try."""
    by_threads = [
        (f"{threads} thread{'s' if threads > 1 else ''}", threads)
        for threads in map(int, FLAGS.torch_threads)
    ]
    if FLAGS.algorithm == "fedavg":
        return [(f"PyTorch, {name}", threads, {}) for name, threads in by_threads]
    set_ups = []
    for gradients in FLAGS.torch_gradients:
        system, further = f"PyTorch by {gradients}", {"gradients": gradients}
        for name, threads in by_threads:
            set_ups.append(
                (f"{system}, {name}", threads, {**further, "clients_at_once": 1})
            )
        for clients in map(int, FLAGS.torch_clients):
            name = f"{system}, {clients} clients at once"
            set_ups.append((name, 1, {**further, "clients_at_once": clients}))
    return set_ups


def take_turns(workers: dict[str, Worker]) -> dict[str, list[dict]]:
    """What every system reports of every turn, warm-up first."""
    turns = {name: [] for name in workers}
    for _ in range(FLAGS.warmup + FLAGS.rounds):
        for name, worker in workers.items():
            time.sleep(PAUSE_SECONDS)
            if name == "fedvi":
                result = worker("round")
                cohort = result.pop("cohort")
            else:
                result = worker("round", cohort=cohort)
            turns[name].append(result)
    return turns


def measure() -> dict:
    """The whole run, as `report.summarise` tells it."""
    dataset = workload.choose_data()
    with tempfile.TemporaryDirectory() as folder:
        data_file = Path(folder) / "data.npz"
        federated = workload.save_data(dataset, data_file)
        workers, versions = start_workers(data_file, federated.classes)
    machine = {**describe_machine(), "load_before": os.getloadavg()[0]}
    turns = take_turns(workers)
    machine["load_after"] = os.getloadavg()[0]
    endings = {name: worker("finish") for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    work = {
        **workload.describe(federated),
        "warmup": FLAGS.warmup,
        "rounds": FLAGS.rounds,
    }
    return summarise(machine, versions, work, turns, endings)


def check_peer() -> None:
    """Raises `UsageError` if there is no such PyTorch peer."""
    work = f"--algorithm={FLAGS.algorithm} --model={FLAGS.model}"
    optimizers = ("sgd", "adam") if FLAGS.algorithm == "pfedbayes" else ("sgd",)
    if FLAGS.algorithm not in PEERS or FLAGS.model != "mlp":
        raise app.UsageError(
            f"{work} has no PyTorch peer: leave --torch_python out, or take "
            f"{' or '.join(PEERS)} and mlp"
        )
    if FLAGS.optimizer not in optimizers:
        raise app.UsageError(
            f"--optimizer={FLAGS.optimizer}: the PyTorch peer of {FLAGS.algorithm} "
            f"takes {' or '.join(optimizers)}"
        )
    if shutil.which(FLAGS.torch_python) is None:
        raise app.UsageError(
            f"--torch_python={FLAGS.torch_python} is no program: give the path of "
            "a Python interpreter that has PyTorch"
        )


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag")
    if FLAGS.torch_python:
        check_peer()
    try:
        report = measure()
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
