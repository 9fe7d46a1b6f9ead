"""The example as a user runs it: in its own process, killed, resumed, misused."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import flags as absl_flags

from fedvi import experiment
from fedvi.experiment import command_line

ROOT = Path(__file__).parents[2]
SETTINGS = """
# A run of a few seconds.
--algorithm=fedavg
--dataset=digits
--partition=iid
--clients=4
--fraction=0.5
--model=logistic
--noaugment
--finetune_epochs=1
--rounds=40
--eval_every=1
"""


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "fedhb_cifar.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )


def finish(process):
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("example")
    (path / "tiny.flags").write_text(SETTINGS)
    return path


@pytest.fixture(scope="module")
def straight(folder):
    """The run that the others are compared with, in this process."""
    values = absl_flags.FlagValues()
    command_line.define(values)
    run_dir = folder / "straight"
    file = folder / "tiny.flags"
    command_line.parse(["x", f"--flagfile={file}", f"--run_dir={run_dir}"], values)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    experiment.run_all(command_line.read(values))
    jax.config.update("jax_compilation_cache_dir", before)
    return run_dir


@pytest.mark.long
def test_a_killed_run_continues_bit_for_bit(folder, straight):
    run_dir = folder / "killed"
    command = [
        f"--flagfile={folder / 'tiny.flags'}",
        f"--run_dir={run_dir}",
        f"--compilation_cache={folder / 'xla'}",
    ]
    process = start(*command)
    wait_for(run_dir / "checkpoint.npz", process)
    process.kill()
    finish(process)
    assert not (run_dir / "summary.json").exists()

    code, output, errors = finish(start(*command, "--resume"))
    assert (code, errors) == (0, "")
    assert "resumed after round" in output
    table = output[output.index("method ") :].splitlines()
    assert table[2].split()[0] == "fedavg"
    assert table[-1] == f"  {run_dir}"
    with (
        np.load(straight / "checkpoint.npz") as expected,
        np.load(run_dir / "checkpoint.npz") as found,
    ):
        assert expected.files == found.files
        for name in expected.files:
            assert expected[name].tobytes() == found[name].tobytes(), name
    with open(run_dir / "metrics.csv", newline="") as file:
        rounds = [int(row["round"]) for row in csv.DictReader(file)]
    assert rounds == list(range(41))


def wait_for(path, process):
    while not path.exists() and process.poll() is None:
        time.sleep(0.005)


@pytest.mark.long
def test_a_run_has_its_folder_for_itself(folder):
    """C34: after a kill, one of two that resume goes on; another start, resume and
    overwrite are refused and change nothing."""
    run_dir, rounds = folder / "shared", 60
    command = [
        f"--flagfile={folder / 'tiny.flags'}",
        f"--run_dir={run_dir}",
        f"--compilation_cache={folder / 'xla'}",
        f"--rounds={rounds}",
    ]
    first = start(*command)
    wait_for(run_dir / "checkpoint.npz", first)
    first.kill()
    finish(first)
    second, lock = start(*command, "--resume"), run_dir / ".lock"
    while f"process {second.pid} " not in lock.read_text() and second.poll() is None:
        time.sleep(0.005)
    second.send_signal(signal.SIGSTOP)  # alive for as long as the others try
    flags = ([], ["--resume"], ["--overwrite"])
    others = [start(*command, *flag) for flag in flags]
    ends = [finish(process) for process in others]
    second.send_signal(signal.SIGCONT)
    for code, _, errors in ends:
        assert code == 1
        who = f"error: run_dir={run_dir} is in use: process {second.pid} "
        assert errors.startswith(who) and errors.count("\n") == 1
    code, _, errors = finish(second)
    assert (code, errors) == (0, "")
    with open(run_dir / "metrics.csv", newline="") as file:
        found = [int(row["round"]) for row in csv.DictReader(file)]
    assert found == list(range(rounds + 1))
    assert not lock.exists()


@pytest.mark.long
def test_a_failed_run_ends_in_an_error_after_the_table(folder):
    code, output, errors = finish(
        start(
            f"--flagfile={folder / 'tiny.flags'}",
            f"--run_dir={folder / 'failed'}",
            f"--compilation_cache={folder / 'xla'}",
            "--learning_rate=1e38",
            "--rounds=2",
        )
    )
    assert code == 1
    assert "\nfedavg (failed) " in output
    assert errors.startswith("error: failed: fedavg, seed 0: no participant's upload")
    assert errors.count("\n") == 1
    assert (folder / "failed" / "summary.json").exists()


@pytest.mark.long
def test_mistakes_end_in_one_line_and_help_lists_the_flags(folder):
    file = f"--flagfile={folder / 'tiny.flags'}"
    never = f"--run_dir={folder / 'never'}"
    mistakes = {
        "--raunds=3": (2, "line flag --raunds: did you mean --rounds?"),
        "--rounds=abc": (2, "--rounds=abc: value should be an integer"),
        "--data_file=missing.npz": (1, "data_file 'missing.npz'"),
    }
    processes = [start(file, never, argument) for argument in mistakes]
    asked = start("--help", PYTHONIOENCODING="ascii:strict", LC_ALL="C")
    left = start("--help")  # as `--help | head` leaves it
    left.stdout.close()
    for process, (code, message) in zip(processes, mistakes.values(), strict=True):
        found, _, errors = finish(process)
        assert found == code
        assert errors.startswith("error: ") and message in errors
        assert errors.count("\n") == 1
    assert not (folder / "never").exists()
    code, output, errors = finish(asked)
    assert (code, errors) == (0, "")
    assert (left.wait(timeout=300), left.stderr.read()) == (0, "")
    left.stderr.close()
    assert output.startswith("FedHB and its baselines")
    for flag in ("--algorithm:", "--p_drop:", "--chunk_size:", "--name:"):
        assert flag in output


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--helpfull", "--helpxml", "--help", "-?"])
@pytest.mark.parametrize("closed", [False, True])
def test_every_help_ends_well_and_survives_a_closed_pipe(flag, closed):
    process = start(flag, "--algorithm=pfedbayes")
    if closed:
        process.stdout.close()
        assert (process.wait(timeout=300), process.stderr.read()) == (0, "")
        process.stderr.close()
        return
    code, output, errors = finish(process)
    assert (code, errors) == (0, "")
    assert "zeta" in output
