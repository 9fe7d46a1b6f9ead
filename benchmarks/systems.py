"""The systems that `round_time.py` compares fedvi with: flags, limits, set-ups."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from absl import app, flags
from native_networks import NATIVE

__all__ = ["PEERS", "Peer", "SetUp", "asked", "check", "with_devices"]

TORCH_MODELS = ("lenet", "mlp", "mobilenet", "pfl_cnn", "vgg")

flags.DEFINE_string("torch_python", None, "Interpreter that has PyTorch: its loop.")
flags.DEFINE_boolean("torch_vmap", False, "Also torch.func.vmap, in --torch_python.")
flags.DEFINE_string("fedjax_python", None, "Interpreter that has FedJAX.")
flags.DEFINE_string("flower_python", None, "Interpreter that has Flower and PyTorch.")
flags.DEFINE_string("pfl_python", None, "Interpreter that has pfl and PyTorch.")
flags.DEFINE_boolean(
    "native_conv", False, "Also fedvi with flax.linen.Conv, one vmap for the cohort."
)
flags.DEFINE_list(
    "torch_threads",
    ["1", "2"],
    "PyTorch's thread counts to try, for pfl too. On a busy machine more than 1 may "
    "never end.",
)
flags.DEFINE_string(
    "torch_device",
    "cpu",
    "PyTorch's, and pfl's: cpu, or cuda on an accelerator, with --dtype by autocast. "
    "pFedBayes' peer and Flower have the CPU alone.",
)
flags.DEFINE_multi_enum(
    "fedjax_backend", ["jit"], ["jit", "pmap"], "FedJAX's; pmap has 2 CPU devices."
)
flags.DEFINE_list(
    "flower_workers", ["2x1", "1x2"], "Ray workers x CPUs (and threads) of each."
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
FLAGS = flags.FLAGS


def _positive(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


for _name in ("torch_threads", "torch_clients"):
    flags.register_validator(
        _name, lambda items: all(map(_positive, items)), "must be positive numbers"
    )
flags.register_validator(
    "flower_workers",
    lambda items: (
        items
        and all(i.count("x") == 1 and all(map(_positive, i.split("x"))) for i in items)
    ),
    "must look like 2x1 or 2x1,1x2",
)


class SetUp(NamedTuple):
    """One way to run a peer: a row of the report."""

    name: str
    environment: dict[str, str]
    arguments: dict[str, Any]  # further ones of its `load`


class Peer(NamedTuple):
    """A system that is not fedvi.

    Attributes:
      flag: asks for it.
      python: the flag with its interpreter.
      package: what the interpreter must have.
      script: below `peers/`, without `.py`.
      models: by algorithm those that it does.
      optimizers: those of its clients.
      set_ups: the ways to run it, by flags.
    """

    flag: str
    python: str
    package: str
    script: str
    models: dict[str, tuple[str, ...]]
    optimizers: tuple[str, ...]
    set_ups: Callable[[], Iterator[SetUp]]


def with_devices(devices: int) -> dict[str, str]:
    """The variables that give a JAX process its CPU devices."""
    if devices == 1:
        return {}
    flag = f"--xla_force_host_platform_device_count={devices}"
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}


def on_device(title: str) -> Callable[[], Iterator[SetUp]]:
    """Set-ups of a PyTorch system that may run on an accelerator."""

    def set_ups():
        device = {"device": FLAGS.torch_device, "dtype": FLAGS.dtype}
        where = "" if FLAGS.torch_device == "cpu" else f" on {FLAGS.torch_device}"
        for name, environment, arguments in by_threads(f"{title}{where}")():
            yield SetUp(name, environment, arguments | device)

    return set_ups


def by_threads(title: str) -> Callable[[], Iterator[SetUp]]:
    """Set-ups of a PyTorch system, one a thread count."""

    def set_ups():
        for threads in map(int, FLAGS.torch_threads):
            name = f"{title}, {threads} thread{'s' if threads > 1 else ''}"
            environment = {"OMP_NUM_THREADS": str(threads)}
            yield SetUp(name, environment, {"threads": threads})

    return set_ups


def by_gradients() -> Iterator[SetUp]:
    """PyTorch's pFedBayes: gradients, threads, clients at once."""
    for gradients in FLAGS.torch_gradients:
        title, further = f"PyTorch by {gradients}", {"gradients": gradients}
        for name, environment, arguments in by_threads(title)():
            arguments = {**arguments, **further, "clients_at_once": 1}
            yield SetUp(name, environment, arguments)
        for clients in map(int, FLAGS.torch_clients):
            arguments = {"threads": 1, **further, "clients_at_once": clients}
            name = f"{title}, {clients} clients at once"
            yield SetUp(name, {"OMP_NUM_THREADS": "1"}, arguments)


def by_backend() -> Iterator[SetUp]:
    """FedJAX's backends."""
    for backend in FLAGS.fedjax_backend:
        devices = 2 if backend == "pmap" else 1
        yield SetUp(f"FedJAX, {backend}", with_devices(devices), {"backend": backend})


def by_workers() -> Iterator[SetUp]:
    """Flower's Ray workers and their CPUs."""
    for item in FLAGS.flower_workers:
        workers, threads = map(int, item.split("x"))
        name = f"Flower, {workers} Ray worker{'s' if workers > 1 else ''} × {threads}"
        yield SetUp(f"{name} CPU", {}, {"workers": workers, "threads": threads})


def _fedavg(flag, package, script, set_ups, models=TORCH_MODELS, python=None) -> Peer:
    work = {"fedavg": models}
    return Peer(flag, python or flag, package, script, work, ("sgd",), set_ups)


PEERS = (
    _fedavg("torch_python", "torch", "torch_loop", on_device("PyTorch")),
    Peer(
        "torch_python",
        "torch_python",
        "torch",
        "torch_pfedbayes",
        {"pfedbayes": ("mlp",)},
        ("sgd", "adam"),
        by_gradients,
    ),
    _fedavg(
        "torch_vmap",
        "torch",
        "torch_vmap",
        on_device("PyTorch vmap"),
        python="torch_python",
    ),
    _fedavg("fedjax_python", "fedjax", "fedjax_rounds", by_backend, ("mlp",)),
    _fedavg("flower_python", "flwr", "flower_rounds", by_workers),
    _fedavg("pfl_python", "pfl", "pfl_rounds", on_device("pfl")),
)


def asked() -> list[Peer]:
    """The peers that the flags ask for and that do the work."""
    return [
        peer
        for peer in PEERS
        if FLAGS[peer.flag].value and FLAGS.algorithm in peer.models
    ]


def check() -> None:
    """Raises `UsageError` if a system that is asked for cannot do the work."""
    work = f"--algorithm={FLAGS.algorithm} --model={FLAGS.model}"
    for flag in dict.fromkeys(peer.flag for peer in PEERS if FLAGS[peer.flag].value):
        peers = [peer for peer in PEERS if peer.flag == flag]
        able = [p for p in peers if FLAGS.model in p.models.get(FLAGS.algorithm, ())]
        if not able:
            does = [
                f"{algorithm} with {' or '.join(models)}"
                for peer in peers
                for algorithm, models in peer.models.items()
            ]
            raise app.UsageError(
                f"{work}: leave --{flag} out; it does {', '.join(does)}"
            )
        for peer in able:
            _check_optimizer(peer)
            _check_python(peer)
    if FLAGS.native_conv and (FLAGS.algorithm != "fedavg" or FLAGS.model not in NATIVE):
        raise app.UsageError(
            f"{work}: leave --native_conv out; it does fedavg with "
            f"{' or '.join(NATIVE)}"
        )


def _check_optimizer(peer: Peer) -> None:
    if FLAGS.optimizer not in peer.optimizers:
        raise app.UsageError(
            f"--optimizer={FLAGS.optimizer}: --{peer.flag} takes "
            f"{' or '.join(peer.optimizers)} with {FLAGS.algorithm}"
        )


def _check_python(peer: Peer) -> None:
    python = FLAGS[peer.python].value
    if not python:
        raise app.UsageError(f"--{peer.flag} needs --{peer.python}")
    if shutil.which(python) is None:
        raise app.UsageError(
            f"--{peer.python}={python} is no program: give the path of a Python "
            f"interpreter that has {peer.package}"
        )
    code = f"import importlib.util as u; exit(u.find_spec({peer.package!r}) is None)"
    if subprocess.run([python, "-c", code], check=False).returncode:
        requirements = f"{peer.flag.split('_')[0]}.txt"
        raise app.UsageError(
            f"--{peer.python}={python} has no package {peer.package}: install "
            f"benchmarks/peers/requirements/{requirements}"
        )
