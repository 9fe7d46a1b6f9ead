"""Settings that must agree with one another."""

import math

from fedvi import checks, codecs

__all__ = ["check_agreement", "check_novel", "participants"]


def check_agreement(config) -> None:
    """Checks what the bounds of single fields of an `ExperimentConfig` cannot say.

    Raises:
      ValueError: names the argument, its value and what would be right.
    """
    if config.clients == 0 and config.partition != "by_group":
        raise ValueError(
            "clients=0 must be at least 1; only partition='by_group' takes 0"
        )
    if config.clients:
        check_novel(config.clients, config.novel_clients)
    codecs.named(config.codec)
    checks.one_of("dtype", config.dtype, ("float32", "bfloat16"))
    if config.second_data_file is not None and config.second_dataset is None:
        raise ValueError(
            f"second_data_file={config.second_data_file!r} needs a name for its "
            "data: give second_dataset"
        )
    if config.second_dataset is not None and config.cluster_transform != "none":
        raise ValueError(
            f"cluster_transform={config.cluster_transform!r} and second_dataset="
            f"{config.second_dataset!r} exclude each other: give one of them"
        )
    if not all(isinstance(width, int) and width >= 1 for width in config.hidden):
        raise ValueError(
            f"hidden={list(config.hidden)} must be widths of at least 1, or none"
        )
    if list(config.lr_decay_at) != sorted(set(config.lr_decay_at)) or not all(
        0 < fraction < 1 for fraction in config.lr_decay_at
    ):
        raise ValueError(
            f"lr_decay_at={list(config.lr_decay_at)} must be rising fractions of the "
            "rounds, between 0 and 1"
        )
    if config.personal_every % config.eval_every:
        raise ValueError(
            f"personal_every={config.personal_every} must be a multiple of "
            f"eval_every={config.eval_every}, or 0: only at the end"
        )
    _check_end(config)


def check_novel(clients: int, novel: int) -> None:
    """Raises `ValueError` if of `clients` clients `novel` ones leave none to train."""
    if novel >= clients:
        raise ValueError(
            f"novel_clients={novel} of clients={clients} leaves nobody to train: give "
            f"at most {clients - 1}"
        )


def participants(clients: int, fraction: float, novel: int = 0) -> int:
    """⌊N·f⌋, clients in a round.

    Args:
      clients: number of clients.
      fraction: f.
      novel: clients that never take part, no part of N.

    Raises:
      ValueError: that is less than one client, or no client is left to train.
    """
    check_novel(clients, novel)
    trained = clients - novel
    # 100 · 0.29 is 28.999999999999996 in floating point.
    count = math.floor(trained * fraction + 1e-9)
    if count < 1:
        less = f" less novel_clients={novel}" if novel else ""
        raise ValueError(
            f"fraction={fraction} of clients={clients}{less} is less than one "
            f"participant: give a fraction of at least {1 / trained:.4g}, or more "
            "clients"
        )
    return count


def _check_end(config) -> None:
    """Checks what is asked of the end of a run."""
    if config.final_rounds > config.rounds:
        raise ValueError(
            f"final_rounds={config.final_rounds} must be at most rounds={config.rounds}"
        )
    if config.window > config.rounds:
        raise ValueError(
            f"window={config.window} must be at most rounds={config.rounds}: give a "
            "smaller window, or 0 for the last round's figures"
        )
    if config.window and config.final_rounds:
        raise ValueError(
            f"window={config.window} and final_rounds={config.final_rounds} exclude "
            "each other: both are a mean over the last rounds; give one of them"
        )
    curve = list(config.finetune_curve)
    if curve != sorted(set(curve)) or any(
        not isinstance(epochs, int) or epochs < 0 for epochs in curve
    ):
        raise ValueError(
            f"finetune_curve={curve} must be rising numbers of epochs, at least 0"
        )
    if config.ood_data_file is not None and config.ood_dataset is None:
        raise ValueError(
            f"ood_data_file={config.ood_data_file!r} needs a name for its data: "
            "give ood_dataset"
        )
