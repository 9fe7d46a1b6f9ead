"""Reliability diagrams show the right numbers and do without matplotlib."""

import numpy as np
import pytest
from fedvi.experiment.plots import reliability_diagram


def make_reliability(bins=5):
    count = np.array([0.0, 10.0, 0.0, 30.0, 60.0])
    accuracy = np.array([np.nan, 0.5, np.nan, 0.6, 0.8])
    confidence = np.array([np.nan, 0.3, np.nan, 0.7, 0.95])
    return {"count": count, "accuracy": accuracy, "confidence": confidence}


def test_reliability_diagram_shows_accuracy_gap_and_ece(tmp_path, drawn, assert_png):
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
    models = {"global": make_reliability()}
    assert reliability_diagram(tmp_path / "r.png", models) is False
    assert list(tmp_path.iterdir()) == []
