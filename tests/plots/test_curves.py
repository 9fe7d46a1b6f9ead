"""Curves show the right numbers and do without matplotlib."""

import numpy as np
import pytest
from fedvi.experiment.plots import (
    comparison_curves,
    finetune_curve,
    learning_curves,
    uncertainty_curves,
)


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


def legend_texts(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_learning_curves_show_mean_and_spread_over_seeds(tmp_path, drawn, assert_png):
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


def test_methods_are_compared_in_thin_lines(tmp_path, drawn, assert_png):
    """Personal models only where they were measured more than once."""
    once = [
        row if row["round"] == 10 else row | {"personal_accuracy": None}
        for row in make_rows("NIW")
    ]
    rows = [row | {"global_ece": 0.25} for row in make_rows("FedAvg") + once]
    assert comparison_curves(tmp_path / "comparison.png", rows, title="digits")
    assert_png(tmp_path / "comparison.png")
    accuracy, nll, ece = drawn[0].axes
    assert [axis.get_ylabel() for axis in (nll, ece)] == ["NLL (nats)", "ECE (%)"]
    styles = [line.get_linestyle() for line in accuracy.lines]
    assert styles == ["-", "--", "-"]
    colours = [line.get_color() for line in accuracy.lines]
    assert colours[0] == colours[1] != colours[2]
    assert all(line.get_linewidth() < 1 for line in accuracy.lines)
    assert all(line.get_marker() == "None" for line in accuracy.lines)
    np.testing.assert_allclose(ece.lines[1].get_ydata(), [25.0] * 3)
    names = ["FedAvg", "FedAvg personal", "NIW", "± std over seeds"]
    assert legend_texts(drawn[0]) == names


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


def test_learning_curves_survive_one_row_and_a_diverged_seed(tmp_path, assert_png):
    path = tmp_path / "curves.png"
    assert learning_curves(path, [{"round": 3, "global_accuracy": 10.0}])
    rows = [*make_rows(), {"round": 10, "seed": 2, "global_nll": np.inf}]
    assert learning_curves(path, rows)
    assert_png(path)
    with pytest.raises(ValueError, match="rows is empty"):
        learning_curves(path, [])


def test_an_absurd_loss_is_a_gap_and_two_rows_of_a_seed_an_error(tmp_path, drawn):
    """The others' curves keep their scale; runs of other settings are no seeds."""
    rows = make_rows(seeds=1)
    rows[1] = rows[1] | {"global_nll": 1e14}
    learning_curves(tmp_path / "curves.png", rows)
    gap = np.isnan(drawn[0].axes[1].lines[0].get_ydata())
    np.testing.assert_array_equal(gap, [False, True, False])
    with pytest.raises(ValueError, match="has two rows of seed 0"):
        learning_curves(tmp_path / "curves.png", [*rows, rows[0]])


def test_novel_clients_have_curves_of_their_own(tmp_path, drawn):
    rows = [row | {"novel_personal_accuracy": 60.0} for row in make_rows(seeds=1)]
    learning_curves(tmp_path / "curves.png", rows)
    lines = drawn[0].axes[0].lines
    assert lines[2].get_ydata().tolist() == [60.0] * 3
    assert len({line.get_color() for line in lines}) == 3
    assert legend_texts(drawn[0]) == ["global", "personal", "novel personal"]


def test_uncertainty_curves_show_ece_in_per_cent(tmp_path, drawn, assert_png):
    rows = [
        {"round": number, "seed": seed, "global_ece": 0.1 * (seed + 1)}
        | {"personal_entropy": 1.0 / number, "global_mutual_information": 0.25}
        for number in (1, 2)
        for seed in (0, 1)
    ]
    assert uncertainty_curves(tmp_path / "u.png", rows, title="digits")
    assert_png(tmp_path / "u.png")
    ece, entropy, information = drawn[0].axes
    np.testing.assert_allclose(ece.lines[0].get_ydata(), [15, 15])
    band = ece.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose(np.ptp(band), 2 * np.std([10.0, 20.0], ddof=1))
    np.testing.assert_allclose(entropy.lines[0].get_ydata(), [1, 0.5])
    np.testing.assert_allclose(information.lines[0].get_ydata(), [0.25, 0.25])
    assert ece.get_ylabel() == "ECE (%)"


@pytest.mark.parametrize("seeds", [1, 2])
def test_finetune_curve_shows_training_and_novel_clients(
    tmp_path, drawn, assert_png, seeds
):
    each = [
        {"training_clients": [70.0 + seed, 80.0], "novel_clients": [60.0, 75.0 + seed]}
        for seed in range(seeds)
    ]
    means = {key: np.mean([one[key] for one in each], axis=0) for key in each[0]}
    curve = {"epochs": [0, 5], **means, "per_seed": each}
    assert finetune_curve(tmp_path / "f.png", curve)
    assert_png(tmp_path / "f.png")
    axis = drawn[0].axes[0]
    for line, values in zip(axis.lines, means.values(), strict=True):
        np.testing.assert_allclose(line.get_xydata(), np.stack([[0, 5], values], 1))
    assert len(axis.collections) == (2 if seeds == 2 else 0)
    assert legend_texts(drawn[0]) == ["training clients", "novel clients"]
    del curve["novel_clients"]
    assert finetune_curve(tmp_path / "f.png", curve)
    assert legend_texts(drawn[1]) == ["training clients"]


def test_without_matplotlib_nothing_is_drawn(tmp_path, no_matplotlib):
    curve = {"epochs": [0], "training_clients": [1.0], "per_seed": [{}]}
    assert learning_curves(tmp_path / "c.png", make_rows()) is False
    assert uncertainty_curves(tmp_path / "u.png", make_rows()) is False
    assert finetune_curve(tmp_path / "f.png", curve) is False
    assert list(tmp_path.iterdir()) == []
