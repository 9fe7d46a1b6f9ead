"""What the plots share: size, colours, legend, an atomic PNG."""

from pathlib import Path
from typing import Any

from fedvi.experiment.files import write_atomically

__all__ = ["COLOURS", "add_legend", "new_figure", "save", "tidy"]

# From the palette of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of that size in inches, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def add_legend(figure: Any, handles: Any, labels: Any, columns: int) -> None:
    """A legend below all axes."""
    figure.legend(
        list(handles),
        list(labels),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
    )


def tidy(axis: Any) -> None:
    """A light grid behind the data, and no frame."""
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: str | Path) -> None:
    """Writes the PNG atomically."""
    write_atomically(path, lambda file: figure.savefig(file, format="png"))
