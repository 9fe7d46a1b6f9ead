"""How the processes of a run find each other."""

import dataclasses
from typing import Literal

from fedvi.experiment.settings import check_bounds, setting

__all__ = ["HostOptions"]


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """How the processes of a run find each other; by default there is one."""

    distributed: Literal["off", "auto"] = setting(
        "off",
        "auto: one of several processes that JAX finds by itself (Slurm, Open MPI, "
        "Kubernetes, TPU pod).",
    )
    coordinator_address: str | None = setting(
        None, "HOST:PORT of process 0, where the processes of a run meet."
    )
    num_processes: int | None = setting(
        None, "Processes of the run; each gets its own --process_id.", at_least=1
    )
    process_id: int | None = setting(
        None, "Of this process, from 0; process 0 writes the files.", at_least=0
    )
    start_timeout: int = setting(
        300, "Seconds that the processes wait for each other at the start.", at_least=1
    )
    lost_timeout: int = setting(
        100,
        "Seconds without a sign of life after which a process counts as lost (JAX's "
        "own figure).",
        at_least=3,
    )

    @property
    def several(self) -> bool:
        """Whether JAX's distributed service is asked for."""
        return self.distributed == "auto" or self.coordinator_address is not None

    def validate(self, devices: int | None = None) -> None:
        """Checks every field, before anything starts.

        Args:
          devices: of all processes together, if asked for.

        Raises:
          ValueError: names the flag, its value and what would be right.
        """
        check_bounds(self)
        three = ("coordinator_address", "num_processes", "process_id")
        given = [name for name in three if getattr(self, name) is not None]
        missing = [name for name in three if name not in given]
        if self.distributed == "off" and given and missing:
            raise ValueError(
                f"{_named(given)} without {_named(missing)}: several processes need "
                "all three, or --distributed=auto where JAX can find them"
            )
        if self.coordinator_address is not None:
            host, _, port = self.coordinator_address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(
                    f"coordinator_address={self.coordinator_address!r} must be "
                    "HOST:PORT, such as node1:12345"
                )
        if self.num_processes is None:
            return
        if self.process_id is not None and self.process_id >= self.num_processes:
            raise ValueError(
                f"process_id={self.process_id} must be at most "
                f"{self.num_processes - 1}: the ids of "
                f"num_processes={self.num_processes} count from 0"
            )
        if devices is not None and devices % self.num_processes:
            raise ValueError(
                f"devices={devices} must be a multiple of "
                f"num_processes={self.num_processes}: each gives as many"
            )


def _named(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)
