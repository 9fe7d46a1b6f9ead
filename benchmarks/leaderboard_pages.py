"""The leaderboard's rows as tables, a figure, and a part of the README."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from leaderboard_protocols import BASELINE
from report import table
from scipy.special import stdtrit

matplotlib.use("Agg")
from matplotlib import pyplot as plt

README = Path(__file__).resolve().parents[1] / "README.md"
MARKS = "<!-- leaderboard: begin -->\n", "<!-- leaderboard: end -->\n"


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """The table, the best personal accuracy first."""

    def gap(cells, key, digits):
        if cells["method"] == BASELINE:
            return "-"
        name = f"{key}_minus_{BASELINE}"
        difference, error = float(cells[name]), float(cells[f"{name}_error"])
        seeds = int(cells["seeds"])
        told = seeds > 1 and abs(difference) > stdtrit(seeds - 1, 0.975) * error
        mark = "**" if told else ""
        if seeds == 1:
            return f"{difference:+.{digits}f}"
        return f"{mark}{difference:+.{digits}f} ± {error:.{digits}f}{mark}"

    ranked = sorted(rows, key=lambda cells: -float(cells["personal_accuracy"]))
    return table(
        "method | global % | personal % | minus FedAvg + FT | personal NLL | minus "
        "FedAvg + FT | personal ECE % | MB up, down a round | s a round (FedAvg = 1; "
        "its gradients)",
        [
            [
                cells["method"],
                mean(cells, "global_accuracy", 2),
                mean(cells, "personal_accuracy", 2),
                gap(cells, "accuracy", 2),
                mean(cells, "personal_nll", 3),
                gap(cells, "nll", 3),
                mean(cells, "personal_ece", 2),
                f"{float(cells['bytes_up']) / 1e6:.1f}, "
                f"{float(cells['bytes_down']) / 1e6:.1f}",
                f"{float(cells['round_seconds']):.3f} "
                f"({float(cells[f'round_over_{BASELINE}']):.1f}; "
                f"{float(cells['gradients']):.1f})",
            ]
            for cells in ranked
        ],
    )


def mean(cells: dict[str, Any], key: str, digits: int) -> str:
    """Over seeds, with the deviation of several."""
    if cells[key] == "":
        return "-"
    value, spread = float(cells[key]), float(cells[f"{key}_std"])
    one = f"{value:.{digits}f}"
    return f"{one} ± {spread:.{digits}f}" if int(cells["seeds"]) > 1 else one


def beside_papers(rows: list[dict[str, Any]]) -> list[str]:
    """What the paper's table has, and ours beside it; no table, no lines."""
    pairs = []
    for cells in rows:
        for model in ("global", "personal"):
            key = f"{model}_accuracy"
            paper, ours = cells[f"paper_{model}"], cells[key]
            if paper and ours != "":
                gap = float(ours) - float(paper.rstrip("?"))
                ours = mean(cells, key, 2)
                pairs.append([cells["method"], model, paper, ours, f"{gap:+.2f}"])
            elif paper:
                pairs.append([cells["method"], model, paper, "no such model", ""])
    return table("method | model | paper % | ours % | difference", pairs)


def settings_of(rows: list[dict[str, Any]]) -> list[str]:
    """What was chosen for every method, and its compilation time."""
    [base] = [cells for cells in rows if cells["method"] == BASELINE]

    def shown(cells):
        return ", ".join(f"{k}={v}" for k, v in json.loads(cells["settings"]).items())

    def compilation(cells):
        own, first = (float(one["compile_seconds"]) for one in (cells, base))
        return f"{own:.1f} ({own / first:.1f})"

    return table(
        "method | settings | compilation, s (FedAvg = 1)",
        [[cells["method"], shown(cells), compilation(cells)] for cells in rows],
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy and NLL of the personal models, and the global accuracy, as points."""
    ranked = sorted(rows, key=lambda cells: float(cells["personal_accuracy"]))
    figure, axes = plt.subplots(
        1, 3, figsize=(12, 1.5 + 0.28 * len(ranked)), sharey=True
    )
    for axis, key, label in zip(
        axes,
        ("personal_accuracy", "personal_nll", "global_accuracy"),
        ("personal accuracy %", "personal NLL", "global accuracy %"),
    ):
        for place, cells in enumerate(ranked):
            if cells[key] != "":
                value, error = float(cells[key]), float(cells[f"{key}_std"])
                axis.errorbar(value, place, xerr=error, fmt="o", color="C0")
                if cells["method"] == BASELINE:
                    axis.axvline(value, color="0.7", linewidth=1, zorder=0)
        axis.set_xlabel(label)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_yticks(range(len(ranked)), [cells["method"] for cells in ranked])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table.

    Raises:
      ValueError: there is none yet.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there yet: train the methods first")
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def put_into_readme(rows: list[dict[str, str]], readme: Path = README) -> None:
    """The table, between the marks."""
    begin, end = MARKS
    text = readme.read_text()
    block = begin + "\n".join(lines_of(rows)) + "\n" + end
    found = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: block, text, flags=re.S
    )
    if found[1] != 1:
        raise ValueError(f"{readme} must have {begin.strip()} and {end.strip()} once")
    readme.write_text(found[0])
