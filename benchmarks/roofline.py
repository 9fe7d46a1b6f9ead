"""Times a client's gradient step and says how far from the machine's limits it is.

    python benchmarks/roofline.py --out=benchmarks/results/roofline

The FLOPs of XLA's cost analysis stand beside those of the hand count (`counting.py`),
which also gives the least bytes. The matrix rate and the bandwidth of the machine are
measured in the same run (`floors.py`).
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from counting import layers_of, least_step
from floors import (
    describe_peaks,
    floors_of,
    gradient_step,
    measure_peaks,
    over_floor,
    xla_cost,
)
from report import cell, describe, page, run, spread, table, write

from fedvi import nn
from fedvi.local import Batch, LocalTraining

flags.DEFINE_multi_enum("model", ["mlp", "mobilenet"], sorted(nn.MODELS), "Networks.")
flags.DEFINE_integer("batch_size", 50, "Examples a step.", lower_bound=1)
flags.DEFINE_integer("calls", 10, "Steps that are timed.", lower_bound=1)
flags.DEFINE_boolean(
    "peak", True, "Measure the matrix rate and the bandwidth, and print the floors."
)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS


def measure(name: str) -> dict[str, Any]:
    """One gradient step of a network: its counts, and seconds of `--calls` calls."""
    shape = (28, 28, 1) if name == "mlp" else (32, 32, 3)
    model = nn.build(name, classes=10, input_shape=shape)
    training = LocalTraining()
    params = model.init(jax.random.key(0))
    moments = training.optimizer_at(0).init(params)
    n = FLAGS.batch_size
    batch = Batch(
        jax.random.normal(jax.random.key(1), (n, *shape)),
        jnp.arange(n) % 10,
        jnp.ones(n, bool),
    )
    step = jax.jit(gradient_step(model, training), donate_argnums=(0, 1))
    start = time.perf_counter()
    lowered = step.lower(params, moments, batch)
    by_xla = xla_cost(lowered)
    compiled = lowered.compile()
    found = {
        "model": name,
        "compile_seconds": time.perf_counter() - start,
        "xla_flops": by_xla["flops"],
        "xla_fused_bytes": xla_cost(compiled)["bytes"],
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }
    seconds = []
    for call in range(1 + FLAGS.calls):
        start = time.perf_counter()
        params, moments, value = compiled(params, moments, batch)
        jax.block_until_ready(value)
        if call:
            seconds.append(time.perf_counter() - start)
    layers = layers_of(model, shape)
    return {
        **found,
        "seconds": spread(seconds),
        "activation_values": sum(layer.outputs for layer in layers),
        "work": least_step(layers, n),
    }


def markdown(report: dict) -> str:
    """The report as a Markdown page."""
    n = report["batch_size"]

    def cells(row):
        work, floor = row["work"], row.get("floor")
        limits = ["-", "-", "-"]
        if floor:
            limits = [
                f"{1e3 * floor['flops_seconds']:.3f}",
                f"{1e3 * floor['bytes_seconds']:.3f}",
                f"{row['over_floor']:.1f}",
            ]
        return [
            row["model"],
            f"{work['flops'] / n / 1e6:.2f}",
            f"{row['xla_flops'] / n / 1e6:.2f}",
            f"{row['activation_values']:,}",
            f"{work['activation_bytes'] / 1e6:.1f} + "
            f"{work['parameter_bytes'] / 1e6:.1f}",
            f"{row['xla_fused_bytes'] / 1e6:.1f}",
            cell(row["seconds"], 1e3, 2),
            *limits,
            f"{row['compile_seconds']:.1f}",
        ]

    return page(
        "One gradient step of a client, and its floors",
        f"{describe(report)} Batch {n}, SGD with momentum, float32; medians (min to "
        f"max) of {report['calls']} calls.",
        describe_peaks(report["peaks"]),
        table(
            "network | MFLOP an image, by hand | by XLA | activation values an image | "
            "least MB a step (activations + parameters) | XLA's MB | ms a step | floor "
            "ms, FLOPs | floor ms, bytes | measured / floor | compile s",
            map(cells, report["steps"]),
        ),
    )


def measure_all() -> dict[str, Any]:
    """The peaks, and every network's step beside its floors."""
    peaks = measure_peaks(("float32", "bfloat16")) if FLAGS.peak else None
    steps = [measure(name) for name in FLAGS.model]
    for row in steps:
        if peaks:
            row["floor"] = floors_of(row["work"], peaks)
            row["over_floor"] = over_floor(row["seconds"]["median"], row["floor"])
        row["work"] = row["work"]._asdict()
    return {"peaks": peaks, "steps": steps}


def main(argv):
    # What compilation costs is to be seen.
    jax.config.update("jax_enable_compilation_cache", False)
    machine, found = run(argv, measure_all)
    work = {"batch_size": FLAGS.batch_size, "calls": FLAGS.calls}
    report = {"machine": machine, **work, **found}
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
