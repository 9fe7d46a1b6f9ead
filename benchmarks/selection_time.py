"""Times a round of DSVGD by how its client is selected: what the scores cost.

    python benchmarks/selection_time.py --out=benchmarks/results/selection_time
    python benchmarks/selection_time.py --draw_from=1000000 --draw_from=10000000

Bayesian logistic regression on Covertype's built-in stand-in, no evaluation. The
rounds of all selections take turns. A round's scores are one gradient per client, its
visit L + L' steps of SVGD with a density estimate or two each, so the share of the
scores depends on L more than on anything else: both of the papers' values are timed.
With --draw_from only the draw of a uniform cohort is timed, beside a permutation of
all clients, of which it would be the first.
"""

import os
import statistics
import time
from typing import Any

import jax
from absl import app, flags
from report import cell, describe_machine, spread, table, write

from fedvi import Federation, LocalTraining, Task, algorithms, data, nn, selection

flags.DEFINE_multi_enum(
    "selection", ["ksd", "hip"], ["ksd", "hip"], "Compared with uniform selection."
)
flags.DEFINE_integer("clients", 120, "K.", lower_bound=2)
flags.DEFINE_integer("particles", 6, "N.", lower_bound=1)
flags.DEFINE_multi_integer("steps", [10, 200], "L = L' (10 in the paper, 200 in code).")
flags.DEFINE_integer("batch_size", 100, "Examples a step.", lower_bound=1)
flags.DEFINE_integer(
    "report_batch_size", 100, "Examples of a report; 0: all of a client's."
)
flags.DEFINE_integer("chunk_size", 0, "Clients in one vmap; 0: all.", lower_bound=0)
flags.DEFINE_integer("calls", 20, "Calls that are timed.", lower_bound=1)
flags.DEFINE_integer("rounds", 5, "Rounds a call.", lower_bound=1)
flags.DEFINE_multi_integer(
    "draw_from", [], "Clients of whom only a cohort is drawn.", lower_bound=2
)
flags.DEFINE_integer("cohort", 10_000, "Clients that are drawn.", lower_bound=1)
flags.DEFINE_string("out", None, "Also write OUT.json and OUT.md.")
FLAGS = flags.FLAGS


def federations(steps: int) -> dict[str, Federation]:
    """One federation for each selection, of the same data."""
    dataset = data.one_against_rest(data.load("covertype_standin"), 1)
    clients = FLAGS.clients
    split = data.partition("class_majority", dataset, clients=clients, seed=0)
    federated = data.federate(dataset, split)
    mean, std = data.pixel_statistics(dataset.train_x)
    training = LocalTraining(
        batch_size=FLAGS.batch_size,
        learning_rate=0.05,
        optimizer="rmsprop",
        steps=steps,
    )
    task = Task(
        model=nn.build(
            "binary_logistic",
            classes=2,
            input_shape=federated.train.x.shape[2:],
            preprocess=data.standardise(mean, std),
        ),
        training=training,
        finetuning=training,
        clients=clients,
        samples=int(federated.train.size.sum()),
    )
    algorithm = algorithms.dsvgd(
        task,
        particles=FLAGS.particles,
        prior="hierarchical",
        report_batch_size=FLAGS.report_batch_size or None,
    )
    rules = {"uniform": selection.uniform(clients, 1)}
    for name in FLAGS.selection:
        rules[name] = selection.proportional(clients, 1, name)
    return {
        name: Federation(
            algorithm,
            federated.train,
            federated.test,
            selection=rule,
            chunk_size=FLAGS.chunk_size or None,
        )
        for name, rule in rules.items()
    }


def measure(steps: int) -> dict[str, Any]:
    """Milliseconds a round by selection: median, least and most."""
    systems = federations(steps)
    states = {name: f.init(jax.random.key(0)) for name, f in systems.items()}
    times = {name: [] for name in systems}
    for call in range(1 + FLAGS.calls):  # the first one compiles
        for name, federation in systems.items():
            start = time.perf_counter()
            states[name], _ = federation.rounds(states[name], FLAGS.rounds)
            jax.block_until_ready(states[name].server)
            if call:
                seconds = time.perf_counter() - start
                times[name].append(1e3 * seconds / FLAGS.rounds)
    plain = times["uniform"]
    return {
        "steps": steps,
        "milliseconds": {
            name: {
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "share": statistics.median(
                    1 - p / v for p, v in zip(plain, values, strict=True)
                ),
            }
            for name, values in times.items()
        },
    }


def measure_draws(clients: int) -> dict[str, Any]:
    """CPU milliseconds of a cohort's draw and of a permutation, in turn."""
    rule = selection.uniform(clients, min(FLAGS.cohort, clients))
    systems = {
        "draw": jax.jit(lambda key: rule.select(key, 0, None, None)[0]),
        "permutation": jax.jit(lambda key: jax.random.permutation(key, clients)),
    }
    times = {name: [] for name in systems}
    for call in range(1 + FLAGS.calls):  # the first one compiles
        key = jax.block_until_ready(jax.random.key(call))
        for name, function in systems.items():
            start = time.process_time()
            jax.block_until_ready(function(key))
            if call:
                times[name].append(1e3 * (time.process_time() - start))
    return {"clients": clients} | {name: spread(t) for name, t in times.items()}


def draws_page(report: dict) -> str:
    """The report of `measure_draws` as a Markdown page."""
    machine, work = report["machine"], report["work"]
    lines = [
        "# The draw of a cohort",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; load "
        f"{machine['load_before']:.2f} before, {machine['load_after']:.2f} after; jax "
        f"{work['jax']}, {work['backend']}. CPU milliseconds, medians (min to max) of "
        f"{work['calls']} calls, in turn; {work['cohort']:,} clients are drawn.",
        "",
        *table(
            "clients | draw ms | permutation of all ms",
            (
                [f"{r['clients']:,}", cell(r["draw"]), cell(r["permutation"])]
                for r in report["results"]
            ),
        ),
    ]
    return "\n".join(lines) + "\n"


def markdown(report: dict) -> str:
    """The report as a Markdown page."""
    machine, work = report["machine"], report["work"]
    examples = work["report_batch_size"] or "all of its"
    chunk = work["chunk_size"] or "all"
    lines = [
        "# A round of DSVGD by its selection",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; load "
        f"{machine['load_before']:.2f} before, {machine['load_after']:.2f} after; jax "
        f"{work['jax']}, {work['backend']}. Milliseconds a round, medians (min to max) "
        f"of {work['calls']} calls of {work['rounds']} rounds, in turn; share: what of "
        "a round goes into the scores.",
        "",
        f"Bayesian logistic regression, 54 features, {work['clients']} clients, "
        f"{work['particles']} particles, batch {work['batch_size']}; a report from "
        f"{examples} examples, {chunk} clients in one vmap.",
        "",
        "| L = L' | uniform ms |"
        + "".join(f" {name.upper()} ms | share |" for name in FLAGS.selection),
        "|---|---|" + "---|---|" * len(FLAGS.selection),
    ]
    for row in report["results"]:
        found = row["milliseconds"]
        cells = [str(row["steps"]), _cell(found["uniform"])]
        for name in FLAGS.selection:
            cells += [_cell(found[name]), f"{100 * found[name]['share']:.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag")
    machine = {**describe_machine(), "load_before": os.getloadavg()[0]}
    if FLAGS.draw_from:
        results = [measure_draws(clients) for clients in FLAGS.draw_from]
    else:
        results = [measure(steps) for steps in FLAGS.steps]
    machine["load_after"] = os.getloadavg()[0]
    keys = ("clients", "particles", "batch_size", "report_batch_size", "chunk_size")
    keys, as_page = (("cohort",), draws_page) if FLAGS.draw_from else (keys, markdown)
    report = {
        "machine": machine,
        "work": {
            **{key: FLAGS[key].value for key in (*keys, "calls", "rounds")},
            "jax": jax.__version__,
            "backend": jax.default_backend(),
        },
        "results": results,
    }
    write(report, as_page(report), FLAGS.out)


if __name__ == "__main__":
    app.run(main)
