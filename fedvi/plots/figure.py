"""A figure of matplotlib that notebooks show, with or without pyplot."""

import io

import matplotlib.figure

__all__ = ["Figure"]


class Figure(matplotlib.figure.Figure):
    """matplotlib's, made without pyplot: no global state, no display."""

    def _repr_png_(self) -> bytes:
        """What IPython asks for; without pyplot it knows no other way."""
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
