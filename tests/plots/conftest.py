import sys
import types

import numpy as np
import pytest

from fedvi.evaluation import Scores


def make_scores(seeds, clients, seed=0, bins=15):
    """Of 20 test examples a client, in two bins; the last client has none."""
    rng = np.random.default_rng(seed)
    shape = (seeds, clients)
    count = np.full(shape, 20.0)
    count[:, -1] = 0.0
    correct = np.minimum(rng.integers(12, 20, shape), count)
    bin_count, bin_correct, bin_confidence = np.zeros((3, *shape, bins))
    bin_count[..., -1] = 0.7 * count
    bin_count[..., 8] = 0.3 * count
    bin_correct[..., -1] = np.minimum(correct, bin_count[..., -1])
    bin_correct[..., 8] = correct - bin_correct[..., -1]
    bin_confidence[..., -1] = 0.95 * bin_count[..., -1]
    bin_confidence[..., 8] = 0.55 * bin_count[..., 8]
    nll = count * rng.uniform(0.1, 0.5, shape)
    rest = [np.zeros(shape)] * 3
    bins_of = bin_count, bin_correct, bin_confidence
    return Scores(count, correct, nll, *rest, *bins_of, np.zeros(shape))


@pytest.fixture
def make_run(tmp_path):
    """What `load_run` returns of a finished run, as far as pictures look at it."""

    def make(
        method="fedavg",
        *,
        curves=None,
        seeds=2,
        clients=6,
        novel=(),
        failed=(),
        first_seed=0,
        global_model=True,
        **settings,
    ):
        """`curves` is column to values of one seed: those of seed s are s larger."""
        per_seed = [
            {
                "seed": first_seed + s,
                "failed": s in failed,
                "clusters": None,
                "global": {"ece": 0.1 * (s + 1)},
                "personal": {"ece": 0.2},
            }
            for s in range(seeds)
        ]
        curves = {"global_accuracy": [50.0, 60.0, 70.0]} if curves is None else curves
        rounds = range(max(map(len, curves.values()), default=0))
        rows = [
            {"round": 5 * r, "seed": one["seed"], "split": "test"}
            | {
                key: None if values[r] is None else values[r] + s * ("_std" not in key)
                for key, values in curves.items()
            }
            for r in rounds
            for s, one in enumerate(per_seed)
        ]
        summary = {
            "method": method,
            "dataset": "digits",
            "evaluated_on": "test",
            "failed": bool(failed),
            "global_model": global_model,
            "seeds": [one["seed"] for one in per_seed],
            "per_seed": per_seed,
            "clients": clients,
            "classes": 10,
            "novel_clients": list(novel),
            "finetune_curve": None,
            "config": {"options": settings, "seed": first_seed, "seeds": seeds},
        }
        models = {m: make_scores(seeds, clients, i) for i, m in enumerate("ab")}
        return types.SimpleNamespace(
            folder=tmp_path / f"{method}{first_seed}",
            config=types.SimpleNamespace(ood_name="digits 8, 9"),
            summary=summary,
            evaluations=rows,
            scores={"global": models["a"], "personal": models["b"]},
            evaluation={},
        )

    return make


@pytest.fixture
def no_matplotlib(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fedvi.plots.figure", raising=False)


@pytest.fixture
def legend_texts():
    return lambda figure: [text.get_text() for text in figure.legends[0].get_texts()]
