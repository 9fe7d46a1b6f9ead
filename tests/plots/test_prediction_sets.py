"""Coverage against set size, and every client's coverage."""

import numpy as np
import pytest

from fedvi.plots import conformal

RULES = "global", "client", "quantile_of_quantiles"
LEVELS = 0.01, 0.1, 0.5


@pytest.fixture
def measured(make_run):
    """A run with prediction sets of two seeds, at the level 0.1."""

    def make(method="fedavg", models=("global", "personal"), **more):
        run = make_run(method, clients=4, **more)
        figures = {"coverage": np.array([0.99, 0.91, 0.6])}
        figures["set_size"] = np.array([4.0, 2.0, 1.0])

        def arrays(offset):
            return {
                key: np.stack([values + offset, values + offset + 0.2])
                for key, values in figures.items()
            }

        run.evaluation["conformal"] = {
            "levels": np.tile(LEVELS, (2, 1)),
            **{
                model: {
                    score: {rule: arrays(0.01 * i) for i, rule in enumerate(RULES)}
                    for score in ("lac", "aps")
                }
                for model in models
            },
        }
        own = {"coverage": 0.93, "set_size": 2.5}
        of_scores = {score: dict.fromkeys(RULES, own) for score in ("lac", "aps")}
        run.summary["conformal"] = {
            "level": 0.1,
            "per_seed": [dict.fromkeys(models, of_scores)] * 2,
        }
        rows = [
            {
                "client": client,
                **{f"{m}_coverage": 0.7 + 0.1 * client + 0.02 * seed for m in models},
                **{f"{m}_own_coverage": None for m in models},
            }
            for seed in range(2)
            for client in range(4)
        ]
        run.per_client = lambda: rows
        return run

    return make


def test_a_line_is_a_rule_and_a_strip_every_clients_coverage(measured, legend_texts):
    figure = conformal(measured(novel=(3,)))
    above, other, below, _ = figure.axes
    assert (above.get_title(), other.get_title()) == ("global", "personal")
    promised, *lines = above.lines
    assert set(promised.get_ydata()) == {90.0}
    curve, dot = lines[:2]
    np.testing.assert_allclose(curve.get_xdata(), [4.1, 2.1, 1.1])  # mean over seeds
    np.testing.assert_allclose(curve.get_ydata(), [109.0, 101.0, 70.0])
    np.testing.assert_allclose(dot.get_xydata(), [[2.5, 93.0]])
    np.testing.assert_allclose(lines[2].get_xdata(), [4.11, 2.11, 1.11])
    names = [text.get_text() for text in below.get_yticklabels()]
    assert names == ["threshold of all", "own thresholds"]
    trained = next(c for c in below.collections if len(c.get_offsets()) == 3)
    np.testing.assert_allclose(trained.get_offsets()[:, 0], [71.0, 81.0, 91.0])
    assert legend_texts(figure)[:3] == [*names, "quantile of quantiles"]


def test_of_several_methods_a_line_each_with_the_threshold_of_all(
    measured, make_run, legend_texts
):
    runs = [
        measured(),
        measured("local_only", ("personal",), global_model=False),
        make_run("without"),
    ]
    figure = conformal(runs, score="aps")
    above, other, below, _ = figure.axes
    assert len(above.lines) == 1 + 2 and len(other.lines) == 1 + 4
    assert [text.get_text() for text in below.get_yticklabels()] == [
        "fedavg",
        "local_only",
    ]
    assert legend_texts(figure)[:2] == ["fedavg", "local_only"]


def test_what_was_not_measured_is_named(measured, make_run):
    with pytest.raises(ValueError, match="run with --calibration_fraction"):
        conformal(make_run())
    with pytest.raises(ValueError, match="score='abs': it must be one of lac, aps"):
        conformal(measured(), score="abs")
