"""The checkpoint of a run: what is kept of it, and whether it is that of this run."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedvi.experiment import folder, npz_tree, processes
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.problems import Problems
from fedvi.experiment.setup import Experiment, identity
from fedvi.federation import BaseFederation, State
from fedvi.placement import on_host

__all__ = ["Kept", "check_rows", "read_notes", "restore_run", "save_run"]


class Kept(NamedTuple):
    """What a checkpoint holds: the states of all seeds, and the run's own notes."""

    states: State
    round: int
    problems: Problems


def save_run(
    experiment: Experiment, run_dir: Path, federation: BaseFederation, kept: Kept
) -> None:
    """Writes the checkpoint of a run, and with it makes permanent what its clients
    keep on disk."""
    config = identity(experiment.config.to_dict(), experiment.data_sha256)
    metadata = {
        "config": config,
        "round": kept.round,
        "problems": kept.problems.to_dict(),
    }
    states = jax.tree.map(on_host, kept.states)  # by all: parts lie with each

    def save():
        if processes.is_first():
            npz_tree.save(run_dir / folder.CHECKPOINT, states, metadata)

    federation.commit(kept.states, save)


def restore_run(experiment: Experiment, run_dir: Path, shapes: State) -> Kept | None:
    """Reads the checkpoint of a run folder; None if the run was stopped before one.

    Raises:
      ValueError: the folder's run belongs to another configuration or other data, or
        its checkpoint is damaged.
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
    config = identity(experiment.config.to_dict(), experiment.data_sha256)
    saved, done, problems = read_notes(path)
    if npz_tree.canonical(saved) != npz_tree.canonical(config):
        raise ValueError(_mismatch(path, saved, config))
    states, _ = npz_tree.restore(path, shapes)
    return Kept(states, done, problems)


def read_notes(path: Path) -> tuple[dict[str, Any], int, Problems]:
    """Configuration, round and problems of the run whose checkpoint this is.

    Raises:
      ValueError: it is missing, damaged or another program's.
    """
    saved = npz_tree.read_metadata(path)
    try:
        config, problems = dict(saved["config"]), Problems(saved["problems"])
        return config, int(saved["round"]), problems
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint {path} holds no notes of a run ({type(error).__name__}: "
            f"{error}): put it back as it was, or start again with --overwrite"
        ) from error


def check_rows(config: ExperimentConfig, run_dir: Path, done: int) -> None:
    """Raises `ValueError` unless `metrics.csv` has every evaluation up to a round."""
    # Runs of an earlier version have no row of round 0.
    rows = [row for row in folder.metrics_rows(run_dir) if 0 < row["round"] <= done]
    seeds = range(config.seed, config.seed + config.seeds)
    wanted = [
        (evaluated, seed)
        for evaluated in itertools.accumulate(config.blocks())
        for seed in seeds
        if evaluated <= done
    ]
    found = [(row["round"], row.get("seed")) for row in rows]
    if found != wanted:
        missing = [pair for pair in wanted if pair not in found]
        odd = [pair for pair in found if pair not in wanted] or found[-1:]
        which, pair = ("no", missing[0]) if missing else ("an unexpected", odd[0])
        why = f"{which} row of round {pair[0]}, seed {pair[1]}"
        raise ValueError(folder.damaged(run_dir / folder.METRICS, why))


def _mismatch(path: Path, saved: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    saved, present = _flatten(saved), _flatten(json.loads(npz_tree.canonical(config)))
    pairs = {
        key: (saved.get(key, "absent"), present.get(key, "absent"))
        for key in sorted(saved.keys() | present.keys())
    }
    differing = [
        f"{key} is {there!r} there and {here!r} here"
        for key, (there, here) in pairs.items()
        if repr(there) != repr(here)
    ]
    return (
        f"checkpoint {path} belongs to another configuration: {'; '.join(differing)}. "
        "Resume with the saved configuration and data, or start a new run: another "
        "run folder, or overwrite this one"
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
