"""The checkpoint of a run: what is kept of it, and whether it is that of this run."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedvi.experiment import folder, npz_tree, processes
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.problems import Problems
from fedvi.experiment.setup import Experiment, identity
from fedvi.federation import BaseFederation, State
from fedvi.placement import on_host

__all__ = [
    "Kept",
    "Notes",
    "check_rows",
    "is_measured",
    "measured_by",
    "read_notes",
    "restore_run",
    "save_run",
]


class Kept(NamedTuple):
    """What a checkpoint holds: the states of all seeds, and the run's own notes.

    Attributes:
      states: of all seeds.
      round: rounds done.
      problems: of these rounds.
      extended_from: `{"rounds": r, "done": d}` for every time that the run was given
        another number of rounds, r before, after round d.
      note: one line on what is not as it was when it was saved; empty: nothing.
    """

    states: State
    round: int
    problems: Problems
    extended_from: tuple[dict[str, int], ...] = ()
    note: str = ""


class Notes(NamedTuple):
    """`Kept` without the states, and the `identity` that the run had."""

    config: dict[str, Any]
    round: int
    problems: Problems
    extended_from: tuple[dict[str, int], ...]


def save_run(
    experiment: Experiment, run_dir: Path, federation: BaseFederation, kept: Kept
) -> None:
    """Writes the checkpoint of a run, and with it makes permanent what its clients
    keep on disk."""
    metadata = {
        "config": identity(experiment.config.to_dict(), experiment.data_sha256),
        "round": kept.round,
        "problems": kept.problems.to_dict(),
        "extended_from": list(kept.extended_from),
    }
    states = jax.tree.map(on_host, kept.states)  # by all: parts lie with each
    states = federation.portable(states)

    def save():
        if processes.is_first():
            npz_tree.save(run_dir / folder.CHECKPOINT, states, metadata)

    federation.commit(kept.states, save)


def restore_run(experiment: Experiment, run_dir: Path, shapes: State) -> Kept | None:
    """Reads the checkpoint of a run folder; None if the run was stopped before one.

    The run may go on with another number of rounds, and be measured with other settings
    that nothing but evaluations reads (`fedvi.option(evaluation=)`); its note says so.

    Raises:
      ValueError: the folder's run belongs to another configuration or other data, or
        has done more rounds; or its checkpoint is damaged.
    """
    path = run_dir / folder.CHECKPOINT
    if not path.exists():
        if (run_dir / folder.SUMMARY).exists():
            raise ValueError(
                f"run_dir={run_dir} holds a finished run of another configuration or "
                "other data, and no checkpoint: replace it with --overwrite, or give "
                "another --run_dir"
            )
        return None
    notes, config = read_notes(path), experiment.config
    changed = _changed(notes, experiment)
    allowed = _may_change(notes, experiment)
    if any(key not in allowed for key in changed):
        raise ValueError(
            _mismatch(path, {k: v for k, v in changed.items() if k not in allowed})
        )
    extended, note = notes.extended_from, []
    if "rounds" in changed:
        before = notes.config["rounds"]
        if config.rounds < notes.round:
            raise ValueError(
                f"rounds={config.rounds} is fewer than the {notes.round} that the run "
                f"in {run_dir} has done: give at least as many, or start again with "
                "--overwrite"
            )
        extended = (*extended, {"rounds": before, "done": notes.round})
        note.append(_extension(config, before, notes.round))
    if measured := {k: v for k, v in changed.items() if k != "rounds"}:
        note.append(f"measured by other settings: {_pairs(measured)}")
    states, _ = npz_tree.restore(path, shapes)
    return Kept(states, notes.round, notes.problems, extended, "; ".join(note))


def _extension(config: ExperimentConfig, before: int, done: int) -> str:
    """One line on what another number of rounds means for the learning rate."""
    line = f"{config.rounds} rounds in place of {before}, of which {done} are done"
    boundaries = ", ".join(map(str, config.decay_rounds()))
    if not boundaries or config.lr_decay == 1:
        return f"{line}: nothing else depends on their number"
    return (
        f"{line} with the learning rates of a run of {before}: from now on those of a "
        f"run of {config.rounds}, which decay after rounds {boundaries}"
    )


def read_notes(path: Path) -> Notes:
    """What a run has noted in its checkpoint.

    Raises:
      ValueError: it is missing, damaged or another program's.
    """
    saved = npz_tree.read_metadata(path)
    try:
        return Notes(
            dict(saved["config"]),
            int(saved["round"]),
            Problems(saved["problems"]),
            tuple(
                {key: int(one[key]) for key in ("rounds", "done")}
                for one in saved["extended_from"]
            ),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint {path} holds no notes of a run ({type(error).__name__}: "
            f"{error}): put it back as it was, or start again with --overwrite"
        ) from error


def check_rows(
    config: ExperimentConfig,
    run_dir: Path,
    done: int,
    extended_from: Sequence[Mapping[str, int]] = (),
) -> None:
    """Raises `ValueError` unless `metrics.csv` has every evaluation up to a round.

    Args:
      config: of the run.
      run_dir: its folder.
      done: the round.
      extended_from: of `Kept`: each of its stretches has its own evaluations.
    """
    rows = [row for row in folder.metrics_rows(run_dir) if row["round"] <= done]
    seeds = range(config.seed, config.seed + config.seeds)
    wanted = [
        (evaluated, seed)
        for evaluated in _evaluated(config, done, extended_from)
        for seed in seeds
    ]
    found = [(row["round"], row.get("seed")) for row in rows]
    if found != wanted:
        missing = [pair for pair in wanted if pair not in found]
        odd = [pair for pair in found if pair not in wanted] or found[-1:]
        which, pair = ("no", missing[0]) if missing else ("an unexpected", odd[0])
        why = f"{which} row of round {pair[0]}, seed {pair[1]}"
        raise ValueError(folder.damaged(run_dir / folder.METRICS, why))


def measured_by(experiment: Experiment) -> dict[str, Any]:
    """The notes of an `evaluation.npz`: what its figures are of."""
    config = identity(experiment.config.to_dict(), experiment.data_sha256)
    return {"config": config, "ood_sha256": experiment.ood_sha256}


def is_measured(experiment: Experiment, run_dir: Path) -> bool:
    """Whether the figures of a folder whose run is finished are those of an experiment:
    not where they were measured anew and that was interrupted."""
    path = run_dir / folder.EVALUATION
    if not path.exists():  # without a checkpoint it cannot come back
        return not (run_dir / folder.CHECKPOINT).exists()
    notes = npz_tree.canonical(npz_tree.read_metadata(path))
    return notes == npz_tree.canonical(measured_by(experiment))


def _evaluated(
    config: ExperimentConfig, done: int, extended_from: Sequence[Mapping[str, int]]
) -> list[int]:
    """The rounds up to `done` after which a run was evaluated."""
    found, start = [0], 0
    for one in (*extended_from, {"rounds": config.rounds, "done": done}):
        stretch = dataclasses.replace(config, rounds=one["rounds"])
        ends = itertools.accumulate(stretch.blocks(start), initial=start)
        found += [end for end in ends if start < end <= one["done"]]
        start = one["done"]
    return found


def _changed(notes: Notes, experiment: Experiment) -> dict[str, tuple[Any, Any]]:
    """Settings by name, `options.name` those of the algorithm, that are not what they
    were: (there, here)."""
    config = identity(experiment.config.to_dict(), experiment.data_sha256)
    saved = _flatten(notes.config)
    present = _flatten(json.loads(npz_tree.canonical(config)))
    pairs = {
        key: (saved.get(key, "absent"), present.get(key, "absent"))
        for key in sorted(saved.keys() | present.keys())
    }
    return {key: pair for key, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}


def _may_change(notes: Notes, experiment: Experiment) -> set[str]:
    """Settings that training so far does not depend on."""
    config = experiment.config
    trained = notes.round == notes.config.get("rounds") == config.rounds
    # Else figures of one kind and figures of another would stand in one mean.
    alone = config.final_rounds <= 1 and not config.window
    kinds = {"after", "rows"} if trained and alone else {"after"}
    found = experiment.evaluation_settings().items()
    return {"rounds", *(name for name, kind in found if kind in kinds)}


def _mismatch(path: Path, changed: Mapping[str, tuple[Any, Any]]) -> str:
    return (
        f"checkpoint {path} belongs to another configuration: {_pairs(changed)}. "
        "Resume with the saved configuration and data, or start a new run: another "
        "run folder, or overwrite this one"
    )


def _pairs(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(
        f"{key} is {there!r} there and {here!r} here"
        for key, (there, here) in changed.items()
    )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted names."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
