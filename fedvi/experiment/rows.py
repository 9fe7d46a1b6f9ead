"""Rows of the CSV files that a run writes as it goes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedvi.evaluation import Scores, adjusted_rand_index, per_client, summarise
from fedvi.experiment.communication import RoundBytes
from fedvi.experiment.setup import Experiment
from fedvi.federation import RoundMetrics, take
from fedvi.selection import Choice

__all__ = [
    "ABSURD_NLL",
    "MODELS",
    "by_method",
    "choice_rows",
    "client_rows",
    "evaluation_rows",
    "trouble",
]

MODELS = ("global", "personal")
# 149 log 2, 103 nats: at a larger mean NLL the probability of the true class, in the
# geometric mean, is below 2^-149, the smallest number that float32 holds.
ABSURD_NLL = 149 * float(np.log(2))
# Of the uniform predictor's log(classes), where the accuracy is no better than its
# 1/classes, a quarter of that for chance and for classes of different sizes.
_SURE, _GUESS = 10.0, 1.25


def evaluation_rows(
    experiment: Experiment,
    *,
    round_index: int,
    seeds: Sequence[int],
    measured: Iterable[str],
    metrics: RoundMetrics | None,
    scores: Mapping[str, Scores],
    clusters: np.ndarray | None,
    seconds: float | None,
    per_round: RoundBytes,
) -> list[dict[str, Any]]:
    """One row per seed.

    Figures are over the clients that take part in training, `global_...` and
    `personal_...`; novel clients, if there are any, have their own `novel_global_...`
    and `novel_personal_...`. `adjusted_rand` is there if the true clusters are known
    and the method has clusters: over the training clients that hold data. `clipped`
    is there if clients are chosen by their importance: the mean over the rounds.
    `bytes_up`, of a round, is there if participants withhold values: what was sent.

    Args:
      experiment: what is run.
      round_index: rounds done.
      seeds: the seeds.
      measured: names of the clients' metrics.
      metrics: leaves `[seeds, rounds, ...]`, numpy, of the rounds since the last row;
        None: before the first round, where nothing was.
      scores: leaves `[seeds, clients, ...]`, numpy, of the `global` models and, where
        evaluated, of the `personal` ones.
      clusters: `[seeds, clients]`, or None.
      seconds: of one round of one seed, in this block; None without one.
      per_round: bytes.
    """
    groups = {"": experiment.trained}
    if len(experiment.novel):
        groups["novel_"] = experiment.novel
    rows = []
    for index, seed in enumerate(seeds):
        row = {
            "round": round_index,
            "seed": seed,
            "split": experiment.config.evaluated_on,
            "seconds": seconds,
            **dict.fromkeys(measured),
        }
        if metrics is not None:
            block = take(metrics, index)
            counted = ~(block.empty | block.failed).all(-1)
            row |= _mean_metrics(block.metrics, counted)
        if "withheld" in row:
            sent = None if metrics is None else int(np.rint(per_round.sent_up(row)))
            row["bytes_up"] = sent
        if experiment.selection.measure is not None:
            clipped = None if metrics is None else float(block.choice.clipped.mean())
            row["clipped"] = clipped
        for group, ids in groups.items():
            own = {
                model: summarise(take(take(tree, index), ids))
                for model, tree in scores.items()
            }
            for model in MODELS:
                figures = own.get(model, dict.fromkeys(own["global"]))
                row |= {f"{group}{model}_{key}": v for key, v in figures.items()}
        if clusters is not None and experiment.data.clusters is not None:
            row["adjusted_rand"] = _agreement(experiment, clusters[index])
        rows.append(row)
    return rows


def trouble(row: Mapping[str, Any], classes: int, finite: bool = True) -> str | None:
    """What says that a seed has diverged; None: nothing does.

    NaN and infinity; a mean NLL above `ABSURD_NLL`, of any model, those without a use
    included (BPFed's global one has a few nats); or personal and global models that
    both guess, and are ten times worse than if they did not pretend to know.

    Args:
      row: of `evaluation_rows`; what was not measured is None.
      classes: that there are.
      finite: whether the server's state is.
    """
    if not finite:
        return "the server's state is not finite"
    loss = row.get("loss")
    if loss is not None and not np.isfinite(loss):
        return f"the loss is {loss}"
    for group in ("", "novel_"):
        for model in MODELS:
            nll = row.get(f"{group}{model}_nll")
            if nll is not None and not nll <= ABSURD_NLL:  # NaN too
                who = f"{group}{model}".replace("_", " ")
                return f"the NLL of the {who} model is {nll:.3g} nats"
    limit = _SURE * np.log(classes)
    if row.get("personal_nll") is not None and all(
        row[f"{model}_accuracy"] <= _GUESS * 100 / classes
        and row[f"{model}_nll"] > limit
        for model in MODELS
    ):
        return (
            f"both models guess, and the global one's NLL is {row['global_nll']:.3g} "
            f"nats, more than {_SURE:.0f} log({classes})"
        )
    return None


def by_method(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of several seeds, to be averaged, under the `method` that each names.

    Raises:
      ValueError: a method has two rows of one round and seed: they are of runs that
        differ in more than the seed.
    """
    methods: dict[str, list[Mapping[str, Any]]] = {}
    seen = set()
    for row in rows:
        method = str(row.get("method", ""))
        place = (method, row.get("round"), row.get("seed"))
        if "seed" in row and place in seen:
            raise ValueError(
                f"method={method!r} has two rows of seed {row['seed']}: give runs that "
                "differ in more than the seed a method of their own"
            )
        seen.add(place)
        methods.setdefault(method, []).append(row)
    return methods


def choice_rows(
    first_round: int, seeds: Sequence[int], metrics: RoundMetrics
) -> list[dict[str, Any]]:
    """One row per round and seed where clients are chosen by their importance.

    Args:
      first_round: number of the block's first round, counted from 1.
      seeds: the seeds.
      metrics: leaves `[seeds, rounds, ...]`, numpy.

    Returns:
      `client`, ids of the cohort, and `invalid`, of the clients that could not be
      chosen, with spaces between them; `uniform` 0 or 1; `clipped`; and `p_k`, the
      probability of client k. No rows for other selections.
    """
    if not metrics.choice:
        return []
    return [
        {
            "round": first_round + offset,
            "seed": seed,
            **_choice_row(*take((metrics.client_ids, metrics.choice), (index, offset))),
        }
        for offset in range(metrics.client_ids.shape[1])
        for index, seed in enumerate(seeds)
    ]


def client_rows(
    experiment: Experiment,
    seeds: Sequence[int],
    scores: Mapping[str, Scores] | None = None,
    clusters: np.ndarray | None = None,
    further: Sequence[Mapping[str, np.ndarray]] = (),
) -> list[dict[str, Any]]:
    """One row per seed and client: who it is, what it holds, how well it is served.

    `client` is its number in all other files, `id` its natural one, if it has one;
    `novel` is 1 if it never trains; `train_class_c` counts its training examples of
    class c. After the run: `global_accuracy` (per cent), `global_nll` (nats) and
    `global_ece` (fraction, from the client's own bins), the same of the `personal`
    model, and `cluster`. A cell is empty where there is nothing: no test data, no
    global model. `true_cluster` is there where it is known.

    Args:
      experiment: what is run.
      seeds: the seeds.
      scores: leaves `[seeds, clients, ...]` of the last evaluation's models; None: it
        is yet to come.
      clusters: `[seeds, clients]`, or None.
      further: columns, `[seeds, clients]` each.
    """
    per_seed = [
        _scored_clients(experiment, {m: take(s, i) for m, s in (scores or {}).items()})
        | ({} if clusters is None else {"cluster": clusters[i]})
        | {key: column[i] for one in further for key, column in one.items()}
        for i in range(len(seeds))
    ]
    known = _described_clients(experiment)
    return [
        {"seed": seed, **dict(zip([*known, *own], cells))}
        for seed, own in zip(seeds, per_seed)
        for cells in zip(*map(_cells, [*known.values(), *own.values()]), strict=True)
    ]


def _described_clients(experiment: Experiment) -> dict[str, Any]:
    """Columns of what is known of the clients before training."""
    data, classes = experiment.data, experiment.data.classes
    train = data.train
    clients = np.arange(len(train.size))
    sizes = np.asarray(train.size)
    real = np.arange(train.y.shape[1]) < sizes[:, None]
    labels = clients[:, None] * classes + np.asarray(train.y)
    counts = np.bincount(labels[real], minlength=clients.size * classes)
    counts = counts.reshape(clients.size, classes)
    names = data.class_names or range(classes)
    columns = {
        "client": clients,
        "id": clients if data.ids is None else data.ids,
        "novel": np.isin(clients, experiment.novel).astype(int),
        "train_size": sizes,
        "test_size": np.asarray(data.test.size),
        **{f"train_class_{name}": counts[:, c] for c, name in enumerate(names)},
    }
    return (
        columns if data.clusters is None else columns | {"true_cluster": data.clusters}
    )


def _scored_clients(
    experiment: Experiment, scores: Mapping[str, Scores]
) -> dict[str, Any]:
    """Columns of how well each client's models predict."""
    columns = {}
    for model, own in scores.items():
        exists = model != "global" or experiment.algorithm.global_model
        for key, values in per_client(own).items():
            columns[f"{model}_{key}"] = np.where(exists, values, np.nan)
    return columns


def _cells(column: Any) -> list[Any]:
    """As Python's own values, which CSV shows shortest; None where there is none."""
    values = np.asarray(column).tolist()
    return [None if value != value else value for value in values]  # NaN


def _choice_row(client_ids: np.ndarray, choice: Choice) -> dict[str, Any]:
    return {
        "client": " ".join(map(str, client_ids)),
        "clipped": _shortest(choice.clipped),
        "uniform": int(choice.uniform),
        "invalid": " ".join(map(str, np.flatnonzero(choice.invalid))),
        **{f"p_{k}": _shortest(p) for k, p in enumerate(choice.probabilities)},
    }


def _shortest(value: np.ndarray) -> float:
    """The double whose text is the shortest one of a float32."""
    return float(str(np.float32(value)))


def _agreement(experiment: Experiment, clusters: np.ndarray) -> float:
    ids = experiment.trained
    ids = ids[np.asarray(experiment.data.train.size)[ids] > 0]
    return adjusted_rand_index(experiment.data.clusters[ids], clusters[ids])


def _mean_metrics(
    metrics: Mapping[str, np.ndarray], counted
) -> dict[str, float | None]:
    """Means over the rounds that had a participant; None if none had."""
    return {
        key: float(values[counted].mean()) if counted.any() else None
        for key, values in metrics.items()
    }
