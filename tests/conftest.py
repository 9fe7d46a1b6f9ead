"""Strict settings for every test: several devices, no silent broadcasting."""

import functools
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

# Before JAX is imported.
FLAGS = [
    # A gradient summed over devices by mistake shows only with several.
    "--xla_force_host_platform_device_count=8",
    # The suite's time is compilation: this takes a third less. `make test-long` sets 3,
    # which users' programs have, and tests of what that decides use `optimised`.
    "--xla_backend_optimization_level=0",
]
if version("jaxlib").startswith("0.10."):
    # XLA's older code generator takes a third less. jaxlib 0.12 ends at the flag.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all of the suite's time is compilation: none twice. Workers and the scripts
# that tests start inherit these.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).resolve().parents[1] / ".cache" / "tests"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

# After the settings above, which JAX reads when it is first imported.
import numpy as np
import pytest

from fedvi.algorithm import Task
from fedvi.data import ClientData
from fedvi.local import LocalTraining
from fedvi.nn import build

SIZES = (20, 13, 8, 1, 0, 20, 5)  # one client is empty
CLASSES, FEATURES = 3, 6


def make_clients(sizes, seed=0) -> ClientData:
    """Three noisy classes in six dimensions, clients of the given sizes."""
    rng = np.random.default_rng(seed)
    capacity = max(sizes)
    y = rng.integers(0, CLASSES, (len(sizes), capacity)).astype(np.int32)
    centres = np.random.default_rng(7).normal(size=(CLASSES, FEATURES)) * 2
    x = (centres[y] + rng.normal(size=(*y.shape, FEATURES))).astype(np.float32)
    return ClientData(x, y, np.array(sizes, np.int32))


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops what a file compiled: without it a worker grew to 4 GB."""
    yield
    if resident_bytes() > 2**30:
        jax.clear_caches()


def resident_bytes() -> int:
    """Memory of this process; where the system does not tell, more than any."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return sys.maxsize
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def clients_of() -> Callable[..., ClientData]:
    return make_clients


@pytest.fixture(scope="session")
def optimised() -> Callable:
    """`jax.jit` as users have it, who do not compile as the tests do: for what depends
    on how one expression is rounded in two places."""
    options = {"xla_backend_optimization_level": 3}
    return functools.partial(jax.jit, compiler_options=options)


@pytest.fixture(scope="session")
def train() -> ClientData:
    return make_clients(SIZES)


@pytest.fixture(scope="session")
def test() -> ClientData:
    return make_clients((10,) * len(SIZES), seed=1)


@pytest.fixture(scope="session")
def task() -> Task:
    return Task(
        model=build("mlp", classes=CLASSES, input_shape=(FEATURES,), hidden=(5,)),
        training=LocalTraining(epochs=2, batch_size=8, learning_rate=0.05),
        finetuning=LocalTraining(epochs=1, batch_size=8, learning_rate=0.01),
        clients=sum(size > 0 for size in SIZES),
        samples=sum(SIZES),
        unlabelled=make_clients(SIZES).x[0],
    )


OWN_PARTS = """
import jax.numpy as jnp
import optax
from flax import linen as nn

import fedvi
from fedvi.algorithms import builder, fedavg


class Pull(fedvi.Options):
    strength: float = fedvi.option(2.0, "How hard.", above=0)


@builder(Pull)
def pull(task, options):
    if options.strength > 100:
        return task.no_such_field
    return fedavg(task)._replace(name="pull")


def plain(task):
    return fedavg(task)


class Net(nn.Module):
    classes: int
    hidden: tuple[int, ...] = (2,)

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.classes, name="classifier")(x)


def net(classes, input_shape, **_):
    return fedvi.nn.from_flax(Net(classes), input_shape, head="classifier")


def scaled(classes, input_shape, preprocess, dtype):
    return fedvi.nn.from_flax(
        Net(classes),
        input_shape,
        head="classifier",
        preprocess=lambda x: preprocess(x) * 2,
        dtype=dtype,
    )


def ten(classes):
    return Net(10)


def headless(classes):
    return nn.Sequential([lambda x: x.reshape(x.shape[0], -1), nn.Dense(classes)])


def raises(classes):
    raise KeyError("nothing here")


def rate(learning_rate):
    return optax.adamw(learning_rate)


number = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A user's own parts, `own_parts`, in the current folder."""
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)
    (tmp_path / "own_slip.py").write_text("import fedvi\n\nfedvi.no_such_thing\n")
    (tmp_path / "own_lack.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_parts"
    for name in ("own_parts", "own_slip", "own_lack"):
        sys.modules.pop(name, None)
