"""Trains every method that one protocol suits and ranks them: one table, one figure.

    python benchmarks/leaderboard.py --dataset=fashion_mnist --seeds=3
    python benchmarks/leaderboard.py --dataset=fashion_mnist --tune

The protocols are those of the papers' tables on images of digits and clothes
(leaderboard_protocols.py), but for this: last round, test data. --tune chooses every
method's settings on a held-out fifth of the training data, one seed, by the NLL of the
personal models: a grid of six cells for each, three learning rates times two values of
a number of its own. What it chose is in benchmarks/settings (--settings); without
--tune it is only read. What is finished is not run again, what was stopped goes on.

--cut writes from the tables that there are: the README's between two marks, and a flag
file, figures in its header, for every method that a paper's table lists
(paper_figures.csv) and that has none of its own.
"""

import csv
import dataclasses
import json
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import leaderboard_pages as pages
import numpy as np
from absl import app, flags
from leaderboard_protocols import (
    ADAM,
    ADAM_RATES,
    AXES,
    BASELINE,
    BESIDE,
    FINE_TUNING,
    GRADIENTS,
    MEAN_FIELD,
    PROTOCOLS,
    RATES,
)
from report import describe, page, run

from fedvi import algorithms
from fedvi.experiment import ExperimentConfig, RunOptions, sweep_all
from fedvi.experiment.run import run_all

HERE = Path(__file__).resolve().parent
FLAGFILES = HERE.parent / "examples" / "flagfiles"
PAPERS = HERE / "paper_figures.csv"
SIGNATURE = "written by benchmarks/leaderboard.py --cut"
SHOWN = "fedhb_fashion_mnist"  # the table in the README


flags.DEFINE_enum("dataset", "fashion_mnist", ["fashion_mnist", "mnist"], "Data.")
flags.DEFINE_enum("protocol", "fedhb", list(PROTOCOLS), "Split, model and rounds.")
flags.DEFINE_string(
    "data_file", None, "An .npz of the data; not needed where fedvi finds them itself."
)
flags.DEFINE_integer("seeds", 3, "Runs of every method.", lower_bound=1)
flags.DEFINE_integer(
    "rounds",
    None,
    "Instead of the protocol's, to try the script; --tune then needs a --settings.",
    lower_bound=1,
)
flags.DEFINE_list("methods", [], "Only these; the others' rows stay as they were.")
flags.DEFINE_bool("listed", False, "Only those that the paper's table lists.")
flags.DEFINE_bool("tune", False, "Choose the settings on held-out training data first.")
flags.DEFINE_string("worker", None, "Set by the script itself.")
flags.DEFINE_bool("cut", False, "Only the README's table and the flag files.")
flags.DEFINE_string("settings", str(HERE / "settings"), "Folder of what --tune chose.")
flags.DEFINE_string("runs", "runs/leaderboard", "Folder of the run folders.")
flags.DEFINE_string(
    "out",
    str(HERE / "results" / "leaderboard"),
    "OUT_PROTOCOL_DATASET.csv, .md and .png are written.",
)
FLAGS = flags.FLAGS


def methods() -> list[str]:
    """Those that the protocol suits, FedAvg first."""
    unsuited = PROTOCOLS[FLAGS.protocol].unsuited
    known = [name for name in algorithms.ALGORITHMS if name not in unsuited]
    return sorted(known, key=lambda name: (name != BASELINE, name))


def asked() -> list[str]:
    """Those of them that the command line asks for."""
    for name in FLAGS.methods:
        why = PROTOCOLS[FLAGS.protocol].unsuited.get(name)
        if why:
            raise ValueError(
                f"--methods has {name}, which --protocol={FLAGS.protocol} does not "
                f"suit: {why}"
            )
        if name not in algorithms.ALGORITHMS:
            raise ValueError(
                f"--methods has {name!r}, which is none of {', '.join(methods())}"
            )
    if FLAGS.listed:
        return [name for name in methods() if name in {BASELINE, *papers()}]
    return [name for name in methods() if name in (FLAGS.methods or methods())]


def papers() -> dict[str, dict[str, str]]:
    """The paper's figures of this protocol and data, by method."""
    own = (FLAGS.protocol, FLAGS.dataset)
    rows = pages.read(PAPERS)
    rows = [row for row in rows if (row["protocol"], row["dataset"]) == own]
    return {row["method"]: row for row in rows}


def settings_given(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What differs from the library's defaults."""
    protocol = PROTOCOLS[FLAGS.protocol]
    rounds = FLAGS.rounds or protocol.settings["rounds"]
    mean_field = ADAM | protocol.mean_field if name in MEAN_FIELD else {}
    return {
        "dataset": FLAGS.dataset,
        "data_file": FLAGS.data_file,
        "augment": False,
        "finetune_learning_rate": 0.01,
        **protocol.settings,
        "rounds": rounds,
        "eval_every": rounds,
        **mean_field,
        **BESIDE.get(name, {}),
        **changes,
    }


def config_of(name: str, **changes: Any) -> ExperimentConfig:
    """The protocol for one method; a name that is no field is an option of it."""
    fields = {field.name for field in dataclasses.fields(ExperimentConfig)}
    settings = settings_given(name, changes)
    return ExperimentConfig(
        algorithm=name,
        options={k: v for k, v in settings.items() if k not in fields},
        **{k: v for k, v in settings.items() if k in fields},
    )


def options_of(*place: str) -> RunOptions:
    """Where a run lies; it goes on where it was stopped."""
    where = Path(FLAGS.runs, board(), *place)
    return RunOptions(str(where), resume=True, plot_formats=())


def grid_of(name: str) -> dict[str, tuple[Any, ...]]:
    """The six cells of one method."""
    return {
        "learning_rate": ADAM_RATES if name in MEAN_FIELD else RATES,
        **AXES.get(name, FINE_TUNING),
    }


def board() -> str:
    """What files and folders are called."""
    return f"{FLAGS.protocol}_{FLAGS.dataset}"


def settings_file() -> Path:
    """What --tune chose, by method; that of one epoch a visit holds for five too."""
    name = f"{FLAGS.protocol.removesuffix('_tau5')}_{FLAGS.dataset}"
    return Path(FLAGS.settings, f"{name}.json")


def tune(name: str) -> None:
    """Tries the cells of one method on held-out training data."""
    config = config_of(name, validation_fraction=0.2)
    sweep_all([(config, options_of("tuning", name))], grid_of(name), retrain=False)


def note_chosen(names: list[str]) -> None:
    """Keeps the cell with the least NLL of the personal models, for every method."""
    path = settings_file()
    chosen = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        found = Path(options_of("tuning", name).run_dir, "sweep.json")
        cells = json.loads(found.read_text())["cells"]
        finished = [cell for cell in cells if cell["figure"] is not None]
        if not finished:
            raise RuntimeError(f"{name}: every cell of the grid failed")
        chosen[name] = min(finished, key=lambda cell: cell["figure"])["settings"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chosen, indent=2, sort_keys=True) + "\n")


def train(name: str) -> None:
    """One method with what was chosen, all seeds."""
    chosen = json.loads(settings_file().read_text())[name]
    run_all([(config_of(name, seeds=FLAGS.seeds, **chosen), options_of(name))])


def in_processes(names: list[str]) -> None:
    """This script anew for every method, as many at a time as there are cores.

    A core each: two methods on two cores are done sooner than one on both and then the
    other, and what a round takes is what it takes on one core.
    """
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    for core in cores:
        free.put(core)

    def work(name: str) -> bool:
        core, start = free.get(), time.perf_counter()
        log = Path(options_of("logs").run_dir, f"{name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{name}: {log}", flush=True)
        with open(log, "w") as file:
            done = subprocess.run(
                [sys.executable, *sys.argv, f"--worker={name}"],
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
        free.put(core)
        seconds = time.perf_counter() - start
        print(f"{name}: {seconds:.0f} s, exit code {done.returncode}", flush=True)
        if done.returncode:
            print(f"{name}: {log.read_text().strip().splitlines()[-1]}", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(len(cores)) as pool:
        well = list(pool.map(work, names))
    if failed := [name for name, good in zip(names, well) if not good]:
        raise RuntimeError(
            f"{', '.join(failed)} did not end well: see {options_of('logs').run_dir}"
        )


def measure() -> list[dict[str, Any]]:
    """A row for every method, those included that are not run this time."""
    names = asked()
    chosen = json.loads(settings_file().read_text()) if settings_file().exists() else {}
    if missing := [name for name in names if name not in chosen]:
        raise ValueError(
            f"{settings_file().name} lacks {', '.join(missing)}: give --tune --methods="
            f"{','.join(missing)}"
        )
    baseline = Path(options_of(BASELINE).run_dir, "summary.json")
    if BASELINE not in names and not baseline.exists():
        raise ValueError(f"--methods leaves {BASELINE} out, and no run of it is there")
    in_processes(names)
    found = {}
    for name in methods():
        path = Path(options_of(name).run_dir, "summary.json")
        if path.exists():
            found[name] = json.loads(path.read_text())
    return [row(name, found, chosen[name]) for name in found]


def row(name: str, found: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What the table has of one method; accuracies and ECE in per cent."""
    one, base = found[name], found[BASELINE]
    cells: dict[str, Any] = {"method": name}
    for model in ("global", "personal"):
        for key, unit in (("accuracy", 1), ("nll", 1), ("ece", 100)):
            values = _by_seed(one, model, key, unit)
            cells[f"{model}_{key}"] = values.mean()
            spread = values.std(ddof=1) if len(values) > 1 else np.nan
            cells[f"{model}_{key}_std"] = spread
    for key in ("accuracy", "nll"):
        gap = _by_seed(one, "personal", key) - _by_seed(base, "personal", key)
        error = gap.std(ddof=1) / np.sqrt(len(gap)) if len(gap) > 1 else np.nan
        cells[f"{key}_minus_{BASELINE}"] = gap.mean()
        cells[f"{key}_minus_{BASELINE}_error"] = error
    if not one["global_model"]:
        cells = {k: "" if k.startswith("global_") else v for k, v in cells.items()}
    config = config_of(name, **settings)
    gradients = GRADIENTS.get(name, lambda config: 1)
    listed = papers().get(name, {})
    return cells | {
        "paper": listed.get("source", ""),
        "paper_global": listed.get("global", ""),
        "paper_personal": listed.get("personal", ""),
        "failed": one["failed"],
        "seeds": len(one["seeds"]),
        "bytes_up": one["bytes_up"],
        "bytes_down": one["bytes_down"],
        "round_seconds": one["round_seconds"],
        f"round_over_{BASELINE}": one["round_seconds"] / base["round_seconds"],
        "gradients": gradients(config),
        "compile_seconds": one["compile_seconds"],
        "settings": json.dumps(settings),
    }


def _by_seed(summary: dict[str, Any], model: str, key: str, unit: float = 1):
    return unit * np.array([one[model][key] for one in summary["per_seed"]], float)


def cut(rows: list[dict[str, str]]) -> None:
    """A flag file for every method that the paper's table lists and that has none by
    hand, and the README's table if it is this one."""
    if board() == SHOWN:
        pages.put_into_readme(rows)
    for cells in rows:
        if cells["paper"]:
            path = flag_file(cells["method"])
            if not path.exists() or SIGNATURE in path.read_text():
                path.write_text(flag_text(cells))


# By hand for the papers' own methods, under these names.
SHORT = {"fedhb_niw": "niw", "fedhb_mixture": "mixture_k2"}


def flag_file(name: str) -> Path:
    """Where a method's flag file lies."""
    folder, ending = {
        "fedhb": ("fedhb", "s5_f0.1_tau1"),
        "fedhb_tau5": ("fedhb", "s5_f0.1_tau5"),
        "pfedbayes": ("pfedbayes", "small"),
        "fedabml": ("fedabml", "n200_s2"),
    }[FLAGS.protocol]
    stem = f"{SHORT.get(name, name)}_{FLAGS.dataset}_{ending}"
    return FLAGFILES / folder / f"{stem}.flags"


def flag_text(cells: dict[str, str]) -> str:
    """A flag file that trains what one row of the table is of."""

    def both(key, digits):
        found = (
            f"{model} {float(cells[f'{model}_{key}']):.{digits}f} ± "
            f"{float(cells[f'{model}_{key}_std']):.{digits}f}"
            for model in ("global", "personal")
            if cells[f"{model}_{key}"]
        )
        return ", ".join(found)

    paper = (
        f"{model} {cells[f'paper_{model}']} %"
        for model in ("global", "personal")
        if cells[f"paper_{model}"]
    )
    name, seeds = cells["method"], int(cells["seeds"])
    chosen = json.loads(cells["settings"])
    config = config_of(name, **chosen)
    fields = dataclasses.asdict(config)
    shown = {k: fields[k] for k in fields if k in settings_given(name, chosen)}
    shown = {"algorithm": name, **config.options, **shown, "seeds": seeds}
    shown |= {"data_file": None, "eval_every": max(1, config.rounds // 10)}
    return "\n".join(
        [
            f"# {name} on {FLAGS.dataset}: {PROTOCOLS[FLAGS.protocol].text}",
            f"# paper: {cells['paper']}: {', '.join(paper)}",
            f"# ours: accuracy {both('accuracy', 2)} %; NLL {both('nll', 3)}; ECE "
            f"{both('ece', 1)} %; last round, {seeds} seeds",
            "# data: found by itself where it is known, else --data_file=FILE.npz",
            f"# chosen on held-out training data: {', '.join(chosen)}",
            f"# {SIGNATURE}",
            "",
            *(_flag(key, value) for key, value in shown.items() if value is not None),
            "",
        ]
    )


def _flag(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{key}" if value else f"--no{key}"
    if isinstance(value, (tuple, list)):
        value = ",".join(map(str, value))
    return f"--{key}={value}"


def tables() -> Path:
    """Without its ending."""
    return Path(f"{FLAGS.out}_{board()}")


def act() -> list[dict[str, Any]] | None:
    """What the flags ask for; rows of a table if methods were to be trained."""
    if FLAGS.tune and FLAGS.rounds and FLAGS.settings == FLAGS["settings"].default:
        raise ValueError(
            f"--rounds={FLAGS.rounds} would replace the settings that the protocol's "
            "rounds chose: give --settings=FOLDER, one of its own"
        )
    if FLAGS.worker:
        return tune(FLAGS.worker) if FLAGS.tune else train(FLAGS.worker)
    if FLAGS.tune:
        in_processes(asked())
        return note_chosen(asked())
    if FLAGS.cut:
        return cut(pages.read(tables().with_suffix(".csv")))
    return measure()


def main(argv: list[str]) -> None:
    try:
        machine, rows = run(argv, act)
    except KeyboardInterrupt:
        raise SystemExit("stopped: the same command goes on") from None
    if rows is not None:
        write(machine, rows)


def write(machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The table as CSV, the page, and the figure."""
    out = tables()
    with open(out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    rows = pages.read(out.with_suffix(".csv"))
    pages.draw(rows, out.with_suffix(".png"))
    if FLAGS.rounds:
        beside = [
            f"**Only {FLAGS.rounds} rounds: no table to set beside the paper's.**"
        ]
    else:
        beside = [
            "Beside the paper, whose figures have a protocol of their own where it is "
            "silent:",
            pages.beside_papers(rows),
        ]
    text = page(
        f"Leaderboard: {FLAGS.dataset}, protocol {FLAGS.protocol}",
        describe({"machine": machine}),
        f"{PROTOCOLS[FLAGS.protocol].text}; last round, test data. "
        "Mean ± standard deviation over seeds; differences are paired by seed, mean ± "
        "standard error, bold where Student's t tells them from 0 (95 %). A method is "
        "trained on one core; in brackets seconds, and gradients of a minibatch, "
        "for FedAvg's one.",
        pages.lines_of(rows),
        *beside,
        "Chosen of six cells each on held-out training data, and how long all programs "
        "take to compile:",
        pages.settings_of(rows),
        "Not in it:",
        [
            f"- `{name}`: {why}"
            for name, why in PROTOCOLS[FLAGS.protocol].unsuited.items()
        ],
    )
    out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    app.run(main)
