import numpy as np
import pytest
from matplotlib.colors import to_rgb

from fedvi.evaluation import per_client
from fedvi.plots import clients
from fedvi.plots.canvas import COLOURS
from fedvi.plots.per_client import jitter

NAMES = "accuracy", "nll", "ece"


def points(axis, marker):
    """`[strips, points, 2]` of the scatters with so many points."""
    found = [c.get_offsets().data for c in axis.collections]
    return [xy for xy in found if len(xy) == marker]


def test_a_point_is_a_client_and_bar_and_diamond_are_over_them(make_run, legend_texts):
    run = make_run(clients=6)
    figure = clients(run)
    assert [a.get_xlabel() for a in figure.axes][:2] == ["accuracy (%)", "NLL (nats)"]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [
        "global",
        "personal",
    ]
    for axis, name in zip(figure.axes, NAMES, strict=True):
        for place, model in enumerate(("global", "personal")):
            # Mean over seeds; the last client has no test data.
            wanted = per_client(run.scores[model])[name][:, :-1].mean(axis=0)
            wanted = wanted * (100 if name == "ece" else 1)
            xy = points(axis, 6)[place]
            np.testing.assert_allclose(xy[:-1, 0], wanted)
            assert np.isnan(xy[-1, 0])
            assert np.abs(xy[:, 1] - place).max() < 0.31
            median, mean = points(axis, 1)[2 * place : 2 * place + 2]
            np.testing.assert_allclose(median, [[np.median(wanted), place]])
            np.testing.assert_allclose(mean, [[wanted.mean(), place]])
        assert len(axis.lines) == 6  # from model to model of every client
    assert legend_texts(figure) == ["client", "median", "mean"]


def test_novel_clients_are_hollow_and_left_out_of_the_mean(make_run, legend_texts):
    run = make_run(clients=30, novel=(0, 1))
    figure = clients(run)
    axis = figure.axes[0]
    hollow = [c for c in axis.collections if len(c.get_offsets()) == 2]
    assert len(hollow) == 2 and not any(len(c.get_facecolor()) for c in hollow)
    wanted = per_client(run.scores["global"])["accuracy"][:, 2:-1].mean(axis=0)
    np.testing.assert_allclose(points(axis, 1)[1], [[wanted.mean(), 0]])
    assert not axis.lines  # too many to follow
    assert legend_texts(figure) == ["client", "novel client", "median", "mean"]


def test_colours_are_clusters_of_one_method_and_methods_of_several(
    make_run, legend_texts
):
    run = make_run(clients=3)
    run.summary["per_seed"][0]["clusters"] = [1, 0, 1]
    figure = clients(run)
    strip = next(c for c in figure.axes[0].collections if len(c.get_offsets()) == 3)
    wanted = [to_rgb(COLOURS[cluster]) for cluster in (1, 0, 1)]
    np.testing.assert_allclose(strip.get_edgecolor()[:, :3], wanted)
    assert legend_texts(figure)[-2:] == ["cluster 0", "cluster 1"]
    local = make_run("local_only", clients=3, global_model=False)
    figure = clients([run, local])
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [
        "fedavg, global",
        "fedavg, personal",
        "local_only, personal",
    ]


def test_a_failed_seed_is_left_out_and_other_clients_are_refused(make_run):
    run = make_run(failed=(1,))
    run.scores["global"].nll[1] = np.nan
    xy = points(clients(run).axes[1], 6)[0]
    np.testing.assert_allclose(
        xy[:-1, 0], per_client(run.scores["global"])["nll"][0, :-1]
    )
    with pytest.raises(ValueError, match="'mine.*' has runs of 3 and 6 clients"):
        clients({"mine": [run, make_run(clients=3)]})


def test_the_jitter_is_even_and_always_the_same():
    for count in (1, 7, 100):
        places = np.sort(jitter(count))
        np.testing.assert_array_equal(places, np.sort(jitter(count)))
        assert np.abs(places).max() < 0.3
        assert np.diff(places, prepend=-0.3, append=0.3).max() < 0.6 * 2.7 / (count + 1)
