"""Bytes of one training step on one TPU chip, compiled where there is none: not run.

    pip install -e '.[tpu-compile]'
    python benchmarks/bytes_of_step.py --out=benchmarks/results/bytes_of_step

Clients train side by side, a minibatch each, SGD with momentum; nothing loops, so that
XLA's cost analysis counts all of it. Each network is compiled with the layers as they
are elsewhere and as they are on TPUs (`fedvi/nn/tpu_layers.py`). Bytes are of padded
arrays, copies into fast memory included, and stand beside those of the hand count
(`counting.py`), as do the FLOPs, which count what is elementwise too.
"""

import time
from typing import Any

import jax
from absl import app, flags
from floors import gradient_step
from hlo import custom_calls
from jax.sharding import SingleDeviceSharding
from report import MIB, describe, page, run, table, write
from tpu_programs import (
    backend,
    build_model,
    check_compiler,
    check_topology,
    hand_count,
    image_shape,
    mesh_of,
)

from fedvi import nn
from fedvi.flat import trees
from fedvi.local import Batch, LocalTraining

flags.DEFINE_multi_enum(
    "model", ["mobilenet", "resnet18"], sorted(nn.MODELS), "As for fedvi.nn.build."
)
flags.DEFINE_multi_enum(
    "layers", ["gpu", "tpu"], ["cpu", "gpu", "tpu"], "As they are on what."
)
flags.DEFINE_string("topology", "v5e:2x2", "Of whose chips one is taken.")
flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Of the activations.")
flags.DEFINE_integer("clients", 25, "Trained at once.", lower_bound=1)
flags.DEFINE_integer("batch_size", 50, "Images of a step.", lower_bound=1)
flags.DEFINE_integer("classes", 10, "Of the images.", lower_bound=2)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

HEADINGS = (
    "network | layers of | MB an image | by hand | MFLOP an image | by hand | "
    "temporaries, MiB | arguments, MiB | custom calls | compile CPU-s"
)


def compile_step(name: str, layers: str) -> dict[str, Any]:
    """What XLA says of one step of a network, its layers as on a CPU, GPU or TPU."""
    settings = {
        "model": name,
        "classes": FLAGS.classes,
        "dtype": FLAGS.dtype,
        "image_shape": None,
        "hidden": 256,
        "program": "rounds",
        "batch_size": FLAGS.batch_size,
        "examples": FLAGS.batch_size,
        "test_examples": FLAGS.batch_size,
    }
    number, work = hand_count(settings)
    place = SingleDeviceSharding(mesh_of(FLAGS.topology).devices.flat[0])
    training = LocalTraining(batch_size=number)

    def shapes(make):
        """Of what each client has, on the chip."""
        return jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(
                (FLAGS.clients, *one.shape), one.dtype, sharding=place
            ),
            jax.eval_shape(make),
        )

    start = time.process_time()
    jax.clear_caches()
    with backend(layers):
        model = build_model(settings)
        params = shapes(lambda: trees(model.init(jax.random.key(0))))
        moments = shapes(lambda: training.optimizer_at(0).init(params_of(params)))
        batch = shapes(lambda: empty_batch(number, image_shape(settings)))
        step = jax.jit(jax.vmap(gradient_step(model, training)), donate_argnums=(0, 1))
        program = step.lower(params, moments, batch).compile()
    cost, memory = program.cost_analysis(), program.memory_analysis()
    images = FLAGS.clients * number
    return {
        "model": name,
        "layers": layers,
        "bytes_per_image": cost["bytes accessed"] / images,
        "hand_bytes_per_image": work.bytes / number,
        "flops_per_image": cost["flops"] / images,
        "hand_flops_per_image": work.flops / number,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "custom_calls": custom_calls(program.as_text()),
        "compile_cpu_seconds": time.process_time() - start,
    }


def params_of(many: Any) -> Any:
    """One client's parameters, zeros, of the shapes of all clients'."""
    return jax.tree.map(lambda s: jax.numpy.zeros(s.shape[1:], s.dtype), many)


def empty_batch(number: int, shape: tuple[int, ...]) -> Batch:
    """A minibatch of a byte a pixel."""
    return Batch(
        jax.numpy.zeros((number, *shape), jax.numpy.uint8),
        jax.numpy.zeros(number, jax.numpy.int32),
        jax.numpy.ones(number, bool),
    )


def measure() -> dict[str, Any]:
    """All rows, each printed as it comes."""
    check_topology(FLAGS.topology)
    check_compiler()
    rows = []
    for name in FLAGS.model:
        for layers in FLAGS.layers:
            rows.append(compile_step(name, layers))
            print(rows[-1], flush=True)
    work = {
        key: FLAGS[key].value for key in ("topology", "dtype", "clients", "batch_size")
    }
    return {"work": work, "rows": rows}


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    calls = ", ".join(f"{name} {n}" for name, n in row["custom_calls"].items())
    flops, by_hand = row["flops_per_image"], row["hand_flops_per_image"]
    return [
        row["model"],
        row["layers"],
        f"{row['bytes_per_image'] / 1e6:.1f}",
        f"{row['hand_bytes_per_image'] / 1e6:.1f}",
        f"{flops / 1e6:.0f} ({flops / by_hand - 1:+.1%})",
        f"{by_hand / 1e6:.0f}",
        f"{row['temporary_bytes'] / MIB:.0f}",
        f"{row['argument_bytes'] / MIB:.0f}",
        calls or "none",
        f"{row['compile_cpu_seconds']:.0f}",
    ]


def markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown page."""
    work = report["work"]
    return page(
        "Bytes of a training step, compiled for one TPU chip",
        "**Compiled, not run**: nothing here is a time of a TPU.",
        describe(report),
        f"{work['clients']} clients at once, {work['batch_size']} images each, "
        f"{work['dtype']} activations, SGD with momentum; one of {work['topology']}. "
        "Bytes are of padded arrays; by hand: the least, unpadded. XLA's FLOPs count "
        "elementwise work too. The custom calls compute nothing that the hand count "
        "has: they make buffers, join slices and read indices.",
        table(HEADINGS, map(cells, report["rows"])),
    )


def main(argv):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    machine, found = run(argv, measure)
    report = {"machine": machine, **found}
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
