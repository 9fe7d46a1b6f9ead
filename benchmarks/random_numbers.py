"""Times the random numbers of a mean-field step, and the step with and without them.

    python benchmarks/random_numbers.py --out=benchmarks/results/random_numbers

Three questions: what a standard normal for every weight costs by generator, layout and
number format; what a whole gradient step costs with a draw of the weights, with draws
of the activations (local reparameterisation) and with none; and whether a client's
numbers depend on the clients that share its `vmap`, which a round must not. All loops
take turns, so what slows the machine down slows all of them.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from report import cell, describe, page, run, spread, table, write

from fedvi import nn
from fedvi.distributions import mean_field
from fedvi.distributions.draws import standard_normal_like
from fedvi.flat import like_flats, trees
from fedvi.local import Batch

flags.DEFINE_integer(
    "hidden", 100, "Hidden units of the 784-hidden-10 network.", lower_bound=1
)
flags.DEFINE_multi_enum(
    "generator",
    ["threefry2x32", "rbg", "unsafe_rbg"],
    ["threefry2x32", "rbg", "unsafe_rbg"],
    "JAX's generators to compare.",
)
flags.DEFINE_integer("batch_size", 50, "Examples a step.", lower_bound=1)
flags.DEFINE_integer("steps", 20, "Draws or steps a call.", lower_bound=1)
flags.DEFINE_integer("calls", 30, "Calls that are timed.", lower_bound=1)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS

FORMATS = ("float32", "bfloat16")
RHO = -2.5
EXAMPLES = 500  # n of KL / n
LEARNING_RATE = 0.01
CLIENTS = 4


def flat_draw(key, tree, dtype):
    """One draw for all leaves."""
    return standard_normal_like(
        key, jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
    )


def draw_by_leaf(key, tree, dtype):
    """A draw for each leaf."""
    leaves, treedef = jax.tree.flatten(trees(tree))
    keys = jax.random.split(key, len(leaves))
    draws = [jax.random.normal(k, leaf.shape, dtype) for k, leaf in zip(keys, leaves)]
    return like_flats(treedef.unflatten(draws), tree)


def add_noise(draw: Callable, dtype: str) -> Callable:
    """A step `(key, tree) -> tree` that adds a draw."""

    def step(key, tree):
        noise = draw(key, tree, dtype)
        return jax.tree.map(lambda t, z: t + z.astype(t.dtype), tree, noise)

    return step


def outputs_of_weights(dtype, model, key, q, x):
    """Logits under one draw of the weights."""
    noise = flat_draw(key, q.mu, dtype)
    params = jax.tree.map(
        lambda m, s, z: m + s * z.astype(m.dtype), q.mu, mean_field.scale(q), noise
    )
    return model.apply(params, x)


def outputs_of_activations(model, key, q, x):
    """Logits under one draw of the activations."""
    return model.apply_local(key, q.mu, mean_field.scale(q), x)


def outputs_of_means(model, key, q, x):
    """Logits without noise."""
    return model.apply(q.mu, x)


def descend(model: nn.Model, outputs: Callable, batch: Batch) -> Callable:
    """An SGD step `(key, q) -> q` on NLL + KL(q ‖ w) / n, w fixed.

    Args:
      model: the network.
      outputs: `(model, key, q, x) -> logits`, one draw.
      batch: the minibatch of every step.
    """
    prior = mean_field.from_rho(model.init(jax.random.key(1)), RHO)

    def loss(q, key):
        nll = model.loss(outputs(model, key, q, batch.x), batch.y, batch.mask)
        return nll + mean_field.kl(q, prior) / EXAMPLES

    def step(key, q):
        gradient = jax.grad(loss)(q, key)
        return jax.tree.map(lambda v, g: v - LEARNING_RATE * g, q, gradient)

    return step


def candidates() -> dict[str, dict[str, tuple[Callable, Any]]]:
    """By table and row what is timed: `(step, start)`."""
    model = nn.build("mlp", classes=10, input_shape=(784,), hidden=(FLAGS.hidden,))
    params = model.init(jax.random.key(0))
    x_key, y_key = jax.random.split(jax.random.key(2))
    batch = Batch(
        jax.random.normal(x_key, (FLAGS.batch_size, 784)),
        jax.random.randint(y_key, (FLAGS.batch_size,), 0, 10),
        jnp.ones(FLAGS.batch_size, bool),
    )
    draws = {
        f"{layout}, {dtype}": (add_noise(draw, dtype), params)
        for layout, draw in (("flat", flat_draw), ("by leaf", draw_by_leaf))
        for dtype in FORMATS
    }
    outputs = {
        f"draw of the weights, {dtype}": partial(outputs_of_weights, dtype)
        for dtype in FORMATS
    }
    outputs["draws of the activations"] = outputs_of_activations
    outputs["no noise"] = outputs_of_means
    q = mean_field.from_rho(params, RHO)
    steps = {name: (descend(model, f, batch), q) for name, f in outputs.items()}
    return {"draw": draws, "step": steps}


def compile_loop(step: Callable, start: Any, generator: str) -> Callable:
    """`--steps` steps as one program: call it to run it and wait for it."""

    @jax.jit
    def loop(key, carry):
        def body(i, carry):
            return step(jax.random.fold_in(key, i), carry)

        return jax.lax.fori_loop(0, FLAGS.steps, body, carry)

    key = jax.random.key(0, impl=generator)
    compiled = loop.lower(key, start).compile()
    return lambda: jax.block_until_ready(compiled(key, start))


def measure() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Microseconds a step, by table, row and generator: median, least and most."""
    tables = candidates()
    loops = {
        (kind, row, generator): compile_loop(step, start, generator)
        for kind, rows in tables.items()
        for row, (step, start) in rows.items()
        for generator in FLAGS.generator
    }
    times = {place: [] for place in loops}
    for call in range(1 + FLAGS.calls):  # the first one warms up
        for place, loop in loops.items():
            begin = time.perf_counter()
            loop()
            if call:
                seconds = time.perf_counter() - begin
                times[place].append(1e6 * seconds / FLAGS.steps)
    found = {kind: {row: {} for row in rows} for kind, rows in tables.items()}
    for (kind, row, generator), values in times.items():
        found[kind][row][generator] = spread(values)
    return found


def depends_on_chunks(generator: str) -> bool:
    """Whether a client's numbers change with the clients that share its `vmap`."""
    keys = jax.random.split(jax.random.key(0, impl=generator), CLIENTS)
    draw = jax.vmap(lambda key: jax.random.normal(key, (8,)))
    alone = np.concatenate([draw(keys[i : i + 1]) for i in range(CLIENTS)])
    return not np.array_equal(alone, draw(keys))


def markdown(report: dict) -> str:
    """The report as a Markdown page."""
    work, depends = report["work"], report["depends_on_chunks"]
    rows = [
        [f"{kind}: {row}", *(cell(values[g], digits=0) for g in FLAGS.generator)]
        for kind, found in report["microseconds"].items()
        for row, values in found.items()
    ]
    answers = ["yes" if depends[g] else "no" for g in FLAGS.generator]
    return page(
        "Random numbers of a mean-field step",
        f"{describe(report)} Microseconds, medians (min to max) of {work['calls']} "
        f"calls of {work['steps']} in a loop, all in turn.",
        f"draw: a standard normal for every weight of a 784-{work['hidden']}-10 "
        "network, added to it. step: gradient of NLL + KL / n by "
        f"means and scales, and SGD, batch {work['batch_size']}.",
        table(
            f" | {' | '.join(FLAGS.generator)}",
            [*rows, ["numbers depend on the size of a vmap", *answers]],
        ),
    )


def main(argv):
    machine, microseconds = run(argv, measure)
    work = {k: FLAGS[k].value for k in ("hidden", "batch_size", "steps", "calls")}
    report = {
        "machine": machine,
        "work": work,
        "microseconds": microseconds,
        "depends_on_chunks": {g: depends_on_chunks(g) for g in FLAGS.generator},
    }
    write(report, markdown(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
