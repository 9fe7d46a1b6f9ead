"""The start of a script: flags in, runs out, a user's mistake in one line."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import absl.app
import absl.flags
import absl.logging
import jax

from fedvi.experiment import flags
from fedvi.experiment.cluster import Cluster
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.host_options import HostOptions
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
    code 1; everything else keeps its traceback. The flags of `HostOptions` make it
    one of several processes: if another one is lost it ends in one line and exit
    code 3 (`fedvi.experiment.cluster`).
    """

    def parse_or_exit(argv):
        try:
            return flags.parse(argv)
        except absl.flags.Error as error:
            Cluster(HostOptions()).leave(2, error)

    def run(argv):
        cluster = Cluster(HostOptions())
        try:
            runs, hosts = flags.read(), flags.read_hosts()
            if not absl.flags.FLAGS["verbosity"].present:
                absl.logging.set_verbosity(absl.logging.WARNING)
            _use_cache(absl.flags.FLAGS.compilation_cache)
            cluster = Cluster(hosts, runs)
            cluster.join(absl.flags.FLAGS.devices)
            problem = _failed(main(runs))
            if problem:
                cluster.leave(1, problem)
            cluster.done()
        except absl.flags.Error as error:
            cluster.leave(2, error)
        except KeyboardInterrupt:
            line = "interrupted; --resume continues from the last checkpoint"
            cluster.leave(130, line)
        except Exception as error:
            cluster.check(error)
            # JAX leaves a note on what was raised while it traced: no user's mistake.
            if isinstance(error, ValueError) and not getattr(error, "__notes__", None):
                cluster.leave(1, error)
            cluster.give_up()
            raise

    flags.define()
    absl.app.run(run, flags_parser=parse_or_exit)


def _failed(summaries: Sequence[Mapping[str, Any]]) -> str | None:
    failed = [one["method"] for one in summaries if one["failed"]]
    if not failed:
        return None
    return (
        f"{', '.join(failed)} failed: the server's state is not finite, or no "
        "participant's upload counted in any round; a smaller learning_rate may help"
    )


def _use_cache(folder: str) -> None:
    """Turns JAX's persistent cache on, unless the user's environment already did."""
    if folder and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
