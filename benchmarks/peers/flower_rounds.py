"""FedAvg with Flower's simulation on Ray: a peer of `round_time.py`.

One simulation lives as long as this process. Its server waits between rounds, and then
does one round of Flower's own `FedAvg`, without evaluation. Clients are PyTorch models
that train as in `torch_loop.py`; every Ray worker reads the data once. CPU time is that
of all processes of the simulation, from Linux's /proc, in steps of 10 ms.
"""

import os
import platform
import queue
import threading
import time
from importlib.metadata import version
from pathlib import Path

# Before Flower and Ray are imported: neither is to report its use.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import flower_client
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import update_console_handler
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch_task import build, read_clients, score, set_weights
from worker import serve

MOST_SECONDS = 600.0  # a simulation that takes longer to answer has died


class Cohort(FedAvg):
    """Flower's FedAvg with the clients that it is told."""

    def __init__(self, work, training):
        super().__init__(fraction_evaluate=0.0)
        self._work, self._training = work, training
        self.clients = []

    def configure_train(self, server_round, arrays, config, grid):
        """One message a client: weights, its id, and how to train."""
        nodes = sorted(grid.get_node_ids())
        return [
            Message(
                content=RecordDict(
                    {
                        "arrays": arrays,
                        "client": ConfigRecord({"id": client}),
                        "work": ConfigRecord(self._work),
                        "training": ConfigRecord(self._training),
                    }
                ),
                message_type=MessageType.TRAIN,
                dst_node_id=nodes[client],
            )
            for client in self.clients
        ]

    def aggregate_train(self, server_round, replies):
        """As FedAvg, but a client that failed ends the simulation."""
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                reason = reply.error.reason.strip("'> \n").splitlines()[-1]
                raise RuntimeError(f"a client failed: {reason}")
        return super().aggregate_train(server_round, replies)


class FlowerRounds:
    """A simulation in a thread of its own, which takes cohorts from a queue."""

    def load(
        self,
        data_file,
        params_file,
        model,
        hidden,
        classes,
        batch_size,
        epochs,
        learning_rate,
        momentum,
        workers,
        threads,
        seed,
    ):
        """Starts the simulation with `workers` Ray workers of `threads` CPUs."""
        train, self._test = read_clients(data_file, model)
        self._model = build(model, train[0][0][0], hidden, classes)
        set_weights(self._model, params_file, model)
        self._arrays = ArrayRecord(self._model.state_dict())
        self._strategy = Cohort(
            {
                "data_file": data_file,
                "model": model,
                "hidden": hidden,
                "classes": classes,
                "threads": threads,
                "seed": seed,
            },
            {
                "batch_size": batch_size,
                "epochs": epochs,
                "learning_rate": learning_rate,
                "momentum": momentum,
            },
        )
        self._cohorts, self._results = queue.Queue(), queue.Queue()
        arguments = (len(train), workers, threads)
        threading.Thread(target=self._simulate, args=arguments, daemon=True).start()
        self._wait()
        names = ("flwr", "ray", "torch")
        return {
            "python": platform.python_version(),
            **{name: version(name) for name in names},
        }

    def _simulate(self, clients, workers, threads):
        update_console_handler(level="WARNING", timestamps=False, colored=False)
        app = ServerApp()
        app.main()(self._serve_rounds)
        try:
            run_simulation(
                server_app=app,
                client_app=flower_client.app,
                num_supernodes=clients,
                backend_config={
                    "init_args": {"num_cpus": workers * threads},
                    "client_resources": {"num_cpus": threads, "num_gpus": 0.0},
                },
            )
        except Exception as error:
            self._results.put(error)

    def _serve_rounds(self, grid, context):
        # The nodes register while the simulation starts.
        while not list(grid.get_node_ids()):
            time.sleep(0.1)
        self._results.put(None)
        for cohort in iter(self._cohorts.get, None):
            self._strategy.clients = cohort
            result = self._strategy.start(grid, self._arrays, num_rounds=1)
            self._arrays = result.arrays
            self._results.put(result.train_metrics_clientapp[1]["loss"])

    def _wait(self):
        try:
            result = self._results.get(timeout=MOST_SECONDS)
        except queue.Empty:
            raise RuntimeError(f"no answer within {MOST_SECONDS:g} s") from None
        if isinstance(result, Exception):
            raise RuntimeError(f"Flower's simulation ended: {result}") from result
        return result

    def round(self, cohort):
        """One round with the clients of `cohort`, and their mean training loss."""
        cpu, wall = tree_cpu_seconds(), time.perf_counter()
        self._cohorts.put(cohort)
        loss = self._wait()
        seconds = time.perf_counter() - wall
        return {
            "seconds": seconds,
            "cpu_seconds": tree_cpu_seconds() - cpu,
            "loss": loss,
        }

    def finish(self):
        """The global model's test scores."""
        self._model.load_state_dict(self._arrays.to_torch_state_dict())
        return score(self._model, self._test)

    def close(self):
        """Lets the simulation end: its threads would keep this process alive."""
        if hasattr(self, "_cohorts"):
            self._cohorts.put(None)


def tree_cpu_seconds():
    """CPU seconds of this process and its descendants, the ended ones included."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has just ended
            continue
        # The name, in brackets, may hold blanks.
        fields = text[text.rindex(")") + 2 :].split()
        process = int(path.parent.name)
        parents[process] = int(fields[1])
        seconds[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    ours = {os.getpid()}
    while more := {p for p, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(seconds[process] for process in ours)


if __name__ == "__main__":
    rounds = FlowerRounds()
    serve(rounds)
    rounds.close()
