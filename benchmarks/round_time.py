"""Times a federated round of fedvi, in turn with the same work in other systems.

    python benchmarks/round_time.py --torch_python=/path/to/python/with/torch

Every system has a process and an interpreter of its own. In every turn each does one
round, so what slows the machine down slows all of them, and the ratio of a turn means
more than any time. All start from the same weights and train the same participants;
only their shuffles and noise differ. `systems.py` tells which there are; each has its
`peers/requirements/`. Without their flags only fedvi is timed. The defaults are
FedHB's Fashion-MNIST (appendix H) without its learning-rate decay; --synthetic takes
random images of that shape or another. FedAvg of other networks, and pFedBayes:

    python benchmarks/round_time.py --flagfile=benchmarks/flagfiles/fedavg_mlp.flags
    python benchmarks/round_time.py --flagfile=benchmarks/flagfiles/lenet.flags
    python benchmarks/round_time.py --flagfile=benchmarks/flagfiles/vgg.flags
    python benchmarks/round_time.py --flagfile=benchmarks/flagfiles/pfedbayes_sgd.flags
    python benchmarks/round_time.py --flagfile=benchmarks/flagfiles/pfedbayes_adam.flags

--torch_gradients=hand,autograd takes turns with both peers of pFedBayes.
"""

import tempfile
import time
from pathlib import Path

import systems
import workload
from absl import app, flags
from report import markdown, run, summarise, write
from worker import Worker

# Lets the threads of one system go to sleep before the next one's turn.
PAUSE_SECONDS = 0.02

flags.DEFINE_integer("rounds", 30, "Turns that are timed.", lower_bound=1)
flags.DEFINE_integer(
    "warmup", 3, "Turns before them; the first one compiles.", lower_bound=1
)
flags.DEFINE_boolean(
    "peak", True, "Measure the matrix rate and the bandwidth, and print the floors."
)
flags.DEFINE_boolean(
    "scores",
    True,
    "Evaluate at the end what was trained, which is a program more to compile.",
)
flags.DEFINE_list(
    "plans",
    [],
    "Further ways to run fedvi in turn, DEVICESxCHUNK such as 1x1,2x5,1x0.",
)
flags.register_validator(
    "plans",
    lambda items: all(
        i.count("x") == 1 and all(part.isdecimal() for part in i.split("x"))
        for i in items
    ),
    "must look like 1x1,2x5",
)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS


def start_workers(data_file: Path, classes: int) -> tuple[dict, dict]:
    """The systems by name, fedvi first, and the versions that each runs on."""
    work = workload.shared() | {"data_file": str(data_file), "classes": classes}
    options = workload.options()
    environment = systems.with_devices(FLAGS.devices)
    fedvi = Worker(None, "fedvi_rounds.py", environment)
    workers = {"fedvi": fedvi}
    own = work | workload.fedvi_only() | {"options": options}
    versions = {"fedvi": fedvi("load", **own)}
    for plan in FLAGS.plans:
        devices, chunk = map(int, plan.split("x"))
        name = f"fedvi, {devices} device(s), chunk size {chunk or 'all'}"
        workers[name] = Worker(None, "fedvi_rounds.py", systems.with_devices(devices))
        plan = {"devices": devices, "chunk_size": chunk}
        versions[name] = workers[name]("load", **own | plan)
    if not (FLAGS.native_conv or systems.asked()):
        return workers, versions
    params_file = str(data_file.with_name("params.npz"))
    fedvi("save_params", params_file=params_file)
    if FLAGS.native_conv:
        name = "fedvi, nn.Conv"
        workers[name] = Worker(None, "fedvi_rounds.py", environment)
        own |= {"chunk_size": 0, "native_conv": True, "params_file": params_file}
        versions[name] = workers[name]("load", **own)
    work["params_file"] = params_file
    del work["model" if FLAGS.algorithm == "pfedbayes" else "optimizer"]
    options.pop("rho", None)  # the weights' file holds it
    for peer in systems.asked():
        python, script = FLAGS[peer.python].value, f"peers/{peer.script}.py"
        for name, environment, further in peer.set_ups():
            workers[name] = Worker(python, script, environment)
            versions[name] = workers[name]("load", **work, **options, **further)
    return workers, versions


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


def measure() -> tuple:
    """What `report.summarise` makes the report of."""
    dataset = workload.choose_data()
    with tempfile.TemporaryDirectory() as folder:
        data_file = Path(folder) / "data.npz"
        federated = workload.save_data(dataset, data_file)
        workers, versions = start_workers(data_file, federated.classes)
        # Flower's workers read the data in the first round.
        turns = take_turns(workers)
    if FLAGS.scores:
        endings = {name: worker("finish") for name, worker in workers.items()}
    else:
        endings = {name: {} for name in workers}
        endings["fedvi"] = workers["fedvi"]("memory")
    if FLAGS.peak:
        endings["fedvi"]["roofline"] = workers["fedvi"]("roofline")
    for worker in workers.values():
        worker.close()
    work = {
        **workload.describe(federated),
        "warmup": FLAGS.warmup,
        "rounds": FLAGS.rounds,
    }
    return versions, work, turns, endings


def main(argv):
    systems.check()
    machine, found = run(argv, measure, computes=False)
    report = summarise(machine, *found)
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
