"""Intervals for figures over clients: how much they hang on which clients there are."""

import numpy as np

from fedvi import checks
from fedvi.evaluation.metrics import Scores

__all__ = ["bootstrap_intervals"]

_AT_ONCE = 10**7  # numbers of resampled clients in memory


def bootstrap_intervals(
    scores: Scores, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> dict[str, list[float]]:
    """Percentile bootstrap over clients (Efron 1979) of the headline figures.

    Clients are drawn with replacement, as many as there are, with all their examples;
    several runs get the same clients, and their figures are averaged. It is the spread
    over clients, neither that over seeds nor that of a client's examples. ECE of few
    examples is biased upwards, and its interval more so.

    Args:
      scores: leaves `[clients, ...]`, or `[runs, clients, ...]`.
      level: of the interval.
      draws: B.
      seed: of the draws.

    Returns:
      `accuracy` (per cent) and `nll` (nats), macro, and `ece`, of the pooled bins, as
      in `summarise`: [lower, upper] each.

    Raises:
      ValueError: no client has a test example; `level` outside (0, 1), `draws` below 1.
    """
    checks.open_unit("level", level)
    checks.whole("draws", draws)
    scores = Scores(*(np.asarray(leaf, np.float64) for leaf in scores))
    if scores.count.ndim == 1:
        scores = Scores(*(leaf[None] for leaf in scores))
    held = (scores.count > 0).all(axis=0)
    if not held.any():
        raise ValueError(
            f"none of the {held.size} clients in scores has a test example: nothing to "
            "resample; give at least one client test data"
        )
    scores = Scores(*(leaf[:, held] for leaf in scores))
    clients = int(held.sum())
    rng, left, parts = np.random.default_rng(seed), draws, []
    while left:
        now = min(left, max(1, _AT_ONCE // clients))
        # How often each client is drawn.
        times = rng.multinomial(clients, np.full(clients, 1 / clients), now)
        parts.append(_figures(scores, times.astype(np.float64)))
        left -= now
    ends = [50 * (1 - level), 50 * (1 + level)]
    return {
        name: np.percentile(np.concatenate([p[name] for p in parts]), ends).tolist()
        for name in parts[0]
    }


def _figures(scores: Scores, times: np.ndarray) -> dict[str, np.ndarray]:
    """`[draws]` each, means over the runs; `times` `[draws, clients]`."""
    clients = times.shape[1]
    gaps = np.abs(times @ (scores.bin_correct - scores.bin_confidence)).sum(-1)
    figures = {
        "accuracy": 100 * (times @ (scores.correct / scores.count).T).T / clients,
        "nll": (times @ (scores.nll / scores.count).T).T / clients,
        "ece": gaps / (times @ scores.count.T).T,
    }
    return {name: values.mean(axis=0) for name, values in figures.items()}
