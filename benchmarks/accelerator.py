"""What only an accelerator can tell: measurements, the most important ones first.

    benchmarks/accelerator.sh OUT --data_file=cifar100.npz --torch_python=PYTHON

Every measurement is a command of its own, with a time limit; its result is printed as
it comes and kept in OUT, with its log. Within --seconds another one is begun only if it
may end in time. What OUT holds is not measured again, so the same command goes on where
it stopped: `fedvi` runs from their checkpoint, the others from their beginning. One
that fails is told in one line and does not stop the others; the exit code is 1 then.

What each needs, and what is left out without it:

    --data_file or --data_dir     CIFAR-100, as for `fedvi run`: FedHB's Table 1
    --torch_python                PyTorch's loop with MobileNet and with pfl's network
    --pfl_python                  pfl itself

--rehearse does all of it in tiny sizes, in OUT/rehearsal: a CPU is enough. --cut writes
the figures of Table 1 that OUT holds into the headers of their flag files.
"""

import dataclasses
import functools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from report import page, table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TABLE_1 = ROOT / "examples" / "flagfiles" / "fedhb"
CELL = "cifar100_s100_f0.1_tau1"
OUT = "{OUT}"
UNFINISHED = "unfinished"  # a folder: results of what may yet fail
POLL_SECONDS = 0.2

flags.DEFINE_integer("seconds", 720, "Time for all measurements.", lower_bound=1)
flags.DEFINE_float(
    "patience",
    5.0,
    "A measurement is ended after so many times the seconds that an H200 should need.",
    lower_bound=1.0,
)
flags.DEFINE_string("data_file", None, "CIFAR-100 as an .npz, as for fedvi.data.load.")
flags.DEFINE_string("data_dir", None, "A prepared tensorflow-datasets copy of it.")
flags.DEFINE_string("torch_python", None, "Interpreter that has PyTorch for the card.")
flags.DEFINE_string("torch_device", "cuda", "Where PyTorch and pfl compute.")
flags.DEFINE_string("pfl_python", None, "Interpreter that has pfl and PyTorch.")
flags.DEFINE_integer(
    "together",
    4,
    "Runs of Table 1 at once: most of their time is compilation, on the host. Their "
    "seconds a round then say nothing; 1 for those.",
    lower_bound=1,
)
flags.DEFINE_list("only", [], "Names of measurements; the others are left out.")
flags.DEFINE_boolean("rehearse", False, "Tiny sizes, to try the script.")
flags.DEFINE_boolean("cut", False, "Only write Table 1's figures into flag files.")
flags.DEFINE_string(
    "data_note", None, "Of --cut: what else is to be said of the data, after figures."
)
FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A command, and where it leaves what it found.

    Attributes:
      name: of its result and log.
      command: its words; OUT stands for the folder.
      seconds: that it takes on an H200, compilation included: an estimate by the
        prototypes' figures. It is ended after --patience times as many.
      result: a file below OUT; where it is, the measurement is done.
      line: `(what the file holds) -> its figures in one line`.
      lacks: the flag without which it cannot be done, if that is not given.
      together: whether others of the kind may run at the same time.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    result: str
    line: Callable[[dict[str, Any]], str]
    lacks: str = ""
    together: bool = False


# What is measured.


def measurements() -> list[Measurement]:
    """All of them, in the order in which they are begun."""
    chunks, ten = ["--chunk_size=20"], ["--participants=10"]
    niw = ["--algorithm=fedhb_niw"]
    return [
        rounds("mobilenet_fedavg_bfloat16", 45, MOBILENET),
        beside_torch("mobilenet_torch_bfloat16", 45, [*MOBILENET, *SHORT]),
        *map(table_1, ("fedavg", "niw", "fedbabu", "mixture_k2")),
        rounds("mobilenet_niw_bfloat16", 45, [*MOBILENET, *niw]),
        rounds("mobilenet_fedavg_float32", 45, [*MOBILENET, *FLOAT32]),
        rounds("mobilenet_fedavg_float32_ten", 40, [*MOBILENET, *FLOAT32, *ten]),
        # All clients at once may not fit: a 3x3 convolution's patches are nine images.
        rounds("resnet18_fedavg_bfloat16_chunk20", 45, [*RESNET18, *chunks]),
        rounds("pfl_protocol", 20, PFL),
        beside_torch("pfl_protocol_torch", 30, [*PFL, "--torch_vmap"]),
        beside_pfl("pfl_protocol_pfl", 30, PFL),
        rounds("mobilenet_fedavg_bfloat16_chunk20", 45, [*MOBILENET, *chunks]),
        rounds("pfedbayes_weight", 20, [*PFEDBAYES, "--sampling=weight"]),
        rounds("pfedbayes_local", 20, [*PFEDBAYES, "--sampling=local"]),
        svgd(),
        rounds("resnet18_fedavg_bfloat16", 45, RESNET18),
        rounds("resnet18_fedavg_float32_chunk20", 45, [*RESNET18, *FLOAT32, *chunks]),
        beside_torch("mobilenet_torch_float32", 45, [*MOBILENET, *FLOAT32, *SHORT]),
        rounds("mobilenet_fedavg_float32_chunk20", 45, [*MOBILENET, *FLOAT32, *chunks]),
        rounds("mobilenet_niw_float32", 45, [*MOBILENET, *niw, *FLOAT32]),
        rounds("resnet18_niw_bfloat16_chunk20", 45, [*RESNET18, *niw, *chunks]),
    ]


# Random images; all clients at once, without an evaluation. No program is compiled
# twice: beside a peer, or when a measurement was stopped, the first call is short.
ROUNDS = [
    *("--synthetic", "--image_shape=32,32,3", "--chunk_size=0", "--noscores"),
    *("--rounds=5", "--warmup=2", f"--compilation_cache={OUT}/compiled"),
]
SHORT = ["--rounds=2", "--warmup=1", "--nopeak"]
FLOAT32 = ["--dtype=float32"]
HUNDRED = [
    *("--clients=100", "--participants=100", "--client_examples=500"),
    "--dtype=bfloat16",
]
MOBILENET = ["--model=mobilenet", *HUNDRED]
RESNET18 = ["--model=resnet18", *HUNDRED]
# The settings of pfl-research's CIFAR-10 benchmark: 1,000 users of 50 images, SGD.
PFL = [
    *("--model=pfl_cnn", "--clients=1000", "--participants=50", "--client_examples=50"),
    *("--batch_size=10", "--momentum=0", "--rounds=20", "--warmup=3"),
]
PFEDBAYES = [
    f"--flagfile={HERE / 'flagfiles' / 'pfedbayes_sgd.flags'}",
    *("--image_shape=28,28,1", "--devices=1"),
]
TINY_ROUNDS = [
    *("--clients=2", "--participants=2", "--client_examples=20", "--batch_size=10"),
    # On 20 examples SGD would not follow pFedBayes' zeta of 10.
    *("--rounds=1", "--warmup=1", "--zeta=0.1"),
]
TINY_TABLE_1 = [
    *("--model=mlp", "--hidden=32", "--fraction=0.02", "--rounds=2", "--eval_every=1"),
    "--finetune_epochs=1",
]


def rounds(
    name: str,
    seconds: float,
    work: list[str],
    peers: Sequence[str] = (),
    lacks: str = "",
) -> Measurement:
    """Rounds by `round_time.py`, in turn with other systems."""
    command = [sys.executable, str(HERE / "round_time.py"), *ROUNDS, *work, *peers]
    command += TINY_ROUNDS if FLAGS.rehearse else []
    command += [f"--out={OUT}/{UNFINISHED}/{name}"]
    result = f"{name}.json"
    return Measurement(name, tuple(command), seconds, result, round_line, lacks)


def beside_torch(name: str, seconds: float, work: list[str]) -> Measurement:
    """The same beside PyTorch."""
    return _beside("torch_python", name, seconds, work)


def beside_pfl(name: str, seconds: float, work: list[str]) -> Measurement:
    """The same beside pfl."""
    return _beside("pfl_python", name, seconds, work)


def _beside(flag: str, name: str, seconds: float, work: list[str]) -> Measurement:
    peers = [f"--{flag}={FLAGS[flag].value}", f"--torch_device={FLAGS.torch_device}"]
    lacks = "" if FLAGS[flag].value else f"--{flag}=PYTHON"
    return rounds(name, seconds, work, [*peers, "--torch_threads=1"], lacks)


def table_1(method: str) -> Measurement:
    """A cell of FedHB's Table 1: its flag file, trained to the end."""
    name = f"{method}_{CELL}"
    command = [sys.executable, str(ROOT / "examples" / "fedhb_cifar.py")]
    command += [f"--flagfile={flag_file(name)}", f"--run_dir={OUT}/{name}", "--resume"]
    command += [
        f"--{key}={FLAGS[key].value}"
        for key in ("data_file", "data_dir")
        if FLAGS[key].value
    ]
    command += TINY_TABLE_1 if FLAGS.rehearse else []
    return Measurement(
        name,
        tuple(command),
        seconds=240,
        result=f"{name}/summary.json",
        line=functools.partial(run_line, name),
        lacks="" if FLAGS.data_file or FLAGS.data_dir else "--data_file=CIFAR100.npz",
        together=True,
    )


def svgd() -> Measurement:
    """Steps of SVGD by `svgd_step.py`."""
    sizes = ["200x7850", "1000x7850", "200x79510", "1000x79510"]
    if FLAGS.rehearse:
        sizes = ["20x55"]
    command = [sys.executable, str(HERE / "svgd_step.py"), "--memory_gib=100"]
    command += [f"--size={size}" for size in sizes]
    command += ["--seconds=5", f"--out={OUT}/{UNFINISHED}/svgd"]
    return Measurement("svgd", tuple(command), 40, "svgd.json", svgd_line)


# A result in one line.


def round_line(report: dict[str, Any]) -> str:
    """Of `round_time.py`: fedvi's seconds and floor, and by how much it is faster."""
    ours, *peers = report["systems"]
    own = report["systems"][ours]
    parts = [
        f"{own['seconds_median']:.4f} s a round",
        f"{own['microseconds_an_example']:.2f} µs an example",
        f"first call {own['first_call_seconds']:.1f} s",
    ]
    if own["xla_temporary_bytes"]:
        parts.append(f"temporaries {own['xla_temporary_bytes'] / 2**30:.2f} GiB")
    if own.get("roofline"):
        parts.append(f"{own['roofline']['over_floor']:.1f} times the floor")
    for peer in peers:
        seconds = report["systems"][peer]["seconds_median"]
        faster = 1 / report["ratios"][peer]["seconds"]["ratio_median"]
        parts.append(f"{peer} {seconds:.4f} s, {faster:.2f} times fedvi's")
    return "; ".join([", ".join(parts), own["versions"]["device"]])


def run_line(name: str, summary: dict[str, Any]) -> str:
    """Of a cell's run: its figures, the paper's, and what they took."""
    paper = re.search(r"(?m)^# paper: (.*)$", flag_file(name).read_text())[1]
    parts = [
        "a seed FAILED" if summary["failed"] else "",
        f"{figures(summary)} ({paper})",
        f"compiled in {summary['compile_seconds']:.0f} s, "
        f"{summary['round_seconds']:.3f} s a round",
        summary["device"],
    ]
    return "; ".join(filter(None, parts))


def figures(summary: dict[str, Any]) -> str:
    """As flag files' headers have them."""

    def both(key, digits, factor=1):
        return " / ".join(
            over_seeds(
                [factor * seed[model][key] for seed in summary["per_seed"]], digits
            )
            for model in ("global", "personal")
        )

    accuracy = both("accuracy", 2).replace(" / ", " %, personalised ")
    seeds = len(summary["per_seed"])
    return (
        f"global {accuracy} %, ECE {both('ece', 1, 100)} %, NLL {both('nll', 3)}; last "
        f"round, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def over_seeds(values: list[float], digits: int) -> str:
    """Mean, of several ± sample standard deviation."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def svgd_line(report: dict[str, Any]) -> str:
    """Of `svgd_step.py`: milliseconds of every size."""
    parts = []
    for size in report["sizes"]:
        median = size["systems"]["fedvi"].get("median")
        took = "does not fit" if median is None else f"{median:.2f} ms"
        parts.append(f"{size['particles']} x {size['dimension']} {took}")
    return ", ".join(parts)


# Figures into flag files.


def flag_file(name: str) -> Path:
    """A cell's flag file."""
    return TABLE_1 / f"{name}.flags"


def cut(out: Path) -> None:
    """Writes what the runs in a folder came to into their flag files' headers.

    Raises:
      ValueError: no run is finished, or one is not what its flag file says.
    """
    runs = [m.name for m in measurements() if m.together and (out / m.result).exists()]
    if not runs:
        raise ValueError(f"{out} holds no finished run of Table 1: measure first")
    for name in runs:
        summary = json.loads((out / name / "summary.json").read_text())
        path, asked = flag_file(name), summary["config"]["rounds"]
        text = path.read_text()
        if f"--rounds={asked}\n" not in text or summary["failed"]:
            raise ValueError(f"{out / name} is no whole run of {path.name}")
        told = [figures(summary), summary["device"], FLAGS.data_note]
        told = "; ".join(filter(None, told))
        path.write_text(re.sub(r"(?m)^# ours: .*$", f"# ours: {told}", text))
        print(f"{path.name}: {told}")


# How it is measured.


class Session:
    """Takes measurements until the time is over.

    Args:
      out: folder of results and logs.
      seconds: for all.
    """

    def __init__(self, out: Path, seconds: float):
        self._out, self._begin, self._seconds = out, time.monotonic(), seconds
        self._lines: dict[str, str] = {}
        self._running: dict[str, subprocess.Popen] = {}
        self.failed = self.measured = 0
        (out / UNFINISHED).mkdir(parents=True, exist_ok=True)

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._begin)

    def take(self, asked: list[Measurement], together: int) -> None:
        """All of them, in order; what may run together so many at a time."""
        queue = list(asked)
        while queue:
            one = queue[0]
            group = (
                [m for m in queue if m.together][:together] if one.together else [one]
            )
            queue = [m for m in queue if m not in group]
            self._take(group)

    def _take(self, group: list[Measurement]) -> None:
        begun = []
        for one in group:
            if (self._out / one.result).exists():
                self._tell(one, f"{self._found(one)} (earlier)")
            elif one.lacks:
                self._tell(one, f"skipped: needs {one.lacks}")
            elif one.seconds > self._left():
                self._tell(one, f"not begun: {self._left():.0f} s are left")
            else:
                begun.append(one)
        try:
            starts = {one: self._start(one, len(begun)) for one in begun}
            while starts:
                starts = {m: at for m, at in starts.items() if not self._ended(m, at)}
                time.sleep(POLL_SECONDS)
        finally:
            for process in self._running.values():
                os.killpg(process.pid, signal.SIGKILL)

    def _start(self, one: Measurement, at_once: int) -> float:
        command = [word.replace(OUT, str(self._out)) for word in one.command]
        environment = dict(os.environ)
        if at_once > 1:
            # JAX would take three quarters of the card for each.
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        with open(self._log(one), "w") as log:
            print(shlex.join(command), file=log, flush=True)
            self._running[one.name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,  # with all that it starts, to end it
            )
        return time.monotonic()

    def _ended(self, one: Measurement, start: float) -> bool:
        process, took = self._running[one.name], time.monotonic() - start
        if process.poll() is None:
            if self._left() < 0:
                said = "ended: the time is over"
            elif took > self._limit(one):
                said = f"failed: not done in {took:.0f} s, as --patience="
                said += f"{FLAGS.patience} allows; {self._log(one)}"
                self.failed += 1
            else:
                return False
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            del self._running[one.name]
        else:
            del self._running[one.name]
            said = self._finish(one, process.returncode)
        self._tell(one, f"{said} [{took:.0f} s]")
        return True

    def _limit(self, one: Measurement) -> float:
        # The seconds are an H200's; a rehearsal's CPU may be busy.
        return FLAGS.patience * one.seconds * (10 if FLAGS.rehearse else 1)

    def _finish(self, one: Measurement, code: int) -> str:
        for path in (self._out / UNFINISHED).glob(f"{one.name}.*"):
            if code == 0:
                path.replace(self._out / path.name)
        if code == 0 and (self._out / one.result).exists():
            return self._found(one)
        self.failed += 1
        said = self._log(one).read_text(errors="replace").strip().splitlines()[-1]
        return f"failed, exit code {code}: {said}; {self._log(one)}"

    def _log(self, one: Measurement) -> Path:
        return self._out / f"{one.name}.log"

    def _found(self, one: Measurement) -> str:
        try:
            line = one.line(json.loads((self._out / one.result).read_text()))
            self.measured += 1
            return line
        except (LookupError, TypeError, ValueError) as error:
            self.failed += 1
            return f"failed: {self._out / one.result} is no such result ({error!r})"

    def _tell(self, one: Measurement, said: str) -> None:
        print(f"{one.name}: {said}", flush=True)
        self._lines[one.name] = said
        rows = [[name, line.replace("|", "/")] for name, line in self._lines.items()]
        text = page("Measurements on an accelerator", table("name | result", rows))
        (self._out / "results.md").write_text(text)


def only(asked: list[Measurement]) -> list[Measurement]:
    """Those that --only names.

    Raises:
      ValueError: it names one that does not exist.
    """
    names = [one.name for one in asked]
    for name in FLAGS.only:
        if name not in names:
            raise ValueError(f"--only={name} must be one of {', '.join(names)}")
    return [one for one in asked if not FLAGS.only or one.name in FLAGS.only]


def main(argv):
    if len(argv) != 2:
        raise app.UsageError("give one folder for the results, and flags")
    # Whatever ends the script ends what it started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    out = Path(argv[1]).resolve()
    try:
        if FLAGS.data_file and not Path(FLAGS.data_file).exists():
            raise ValueError(f"--data_file={FLAGS.data_file} is no file")
        if FLAGS.cut:
            return cut(out)
        asked = only(measurements())
        session = Session(out / "rehearsal" if FLAGS.rehearse else out, FLAGS.seconds)
        session.take(asked, FLAGS.together)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: results cannot be written to {out}: {error}")
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    print(f"{session.measured} of {len(asked)} measured")
    return 1 if session.failed else 0


if __name__ == "__main__":
    app.run(main)
