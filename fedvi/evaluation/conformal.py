"""Prediction sets that hold the true class with a chosen probability, over clients.

Split conformal prediction: every class of an example has a score, small where the
model thinks it likely. From n calibration examples that nobody trained on comes a
threshold, the k-th smallest score of their true classes with k = ⌈(n + 1)(1 - α)⌉, and
an example's set is all classes whose score does not exceed it. If calibration and test
examples are exchangeable, the set holds the true class with probability at least 1 - α,
whatever the model (docs/calibration.md says when they are).

Everything here is NumPy, in float64 on the host.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import betainc, roots_legendre

from fedvi import checks

__all__ = [
    "SCORES",
    "PredictionSets",
    "aps",
    "client_thresholds",
    "conformal_rank",
    "histogram_threshold",
    "lac",
    "of_labels",
    "prediction_sets",
    "quantile_of_quantiles",
    "quantile_of_quantiles_orders",
    "raps",
    "score_edges",
    "score_histogram",
]


_MOST_CLIENTS = 256  # whose orders are chosen from: the time is quadratic in them

# Scores: `[..., classes]` log-probabilities -> `[..., classes]`.


def lac(log_probs: np.ndarray, uniforms: np.ndarray | None = None) -> np.ndarray:
    """1 - p(y|x), of the least ambiguous sets (Sadinle et al. 2019).

    The smallest sets on average, some of them empty.

    Args:
      log_probs: `[..., classes]`.
      uniforms: not used.
    """
    del uniforms
    return -np.expm1(np.asarray(log_probs, np.float64))


def aps(log_probs: np.ndarray, uniforms: np.ndarray | None = None) -> np.ndarray:
    """Adaptive prediction sets (Romano et al. 2020): the classes' cumulative mass.

    `Σ_{c more likely than y} p(c|x) + u p(y|x)`, classes of one probability in order of
    their number.

    Args:
      log_probs: `[..., classes]`.
      uniforms: `[...]` uniform in [0, 1], one u an example, as in the paper. Default 1:
        deterministic; then the true class of a sure model has a score near 1, as nearly
        all others have, and the sets of one that is right more often than 1 - α hold
        nearly all classes.
    """
    return raps(log_probs, uniforms, penalty=0.0)


def raps(
    log_probs: np.ndarray,
    uniforms: np.ndarray | None = None,
    *,
    penalty: float = 0.01,
    rank: int = 5,
) -> np.ndarray:
    """Regularised adaptive prediction sets (Angelopoulos et al. 2021).

    That of `aps` + λ max(0, o(y) - k), o(y) from 1 being the rank of class y by its
    probability: classes far down the list come in late, and sets are smaller.

    Args:
      log_probs: `[..., classes]`.
      uniforms: as of `aps`.
      penalty: λ; 0.01 and `rank` 5 are the authors' fixed choice for ImageNet.
      rank: k.
    """
    p = np.exp(np.asarray(log_probs, np.float64))
    order = np.argsort(-p, axis=-1, kind="stable")
    sorted_p = np.take_along_axis(p, order, -1)
    # Rounding may lead beyond 1.
    mass = np.minimum(np.cumsum(sorted_p, axis=-1), 1.0)
    if uniforms is not None:
        mass = mass - (1 - np.asarray(uniforms)[..., None]) * sorted_p
    mass = mass + penalty * np.maximum(np.arange(1, p.shape[-1] + 1) - rank, 0)
    scores = np.empty_like(p)
    np.put_along_axis(scores, order, mass, -1)
    return scores


SCORES: dict[str, Callable[..., np.ndarray]] = {"lac": lac, "aps": aps, "raps": raps}
"""By name, each of `(log_probs, uniforms=None)`."""


def of_labels(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The scores `[...]` of the true classes, from `[..., classes]`; infinite, which no
    set holds, where a prediction is NaN."""
    own = np.take_along_axis(scores, np.asarray(labels)[..., None], -1)[..., 0]
    return np.where(np.isnan(own), np.inf, own)


# Thresholds.


def conformal_rank(n: int | np.ndarray, level: float, extra: int = 1) -> np.ndarray:
    """k = ⌈(n + extra)(1 - α)⌉: the threshold is the k-th smallest of n scores, and
    infinite for k > n, which with `extra` 1 means n < 1/α - 1.

    Args:
      n: numbers of scores.
      level: α, between 0 and 1.
      extra: 1 for examples that are all exchangeable. With the number K of the clients
        that they come from, those of each client need be exchangeable only among
        themselves, and the test example to be of client i with probability
        (n_i + 1) / (n + K) (partial exchangeability, Lu et al. 2023).
    """
    checks.open_unit("level", level)
    # ⌊·⌋ of what is whole but for rounding, such as 0.3 · 10, must not lose one.
    return n + extra - np.floor((n + extra) * level + 1e-9).astype(int)


def client_thresholds(scores: np.ndarray, mask: np.ndarray, level: float) -> np.ndarray:
    """Each client's own threshold, `[clients]`; infinite for those of too few examples.

    Args:
      scores: `[clients, capacity]`, of true classes.
      mask: `[clients, capacity]` bool, True for real examples.
      level: α.
    """
    scores, mask = np.asarray(scores), np.asarray(mask)
    n = mask.sum(axis=-1)
    rank = conformal_rank(n, level)
    inside = np.sort(np.where(mask, scores, np.inf), axis=-1)
    found = np.take_along_axis(
        inside, np.clip(rank - 1, 0, mask.shape[-1] - 1)[:, None], -1
    )
    return np.where(rank <= n, found[:, 0], np.inf)


def score_edges(largest: float, bins: int = 1000) -> np.ndarray:
    """Right edges `[bins + 1]` of a histogram of scores in [0, largest].

    Evenly spaced in logit(score / largest), so that both ends are resolved to 10⁻⁷,
    where sure models have most scores of LAC. The last edge is infinite.
    """
    checks.whole("bins", bins, least=2)
    inner = 1 / (1 + np.exp(-np.linspace(-16.0, 16.0, bins - 1)))
    return largest * np.concatenate([inner, [1.0, np.inf]])


def score_histogram(
    scores: np.ndarray, mask: np.ndarray, edges: np.ndarray
) -> np.ndarray:
    """What each client uploads: `[clients, bins]` counts of its scores in (l, r]."""
    bins, mask = len(edges), np.asarray(mask)
    index = np.searchsorted(edges, scores, side="left").clip(max=bins - 1)
    return np.stack(
        [np.bincount(i[m], minlength=bins) for i, m in zip(index, mask, strict=True)]
    )


def histogram_threshold(
    counts: np.ndarray, edges: np.ndarray, level: float, extra: int = 1
) -> float:
    """The threshold of all clients, from the sum `[bins]` of their histograms.

    It is the right edge of the bin of the k-th smallest score, so never below the exact
    one: what binning costs is set size, not coverage. Infinite for too few examples.

    Args:
      counts: `[bins]`.
      edges: of `score_edges`.
      level: α.
      extra: as of `conformal_rank`.
    """
    below = np.cumsum(counts)
    rank = conformal_rank(below[-1], level, extra)
    return float(edges[np.searchsorted(below, rank)]) if rank <= below[-1] else math.inf


def quantile_of_quantiles(scores: np.ndarray, mask: np.ndarray, level: float) -> float:
    """The k-th smallest of the clients' ℓ_i-th smallest scores (FedCP-QQ).

    One number a client in one upload (Humbert et al. 2023). Infinite where no order
    reaches 1 - α. Of more than 256 clients with examples as many are asked, evenly
    spaced by id: any fixed choice of clients keeps the coverage.

    Args:
      scores: `[clients, capacity]`, of true classes.
      mask: `[clients, capacity]` bool, True for real examples; clients without any send
        nothing.
      level: α.
    """
    scores, mask = np.asarray(scores), np.asarray(mask)
    held = np.flatnonzero(mask.any(axis=-1))
    if len(held) > _MOST_CLIENTS:
        held = held[np.linspace(0, len(held) - 1, _MOST_CLIENTS).astype(int)]
    orders = quantile_of_quantiles_orders(tuple(mask[held].sum(-1).tolist()), level)
    if orders is None:
        return math.inf
    ranks, order, _ = orders
    inside = np.sort(np.where(mask, scores, np.inf)[held], axis=-1)
    sent = np.take_along_axis(inside, np.array(ranks)[:, None] - 1, -1)
    return float(np.sort(sent[:, 0])[order - 1])


@functools.lru_cache(maxsize=64)
def quantile_of_quantiles_orders(
    sizes: Sequence[int], level: float
) -> tuple[tuple[int, ...], int, float] | None:
    """Which order statistics keep the coverage, with the least of it to spare.

    The paper takes the pair (ℓ, k) of the smallest coverage M_{ℓ,k} that is at least
    1 - α, all clients holding n scores. Here a client of n_i sends its
    ℓ_i = ⌈(n_i + 1) q⌉-th smallest, for nine levels q within a standard deviation of a
    client's own quantile, √(α(1 - α) / n), around 1 - α: k is then near the median of
    the clients. With k near 1 or their number a pair may be as close to 1 - α on
    average, and its threshold varies twice as much.

    Args:
      sizes: n_i of the clients, each at least 1.
      level: α.

    Returns:
      (ℓ_i of every client, k from 1, the coverage), or None: no order reaches 1 - α.
    """
    checks.open_unit("level", level)
    if not sizes:
        return None
    n, best = np.array(sizes, int), None
    around = math.sqrt(level * (1 - level) / n.mean())
    levels = 1 - level + around * np.linspace(-1.0, 1.0, 9)
    candidates = [np.ceil((n + 1) * q - 1e-9).clip(1, n).astype(int) for q in levels]
    for ranks in {tuple(one.tolist()): one for one in [*candidates, n]}.values():
        if best is not None and (ranks == n).all():
            break  # the largest scores are the last resort
        coverage = _coverage_of_orders(n, ranks)
        enough = coverage >= 1 - level - 1e-12
        if enough.any() and (best is None or coverage[enough].min() < best[2]):
            order = int(np.argmax(enough))  # it rises with k
            best = tuple(ranks.tolist()), order + 1, float(coverage[order])
    return best


def _coverage_of_orders(n: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """`[clients]` coverage M_{ℓ,k} of k = 1, 2, ... for scores without ties.

    Scores are uniform without loss of generality, and the ℓ-th smallest of n is at most
    t with probability I_t(ℓ, n - ℓ + 1). The k-th smallest of the clients' is so if k
    of them are, a Poisson binomial tail, and M = E[k-th smallest] = 1 - ∫ P(≤ t) dt.
    """
    # Enough points for the steps of width 1 / √(Σ n) that the tails are.
    nodes, weights = roots_legendre(32 + math.ceil(3 * math.sqrt(n.sum())))
    nodes, weights = (nodes + 1) / 2, weights / 2
    sent = betainc(ranks, n - ranks + 1, nodes[:, None])  # [nodes, clients]
    clients = len(n)
    number = np.zeros((len(nodes), clients + 1))  # P(that many are at most t)
    number[:, 0] = 1.0
    for i, p in enumerate(sent.T):
        p = p[:, None]
        number[:, 1 : i + 2] = number[:, 1 : i + 2] * (1 - p) + number[:, : i + 1] * p
        number[:, :1] *= 1 - p
    at_least = np.cumsum(number[:, ::-1], axis=1)[:, ::-1][:, 1:]
    return 1 - weights @ at_least


# Sets.


class PredictionSets(NamedTuple):
    """Sums over each client's examples, float64 `[clients]`."""

    count: np.ndarray  # examples
    covered: np.ndarray  # sets that hold the true class
    size: np.ndarray  # classes in the sets

    def summarise(self) -> dict[str, float]:
        """Figures over the clients that have examples.

        Returns:
          `coverage` and `set_size`: means over clients of the mean over their examples;
          `coverage_micro`: pooled over examples, what a global threshold is for;
          `worst_client`: the smallest coverage of a client. NaN without any example.
        """
        count, covered, size = (leaf[self.count > 0] for leaf in self)
        if not count.size:
            keys = ("coverage", "set_size", "coverage_micro", "worst_client")
            return dict.fromkeys(keys, math.nan)
        return {
            "coverage": float(np.mean(covered / count)),
            "set_size": float(np.mean(size / count)),
            "coverage_micro": float(covered.sum() / count.sum()),
            "worst_client": float(np.min(covered / count)),
        }


def prediction_sets(
    scores: np.ndarray, labels: np.ndarray, mask: np.ndarray, thresholds: np.ndarray
) -> PredictionSets:
    """Counts what sets {classes with score <= threshold} hold; a NaN is in none.

    Args:
      scores: `[clients, capacity, classes]`.
      labels: `[clients, capacity]` int.
      mask: `[clients, capacity]` bool, True for real examples.
      thresholds: `[clients]`, or one of all.
    """
    mask, thresholds = np.asarray(mask), np.reshape(thresholds, (-1, 1, 1))
    inside = (np.asarray(scores) <= thresholds) & mask[..., None]
    covered = np.take_along_axis(inside, np.asarray(labels)[..., None], -1)[..., 0]
    return PredictionSets(
        count=mask.sum(-1).astype(float),
        covered=covered.sum(-1).astype(float),
        size=inside.sum((-1, -2)).astype(float),
    )
