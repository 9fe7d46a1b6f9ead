"""Which runs a picture shows, under which names; how it is written."""

import numpy as np
import pytest

from fedvi import plots
from fedvi.evaluation import Uncertainty
from fedvi.experiment import folder
from fedvi.plots.runs import named


def test_runs_are_named_after_what_differs(make_run):
    one, other = make_run("prox", mu=1.0), make_run("prox", mu=2.0)
    more = make_run("prox", mu=1.0, first_seed=7, failed=(0,))
    assert named([one, other, more]) == {
        "prox mu=1.0 (1 of 4 seeds failed)": [one, more],
        "prox mu=2.0": [other],
    }
    assert named(one) == {"prox": [one]}
    assert named({"mine": (one, other)}) == {"mine": [one, other]}


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "runs is empty"),
        ({}, "runs is empty"),
        ("runs/mine", "runs holds 'runs/mine': give what fedvi.load_run"),
    ],
)
def test_what_is_no_run_is_named(runs, message):
    with pytest.raises(ValueError, match=message):
        named(runs)


def test_an_unfinished_run_has_no_pictures(make_run):
    run = make_run()
    run.summary = {}
    with pytest.raises(ValueError, match="unfinished run.*--resume"):
        plots.learning_curves(run)


def test_all_pictures_of_a_run_are_drawn_into_its_folder(make_run):
    run = make_run(curves={"global_accuracy": [50.0], "global_entropy": [1.0]})
    run.summary["finetune_curve"] = {
        "epochs": [0],
        "per_seed": [{"training_clients": [1.0]}] * 2,
        "training_clients": [1.0],
    }
    values = np.full((2, 6, 4), 0.5)
    uncertainty = Uncertainty(values, values, values > 0)
    run.evaluation["ood"] = uncertainty, uncertainty
    run.folder.mkdir()
    written = plots.draw(run, ("svg",))
    names = "learning_curves", "uncertainty", "reliability", "per_client"
    names += "finetune_curve", "entropy_density"
    assert [path.name for path in written] == [f"{name}.svg" for name in names]
    assert {path.name for path in run.folder.iterdir()} == {p.name for p in written}
    # What --overwrite removes.
    assert {f"{n}.{s}" for n in names for s in ("png", "svg", "pdf")} < set(
        folder.RUN_FILES
    )
    with pytest.raises(ValueError, match=r"formats=jpg: they must be of png, svg, pdf"):
        plots.draw(run, ("jpg",))


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_the_same_run_gives_the_same_bytes(make_run, tmp_path, suffix, monkeypatch):
    for epoch, name in (("0", "a"), ("1000000000", "b")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        plots.reliability_diagram(make_run(), tmp_path / f"deep/{name}.{suffix}")
    first, second = ((tmp_path / f"deep/{n}.{suffix}").read_bytes() for n in "ab")
    assert first == second
    starts = {"svg": b"<?xml", "pdf": b"%PDF"}
    assert first.startswith(starts[suffix])
    if suffix == "svg":
        assert b">accuracy</text>" in first  # text is text
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {
        f"{n}.{suffix}" for n in "ab"
    }


def test_another_suffix_is_refused_and_a_notebook_gets_a_png(make_run, tmp_path):
    with pytest.raises(ValueError, match=r"x.jpg: .*one of .png, .svg, .pdf"):
        plots.reliability_diagram(make_run(), tmp_path / "x.jpg")
    figure = plots.reliability_diagram(make_run())
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert not list(tmp_path.iterdir())


def test_ten_long_names_fit(make_run):
    runs = {
        f"method_{i} penalty_scale=0.{i}" * (1 + i % 2): make_run() for i in range(9)
    }
    figure = plots.learning_curves({**runs, "long " * 30: make_run()})
    figure.draw_without_rendering()
    page, legend = figure.bbox, figure.legends[0].get_window_extent()
    assert page.x0 <= legend.x0 and legend.x1 <= page.x1 and page.y0 <= legend.y0
    lines = figure.axes[0].lines
    looks = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(looks) == len(runs) + 1


def test_without_matplotlib_nothing_is_drawn(make_run, no_matplotlib, tmp_path):
    assert plots.draw(make_run()) == []
    with pytest.raises(ImportError, match=r"pip install 'fedvi\[plots\]'"):
        plots.clients(make_run(), tmp_path / "c.png")
    assert not list(tmp_path.iterdir())
