"""The command `fedvi`: which command, which runs, what ends how."""

import contextlib
import re
import types
from pathlib import Path

import pytest

from fedvi import __version__, plots
from fedvi.experiment import command_line, commands, report


@pytest.fixture
def fedvi(capsys, monkeypatch):
    """`(arguments) -> (exit code, what was printed, errors)`."""
    # What is tested elsewhere, and pytest's own streams cannot do.
    monkeypatch.setattr(commands.processes, "any_letter", contextlib.nullcontext)

    def call(*arguments):
        with pytest.raises(SystemExit) as left:
            commands.main(["fedvi", *arguments])
        return left.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("--helpfull",)])
def test_it_says_which_commands_there_are(fedvi, arguments):
    code, text, errors = fedvi(*arguments)
    assert (code, errors) == (0, "")
    for name in ("run", "sweep", "compare", "report"):
        assert f"\nfedvi {name} " in text
    assert fedvi("--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["rnu"], 2, "'rnu' is none of the commands run, .* did you mean run?"),
        (["compare"], 2, "fedvi compare needs a run folder"),
        (["compare", "x", "--ouT=y"], 2, "line flag --ouT: did you mean --out?"),
        (["report", "x", "--plot_formats=PNG"], 2, "<png.svg.pdf>: did you mean png?"),
        (["compare", "missing"], 1, "missing is no run folder"),
    ],
)
def test_a_mistake_ends_in_one_line(fedvi, tmp_path, arguments, code, message):
    found, text, errors = fedvi(*arguments)
    assert (found, text) == (code, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert re.search(message, errors)


@pytest.mark.parametrize("name", ["compare", "report"])
def test_a_command_of_folders_has_help(fedvi, name):
    code, text, _ = fedvi(name, "--help")
    assert code == 0 and f"usage: fedvi {name} FOLDER" in text
    assert ("--out:" in text) == (name == "compare")
    assert ("--plot_formats:" in text) == (name == "report")


def test_run_and_sweep_are_the_driver_of_the_examples(monkeypatch, fedvi):
    started = []

    def start(main=None, **options):
        started.append((main, options["argv"]))
        raise SystemExit(0)

    monkeypatch.setattr(commands, "start", start)
    fedvi("run", "--rounds=3")
    fedvi("sweep", "--sweep=rounds=3")
    (main, run), (swept, sweep) = started
    assert main is None and run == ["fedvi run", "--rounds=3"]
    assert sweep == ["fedvi sweep", "--sweep=rounds=3"]
    with pytest.raises(command_line.flags.Error, match="fedvi sweep needs --sweep="):
        swept([])


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Folders a (a run), b (an unfinished one) and all/c, all/d; what was drawn."""
    seen = types.SimpleNamespace(drawn=[], written=[])

    def run(where, finished=True):
        return types.SimpleNamespace(folder=Path(where), finished=finished)

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "all").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        commands, "load_run", lambda one: run(one, Path(one).name != "b")
    )
    monkeypatch.setattr(
        commands,
        "load_runs",
        lambda one: [run(one / "c"), run(one / "d"), run(one / "e", False)],
    )
    monkeypatch.setattr(
        commands.LoadedRuns,
        "comparison",
        lambda self: " against ".join(str(one.folder) for one in self),
    )

    def draw(run, formats):
        seen.drawn.append((str(run.folder), formats))
        return [run.folder / f"x.{suffix}" for suffix in formats]

    monkeypatch.setattr(plots, "draw", draw)
    monkeypatch.setattr(
        report,
        "write_comparison",
        lambda where, runs, text: seen.written.append((where, len(runs), text)),
    )
    return seen


def test_finished_runs_are_compared(fedvi, runs):
    code, text, _ = fedvi("compare", "a", "all", "./a")
    assert code == 0
    assert text == "all/e is not finished: left out\na against all/c against all/d\n"
    assert not runs.written
    code, text, errors = fedvi("compare", "all", "a", "--out=new/one")
    assert (code, errors) == (0, "")
    table = "all/c against all/d against a"
    assert runs.written == [(Path("new/one"), 3, table)] and Path("new/one").is_dir()
    code, _, errors = fedvi("compare", "b")
    assert code == 1 and "b is not finished: --resume goes on with it" in errors


def test_a_finished_run_is_reported_and_drawn_again(fedvi, runs):
    code, text, _ = fedvi("report", "a", "--plot_formats=svg,pdf")
    assert code == 0 and text == "a\na\n  a/x.svg\n  a/x.pdf\n\n"
    fedvi("report", "all")
    assert runs.drawn == [
        ("a", ("svg", "pdf")),
        ("all/c", ("png",)),
        ("all/d", ("png",)),
    ]
