"""The start of a script: flags in, runs out, a user's mistake in one line."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import absl.app
import absl.flags
import absl.logging
import jax

from fedvi.experiment import flags
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.run_options import RunOptions

__all__ = ["start"]

# `--help` lists the flags under the script that calls `start`.
absl.flags.disclaim_key_flags()


def start(
    main: Callable[
        [list[tuple[ExperimentConfig, RunOptions]]], Sequence[Mapping[str, Any]]
    ],
) -> NoReturn:
    """Runs a script: defines and parses the flags, calls `main` with the runs.

    A mistake in the flags ends in one line and exit code 2; a `ValueError` of fedvi,
    or a failed run among the summaries that `main` returns, in one line and exit
    code 1; everything else keeps its traceback.
    """

    def parse_or_exit(argv):
        try:
            return flags.parse(argv)
        except absl.flags.Error as error:
            _exit(error, 2)

    def run(argv):
        try:
            runs = flags.read()
            if not absl.flags.FLAGS["verbosity"].present:
                absl.logging.set_verbosity(absl.logging.WARNING)
            _use_cache(absl.flags.FLAGS.compilation_cache)
            _check(main(runs))
        except absl.flags.Error as error:
            _exit(error, 2)
        except ValueError as error:
            # JAX leaves a note on what was raised while it traced: no user's mistake.
            if getattr(error, "__notes__", None):
                raise
            _exit(error, 1)
        except KeyboardInterrupt:
            _exit("interrupted; --resume continues from the last checkpoint", 130)

    flags.define()
    absl.app.run(run, flags_parser=parse_or_exit)


def _check(summaries: Sequence[Mapping[str, Any]]) -> None:
    failed = [one["method"] for one in summaries if one["failed"]]
    if failed:
        _exit(
            f"{', '.join(failed)} failed: the server's state is not finite, or no "
            "participant's upload counted in any round; a smaller learning_rate may "
            "help",
            1,
        )


def _exit(error: Any, code: int) -> NoReturn:
    sys.stdout.flush()  # the line comes last where both streams go to one file
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(code)


def _use_cache(folder: str) -> None:
    """Turns JAX's persistent cache on, unless the user's environment already did."""
    if folder and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
