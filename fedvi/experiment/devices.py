"""The devices of a run: how many, and of a CPU how many it shows."""

import os

import jax
from jax.sharding import Mesh

from fedvi.client_map import clients_mesh

__all__ = ["mesh", "show_cpus", "usable_cores"]


def mesh(devices: int | None, model_devices: int = 1, together: int = 1) -> Mesh:
    """The devices of a run.

    Args:
      devices: how many; None: every accelerator. Of a CPU: of one process as many as
        there are cores for the clients that train together, since a client alone
        keeps little more than one core busy; of several processes one each.
      model_devices: as of `clients_mesh`.
      together: clients that train together.

    Raises:
      ValueError: as `clients_mesh`.
    """
    if devices is None and jax.default_backend() == "cpu":
        devices = max(jax.process_count(), model_devices)
        if devices == 1:
            devices = min(together, usable_cores(), len(jax.devices()))
    return clients_mesh(devices, model_devices)


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def show_cpus(devices: int) -> None:
    """Lets JAX show a CPU as `devices` devices, unless it has been used before.

    A number that XLA_FLAGS asks for stays.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if devices < 1:
        return  # refused with the other settings
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        pass  # too late: `clients_mesh` says how many there are
