"""Diagrams of calibration show the right numbers."""

import numpy as np
import pytest

from fedvi.evaluation import reliability
from fedvi.plots import reliability_diagram, risk_coverage


def pooled(scores, ids):
    leaves = [np.concatenate(leaf[:, ids]) for leaf in scores]
    return reliability(type(scores)(*leaves))


def test_reliability_diagram_shows_pooled_bins_and_the_mean_ece(make_run, legend_texts):
    run = make_run(novel=(0,))
    figure = reliability_diagram(run)
    above, other, below, _ = figure.axes
    assert above.get_title() == "global: ECE 15.00 %"  # of 0.1 and 0.2
    assert other.get_title() == "personal: ECE 20.00 %"
    wanted = pooled(run.scores["global"], [1, 2, 3, 4, 5])
    full = wanted["count"] > 0
    np.testing.assert_allclose(
        above.lines[0].get_xydata(),
        np.stack([wanted["confidence"], wanted["accuracy"]], 1)[full],
    )
    shares, edges, _ = below.patches[0].get_data()
    np.testing.assert_allclose(shares, 100 * wanted["count"] / wanted["count"].sum())
    np.testing.assert_allclose(edges, np.linspace(0, 1, 16))
    shown = [gap[:, 1].tolist() for gap in above.collections[0].get_segments()]
    np.testing.assert_allclose(
        shown, np.stack([wanted["confidence"], wanted["accuracy"]], 1)[full]
    )
    assert legend_texts(figure) == ["fedavg", "perfect calibration"]


def test_recalibration_is_dashed_beside_it(make_run, legend_texts):
    run = make_run()
    scores = run.scores
    run.evaluation["recalibration"] = {"global": {"global": scores["personal"]}}
    for one in run.summary["per_seed"]:
        one["recalibration"] = None
    run.summary["recalibration"] = {
        "per_seed": [{m: {"global": {"ece": 0.05}} for m in scores}] * 2
    }
    figure = reliability_diagram(run)
    assert figure.axes[0].get_title() == "global: ECE 15.00 → 5.00 %"
    wanted = pooled(scores["personal"], range(6))
    after = figure.axes[0].lines[1]
    full = wanted["count"] > 0
    np.testing.assert_allclose(after.get_ydata(), wanted["accuracy"][full])
    assert after.get_linestyle() == "--"
    names = ["fedavg", "recalibrated", "perfect calibration"]
    assert legend_texts(figure) == names


def test_several_methods_are_lines_and_a_diverged_one_has_none(make_run, legend_texts):
    good, bad = make_run(), make_run("bad", global_model=False)
    for leaf in bad.scores["personal"][6:9]:
        leaf[:] = 0.0
    figure = reliability_diagram([good, bad])
    above, other = figure.axes[:2]
    assert len(above.lines) == 2 and len(other.lines) == 3  # the diagonal too
    assert not other.lines[1].get_xdata().size
    assert above.get_title() == "global"
    assert legend_texts(figure) == ["fedavg", "bad", "perfect calibration"]
    bad.summary["per_seed"][0]["personal"] = {"ece": None}  # JSON's NaN
    assert reliability_diagram(bad).axes[0].get_title() == "personal: ECE nan %"


def test_risk_coverage_curves_are_means_over_seeds(make_run, legend_texts):
    run, other = make_run(), make_run("other")
    coverage = np.tile(np.linspace(0.25, 1, 4), (2, 1))
    risk = np.array([[0.0, 0.1, 0.2, 0.2], [0.2, 0.1, 0.2, 0.4]])
    for one in (run, other):
        one.evaluation["risk_coverage"] = {
            "personal": {"coverage": coverage, "risk": risk}
        }
        areas = [{"personal": {"aurc": area}} for area in (0.1, 0.2)]
        one.summary["risk_coverage"] = {"per_seed": areas}
    figure = risk_coverage(run)
    [axis] = figure.axes
    assert axis.get_title() == "personal: AURC 15.00 %"
    np.testing.assert_allclose(axis.lines[0].get_xdata(), [25, 50, 75, 100])
    np.testing.assert_allclose(axis.lines[0].get_ydata(), [10, 10, 20, 30])
    assert legend_texts(figure) == ["fedavg", "± std over seeds"]
    figure = risk_coverage([run, make_run("without"), other])
    assert legend_texts(figure) == ["fedavg", "other", "± std over seeds"]
    with pytest.raises(ValueError, match="run with --risk_coverage"):
        risk_coverage(make_run())
