"""What to call runs beside others, in tables and in pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvi.experiment.setup import settings

__all__ = ["labels", "marked"]


def labels(
    summaries: Sequence[Mapping[str, Any]], folders: Sequence[str | Path]
) -> list[str]:
    """What to call each run beside the others: its method, and what it alone has.

    Runs that differ in nothing but the seed have one label; those of one method that
    differ in settings have them in it (`fedhb_niw penalty_scale=0.1`), and those that
    do not differ at all the name of their folder.

    Args:
      summaries: what the `summary.json` of each holds.
      folders: of the runs.
    """
    made_from = [_settings(summary) for summary in summaries]
    result = []
    for summary, own in zip(summaries, made_from):
        same = [
            other
            for other, one in zip(made_from, summaries)
            if one["method"] == summary["method"]
        ]
        differing = [
            key
            for key in dict.fromkeys(key for one in same for key in one)
            if any(one.get(key) != own.get(key) for one in same)
        ]
        if len(differing) > 1 and "data" in differing:
            differing.remove("data")  # what differs in them is named
        shown = [f"{key.removeprefix('options.')}={own.get(key)}" for key in differing]
        result.append(" ".join([summary["method"], *shown]))
    seeds: dict[str, list[int]] = {}
    for label, summary in zip(result, summaries):
        seeds.setdefault(label, []).extend(summary.get("seeds", [0]))
    twice = {label for label, own in seeds.items() if len(set(own)) < len(own)}
    names = [Path(one).name for one in folders]
    if len(set(names)) < len(names):
        names = [str(one) for one in folders]
    return [
        f"{label} ({name})" if label in twice else label
        for label, name in zip(result, names)
    ]


def _settings(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is made from, but for its seeds."""
    return settings(summary["config"]) | {"data": str(summary.get("data_sha256"))[:8]}


def marked(name: str, failed: Sequence[bool]) -> str:
    """A name, with how many of its seeds came to nothing."""
    if not any(failed):
        return name
    several = len(failed) > 1
    return f"{name} ({f'{sum(failed)} of {len(failed)} seeds ' * several}failed)"
