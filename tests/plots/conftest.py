import sys

import pytest
from matplotlib import image
from matplotlib.figure import Figure


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, in order."""
    figures = []
    savefig = Figure.savefig

    def spy(self, *args, **kwargs):
        figures.append(self)
        return savefig(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return figures


@pytest.fixture
def no_matplotlib(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def assert_png():
    def check(path):
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 300
        assert pixels.std() > 0.01

    return check
