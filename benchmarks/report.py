"""What `round_time.py` measured, as JSON and as a Markdown table."""

import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "markdown", "spread", "summarise", "write"]

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
    """The report as a Markdown page."""
    machine, work, systems = report["machine"], report["work"], report["systems"]
    ours = next(iter(systems))
    scores = SCORES | (PERSONAL if "personal_nll" in systems[ours] else TRAINING)
    lines = [
        f"# One round of {work['algorithm']}, {work['model']}, {work['dataset']}",
        "",
        f"{work['clients']} clients × {'/'.join(map(str, work['client_size']))} of "
        f"{'×'.join(map(str, work['input_shape']))} ({work['shards']} class shards), "
        f"{work['participants']} a round, batch {work['batch_size']}, {work['epochs']} "
        f"local epoch(s), {_optimizer(work)}, chunk size {work['chunk_size']}"
        f"{_options(work)}; {work['fidelity']}.",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; load "
        f"{machine['load_before']:.2f} before, {machine['load_after']:.2f} after. "
        f"Medians (min to max) of {work['rounds']} turns after {work['warmup']}; ratio "
        f"{ours} / system, turn by turn.",
        "",
        "| system | s a round | CPU-s a round | first call s | ratio of s | ratio of "
        f"CPU-s | {' | '.join(scores)} |",
        "|---|---|---|---|---|---|" + "---|" * len(scores),
    ]
    for name, system in systems.items():
        ratio = report["ratios"].get(name, {})
        cells = [
            name,
            _cell(system, "seconds"),
            _cell(system, "cpu_seconds"),
            f"{system['first_call_seconds']:.2f}",
            _cell(ratio.get("seconds"), "ratio"),
            _cell(ratio.get("cpu_seconds"), "ratio"),
            *(f"{system[key]:.3f}" for key in scores.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    temporary = systems[ours]["xla_temporary_bytes"]
    lines += [
        "",
        f"Memory of the {ours} process: peak {systems[ours]['peak_bytes'] / MIB:.0f} "
        f"MiB, of which {systems[ours]['above_before_data_bytes'] / MIB:.0f} MiB since "
        "before the data were loaded (data, compilation, rounds); XLA's temporaries of "
        f"a round {'unknown' if temporary is None else f'{temporary / MIB:.1f} MiB'}.",
        "",
        *_roofline(ours, systems[ours].get("roofline")),
    ]
    for name, system in systems.items():
        versions = (f"{key} {value}" for key, value in system["versions"].items())
        lines.append(f"- {name}: {', '.join(versions)}")
    return "\n".join(lines) + "\n"


def _roofline(ours: str, floor: dict | None) -> list[str]:
    if not floor:
        return []
    return [
        f"Roofline: a round is at least {floor['flops'] / 1e9:.2f} GFLOP "
        f"({floor['xla_flops'] / 1e9:.2f} by XLA's cost analysis, elementwise work "
        f"included) and {floor['bytes'] / 1e6:.0f} MB "
        f"({floor['activation_bytes'] / 1e6:.0f} of activations, "
        f"{floor['parameter_bytes'] / 1e6:.0f} of parameters). {floor['description']} "
        f"Floors {floor['flops_seconds']:.4f} s and {floor['bytes_seconds']:.4f} s; "
        f"{ours}, measured / floor: {floor['over_floor']:.1f}.",
        "",
    ]


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
    median, low, high = (values[f"{name}_{part}"] for part in ("median", "min", "max"))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def write(report: dict, page: str, out: str | None) -> None:
    """Prints JSON and page, the page last; writes both to OUT.json and OUT.md."""
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    print(page)
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").write_text(text)
        Path(f"{out}.md").write_text(page)
