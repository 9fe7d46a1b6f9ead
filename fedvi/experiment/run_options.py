"""Where and how a run is carried out."""

import dataclasses

from fedvi.experiment.settings import check_bounds, setting

__all__ = ["RunOptions"]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where and how a run is carried out: nothing that changes its results."""

    run_dir: str = setting("", "Run folder. Default: runs/NAME.")
    overwrite: bool = setting(False, "Replace the run that lies in the run folder.")
    resume: bool = setting(False, "Continue the run that lies in the run folder.")
    chunk_size: int | str = setting(
        "auto",
        "Clients trained at once on a device: a number, whole (the whole cohort) or "
        "auto (1 on CPU, else as many as memory allows).",
    )
    devices: int | None = setting(
        None,
        "Devices to use, of all processes together; a CPU shows as many as are asked "
        "for. Default: every accelerator; of a CPU one for each core and client of a "
        "round, or one of each process.",
        at_least=1,
    )
    model_devices: int = setting(
        1,
        "Devices that hold one model together: for models that do not fit on one. "
        "Must divide the number of devices.",
        at_least=1,
    )
    checkpoint_every: int = setting(
        1, "Evaluations between checkpoints; the last round always has one.", at_least=1
    )
    tensorboard: bool = setting(
        False, "Write TensorBoard event files too (extra: tensorboard)."
    )

    def validate(self) -> None:
        """Checks every field.

        Raises:
          ValueError: names the argument, its value and what would be right.
        """
        check_bounds(self)
        if self.overwrite and self.resume:
            raise ValueError(
                "overwrite=True and resume=True exclude each other: give one of them"
            )
        if not self.run_dir:
            raise ValueError("run_dir='' is empty: give the name of a run folder")
        whole = isinstance(self.chunk_size, int) and self.chunk_size >= 1
        if not whole and self.chunk_size not in ("auto", "whole"):
            raise ValueError(
                f"chunk_size={self.chunk_size!r} must be auto, whole or a number of at "
                "least 1"
            )
