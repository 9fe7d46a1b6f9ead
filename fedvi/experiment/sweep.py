"""Many settings, some seeds each: run, compared, and chosen from on held-out data."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedvi import algorithms, checks, names
from fedvi.algorithm import Algorithm
from fedvi.experiment import folder, processes, report
from fedvi.experiment.config import CRITERIA, ExperimentConfig, RunOptions
from fedvi.experiment.loaded_run import LoadedRuns, load_run
from fedvi.experiment.npz_tree import canonical
from fedvi.experiment.run import run_all

__all__ = ["FIXED", "Cell", "Sweep", "sweep", "sweep_all"]

SWEEP, WINNER = "sweep.json", "winner"
# What says which run it is, or what figures mean, is the same in all cells.
FIXED = ("algorithm", "options", "seed", "seeds", "validation_fraction")


class Cell(NamedTuple):
    """One combination of settings, and what its seeds came to.

    Attributes:
      settings: by name.
      run_dir: its run folder.
      summary: what its `summary.json` holds.
      figure: the criterion, mean over the seeds; None: a seed failed.
    """

    settings: dict[str, Any]
    run_dir: str
    summary: dict[str, Any]
    figure: float | None


class Sweep(NamedTuple):
    """What a sweep of one method gave.

    Attributes:
      cells: in the order of the grid, the last name's values fastest.
      chosen: the cell with the best figure on held-out data; None: nothing was held
        out, or every cell failed.
      winner: the summary of the chosen settings trained on all training data and
        evaluated on the test data, of `run_dir/winner`; None without a chosen cell.
    """

    cells: list[Cell]
    chosen: Cell | None
    winner: dict[str, Any] | None

    @property
    def outcome(self) -> list[dict[str, Any]]:
        """The summaries that say whether the sweep has come to something: the winner's,
        or those of all cells if every one failed; else none."""
        if self.winner is not None:
            return [self.winner]
        failed = [cell.summary for cell in self.cells if cell.figure is None]
        return failed if len(failed) == len(self.cells) else []


def sweep(
    config: ExperimentConfig,
    grid: Mapping[str, Sequence[Any]],
    options: RunOptions | None = None,
    *,
    seeds: int | None = None,
    choose_by: str = "personal_nll",
    builder: Callable[..., Algorithm] | None = None,
) -> Sweep:
    """Runs every combination of settings and compares them.

    ```
    found = fedvi.sweep(config, {"penalty_scale": [0.1, 0.3, 1.0]}, seeds=5)
    ```

    Cells that differ in numbers of formulas only share one compiled program
    (`run_all`); a line says which settings need one of their own for each value. Every
    cell is a run folder of its own, in `run_dir`, without pictures (`fedvi report`
    draws them); with `RunOptions(resume=True)` what
    is finished is not run again.

    Settings are never chosen by test data. With `validation_fraction` every figure is
    of training data that were held out; the cell with the best criterion, the mean over
    its seeds, is then trained anew on all training data and evaluated on the test data
    (`run_dir/winner`), where the criterion is the mean of the last rounds if
    `final_rounds` asks for it. Without it the cells are compared and none is chosen.

    Args:
      config: what all cells have in common.
      grid: values by the name of a field of the configuration or an option of the
        algorithm.
      options: where and how; default run_dir: `runs/ALGORITHM_DATASET_sweep`.
      seeds: of each cell; default: those of the configuration.
      choose_by: the figure that decides, one of `personal_nll`, `personal_accuracy`,
        `global_nll`, `global_accuracy`.
      builder: as of `run`.

    Raises:
      ValueError: a name that is no setting, a setting without values or with one twice,
        a criterion that does not exist; and as `run_all`.
    """
    if seeds is not None:
        config = dataclasses.replace(config, seeds=seeds)
    if options is None:
        name = f"{config.algorithm}_{config.data_name}_sweep".replace(":", "_")
        options = RunOptions(f"runs/{name}")
    [found] = sweep_all([(config, options)], grid, choose_by=choose_by, builder=builder)
    return found


def sweep_all(
    runs: Sequence[tuple[ExperimentConfig, RunOptions]],
    grid: Mapping[str, Sequence[Any]],
    *,
    choose_by: str = "personal_nll",
    builder: Callable[..., Algorithm] | None = None,
    retrain: bool = True,
) -> list[Sweep]:
    """`sweep` of several methods, each over those settings of the grid that it has.

    The winners of all are compared at the end: the same grid, budget and criterion for
    everyone. With `retrain=False` there are none: settings are chosen, and that is all.

    Raises:
      ValueError: as `sweep`.
    """
    checks.one_of("choose_by", choose_by, CRITERIA)
    _check_grid(grid, [_settings_of(config, builder) for config, _ in runs])
    plans = []
    for config, options in runs:
        own = {k: v for k, v in grid.items() if k in _settings_of(config, builder)}
        plans.append(_cells(config, options, own))
    sweeps = []
    for (config, options), plan in zip(runs, plans):
        summaries = run_all([cell[1:] for cell in plan], builder)
        cells = [
            Cell(settings, one.run_dir, summary, _figure(summary, choose_by))
            for (settings, _, one), summary in zip(plan, summaries)
        ]
        chosen = _choose(config, cells, choose_by)
        sweeps.append(Sweep(cells, chosen, None))
        processes.on_first(
            lambda found=sweeps[-1], options=options: (
                _clear_winner(options, found),
                _write(options, found, choose_by),
            )
        )
    return _retrained(runs, plans, sweeps, builder) if retrain else sweeps


# Before the first run.


def _settings_of(
    config: ExperimentConfig, builder: Callable[..., Algorithm] | None
) -> list[str]:
    """Names that a grid of this method may have."""
    fields = [field.name for field in dataclasses.fields(config)]
    options = getattr(builder, "options", None)
    if builder is None:
        options = algorithms.options_of(config.algorithm)
    own = () if options is None else dataclasses.fields(options)
    return [*(name for name in fields if name not in FIXED), *(f.name for f in own)]


def _check_grid(grid: Mapping[str, Sequence[Any]], known: Sequence[list[str]]) -> None:
    if not grid:
        raise ValueError("grid is empty: give at least one setting with its values")
    settings = list(dict.fromkeys(itertools.chain(*known)))
    for name, values in grid.items():
        if name in FIXED:
            raise ValueError(
                f"grid has {name}, which is one for all cells: give it in the "
                "configuration"
            )
        if name not in settings:
            raise ValueError(
                f"grid has {name!r}, which is no setting: it must be one of "
                f"{', '.join(settings)}{names.near(name, settings)}"
            )
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(
                f"grid[{name!r}]={values!r} must be a list of at least one value"
            )
        if len({repr(value) for value in values}) < len(values):
            raise ValueError(f"grid[{name!r}]={list(values)} has a value twice")


def _cells(
    config: ExperimentConfig, options: RunOptions, grid: Mapping[str, Sequence[Any]]
) -> list[tuple[dict[str, Any], ExperimentConfig, RunOptions]]:
    """Settings, configuration and folder of every combination."""
    fields = {field.name for field in dataclasses.fields(config)}
    cells = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values))
        own = {k: v for k, v in settings.items() if k in fields}
        given = {k: v for k, v in settings.items() if k not in fields}
        cell = dataclasses.replace(config, **own, options=config.options | given)
        run_dir = Path(options.run_dir) / _folder_name(settings, len(cells))
        cells.append((settings, cell, _moved(options, run_dir, plot_formats=())))
    return cells


def _folder_name(settings: Mapping[str, Any], number: int) -> str:
    def text(value):
        several = isinstance(value, (list, tuple))
        return "x".join(map(str, value)) if several else str(value)

    name = ",".join(f"{key}={text(value)}" for key, value in settings.items())
    plain = re.sub(r"[^\w.,=+-]", "_", name)
    # What is no name of a folder, or might be that of two cells.
    return plain if plain == name and 0 < len(name) <= 120 else f"cell_{number:03d}"


def _moved(options: RunOptions, run_dir: Path, **changes: Any) -> RunOptions:
    return dataclasses.replace(options, run_dir=str(run_dir), **changes)


# After the last.


def _figure(summary: Mapping[str, Any], choose_by: str) -> float | None:
    if summary["failed"]:
        return None
    model, _, key = choose_by.partition("_")
    if model == "global" and not summary["global_model"]:
        raise ValueError(
            f"choose_by={choose_by!r}: {summary['method']} has no global model: choose "
            "by personal_nll, and --resume, for the cells are finished"
        )
    figures = [one["mean_of_last_rounds"] or one for one in summary["per_seed"]]
    return float(np.mean([one[model][key] for one in figures]))


def _choose(
    config: ExperimentConfig, cells: Sequence[Cell], choose_by: str
) -> Cell | None:
    """The best cell on held-out data, said in a line."""
    if not config.validation_fraction:
        print(
            "no cell is chosen, since these are figures of the test data: give "
            "validation_fraction, the part of the training data to choose on"
        )
        return None
    whole = [cell for cell in cells if cell.figure is not None]
    if not whole:
        print("no cell is chosen: every one failed")
        return None
    sign = -1 if choose_by.endswith("accuracy") else 1
    chosen = min(whole, key=lambda cell: sign * cell.figure)
    shown = ", ".join(f"{key}={value}" for key, value in chosen.settings.items())
    print(
        f"chosen of {len(cells)} cells by {choose_by} on held-out training data, "
        f"{chosen.figure:.4g}: {shown}"
    )
    for name, value in chosen.settings.items():
        values = sorted({cell.settings[name] for cell in cells}, key=_order)
        numbers = all(isinstance(one, (int, float)) for one in values)
        if numbers and len(values) > 1 and value in (values[0], values[-1]):
            print(
                f"{name}={value} is an end of its values: a better one may lie beyond"
            )
    return chosen


def _order(value: Any) -> tuple[bool, Any]:
    number = isinstance(value, (int, float))
    return not number, value if number else str(value)


def _clear_winner(options: RunOptions, found: Sweep) -> None:
    """Removes the winner of a smaller grid, which is the winner no more."""
    where = Path(options.run_dir)
    if not (where / SWEEP).exists():
        return
    before = folder.read_json(where / SWEEP).get("chosen") or {}
    now = {} if found.chosen is None else found.chosen.settings
    if canonical(before.get("settings")) != canonical(now):
        folder.prepare(where / WINNER, overwrite=True)


def _write(options: RunOptions, found: Sweep, choose_by: str) -> None:
    def row(cell: Cell) -> dict[str, Any]:
        return {
            "settings": cell.settings,
            "folder": Path(cell.run_dir).name,
            "figure": cell.figure,
        }

    where = Path(options.run_dir)
    with folder.writing(where):
        folder.write_json(
            where / SWEEP,
            {
                "choose_by": choose_by,
                "evaluated_on": found.cells[0].summary["evaluated_on"],
                "cells": [row(cell) for cell in found.cells],
                "chosen": None if found.chosen is None else row(found.chosen),
            },
        )


def _compare(
    where: Path, winners: Sequence[tuple[ExperimentConfig, RunOptions]]
) -> None:
    loaded = LoadedRuns([load_run(options.run_dir) for _, options in winners])
    report.write_comparison(where, loaded, loaded.comparison())


def _retrained(
    runs: Sequence[tuple[ExperimentConfig, RunOptions]],
    plans: Sequence[Sequence[tuple[dict[str, Any], ExperimentConfig, RunOptions]]],
    sweeps: Sequence[Sweep],
    builder: Callable[..., Algorithm] | None,
) -> list[Sweep]:
    """The chosen settings of every method on all training data, in one table."""
    winners = {}
    for number, ((_, options), plan, found) in enumerate(zip(runs, plans, sweeps)):
        if found.chosen is not None:
            config = plan[found.cells.index(found.chosen)][1]
            whole = dataclasses.replace(config, validation_fraction=0.0)
            winners[number] = whole, _moved(options, Path(options.run_dir) / WINNER)
    if not winners:
        return list(sweeps)
    print("the chosen settings, trained on what was held out too, on the test data:")
    chosen = list(winners.values())
    summaries = dict(zip(winners, run_all(chosen, builder)))
    if len(chosen) > 1:  # beside the folders of the methods
        processes.on_first(lambda: _compare(Path(runs[0][1].run_dir).parent, chosen))
    return [one._replace(winner=summaries.get(i)) for i, one in enumerate(sweeps)]
