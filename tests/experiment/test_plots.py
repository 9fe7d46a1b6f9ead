"""Plots are written, show the right numbers and do without matplotlib."""

import sys

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from fedvi.experiment.plots import learning_curves, reliability_diagram


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


def make_rows(method=None, seeds=2):
    rows = [
        {
            "round": number,
            "seed": seed,
            "global_accuracy": 50.0 + number + 4.0 * seed,
            "personal_accuracy": 70.0 + number if number % 10 == 0 else None,
            "global_nll": 1.0 / (1 + number),
        }
        for seed in range(seeds)
        for number in (0, 5, 10)
    ]
    return rows if method is None else [{"method": method, **row} for row in rows]


def make_reliability(bins=5):
    count = np.array([0.0, 10.0, 0.0, 30.0, 60.0])
    accuracy = np.array([np.nan, 0.5, np.nan, 0.6, 0.8])
    confidence = np.array([np.nan, 0.3, np.nan, 0.7, 0.95])
    return {"count": count, "accuracy": accuracy, "confidence": confidence}


def assert_png(path):
    pixels = image.imread(path)
    assert min(pixels.shape[:2]) > 300
    assert pixels.std() > 0.01


def legend_texts(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_learning_curves_show_mean_and_spread_over_seeds(tmp_path, drawn):
    path = tmp_path / "plots" / "curves.png"
    assert learning_curves(path, make_rows(), title="digits")
    assert_png(path)
    (figure,) = drawn
    accuracy, nll = figure.axes
    solid, dashed = accuracy.lines
    np.testing.assert_allclose(solid.get_xydata(), [[0, 52], [5, 57], [10, 62]])
    np.testing.assert_allclose(dashed.get_xydata(), [[0, 70], [10, 80]])
    band = accuracy.collections[0].get_paths()[0].vertices[:, 1]
    spread = np.std([0.0, 4.0], ddof=1)
    np.testing.assert_allclose([band.min(), band.max()], [52 - spread, 62 + spread])
    assert len(nll.lines) == 1
    assert legend_texts(figure) == ["global", "personal", "± std over seeds"]
    assert "%" in accuracy.get_ylabel() and nll.get_ylabel().startswith("NLL")


def test_learning_curves_give_each_method_its_colour(tmp_path, drawn):
    rows = make_rows("FedAvg") + make_rows("NIW", seeds=1)
    assert learning_curves(tmp_path / "curves.png", rows)
    lines = drawn[0].axes[0].lines
    colours = [line.get_color() for line in lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    wanted = ["FedAvg global", "FedAvg personal", "NIW global", "NIW personal"]
    assert legend_texts(drawn[0]) == [*wanted, "± std over seeds"]


@pytest.mark.parametrize("rounds", [(1,), (1, 2), (2, 4, 6)])
def test_learning_curves_have_integer_rounds(tmp_path, drawn, rounds):
    rows = [{"round": number, "global_accuracy": 10.0} for number in rounds]
    learning_curves(tmp_path / "curves.png", rows)
    axis = drawn[0].axes[0]
    ticks = axis.get_xticks()
    np.testing.assert_array_equal(ticks, np.round(ticks))
    low, high = axis.get_xlim()
    assert any(low <= tick <= high for tick in ticks)
    assert legend_texts(drawn[0]) == ["global"]


def test_learning_curves_survive_one_row_and_a_diverged_seed(tmp_path):
    path = tmp_path / "curves.png"
    assert learning_curves(path, [{"round": 3, "global_accuracy": 10.0}])
    rows = [*make_rows(), {"round": 10, "seed": 2, "global_nll": np.inf}]
    assert learning_curves(path, rows)
    assert_png(path)
    with pytest.raises(ValueError, match="rows is empty"):
        learning_curves(path, [])


def test_reliability_diagram_shows_accuracy_gap_and_ece(tmp_path, drawn):
    path = tmp_path / "reliability.png"
    models = {"global": make_reliability(), "personal": make_reliability()}
    assert reliability_diagram(path, models)
    assert_png(path)
    above, other, below, _ = drawn[0].axes
    ece = 100 * (0.1 * 0.2 + 0.3 * 0.1 + 0.6 * 0.15)
    assert above.get_title() == f"global: ECE {ece:.2f} %"
    assert other.get_title().startswith("personal")
    bars, gaps = above.containers
    middle = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    np.testing.assert_allclose(middle, [0.3, 0.7, 0.9])
    np.testing.assert_allclose([bar.get_height() for bar in bars], [0.5, 0.6, 0.8])
    np.testing.assert_allclose([bar.get_height() for bar in gaps], [0.2, 0.1, 0.15])
    np.testing.assert_allclose([bar.get_y() for bar in gaps], [0.3, 0.6, 0.8])
    shares = [bar.get_height() for bar in below.patches]
    np.testing.assert_allclose(shares, [0, 10, 0, 30, 60])


def test_reliability_diagram_shows_the_ece_that_it_is_given(tmp_path, drawn):
    models = {"global": make_reliability()}
    path = tmp_path / "reliability.png"
    reliability_diagram(path, models, ece={"global": 0.1234}, title="digits")
    assert drawn[0].axes[0].get_title() == "global: ECE 12.34 %"
    assert drawn[0].get_suptitle() == "digits"


def test_reliability_diagram_of_a_diverged_model_is_empty(tmp_path, drawn):
    nothing = np.full(5, np.nan)
    diverged = {"count": np.zeros(5), "accuracy": nothing, "confidence": nothing}
    assert reliability_diagram(tmp_path / "r.png", {"global": diverged})
    assert drawn[0].axes[0].get_title() == "global: ECE nan %"
    partly = make_reliability() | {"confidence": nothing}
    assert reliability_diagram(tmp_path / "r.png", {"global": partly})
    with pytest.raises(ValueError, match="models is empty"):
        reliability_diagram(tmp_path / "r.png", {})


def test_without_matplotlib_nothing_is_drawn(tmp_path, no_matplotlib):
    assert learning_curves(tmp_path / "c.png", make_rows()) is False
    models = {"global": make_reliability()}
    assert reliability_diagram(tmp_path / "r.png", models) is False
    assert list(tmp_path.iterdir()) == []
