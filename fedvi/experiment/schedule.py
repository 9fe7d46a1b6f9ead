"""When a run is evaluated: every `eval_every` rounds and after each of the last."""

from collections.abc import Iterator

from fedvi.experiment.config import ExperimentConfig

__all__ = ["blocks", "in_window", "is_final", "personal_too"]


def blocks(config: ExperimentConfig, done: int = 0) -> Iterator[int]:
    """Numbers of rounds between the evaluations after round `done`, in order.

    The rounds of evaluations do not depend on `done`, so a resumed run has those of a
    straight one. There are at most three different numbers.
    """
    while done < config.rounds:
        end = min(done - done % config.eval_every + config.eval_every, config.rounds)
        if config.final_rounds:
            first_final = config.rounds - config.final_rounds + 1
            end = min(end, max(done + 1, first_final))
        yield end - done
        done = end


def is_final(config: ExperimentConfig, round: int) -> bool:
    """Whether a round, counted from 1, is one of the last `final_rounds`."""
    return round > config.rounds - config.final_rounds


def in_window(config: ExperimentConfig, round: int) -> bool:
    """Whether a round, counted from 1, is one of the last `window`."""
    return round > config.rounds - config.window


def personal_too(config: ExperimentConfig, round: int) -> bool:
    """Whether the evaluation after a round includes the personalised models."""
    every = config.personal_every
    regular = every > 0 and round % every == 0
    return regular or is_final(config, round) or round == config.rounds
