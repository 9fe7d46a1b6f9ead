"""Curves show the right numbers, on axes that show what matters."""

import numpy as np
import pytest

from fedvi.plots import finetune_curve, learning_curves

SPREAD = np.std([0.0, 1.0], ddof=1)  # of two seeds that are 1 apart


def heights(band):
    """Lowest and highest of a band at each x."""
    x, y = band.get_paths()[0].vertices.T
    return {at: (y[x == at].min(), y[x == at].max()) for at in np.unique(x)}


def learned(top, rounds=100):
    """From chance to `top` within a few rounds, as most curves are."""
    return list(top - (top - 10.0) * np.exp(-np.arange(rounds) / 4.0))


def test_a_row_is_a_model_and_a_column_a_metric(make_run, legend_texts):
    run = make_run(
        curves={
            "global_accuracy": [20.0, 60.0, 70.0],
            "personal_accuracy": [None, None, 80.0],
            "global_nll": [2.0, 1.0, 0.5],
        }
    )
    figure = learning_curves(run)
    assert [a.get_title() for a in figure.axes] == [
        "accuracy (%)",
        "NLL (nats)",
        "",
        "",
    ]
    assert [a.get_ylabel() for a in figure.axes[::2]] == ["global", "personal"]
    line = figure.axes[0].lines[0]
    np.testing.assert_allclose(line.get_xydata(), [[0, 20.5], [5, 60.5], [10, 70.5]])
    np.testing.assert_allclose(figure.axes[2].lines[0].get_xydata(), [[10, 80.5]])
    assert not figure.axes[3].axison  # no NLL of personal models
    band = heights(figure.axes[0].collections[0])
    np.testing.assert_allclose(band[10], (70.5 - SPREAD, 70.5 + SPREAD))
    assert legend_texts(figure) == ["fedavg", "± std over seeds"]
    assert figure.get_suptitle() == "fedavg, digits, test data"


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_band_over_clients_is_lighter_and_ends_at_100(
    make_run, seeds, legend_texts
):
    curves = {"global_accuracy": [90.0, 97.0], "global_accuracy_std": [8.0, 5.0]}
    figure = learning_curves(make_run(curves=curves, seeds=seeds))
    wide, _, *narrow = figure.axes[0].collections  # each with one for the legend
    mean = 97.0 + (seeds - 1) / 2
    np.testing.assert_allclose(heights(wide)[5], (mean - 5, 100))
    assert len(narrow) == (2 if seeds == 2 else 0)
    assert all(band.get_alpha() > wide.get_alpha() for band in narrow)
    bands = ["± std over seeds", "± std over clients"]
    assert legend_texts(figure) == ["fedavg", *bands[2 - seeds :]]
    low, high = figure.axes[0].get_ylim()
    assert low < mean - 5 and high > 100


def test_several_methods_have_colours_and_the_ece(make_run, legend_texts):
    curves = {"global_accuracy": [50.0] * 2, "personal_accuracy": [60.0] * 2}
    curves |= {"global_ece": [0.25] * 2, "global_accuracy_std": [9.0] * 2}
    runs = [
        make_run("fedavg", curves=curves, seeds=1),
        make_run("local_only", curves=curves, seeds=1, global_model=False),
    ]
    figure = learning_curves(runs)
    accuracy, ece, personal, _ = figure.axes
    assert ece.get_title() == "ECE (%)"
    np.testing.assert_allclose(ece.lines[0].get_ydata(), [25.0] * 2)
    assert len(accuracy.lines) == 1 and len(personal.lines) == 2
    first, second = (line.get_color() for line in personal.lines)
    assert accuracy.lines[0].get_color() == first != second
    assert not accuracy.collections  # bands over clients would hide each other
    assert legend_texts(figure) == ["fedavg", "local_only"]
    assert figure.get_suptitle() == "digits, test data"


def test_neither_round_0_nor_the_first_rounds_decide_the_axis(make_run):
    curves = {"personal_accuracy": learned(98.0), "global_accuracy": learned(90.0)}
    figure = learning_curves(make_run(curves=curves), metrics=["accuracy"])
    for axis, top in zip(figure.axes, (90.0, 98.0), strict=True):
        low, high = axis.get_ylim()
        assert top - 10 < low < top < top + 1 < high < top + 2
        (mark,) = axis.lines[1:]  # where the curve comes from
        assert mark.get_marker() == "v" and mark.get_xydata().tolist() == [[0.0, low]]


def test_few_evaluations_and_a_near_round_0_are_all_shown(make_run):
    def axis_of(values):
        curves = {"global_accuracy": values}
        [axis] = learning_curves(make_run(curves=curves, seeds=1)).axes
        return axis

    axis = axis_of([10.0, 60.0, 80.0, 95.0])
    assert 10 < axis.get_ylim()[0] < 60 and len(axis.lines) == 2
    axis = axis_of([40.0, 60.0, 80.0, 95.0])
    assert axis.get_ylim()[0] < 40 and len(axis.lines) == 1
    axis = axis_of([10.0, 95.0])
    assert axis.get_ylim()[0] < 10 and len(axis.lines) == 1


def test_a_seed_that_failed_leaves_the_others_to_be_seen(make_run, legend_texts):
    """An absurd loss is a gap in the mean, a bad one far off; neither is the axis's."""
    run = make_run(curves={"global_nll": [2.0, 0.5, 0.4]}, seeds=3, failed=(2,))
    run.evaluations[-1]["global_nll"] = 1e14
    run.evaluations[-4]["global_nll"] = 90.0
    figure = learning_curves(
        {"one": run, "other": make_run(curves={"global_nll": [1]})}
    )
    axis = figure.axes[0]
    thin, mean = axis.lines[:3], axis.lines[3]
    assert all(line.get_linewidth() < mean.get_linewidth() for line in thin)
    np.testing.assert_allclose(thin[1].get_ydata(), [3.0, 1.5, 1.4])
    np.testing.assert_allclose(mean.get_ydata(), [3.0, (0.5 + 1.5 + 90) / 3, np.nan])
    assert axis.get_ylim()[1] < 4
    assert legend_texts(figure)[0] == "one (1 of 3 seeds failed)"
    useless = make_run(curves={"global_accuracy": [0.0, 0.0]}, seeds=1)
    np.testing.assert_array_equal(
        learning_curves(useless).axes[0].lines[0].get_ydata(), [0.0, 0.0]
    )
    alone = make_run(curves={"global_nll": [2.0, np.nan]}, seeds=1, failed=(0,))
    assert learning_curves(alone).axes[0].get_ylim() == pytest.approx((1.9, 2.1))


def test_novel_clients_have_rows_of_their_own(make_run):
    curves = {f"{m}_accuracy": [50.0] for m in ("global", "novel_personal")}
    figure = learning_curves(make_run(curves=curves))
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert labels == ["global", "novel clients, personal"]


def test_the_metrics_can_be_chosen(make_run):
    curves = {"personal_entropy": [1.0, 0.5], "personal_mutual_information": [0.0, 0.0]}
    curves |= {"personal_accuracy": [50.0, 60.0]}
    run = make_run(curves=curves, seeds=1)
    figure = learning_curves(run, metrics=("mutual_information", "entropy"))
    assert [axis.get_title() for axis in figure.axes] == ["entropy (nats)"]
    with pytest.raises(
        ValueError, match="metrics has 'acc': it must be one of accuracy"
    ):
        learning_curves(run, metrics=["acc"])
    with pytest.raises(ValueError, match="no brier in metrics.csv"):
        learning_curves(run, metrics=["brier"])


@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_are_whole_numbers(make_run, rounds):
    run = make_run(curves={"global_accuracy": [10.0] * rounds}, seeds=1)
    for row in run.evaluations:
        row["round"] = 1 + row["round"] // 5
    axis = learning_curves(run).axes[0]
    ticks = axis.get_xticks()
    np.testing.assert_array_equal(ticks, np.round(ticks))
    low, high = axis.get_xlim()
    assert any(low <= tick <= high for tick in ticks)


@pytest.mark.parametrize("seeds", [1, 2])
def test_finetune_curve_shows_training_and_novel_clients(make_run, seeds, legend_texts):
    each = [
        {"training_clients": [70.0 + seed, 80.0], "novel_clients": [60.0, 75.0 + seed]}
        for seed in range(seeds)
    ]
    run = make_run(seeds=seeds)
    means = {key: np.mean([one[key] for one in each], axis=0) for key in each[0]}
    run.summary["finetune_curve"] = {"epochs": [0, 5], **means, "per_seed": each}
    figure = finetune_curve(run)
    [axis] = figure.axes
    for line, values in zip(axis.lines, means.values(), strict=True):
        np.testing.assert_allclose(line.get_xydata(), np.stack([[0, 5], values], 1))
    names = ["training clients", "novel clients", "± std over seeds"]
    assert legend_texts(figure) == names[: 1 + seeds]
    assert legend_texts(finetune_curve({"a": run, "b": run}))[:2] == [
        "a",
        "a, novel clients",
    ]
    with pytest.raises(ValueError, match="no finetune_curve: run with"):
        finetune_curve(make_run())
