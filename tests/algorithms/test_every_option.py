"""Every value of every option of every algorithm, traced: nothing is compiled.

Each goes through a round and the evaluations by shapes, and rows, summary and plots get
zeros of the shapes of what came out: a name or a shape that one of them cannot take
shows here and not after the first block of a run.
"""

import dataclasses
import types
import typing

import jax
import numpy as np
import pytest

from fedvi import plots
from fedvi.algorithms import ALGORITHMS, options_of
from fedvi.evaluation import Scores
from fedvi.experiment import ExperimentConfig, RunOptions, report, rows, setup
from fedvi.experiment.communication import bytes_per_round
from fedvi.experiment.loading import LoadedData, load_data
from fedvi.experiment.problems import Problems
from fedvi.federation import RoundMetrics
from fedvi.options import choices_of, kinds_of
from fedvi.selection import Choice

pytestmark = pytest.mark.long

# What an option needs beside it to have a meaning.
WITH = {
    ("fedhb_niw", "prediction"): {"num_samples": 2},
    ("dsvgd", "initial"): {"first_t": "prior"},
    ("dsvgd", "kde"): {"first_t": "prior"},
    ("fedpop", "sampler_steps"): {"samples": 2},
    ("fedsoul", "sampler_steps"): {"samples": 2},
}
# Options of text that is no choice.
TEXTS = {"personal_part": ["body"]}
NUMBERS = {int: (3, 2, 1, 0), float: (0.3, 0.7, 3.0, 0.0)}
CONFIG = ExperimentConfig(
    dataset="digits",
    partition="iid",
    clients=4,
    fraction=0.5,
    model="mlp",
    hidden=(5,),
    augment=False,
    momentum=0.0,
    rounds=2,
    eval_every=1,
    unlabelled=20,
)


def other_values(options: type, field: dataclasses.Field) -> list:
    """The values of an option other than its default: all, or one of a range."""
    hint = typing.get_type_hints(options)[field.name]
    if choices := choices_of(field, hint):
        return [value for value in choices if value != field.default]
    if kinds_of(hint) == (bool,):
        return [not field.default]
    if kinds_of(hint) == (str,):
        return TEXTS[field.name]
    for kind in kinds_of(hint):
        for number in NUMBERS[kind]:
            try:
                options(**{field.name: number}, **field.metadata["only_with"])
            except ValueError:
                continue
            if number != field.default:
                return [number]
    raise AssertionError(f"no second value of {options.__name__}.{field.name}")


VARIANTS = [
    (
        name,
        {field.name: value}
        | dict(field.metadata["only_with"])
        | WITH.get((name, field.name), {}),
        "uniform",
    )
    for name in sorted(ALGORITHMS)
    for field in dataclasses.fields(options_of(name))
    for value in other_values(options_of(name), field)
]
VARIANTS += [(name, {}, "uniform") for name in sorted(ALGORITHMS)]
VARIANTS += [("dsvgd", {}, "ksd"), ("dsvgd", {"report_batch_size": 3}, "hip")]


@pytest.fixture(scope="module")
def loaded() -> LoadedData:
    return load_data(CONFIG)


def zeros_of(experiment, federation) -> tuple[RoundMetrics, dict[str, Scores]]:
    """Of one seed and one round, what the driver would get."""
    clients, cohort = CONFIG.clients, experiment.selection.size
    choice = ()
    if experiment.selection.measure is not None:
        chances = np.full((1, 1, clients), 1 / clients, np.float32)
        nobody = np.zeros((1, 1, clients), bool)
        choice = Choice(chances, nobody, np.zeros((1, 1)), np.zeros((1, 1), bool))
    nobody = np.zeros((1, 1, cohort), bool)
    metrics = {
        name: np.zeros((1, 1, *shape.shape), shape.dtype)
        for name, shape in federation.messages.metrics.items()
    }
    figures = [np.zeros((1, clients), np.float32)] * len(Scores._fields)
    scores = Scores(*figures)._replace(
        count=np.ones((1, clients)),
        **{f: np.zeros((1, clients, 15)) for f in Scores._fields if f[:4] == "bin_"},
    )
    ids = np.arange(cohort)[None, None]
    return RoundMetrics(ids, nobody, nobody, metrics, choice), {
        "global": scores,
        "personal": scores,
    }


PLOTTED: set[frozenset[str]] = set()


def tell(run_dir, experiment, federation) -> None:
    """Rows, summary and plots; plots once for each set of columns."""
    metrics, scores = zeros_of(experiment, federation)
    per_round = bytes_per_round(experiment, federation.messages)
    found = rows.evaluation_rows(
        experiment,
        round_index=1,
        seeds=[0],
        measured=federation.messages.metrics,
        metrics=metrics,
        scores=scores,
        clusters=None,
        seconds=1.0,
        per_round=per_round,
    )
    problems = Problems()
    problems.add(1, [0], metrics)
    rows.choice_rows(1, [0], metrics)
    summary = report.summary(
        experiment,
        rows=found,
        problems=problems.to_dict(),
        finite=np.ones(1, bool),
        clusters=None,
        ending={"finetune_curve": None, "ood": None},
        compile_seconds=0.0,
        plan="",
        devices=jax.devices()[:1],
        per_round=per_round,
    )
    report.table(report.table_rows(summary))
    if (columns := frozenset(found[0])) not in PLOTTED:
        PLOTTED.add(columns)
        plots.draw(
            types.SimpleNamespace(
                folder=run_dir,
                config=experiment.config,
                summary=summary,
                evaluations=found,
                scores=scores,
                evaluation={},
            )
        )


@pytest.mark.parametrize(("name", "options", "selection"), VARIANTS, ids=str)
def test_it_is_traced_and_told(name, options, selection, loaded, tmp_path):
    config = dataclasses.replace(
        CONFIG, algorithm=name, options=options, selection=selection
    )
    experiment = setup.experiment(config, loaded=loaded)
    federation = setup.federation(experiment, RunOptions(str(tmp_path)), None)
    tell(tmp_path, experiment, federation)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_float64_and_strict_types_change_no_state(name, loaded, tmp_path):  # C24
    config = dataclasses.replace(CONFIG, algorithm=name)

    def shapes():
        experiment = setup.experiment(config, loaded=loaded)
        federation = setup.federation(experiment, RunOptions(str(tmp_path)), None)
        return federation.messages, federation.shapes()

    expected = shapes()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = shapes()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (found, expected))):
        assert getattr(one, "shape", one) == getattr(other, "shape", other)
        assert getattr(one, "dtype", 0) == getattr(other, "dtype", 0)
