"""What all pictures share: style, colours, legend, file.

matplotlib comes with the `plots` extra and is imported only when a picture is drawn.
"""

import contextlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedvi.experiment import folder

__all__ = [
    "COLOURS",
    "PANEL",
    "SEEDS",
    "band",
    "integer_rounds",
    "legend",
    "look",
    "picture",
]

# The palette of Okabe and Ito, which colour-blind readers can tell apart, without its
# yellow, which is hard to see on white. The eighth line has the first colour, dashed.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#000000",
)
_STYLES = ("-", "--", ":", "-.")
# Width and height in inches. Three panels are as wide as a page of text, two little
# wider than a column of two; letters are made for that, not for shrinking.
PANEL = 2.25, 1.75
SEEDS = "± std over seeds"
# Inches, of a letter and a line of a legend, and of what stands beside each label.
_CHARACTER, _LINE, _HANDLE = 0.07, 0.15, 0.55
_STYLE = {
    "figure.dpi": 150,
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    # Text stays text, which can be searched and edited, and the same run gives the
    # same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "fedvi",
    "pdf.fonttype": 42,
}
_NO_DATE = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


@contextlib.contextmanager
def picture(path: str | Path | None, title: str = "") -> Iterator[Any]:
    """An empty figure to draw on, which is then written.

    Args:
      path: the file, whose suffix is .png, .svg or .pdf; its folder is made, and it is
        replaced atomically. None: nothing is written.
      title: over the figure.

    Raises:
      ValueError: another suffix.
      ImportError: matplotlib is not installed.
    """
    kind = "png" if path is None else Path(path).suffix[1:].lower()
    if kind not in folder.FORMATS:
        known = ", ".join(f".{name}" for name in folder.FORMATS)
        raise ValueError(f"path={path}: a picture's suffix must be one of {known}")
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "drawing needs matplotlib: pip install 'fedvi[plots]'"
        ) from error
    from fedvi.plots.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(layout="constrained")
        yield figure
        if title:
            letters = int(figure.get_figwidth() / _CHARACTER)
            figure.suptitle(textwrap.fill(title, letters))
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            folder.write_atomically(
                path,
                lambda file: figure.savefig(file, format=kind, metadata=_NO_DATE[kind]),
            )


def look(number: int) -> dict[str, Any]:
    """Colour and style of the line of this number."""
    style = _STYLES[number // len(COLOURS) % len(_STYLES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": style}


def band(axis: Any, x, low, high, colour: str, alpha: float) -> Any:
    """A shaded area without an edge; returns a grey one for the legend."""
    if len(x) == 1:  # an area of no width
        axis.vlines(x, low, high, color=colour, alpha=alpha, lw=6)
    else:
        axis.fill_between(x, low, high, color=colour, alpha=alpha, lw=0)
    return axis.fill_between([], [], [], color="0.2", alpha=alpha, lw=0)


def integer_rounds(axis: Any) -> None:
    """Ticks of whole numbers, one at least."""
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1, nbins=5)


def legend(figure: Any, handles: Mapping[str, Any], first: Iterable[str] = ()) -> None:
    """A legend below all axes, in as many columns as fit; the figure grows by it.

    Args:
      figure: below whose axes.
      handles: what stands for each name.
      first: names that come first, in this order; those without a handle are left out.
    """
    handles = {name: handles[name] for name in (*first, *handles) if name in handles}
    width = figure.get_figwidth()
    labels = [textwrap.fill(name, int(width / _CHARACTER) - 9) for name in handles]
    lengths = [max(map(_width, name.splitlines())) for name in labels]
    for columns in range(len(labels), 0, -1):
        # matplotlib fills columns one after another, as evenly as can be.
        widest = [max(part) for part in np.array_split(lengths, columns)]
        if sum(widest) + _HANDLE * columns <= width:
            break
    lines = -(-len(labels) // columns)
    lines += sum(name.count("\n") for name in labels)
    figure.set_figheight(figure.get_figheight() + lines * _LINE)
    figure.legend(
        list(handles.values()), labels, loc="outside lower center", ncols=columns
    )


def _width(text: str) -> float:
    """Inches that a line of a legend is wide."""
    import matplotlib
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=matplotlib.rcParams["legend.fontsize"])
    return text_to_path.get_text_width_height_descent(text, font, False)[0] / 72
