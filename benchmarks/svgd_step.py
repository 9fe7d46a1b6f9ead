"""Times one SVGD step, bandwidth included, beside blackjax's if it is installed.

    python benchmarks/svgd_step.py --out=benchmarks/results/svgd_step

Both step towards a standard normal, each with its own median heuristic, in turn. A
size that needs more memory than `--memory_gib` by XLA's own analysis is compiled but
not run. Before timing, both directions are compared at one bandwidth.
"""

import importlib.metadata
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from counting import Work
from floors import describe_peaks, floors_of, measure_peaks, over_floor
from report import describe_machine, write

from fedvi.stein import svgd_direction

flags.DEFINE_multi_string(
    "size",
    [
        *("50x55", "200x55", "1000x55"),
        *("50x7850", "200x7850", "1000x7850"),
        *("20x79510", "200x79510", "1000x79510"),
    ],
    "Particles x dimension.",
)
flags.DEFINE_integer("calls", 20, "Most steps that are timed.", lower_bound=1)
flags.DEFINE_float(
    "seconds", 20.0, "Time for a size, after which calls stop.", lower_bound=0.0
)
flags.DEFINE_float(
    "memory_gib", 16.0, "Most temporaries that a step may need.", lower_bound=0.0
)
flags.DEFINE_boolean(
    "peak", True, "Measure the matrix rate and the bandwidth, and print the floors."
)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

GIB = 2**30
RATE = 1e-3


def our_step(particles):
    """A step of fedvi."""
    return particles + RATE * svgd_direction(particles, -particles)


def blackjax_step() -> Callable | None:
    """A step of blackjax, its bandwidth updated; None where it is not installed."""
    try:
        from blackjax.vi import svgd
    except ImportError:
        return None
    algorithm = svgd.as_top_level_api(lambda theta: -theta, optax.sgd(RATE))

    def step(particles):
        state = svgd.update_median_heuristic(algorithm.init(particles))
        return algorithm.step(state).particles

    return step


def disagreement() -> float | None:
    """Largest difference of the two directions, relative to the largest entry."""
    try:
        from blackjax.vi import svgd
    except ImportError:
        return None
    algorithm = svgd.as_top_level_api(lambda theta: -theta, optax.sgd(1.0))
    x = jax.random.normal(jax.random.key(3), (30, 40))
    state = svgd.update_median_heuristic(algorithm.init(x))
    bandwidth = float(state.kernel_parameters["length_scale"])
    theirs = algorithm.step(state).particles - x
    ours = svgd_direction(x, -x, bandwidth=bandwidth)
    return float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max())


def measure(particles: int, dimension: int) -> dict[str, Any]:
    """Milliseconds and temporaries of each system, and what must be moved and done."""
    x = jax.random.normal(jax.random.key(0), (particles, dimension))
    steps = {"fedvi": our_step, "blackjax": blackjax_step()}
    found, calls = {}, {}
    for name, step in steps.items():
        if step is None:
            continue
        start = time.perf_counter()
        compiled = jax.jit(step).lower(x).compile()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        found[name] = {
            "compile_seconds": time.perf_counter() - start,
            "temporary_bytes": temporaries,
        }
        if temporaries <= FLAGS.memory_gib * GIB:
            calls[name] = compiled
    times = _in_turn(calls, x)
    for name, values in times.items():
        found[name] |= {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "calls": len(values),
        }
    ratio = None
    if len(times) == 2:
        ratio = statistics.median(
            b / a for a, b in zip(times["fedvi"], times["blackjax"])
        )
    return {
        "particles": particles,
        "dimension": dimension,
        # Two matrix products; particles and scores read, the result written.
        "flops": 4 * particles**2 * dimension,
        "least_bytes": 3 * 4 * particles * dimension,
        "systems": found,
        "ratio": ratio,
    }


def _in_turn(calls: dict[str, Callable], x: jax.Array) -> dict[str, list[float]]:
    """Milliseconds of each call, the first one left out."""
    times = {name: [] for name in calls}
    begin = time.perf_counter()
    for call in range(1 + FLAGS.calls):
        for name, step in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(step(x))
            if call:
                times[name].append(1e3 * (time.perf_counter() - start))
        if call and time.perf_counter() - begin > FLAGS.seconds:
            break
    return times


def compare(row: dict[str, Any], peaks: dict[str, Any]) -> None:
    """Adds the floors of a size, and how far above the higher one fedvi is."""
    floor = floors_of(Work(row["flops"], row["least_bytes"], 0), peaks)
    row["floor_seconds"] = {k: floor[f"{k}_seconds"] for k in ("flops", "bytes")}
    median = row["systems"]["fedvi"].get("median")
    if median is not None:
        row["over_floor"] = over_floor(median / 1e3, floor)


def markdown(report: dict) -> str:
    """The report as a Markdown page."""
    machine, versions = report["machine"], report["versions"]
    difference = report["disagreement"]
    agreement = (
        "blackjax is not installed"
        if difference is None
        else f"at one bandwidth the directions differ by {difference:.1e}, relatively"
    )
    lines = [
        "# One SVGD step",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; load "
        f"{machine['load_before']:.2f} before, {machine['load_after']:.2f} after; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        "",
        "A step towards a standard normal with the median heuristic: milliseconds, "
        "medians (min to max), in turn; ratio blackjax / fedvi, turn by turn; "
        f"{agreement}. GFLOP/s counts two matrix products; the floor is the longer of "
        "them and of reading particles and scores and writing the result once, without "
        "the bandwidth's median.",
        "",
        describe_peaks(report["peaks"]) if report["peaks"] else "No peaks measured.",
        "",
        "| N | d | fedvi ms | temporaries GiB | GFLOP/s | measured / floor | blackjax "
        "ms | temporaries GiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["sizes"]:
        ours = row["systems"]["fedvi"]
        rate = row["flops"] / ours["median"] / 1e6 if "median" in ours else math.nan
        theirs = row["systems"].get("blackjax", {})
        cells = [
            row["particles"],
            row["dimension"],
            _cell(ours),
            f"{ours['temporary_bytes'] / GIB:.2f}",
            f"{rate:.1f}",
            f"{row['over_floor']:.1f}" if "over_floor" in row else "-",
            _cell(theirs),
            f"{theirs['temporary_bytes'] / GIB:.2f}" if theirs else "-",
            "-" if row["ratio"] is None else f"{row['ratio']:.1f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _cell(system: dict) -> str:
    if not system:
        return "-"
    if "median" not in system:
        return "does not fit"
    low, high = system["min"], system["max"]
    return f"{system['median']:.2f} ({low:.2f} to {high:.2f})"


def read_sizes() -> list[tuple[int, int]]:
    """The sizes asked for."""
    sizes = []
    for text in FLAGS.size:
        parts = text.split("x")
        if len(parts) != 2 or not all(p.isdecimal() and int(p) for p in parts):
            raise app.UsageError(f"--size={text} must look like 200x7850")
        sizes.append((int(parts[0]), int(parts[1])))
    return sizes


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag")
    sizes = read_sizes()
    packages = {"jax": jax.__version__, "numpy": np.__version__}
    try:
        packages["blackjax"] = importlib.metadata.version("blackjax")
    except importlib.metadata.PackageNotFoundError:
        pass
    machine = {**describe_machine(), "load_before": os.getloadavg()[0]}
    peaks = measure_peaks() if FLAGS.peak else None
    rows = [measure(*size) for size in sizes]
    if peaks:
        for row in rows:
            compare(row, peaks)
    machine["load_after"] = os.getloadavg()[0]
    report = {
        "machine": machine,
        "versions": packages,
        "disagreement": disagreement(),
        "peaks": peaks,
        "sizes": rows,
    }
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
