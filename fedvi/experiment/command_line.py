"""The command line: flags in, runs out, a user's mistake in one line.

One flag per field of `ExperimentConfig`, `RunOptions` and `HostOptions`, one per
option of every registered algorithm, and a few of the command line's own.
"""

import codecs
import dataclasses
import os
import re
import sys
import threading
import time
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import absl.app
import absl.logging
import jax
from absl import flags
from jax._src import distributed

from fedvi.algorithms import ALGORITHMS, options_of
from fedvi.experiment import processes, report
from fedvi.experiment.config import ExperimentConfig, HostOptions, RunOptions
from fedvi.experiment.lost_processes import Watchdog, lost_line
from fedvi.experiment.run import run_all
from fedvi.options import choices_of, kinds_of, range_of

__all__ = ["define", "parse", "read", "read_hosts", "start"]

_LOST = 3  # exit code of a process that lost another one
# Process 0 holds the coordination service: without it the others' JAX aborts before
# they can say anything.
_LINGER_SECONDS = 1.0

# Defined by absl when it parses.
_FLAGS_OF_ABSL = ("help", "helpfull", "helpshort", "helpxml", "flagfile", "undefok")

# `--help` lists the flags under the script that calls `start`.
flags.disclaim_key_flags()


def start(
    main: Callable[
        [list[tuple[ExperimentConfig, RunOptions]]], Sequence[Mapping[str, Any]]
    ] = run_all,
) -> NoReturn:
    """Runs a script: defines and parses the flags, calls `main` with the runs.

    A script of a user's own registers algorithms before (`fedvi.algorithms.register`).

    A mistake in the flags ends in one line and exit code 2; a `ValueError` of fedvi,
    or a failed run among the summaries that `main` returns, in one line and exit
    code 1; everything else keeps its traceback. The flags of `HostOptions` make it
    one of several processes: if another one is lost it ends in one line and exit
    code 3 (`fedvi.experiment.lost_processes`).
    """

    def parse_or_exit(argv):
        try:
            return parse(argv)
        except flags.Error as error:
            Ending().leave(2, error)
        except (SystemExit, BrokenPipeError):
            Ending().leave(0)  # --help, for which absl has the code of a mistake

    def run(argv):
        ending = Ending()
        try:
            runs, hosts = read(), read_hosts()
            if not flags.FLAGS["verbosity"].present:
                absl.logging.set_verbosity(absl.logging.WARNING)
            _use_cache(flags.FLAGS.compilation_cache)
            ending = Ending(runs)
            processes.join(hosts, flags.FLAGS.devices)
            if hosts.several:
                ending.watch(hosts.lost_timeout)
            problem = _failed(main(runs))
            if problem:
                ending.leave(1, problem)
            sys.stdout.flush()
            ending.done()
        except flags.Error as error:
            ending.leave(2, error)
        except KeyboardInterrupt:
            line = "interrupted; --resume continues from the last checkpoint"
            ending.leave(130, line)
        except BrokenPipeError:  # whoever read what was printed has left
            ending.leave(1)
        except Exception as error:
            ending.check(error)
            # JAX leaves a note on what was raised while it traced: no user's mistake.
            if isinstance(error, ValueError) and not getattr(error, "__notes__", None):
                ending.leave(1, error)
            ending.give_up()
            raise

    with processes.any_letter(sys.stdout), processes.any_letter(sys.stderr):
        try:
            define()
        except ValueError as error:  # an option of a user's own algorithm
            Ending().leave(2, error)
        absl.app.run(run, flags_parser=parse_or_exit)


def _use_cache(folder: str) -> None:
    """Turns JAX's persistent cache on, unless the user's environment already did."""
    if folder and not jax.config.jax_compilation_cache_dir:
        folder = os.path.expanduser(folder)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:  # JAX would say so at every program
            print(f"no compilation cache in {folder}: {error.strerror}")
            return
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


# How a process ends.


class Ending:
    """Ends this process: in one line, or, as one of several, without the others.

    Args:
      runs: what is run, to tell where a lost run can go on.
    """

    def __init__(self, runs: Sequence[tuple[ExperimentConfig, RunOptions]] = ()):
        self._runs = runs
        self._watchdog: Watchdog | None = None
        self._leaving = threading.Lock()

    def watch(self, lost_timeout: float) -> None:
        """Ends the process too if another one of several is lost from now on."""
        state = distributed.global_state
        self._watchdog = Watchdog(
            state.client,
            state.process_id,
            state.num_processes,
            lost_timeout,
            self._lose,
        )
        self._watchdog.start()

    def done(self) -> None:
        """Tells the others that this process has nothing left to do with them."""
        if self._watchdog is not None:
            self._watchdog.stop()

    def check(self, error: BaseException) -> None:
        """Ends the process if `error` comes of the loss of another one."""
        missing = self._watchdog and self._watchdog.behind(error)
        if missing is not None:
            self._lose(missing)

    def give_up(self) -> None:
        """Ends one of several processes with a traceback; alone it does nothing."""
        if self._watchdog is not None:
            traceback.print_exc()
            self.leave(1)

    def leave(self, code: int, error: Any = None) -> NoReturn:
        """Ends the process, in one line if `error` is given.

        One of several does not wait for the others, as Python's own exit would: they
        may be waiting for this one.
        """
        with self._leaving:  # the watchdog has a thread of its own
            try:
                sys.stdout.flush()  # the line comes last where both go to one file
            except BrokenPipeError:  # Python would try again, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error is not None:
                line = f"error: {' '.join(str(error).split())}"
                print(line, file=sys.stderr, flush=True)
            if self._watchdog is None:
                sys.exit(code)
            if distributed.global_state.process_id == 0:
                time.sleep(_LINGER_SECONDS)
            os._exit(code)

    def _lose(self, missing: Sequence[int]) -> NoReturn:
        count = distributed.global_state.num_processes
        self.leave(_LOST, lost_line(missing, count, self._runs))


def _failed(summaries: Sequence[Mapping[str, Any]]) -> str | None:
    failed = [
        f"{one['method']}, seed {seed}: {why}"
        for one in summaries
        for seed, why in report.failures(one).items()
    ]
    if not failed:
        return None
    return f"failed: {'; '.join(failed)}; a smaller learning_rate may help"


# Flags.


class _NumberParser(flags.ArgumentParser):
    """An int or a float, or several separated by commas; absl's own parsers leave the
    message to Python."""

    def __init__(self, kind: type, several: bool = False):
        super().__init__()
        self._kind, self._several = kind, several
        self.syntactic_help = "an integer" if kind is int else "a number"
        if several:
            numbers = "integers" if kind is int else "numbers"
            self.syntactic_help = f"{numbers} separated by commas"

    def parse(self, argument) -> Any:
        try:
            if not self._several:
                return self._kind(argument)
            parts = argument.split(",") if isinstance(argument, str) else argument
            return tuple(self._kind(part) for part in parts if part != "")
        except ValueError:
            raise ValueError(f"value should be {self.syntactic_help}") from None


class _AlgorithmsParser(flags.ArgumentParser):
    """Registered algorithms separated by commas, each with or without a selection."""

    syntactic_help = "names or name:selection separated by commas"

    def parse(self, argument) -> list[str]:
        names = argument.split(",") if isinstance(argument, str) else list(argument)
        for name in names:
            algorithm, colon, selection = name.partition(":")
            if algorithm not in ALGORITHMS:
                raise ValueError(f"{algorithm!r} is none of {', '.join(ALGORITHMS)}")
            if colon and not selection:
                raise ValueError(f"{name!r} names no selection after its colon")
        return names


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines every flag. A user's own algorithms must be registered before."""
    for config in (ExperimentConfig, RunOptions, HostOptions):
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.name not in ("algorithm", "options"):
                hint, text = hints[field.name], field.metadata["help"]
                choices = choices_of(field, hint)
                _define_one(field.name, hint, choices, field.default, text, flag_values)
    flags.DEFINE(
        _AlgorithmsParser(),
        "algorithm",
        [ExperimentConfig.algorithm],
        "One or several, run one after another on the same data and seeds, each as "
        f"NAME or NAME:SELECTION (dsvgd:ksd): {', '.join(ALGORITHMS)}.",
        flag_values,
        flags.CsvListSerializer(","),
    )
    flags.DEFINE_string(
        "name",
        None,
        "Name of the run. Default: the flag file's, or algorithm_dataset.",
        flag_values=flag_values,
    )
    flags.DEFINE_string(
        "compilation_cache",
        _default_cache(),
        "Folder that keeps compiled programs for later runs; empty: none.",
        flag_values=flag_values,
    )
    for option, takers in _algorithm_options().items():
        _define_option(option, takers, flag_values)


def parse(
    argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS
) -> list[str]:
    """Parses a command line, program name first; the flag file's stem names the run.

    Returns:
      The program's name, and nothing else.

    Raises:
      flags.Error: an unknown flag, a value that it does not take, a flag file that
        cannot be read, or an argument that is no flag.
    """
    rest = flag_values([argv[0], *_with_flag_files(argv[1:])])
    if len(rest) > 1:
        raise flags.Error(f"{rest[1]!r} is no flag: settings are given as --flag=value")
    flag_values.set_default("name", flag_values.name or _flagfile_stem(argv))
    return rest


def read(
    flag_values: flags.FlagValues = flags.FLAGS,
) -> list[tuple[ExperimentConfig, RunOptions]]:
    """The runs that parsed flags ask for: one per algorithm and selection.

    Raises:
      flags.Error: an option that no chosen algorithm takes, or one run named twice.
    """
    parts = [name.partition(":") for name in flag_values.algorithm]
    algorithms = list(dict.fromkeys(algorithm for algorithm, _, _ in parts))
    takers_of = _algorithm_options()
    given = {
        option: flag_values[option].value
        for option in takers_of
        if flag_values[option].value is not None
    }
    for option, value in given.items():
        takers = takers_of[option]
        if not any(name in takers for name in algorithms):
            raise flags.IllegalFlagValueError(
                f"flag --{option}={value}: {', '.join(algorithms)} does not take it; "
                f"{', '.join(takers)} does"
            )
    configs = []
    for algorithm, _, selection in parts:
        options = {k: v for k, v in given.items() if algorithm in takers_of[k]}
        config = _fill(
            ExperimentConfig,
            flag_values,
            algorithm=algorithm,
            options=options,
            selection=selection or flag_values.selection,
        )
        configs.append(config)
    folders = [config.method.replace(":", "_") for config in configs]
    for config, folder in zip(configs, folders):
        if folders.count(folder) > 1:
            raise flags.IllegalFlagValueError(
                f"flag --algorithm={','.join(flag_values.algorithm)}: {config.method} "
                "is named twice"
            )
    name = flag_values.name or f"{'-'.join(folders)}_{configs[0].data_name}"
    run_dir = Path(flag_values.run_dir or Path("runs") / name)
    chunk_size = flag_values.chunk_size
    if chunk_size.isdecimal():
        chunk_size = int(chunk_size)
    runs = []
    for config, folder in zip(configs, folders):
        own_dir = run_dir / folder if len(configs) > 1 else run_dir
        run_options = _fill(
            RunOptions, flag_values, run_dir=str(own_dir), chunk_size=chunk_size
        )
        runs.append((config, run_options))
    return runs


def read_hosts(flag_values: flags.FlagValues = flags.FLAGS) -> HostOptions:
    """How the processes of the runs find each other.

    Raises:
      flags.Error: flags that do not agree.
    """
    options = _fill(HostOptions, flag_values)
    try:
        options.validate(flag_values.devices)
    except ValueError as error:
        raise flags.IllegalFlagValueError(f"flag {error}") from None
    return options


def _fill(config: type, flag_values: flags.FlagValues, **given):
    """A dataclass from the flags of its fields' names."""
    names = [f.name for f in dataclasses.fields(config) if f.name not in given]
    return config(**{name: flag_values[name].value for name in names}, **given)


def _define_one(
    name: str,
    hint: Any,
    choices: Sequence[str] | None,
    default: Any,
    text: str,
    flag_values: flags.FlagValues,
) -> None:
    """Defines the flag of one field or option from its annotation and choices."""
    kinds = kinds_of(hint)
    serializer = flags.ArgumentSerializer()
    if choices is not None and all(isinstance(choice, str) for choice in choices):
        flags.DEFINE_enum(name, default, list(choices), text, flag_values=flag_values)
    elif kinds == (tuple,):
        parser = _NumberParser(typing.get_args(hint)[0], several=True)
        serializer = flags.CsvListSerializer(",")
        flags.DEFINE(parser, name, default, text, flag_values, serializer)
    elif kinds == (bool,):
        flags.DEFINE_boolean(name, default, text, flag_values=flag_values)
    elif kinds in ((int,), (float,)):
        parser = _NumberParser(kinds[0])
        flags.DEFINE(parser, name, default, text, flag_values, serializer)
    elif str in kinds:
        flags.DEFINE_string(name, default, text, flag_values=flag_values)
    else:
        raise ValueError(
            f"option {name} is annotated {hint}: use int, float, bool, str or a Literal"
        )


def _algorithm_options() -> dict[str, dict[str, dataclasses.Field]]:
    """option -> algorithm -> its field, over all registered algorithms."""
    options: dict[str, dict[str, dataclasses.Field]] = {}
    for algorithm in ALGORITHMS:
        for field in dataclasses.fields(options_of(algorithm)):
            options.setdefault(field.name, {})[algorithm] = field
    return options


def _define_option(
    option: str, takers: dict[str, dataclasses.Field], flag_values: flags.FlagValues
) -> None:
    """One flag for all algorithms that take an option of this name."""
    if option in flag_values or option in _FLAGS_OF_ABSL:
        raise ValueError(
            f"option {option} of {', '.join(takers)}: the command line has a flag of "
            "that name already; give the option another one"
        )
    hints = [typing.get_type_hints(options_of(name))[option] for name in takers]
    choices = [choices_of(field, hint) for field, hint in zip(takers.values(), hints)]
    if None not in choices:  # those of any of them
        choices, hints = [[*dict.fromkeys(sum(choices, ()))]], hints[:1]
    if any(hint != hints[0] for hint in hints):
        raise ValueError(
            f"option {option} is annotated differently in {', '.join(takers)}: it can "
            "be one flag only if they agree"
        )
    # Algorithms that mean the same by it share a sentence.
    algorithms_of: dict[str, list[str]] = {}
    for name, field in takers.items():
        facts = [str(field.default), range_of(field), field.metadata["source"]]
        meaning = field.metadata["help"].partition(". ")[0].rstrip(".")
        default = f"{name} ({'; '.join(filter(None, facts))})"
        algorithms_of.setdefault(meaning, []).append(default)
    text = " ".join(
        f"Option of {', '.join(names)}: {meaning}."
        for meaning, names in algorithms_of.items()
    )
    _define_one(option, hints[0], choices[0], None, text, flag_values)


def _flagfile_stem(argv: Sequence[str]) -> str | None:
    """The stem of the last `--flagfile` of a command line; absl does not keep it."""
    stem = None
    for argument, following in zip(argv, [*argv[1:], ""]):
        option, _, value = argument.partition("=")
        if option in ("--flagfile", "-flagfile"):
            stem = Path(value or following).stem
    return stem


def _with_flag_files(
    arguments: Sequence[str], above: tuple[str, ...] = ()
) -> list[str]:
    """Puts what flag files say in the place of each `--flagfile`.

    absl would read them in the encoding of the terminal, and take a comment behind a
    value for a part of it.
    """
    found = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, name = argument.partition("=")
        if option not in ("--flagfile", "-flagfile"):
            found.append(argument)
            continue
        name = os.path.expanduser(name if equals else next(rest, ""))
        if name in above:
            raise flags.Error(f"flag --flagfile={name}: it leads back to itself")
        found += _with_flag_files(_flag_file_lines(name), (*above, name))
    return found


def _flag_file_lines(name: str) -> list[str]:
    """The flags of a file in UTF-8, or in UTF-16 with its mark, without comments."""
    try:
        raw = Path(name).read_bytes()
        wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = raw.decode("utf-16" if wide else "utf-8-sig")
        if "\0" in text:
            raise ValueError("it has null characters")
    except OSError as error:
        raise flags.CantOpenFlagFileError(
            f"flag --flagfile={name}: cannot be read ({error.strerror})"
        ) from None
    except ValueError as error:
        raise flags.Error(
            f"flag --flagfile={name}: is not text in UTF-8 ({error}): save it so"
        ) from None
    lines = [re.sub(r"\s#.*", "", f" {line}").strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("//")]


def _default_cache() -> str:
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user id without a home
        return ""
    return str(Path(home) / "fedvi" / "xla")
