"""What the benchmarks measured, as JSON and Markdown; `round_time.py`'s own report."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from absl import app

__all__ = [
    "cell",
    "describe",
    "describe_machine",
    "markdown",
    "mebibytes",
    "page",
    "run",
    "spread",
    "summarise",
    "table",
    "write",
]

MIB = 2**20

# Headings and keys of what shows that the systems do the same work.
SCORES = {"test accuracy": "test_accuracy", "test NLL": "test_nll"}
TRAINING = {"train loss, last tenth": "train_loss_last_tenth"}
# Of methods with personal models, whose systems report losses of different terms.
PERSONAL = {
    "personal test accuracy": "personal_accuracy",
    "personal test NLL": "personal_nll",
}


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, system and XLA's flags."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def run(argv: list[str], measure: Callable, computes: bool = True) -> tuple:
    """What a script's `main` does: `measure()`, its mistakes as one line.

    Args:
      argv: of `main`; a further word is a mistake.
      measure: `() -> results`.
      computes: this process runs JAX itself.

    Returns:
      (the machine, with its load before and after; the results).
    """
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag")
    machine = {**describe_machine(), "load_before": os.getloadavg()[0]}
    try:
        results = measure()
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    machine["load_after"] = os.getloadavg()[0]
    if computes:
        import jax  # not where peers' processes do everything

        machine |= {"jax": jax.__version__, "backend": jax.default_backend()}
    return machine, results


def describe(report: dict) -> str:
    """A sentence about the machine of a report."""
    machine = report["machine"]
    jax = f"; jax {machine['jax']}, {machine['backend']}" if "jax" in machine else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; load "
        f"{machine['load_before']:.2f} before, {machine['load_after']:.2f} after{jax}."
    )


def page(title: str, *parts: str | list[str]) -> str:
    """A Markdown page; every part is a paragraph or a table, "" is left out."""
    blocks = [part if isinstance(part, str) else "\n".join(part) for part in parts]
    return "\n\n".join([f"# {title}", *filter(None, blocks)]) + "\n"


def table(headings: str, rows: Iterable[list[Any]]) -> list[str]:
    """The lines of a table, whose headings stand between bars."""
    columns = headings.count("|") + 1
    lines = [f"| {headings} |", "|" + "---|" * columns]
    return lines + [f"| {' | '.join(map(str, cells))} |" for cells in rows]


def cell(values: dict[str, float] | None, unit: float = 1, digits: int = 3) -> str:
    """Median (least to most) of a `spread`, in a unit of which so many make one."""
    if values is None:
        return "-"
    median, low, high = (
        f"{unit * values[key]:.{digits}f}" for key in ("median", "min", "max")
    )
    return f"{median} ({low} to {high})"


def mebibytes(count: int | None) -> str:
    """A number of bytes in MiB."""
    return "-" if count is None else f"{count / MIB:.1f}"


def summarise(
    machine: dict, versions: dict, work: dict, turns: dict, endings: dict
) -> dict[str, Any]:
    """Medians over the turns after warm-up, and ratios turn by turn.

    Args:
      machine: from `describe_machine`, with `load_before` and `load_after`.
      versions: by system.
      work: what was timed; its `warmup` turns are left out, the first one of them
        is the first call.
      turns: by system the list of `seconds, cpu_seconds, loss`, warm-up included.
      endings: by system what its `finish` returned.
    """
    systems, warmup = {}, work["warmup"]
    for name, results in turns.items():
        timed = results[warmup:]
        tenth = results[-max(1, len(results) // 10) :]
        systems[name] = {
            "first_call_seconds": results[0]["seconds"],
            **_spread("seconds", [r["seconds"] for r in timed]),
            **_spread("cpu_seconds", [r["cpu_seconds"] for r in timed]),
            **_per_example([r["seconds"] for r in timed], work),
            "train_loss_first_round": results[0]["loss"],
            "train_loss_last_tenth": statistics.fmean(r["loss"] for r in tenth),
            **endings[name],
            "versions": versions[name],
            "turns": {
                key: [round(result[key], 5) for result in results]
                for key in ("seconds", "cpu_seconds", "loss")
            },
        }
    ours, *peers = systems
    floor = systems[ours].get("roofline")
    if floor:
        higher = max(floor["flops_seconds"], floor["bytes_seconds"])
        floor["over_floor"] = systems[ours]["seconds_median"] / higher
    ratios = {
        peer: {
            key: _spread("ratio", _ratios(turns[ours], turns[peer], key, warmup))
            for key in ("seconds", "cpu_seconds")
        }
        for peer in peers
    }
    best = min(peers, key=lambda p: systems[p]["seconds_median"], default=None)
    return {
        "machine": machine,
        "work": work,
        "best_peer": best,
        "ratios": ratios,
        "systems": systems,
    }


def _per_example(seconds: list[float], work: dict) -> dict[str, float]:
    """Microseconds a training example and pass over it, where a round's are known."""
    if "round_examples" not in work:
        return {}
    each = 1e6 * statistics.median(seconds) / work["round_examples"]
    return {"microseconds_an_example": each}


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_{part}": value for part, value in spread(values).items()}


def _ratios(ours: list, peer: list, key: str, warmup: int) -> list[float]:
    pairs = zip(ours[warmup:], peer[warmup:])
    return [a[key] / b[key] for a, b in pairs]


def markdown(report: dict) -> str:
    """`round_time.py`'s report as a Markdown page."""
    work, systems = report["work"], report["systems"]
    ours = next(iter(systems))
    scores = SCORES | (PERSONAL if "personal_nll" in systems[ours] else TRAINING)

    def cells(name, system):
        ratio = report["ratios"].get(name, {})
        return [
            name,
            _cell(system, "seconds"),
            _cell(system, "cpu_seconds"),
            f"{system['microseconds_an_example']:.2f}",
            f"{system['first_call_seconds']:.2f}",
            _cell(ratio.get("seconds"), "ratio"),
            _cell(ratio.get("cpu_seconds"), "ratio"),
            *(
                f"{system[key]:.3f}" if key in system else "-"
                for key in scores.values()
            ),
        ]

    memory = (
        mebibytes(systems[ours][key])
        for key in ("peak_bytes", "above_before_data_bytes", "xla_temporary_bytes")
    )
    return page(
        f"One round of {work['algorithm']}, {work['model']}, {work['dataset']}",
        f"{work['clients']} clients × {'/'.join(map(str, work['client_size']))} of "
        f"{'×'.join(map(str, work['input_shape']))} ({work['shards']} class shards), "
        f"{work['participants']} a round, batch {work['batch_size']}, {work['epochs']} "
        f"local epoch(s), {_optimizer(work)}, chunk size {work['chunk_size']}"
        f"{_options(work)}; {work['fidelity']}.",
        f"{describe(report)} Medians (min to max) of {work['rounds']} turns after "
        f"{work['warmup']}; ratio {ours} / system, turn by turn.",
        table(
            "system | s a round | CPU-s a round | µs an example | first call s | ratio "
            f"of s | ratio of CPU-s | {' | '.join(scores)}",
            (cells(name, system) for name, system in systems.items()),
        ),
        "Memory of the {} process: peak {} MiB, of which {} MiB since before the data "
        "were loaded (data, compilation, rounds); XLA's temporaries of a round {} MiB."
        "".format(ours, *memory),
        _roofline(ours, systems[ours].get("roofline")),
        [
            f"- {name}: "
            + ", ".join(f"{key} {value}" for key, value in system["versions"].items())
            for name, system in systems.items()
        ],
    )


def _roofline(ours: str, floor: dict | None) -> str:
    if not floor:
        return ""
    return (
        f"Roofline: a round is at least {floor['flops'] / 1e9:.2f} GFLOP "
        f"({floor['xla_flops'] / 1e9:.2f} by XLA's cost analysis, elementwise work "
        f"included) and {floor['bytes'] / 1e6:.0f} MB "
        f"({floor['activation_bytes'] / 1e6:.0f} of activations, "
        f"{floor['parameter_bytes'] / 1e6:.0f} of parameters). {floor['description']} "
        f"Floors {floor['flops_seconds']:.4f} s and {floor['bytes_seconds']:.4f} s; "
        f"{ours}, measured / floor: {floor['over_floor']:.1f}."
    )


def _optimizer(work: dict) -> str:
    if work["optimizer"] == "adam":
        return f"Adam {work['learning_rate']:g}"
    return f"SGD {work['learning_rate']:g} momentum {work['momentum']:g}"


def _options(work: dict) -> str:
    devices = work["devices"]
    parts = [f"{devices} devices"] if devices > 1 else []
    parts += [f"{key} {value}" for key, value in work["options"].items()]
    return "".join(f", {part}" for part in parts)


def _cell(values: dict | None, name: str) -> str:
    if values is None:
        return "1"
    return cell({part: values[f"{name}_{part}"] for part in ("median", "min", "max")})


def write(report: dict, page: str, out: str | None) -> None:
    """Prints JSON and page, the page last; writes both to OUT.json and OUT.md."""
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    print(page)
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").write_text(text)
        Path(f"{out}.md").write_text(page)
