"""The accelerator's measurements go on where they stopped, whatever became of one."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from absl import flags

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# Counts its calls, and leaves a number as its result.
WORKS = """
import json, pathlib, sys
calls = pathlib.Path("{OUT}/" + NAME + ".calls")
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
json.dump({"value": 3}, open("{OUT}/unfinished/" + NAME + ".json", "w"))
"""


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(flags.FLAGS)
    module = importlib.import_module("accelerator")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["accelerator"])
    yield module
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
    sys.modules.pop("accelerator")


@pytest.fixture
def clock(accelerator, monkeypatch):
    """Its `now` is the script's, which a busy machine does not change."""
    clock = SimpleNamespace(now=lambda: 0.0)
    monkeypatch.setattr(accelerator.time, "monotonic", lambda: clock.now())
    return clock


@pytest.fixture
def fake(accelerator, clock):
    """`(name, code) -> Measurement` whose command is Python code."""

    def fake(name, code=WORKS, seconds=10.0, **further):
        command = (sys.executable, "-c", f"NAME = {name!r}\n{code}")
        line = "value {value}".format_map
        return accelerator.Measurement(
            name, command, seconds, f"{name}.json", line, **further
        )

    return fake


def lines(capsys):
    """What was printed, without the seconds that it took."""
    return capsys.readouterr().out.replace(" [0 s]", "").splitlines()


def test_what_is_there_is_not_measured_again(accelerator, fake, tmp_path, capsys):
    for told in ("one: value 3", "one: value 3 (earlier)"):
        session = accelerator.Session(tmp_path, 60)
        session.take([fake("one")], together=1)
        assert lines(capsys) == [told]
        assert session.failed == 0
    assert (tmp_path / "one.calls").read_text() == "x"
    assert "| one | value 3 (earlier) |" in (tmp_path / "results.md").read_text()


def test_a_broken_one_does_not_stop_the_others(accelerator, fake, tmp_path, capsys):
    half = WORKS + "print('no memory'); sys.exit(3)"
    nothing = "pass"
    strange = WORKS.replace("value", "other")
    session = accelerator.Session(tmp_path, 60)
    session.take(
        [
            *(fake("half", half), fake("nothing", nothing), fake("strange", strange)),
            *(fake("lacking", lacks="--data_file=FILE"), fake("last")),
        ],
        together=1,
    )
    told = lines(capsys)
    assert told[0].startswith("half: failed, exit code 3: no memory; ")
    assert told[1].startswith("nothing: failed, exit code 0: ")
    assert told[2].startswith("strange: failed: ")
    assert told[3:] == ["lacking: skipped: needs --data_file=FILE", "last: value 3"]
    assert session.failed == 3
    # Half of a result is none.
    assert not (tmp_path / "half.json").exists()


def test_nothing_is_begun_that_would_not_end_in_time(
    accelerator, fake, tmp_path, capsys
):
    session = accelerator.Session(tmp_path, 60)
    session.take([fake("long", seconds=61.0), fake("short")], together=1)
    assert lines(capsys) == ["long: not begun: 60 s are left", "short: value 3"]


@pytest.mark.parametrize(
    ("seconds", "estimate", "told", "failed"),
    [(99, 50, "ended: the time is over", 0), (999, 9, "failed: not done in 100 s", 1)],
)
def test_what_takes_too_long_is_ended_with_all_that_it_started(
    accelerator, fake, clock, tmp_path, capsys, seconds, estimate, told, failed
):
    code = (
        "import subprocess, sys, time\n"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(99)']\n"
        "child = subprocess.Popen(sleeps)\n"
        "print(child.pid, file=open('{OUT}/child', 'w'), flush=True)\n"
        "time.sleep(99)"
    )
    child = tmp_path / "child"
    clock.now = lambda: 100.0 if child.exists() and child.read_text() else 0.0
    session = accelerator.Session(tmp_path, seconds)
    session.take([fake("slow", code, seconds=estimate)], together=1)
    assert capsys.readouterr().out.startswith(f"slow: {told}")
    assert session.failed == failed
    assert ended(int(child.read_text()))


def ended(process):
    """Whether a process is gone, or was ended and only waits for its parent."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        except FileNotFoundError:
            return True
        if state[0] in "ZX":
            return True
        time.sleep(0.05)
    return False


def test_runs_of_the_table_share_the_time(accelerator, fake, tmp_path, capsys):
    # Each waits until the other has begun too.
    meets = WORKS + (
        "import time\n"
        "while len(list(pathlib.Path('{OUT}').glob('*.calls'))) < 2: time.sleep(0.01)\n"
        "import os; print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"
    )
    both = [fake(name, meets, together=True) for name in "ab"]
    session = accelerator.Session(tmp_path, 60)
    session.take([both[0], fake("alone"), both[1]], together=2)
    told = lines(capsys)
    assert sorted(told[:2]) == ["a: value 3", "b: value 3"]
    assert told[2:] == ["alone: value 3"]
    assert session.failed == 0
    assert (tmp_path / "a.log").read_text().endswith("false\n")


def test_a_round_in_one_line(accelerator):
    own = {
        "seconds_median": 0.25,
        "microseconds_an_example": 5.0,
        "first_call_seconds": 20.04,
        "xla_temporary_bytes": 3 * 2**30,
        "roofline": {"over_floor": 2.0},
        "versions": {"device": "card"},
    }
    report = {
        "systems": {"fedvi": own, "peer": {"seconds_median": 1.0}},
        "ratios": {"peer": {"seconds": {"ratio_median": 0.25}}},
    }
    assert accelerator.round_line(report) == (
        "0.2500 s a round, 5.00 µs an example, first call 20.0 s, temporaries 3.00 "
        "GiB, 2.0 times the floor, peer 1.0000 s, 4.00 times fedvi's; card"
    )


def test_figures_go_into_the_flag_files_of_whole_runs(
    accelerator, tmp_path, monkeypatch, capsys
):
    name = "niw_cifar100_s100_f0.1_tau1"
    text = (accelerator.TABLE_1 / f"{name}.flags").read_text()
    monkeypatch.setattr(accelerator, "TABLE_1", tmp_path / "flags")
    flags.FLAGS.data_note = "a note"
    path = tmp_path / "flags" / f"{name}.flags"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no finished run"):
        accelerator.cut(tmp_path)

    def model(accuracy):
        return {"accuracy": accuracy, "ece": 0.012, "nll": 2.0}

    summary = {
        "failed": False,
        "config": {"rounds": 2},
        "device": "1 x card (gpu)",
        "per_seed": [{"global": model(50.0), "personal": model(54.321)}],
    }
    (tmp_path / name).mkdir()
    found = tmp_path / name / "summary.json"
    found.write_text(json.dumps(summary))
    with pytest.raises(ValueError, match="is no whole run of niw_cifar100"):
        accelerator.cut(tmp_path)
    found.write_text(json.dumps(summary | {"config": {"rounds": 320}}))
    accelerator.cut(tmp_path)
    before, after = text.splitlines(), path.read_text().splitlines()
    assert after[2] == (
        "# ours: global 50.00 %, personalised 54.32 %, ECE 1.2 / 1.2 %, NLL 2.000 / "
        "2.000; last round, 1 seed; 1 x card (gpu); a note"
    )
    assert after[:2] + after[3:] == before[:2] + before[3:]
    seeds = [{"global": model(a), "personal": model(a)} for a in (50.0, 52.0)]
    assert accelerator.figures({"per_seed": seeds}).startswith("global 51.00 ± 1.41 %")


def test_every_measurement_names_scripts_and_flags_that_exist(accelerator):
    found = accelerator.measurements()
    assert len({one.name for one in found}) == len(found)
    assert len({one.result for one in found}) == len(found)
    for one in found:
        assert Path(one.command[1]).exists()
        for word in one.command:
            if word.startswith("--flagfile="):
                assert Path(word.split("=", 1)[1]).exists()
    # What is measured first fits into the time, with the start of the machine.
    assert sum(one.seconds for one in found[:2]) + 240 < 600


def run(*arguments, **further):
    script = BENCHMARKS / "accelerator.sh"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path},
        **further,
    )


@pytest.mark.long
def test_a_killed_rehearsal_goes_on(tmp_path):
    rehearse = [str(tmp_path), "--rehearse", "--seconds=900", "--patience=20"]
    rehearse.append("--only=svgd,pfl_protocol,pfl_protocol_pfl")
    first = run(*rehearse)
    lines = iter(first.stdout.readline, "")
    assert next(lines).startswith("pfl_protocol: ")
    assert next(lines) == "pfl_protocol_pfl: skipped: needs --pfl_python=PYTHON\n"
    first.send_signal(signal.SIGTERM)
    assert first.communicate()[0] == ""
    assert first.returncode == 128 + signal.SIGTERM
    second = run(*rehearse)
    out, _ = second.communicate()
    assert second.returncode == 0, out
    lines = out.splitlines()
    assert lines[0].startswith("pfl_protocol: ") and lines[0].endswith("(earlier)")
    assert "µs an example" in lines[0]
    assert lines[2].startswith("svgd: 20 x 55 ")
    folder = tmp_path / "rehearsal"
    assert not list((folder / "unfinished").iterdir())
    assert json.loads((folder / "pfl_protocol.json").read_text())["systems"]["fedvi"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one folder for the results"),
        (["OUT", "--only=nothing"], "error: --only=nothing must be one of mobilenet_"),
        (["OUT", "--data_file=nowhere"], "error: --data_file=nowhere is no file"),
        (["OUT", "--cut"], "holds no finished run of Table 1"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, message):
    process = run(*(word.replace("OUT", str(tmp_path)) for word in arguments))
    assert message in process.communicate()[0]
    assert process.returncode != 0
    assert not list(tmp_path.iterdir())
