"""The example in two processes on this machine: same result, losses, mistakes."""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from absl import flags as absl_flags

from fedvi import experiment
from fedvi.experiment import command_line, npz_tree

ROOT = Path(__file__).parents[2]
ROUNDS = 30
SETTINGS = f"""
--algorithm=fedavg
--dataset=digits
--partition=iid
--clients=4
--fraction=0.5
--model=logistic
--noaugment
--finetune_epochs=1
--rounds={ROUNDS}
--eval_every=1
"""
pytestmark = pytest.mark.long
TIMEOUT = 300  # seconds; a machine under load compiles slowly


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes")
    (path / "tiny.flags").write_text(SETTINGS)
    return path


@pytest.fixture(scope="module")
def straight(folder):
    """The folder of the same run in one process, on one device."""
    values = absl_flags.FlagValues()
    command_line.define(values)
    run_dir = folder / "straight"
    file = folder / "tiny.flags"
    command_line.parse(["x", f"--flagfile={file}", f"--run_dir={run_dir}"], values)
    experiment.run_all(command_line.read(values))
    return run_dir


@pytest.fixture
def start(folder):
    """Starts the example in a process of its own; none outlives its test."""
    processes = []

    def call(run_dir, *arguments, **environment):
        # The fake devices of this process are no setting of those.
        inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "examples" / "fedhb_cifar.py"),
                f"--flagfile={folder / 'tiny.flags'}",
                f"--run_dir={run_dir}",
                f"--compilation_cache={folder / 'xla'}",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def start_both(start):
    def call(run_dir, *arguments, second=()):
        port = free_port()
        return [
            start(
                run_dir,
                *arguments,
                *(second if process else ()),
                f"--coordinator_address=localhost:{port}",
                "--num_processes=2",
                f"--process_id={process}",
            )
            for process in range(2)
        ]

    return call


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def finish(process):
    output, errors = process.communicate(timeout=TIMEOUT)
    return process.returncode, output, errors


def assert_same_run(expected, found):
    """Up to the order of float additions: over clients, and within a layer."""
    rows = []
    for run_dir in (expected, found):
        assert (run_dir / "summary.json").exists()
        with open(run_dir / "metrics.csv", newline="") as file:
            rows.append(list(csv.DictReader(file)))
    assert len(rows[0]) == len(rows[1]) == ROUNDS + 1  # one before the first
    for left, right in zip(*rows):
        assert left.keys() == right.keys()
        for name in left.keys() - {"seconds", "split"}:
            if left[name] or right[name]:
                value = pytest.approx(float(left[name]), rel=1e-4, abs=1e-6)
                assert float(right[name]) == value, (left["round"], name)
    with (
        np.load(expected / "checkpoint.npz") as left,
        np.load(found / "checkpoint.npz") as right,
    ):
        assert left.files == right.files
        for name in set(left.files) - {"metadata"}:
            np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=1e-5)


def test_two_processes_give_the_result_of_one(folder, straight, start_both):
    run_dir = folder / "two"
    (code, output, errors), (code_1, output_1, errors_1) = map(
        finish, start_both(run_dir)
    )
    assert (code, errors, code_1, errors_1) == (0, "", 0, "")
    assert "round 30/30" in output
    assert "round" not in output_1  # process 0 prints
    assert_same_run(straight, run_dir)


def test_slurm_is_found_and_models_are_spread_over_devices(folder, straight, start):
    """Its variables are set by hand: this is no Slurm."""
    run_dir, port = folder / "slurm", free_port()
    processes = [
        start(
            run_dir,
            "--distributed=auto",
            "--devices=8",
            "--model_devices=2",
            SLURM_JOB_ID="1",
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS="2",
            SLURM_PROCID=str(process),
            SLURM_LOCALID=str(process),
            JAX_COORDINATOR_PORT=str(port),
        )
        for process in range(2)
    ]
    for code, _, errors in map(finish, processes):
        assert (code, errors) == (0, "")
    assert '"device": "8 x cpu' in (run_dir / "summary.json").read_text()
    assert_same_run(straight, run_dir)


def test_a_lost_process_ends_the_other_and_the_run_goes_on(
    folder, straight, start_both
):
    run_dir = folder / "lost"
    first, second = start_both(run_dir)
    while not (run_dir / "checkpoint.npz").exists() and first.poll() is None:
        time.sleep(0.005)
    second.kill()
    killed = time.monotonic()
    code, _, errors = finish(first)
    assert time.monotonic() - killed < 30
    assert code == 3, errors
    saved = npz_tree.read_metadata(run_dir / "checkpoint.npz")["round"]
    assert 1 <= saved < ROUNDS
    assert errors == (
        f"error: process 1 of 2 was lost; {run_dir}/checkpoint.npz holds round {saved} "
        f"of {ROUNDS}: start all 2 again with --resume\n"
    )
    assert not (run_dir / "summary.json").exists()

    (code, output, errors), (code_1, _, _) = map(
        finish, start_both(run_dir, "--resume")
    )
    assert (code, code_1, errors) == (0, 0, "")
    assert f"resumed after round {saved} of {ROUNDS}" in output
    assert_same_run(straight, run_dir)


def test_a_process_that_only_hangs_is_lost_too(folder, start_both):
    """As when a machine is gone: no socket is closed, and no collective returns."""
    run_dir = folder / "hangs"
    first, second = start_both(run_dir, "--lost_timeout=3")
    while not (run_dir / "checkpoint.npz").exists() and first.poll() is None:
        time.sleep(0.005)
    second.send_signal(signal.SIGSTOP)
    code, _, errors = finish(first)
    assert code == 3, errors
    assert errors.startswith("error: process 1 of 2 was lost; ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("mistake", "first_says", "second_says"),
    [
        (
            "--data_file=missing.npz",
            "error: process 1: data_file 'missing.npz'",
            "error: data_file 'missing.npz'",
        ),
        ("--rounds=6", *["rounds is 30 in process 0 and 6 in process 1"] * 2),
    ],
)
def test_the_mistake_of_one_process_is_told_by_both(
    folder, start_both, mistake, first_says, second_says
):
    processes = start_both(folder / "never", second=[mistake])
    for process, message in zip(processes, (first_says, second_says)):
        code, _, errors = finish(process)
        assert code == 1
        assert message in errors and errors.count("\n") == 1
    assert not (folder / "never").exists()


def test_a_start_that_fails_says_why(folder, start):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        alone, port = free_port(), taken.getsockname()[1]
        cases = [
            (
                [f"--coordinator_address=localhost:{alone}", "--start_timeout=4"],
                f"did not all come together at coordinator_address=localhost:{alone} "
                "within start_timeout=4 s",
            ),
            ([f"--coordinator_address=localhost:{port}"], "its port cannot be used"),
            (["--distributed=auto"], "JAX finds no cluster"),
        ]
        where = ["--num_processes=2", "--process_id=0"]
        started = [
            start(folder / "never", *given, *(where if i < 2 else ()))
            for i, (given, _) in enumerate(cases)
        ]
        for process, (_, message) in zip(started, cases):
            code, _, errors = finish(process)
            last = errors.splitlines()[-1]
            assert (code, last[:7]) == (1, "error: ")
            assert message in last
    assert not (folder / "never").exists()
