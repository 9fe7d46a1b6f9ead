"""The command line: flags in, runs out, a user's mistake in one line.

One flag per field of `ExperimentConfig`, `RunOptions` and `HostOptions`, one per
option of every registered algorithm and of those of a user's own that the command line
names, and a few of the command line's own.
"""

import dataclasses
import os
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import absl.app
import absl.logging
import jax
from absl import flags

from fedvi import names
from fedvi.algorithms import ALGORITHMS, find, is_registered, options_of
from fedvi.experiment import flag_files, flag_help, processes, report
from fedvi.experiment.config import (
    CRITERIA,
    ExperimentConfig,
    HostOptions,
    RunOptions,
)
from fedvi.experiment.ending import Ending
from fedvi.experiment.flag_kinds import define_one, several
from fedvi.experiment.run import run_all
from fedvi.experiment.sweep import FIXED, sweep_all
from fedvi.options import check_one, choices_of, range_of, text_of
from fedvi.selection import RULES

__all__ = [
    "define",
    "help_text",
    "parse",
    "parse_known",
    "read",
    "read_hosts",
    "read_sweep",
    "start",
]

# Defined by absl when it parses.
_FLAGS_OF_ABSL = ("help", "helpfull", "helpshort", "helpxml", "flagfile", "undefok")

# `--helpfull` lists the flags under the script that calls `start`.
flags.disclaim_key_flags()


def start(
    main: Callable[
        [list[tuple[ExperimentConfig, RunOptions]]], Sequence[Mapping[str, Any]]
    ] = run_all,
    *,
    adjust: Callable[[ExperimentConfig], ExperimentConfig] = lambda config: config,
    argv: Sequence[str] | None = None,
    title: str | None = None,
    **defaults: Any,
) -> NoReturn:
    """Runs a script: defines and parses the flags, calls `main` with the runs.

    With `--sweep` it calls `fedvi.experiment.sweep_all` with them instead. A script of
    a user's own registers algorithms before (`fedvi.algorithms.register`).

    A mistake in the flags ends in one line and exit code 2; a `ValueError` of fedvi,
    or a failed run among the summaries that `main` returns, in one line and exit
    code 1; everything else keeps its traceback. The flags of `HostOptions` make it
    one of several processes: if another one is lost it ends in one line and exit
    code 3 (`fedvi.experiment.lost_processes`).

    Args:
      main: `(runs) -> summaries`.
      adjust: makes of every run's configuration what is run.
      argv: the command line, program name first; default: this process's.
      title: stands above the flags in `--help`; default: the script's docstring.
      **defaults: of flags, for command lines without a flag file, which means the same
        whoever reads it; but for `algorithm`, which is always the default.
    """
    argv = sys.argv if argv is None else argv

    def run(_):
        ending = Ending()
        try:
            runs, hosts, grid = read(), read_hosts(), read_sweep()
            runs = [(adjust(config), options) for config, options in runs]
            if not flags.FLAGS["verbosity"].present:
                absl.logging.set_verbosity(absl.logging.WARNING)
            _use_cache(flags.FLAGS.compilation_cache)
            ending = Ending(runs)
            processes.join(hosts, flags.FLAGS.devices)
            if hosts.several:
                ending.watch(hosts.lost_timeout)
            if grid:
                sweeps = sweep_all(runs, grid, choose_by=flags.FLAGS.choose_by)
                summaries = [one for found in sweeps for one in found.outcome]
            else:
                summaries = main(runs)
            if problem := _failed(summaries):
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
            define(flags.FLAGS, argv[1:], **defaults)
        except (flags.Error, ValueError) as error:  # of a user's own algorithm too
            Ending().leave(2, error)
        absl.app.run(run, argv, flags_parser=partial(_parse_or_exit, title=title))


def _parse_or_exit(argv: Sequence[str], title: str | None) -> list[str]:
    """`parse` as a script does it: what it raises, and help, end the process."""
    try:
        if flag_help.ASKING & set(argv):
            parse([one for one in argv if one not in flag_help.ASKING])
            script = sys.modules["__main__"].__doc__ or f"{argv[0]} --flag=value"
            print(help_text(flags.FLAGS, title or script), flush=True)
            Ending().leave(0)
        return parse(argv)
    except flags.Error as error:
        Ending().leave(2, error)
    except (SystemExit, BrokenPipeError):
        Ending().leave(0)  # --helpfull, for which absl has the code of a mistake


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


class _AlgorithmsParser(flags.ArgumentParser):
    """Registered algorithms separated by commas, each with or without a selection."""

    syntactic_help = "names or name:selection separated by commas"

    def parse(self, argument) -> list[str]:
        given = argument.split(",") if isinstance(argument, str) else list(argument)
        for one in given:
            algorithm, _ = _split(one)
            if one.endswith(":"):
                raise ValueError(f"{one!r} names nothing after its colon")
            find(algorithm)
        return given


def _split(name: str) -> tuple[str, str]:
    """Algorithm and selection of `NAME`, `NAME:SELECTION`, `package.module:builder` or
    `package.module:builder:SELECTION`; what is registered goes before a module."""
    first, *rest = name.split(":")
    if rest and not is_registered(first):
        first = f"{first}:{rest.pop(0)}"
    return first, ":".join(rest)


def _named_algorithms(arguments: Sequence[str]) -> list[str]:
    """The algorithms of a command line that is not parsed yet."""
    arguments = flag_files.expanded(arguments)
    found = []
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        option, equals, value = argument.partition("=")
        if option in ("--algorithm", "-algorithm"):
            found += (value if equals else following).split(",")
    return [_split(one)[0] for one in found]


def define(
    flag_values: flags.FlagValues = flags.FLAGS,
    arguments: Sequence[str] = (),
    **defaults: Any,
) -> None:
    """Defines every flag.

    Args:
      flag_values: where.
      arguments: the command line without the program's name, for the algorithms of a
        user's own, `package.module:builder`, whose options are flags too. Registered
        ones must be so before.
      **defaults: of flags, as of `start`.

    Raises:
      ValueError: an option that cannot be a flag, an algorithm that is not there, or a
        default of no flag.
      flags.Error: a flag file that cannot be read, or a default that a flag refuses.
    """
    for config in (ExperimentConfig, RunOptions, HostOptions):
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.name not in ("algorithm", "options"):
                hint = hints[field.name]
                define_one(
                    field.name,
                    hint,
                    choices_of(field, hint),
                    field.default,
                    text_of(field, hint),
                    flag_values,
                    field.metadata["importable"],
                )
    _define_own(flag_values)
    default = defaults.get("algorithm", "").split(",")
    named = [*(_split(one)[0] for one in default), *_named_algorithms(arguments)]
    for option, takers in _algorithm_options(filter(names.is_path, named)).items():
        _define_option(option, takers, flag_values)
    of_file = flag_files.stem(arguments) is not None
    for name, value in defaults.items():
        if name not in flag_values:
            known = names.near(name, flag_values)
            raise ValueError(f"default {name}={value!r} is that of no flag{known}")
        if name == "algorithm" or not of_file:
            flag_values.set_default(name, value)


def _define_own(flag_values: flags.FlagValues) -> None:
    """Defines the flags that are no field of a dataclass."""
    flags.DEFINE(
        _AlgorithmsParser(),
        "algorithm",
        [ExperimentConfig.algorithm],
        "One or several, run one after another on the same data and seeds, each as "
        f"NAME or NAME:SELECTION (dsvgd:ksd): {', '.join(ALGORITHMS)}; or your own, "
        "package.module:builder, from the current folder too.",
        flag_values,
        flags.CsvListSerializer(","),
    )
    flags.DEFINE_string(
        "name",
        None,
        "Name of the run. Default: the flag file's, or algorithm_dataset, of a sweep "
        "with _sweep.",
        flag_values=flag_values,
    )
    flags.DEFINE_string(
        "compilation_cache",
        _default_cache(),
        "Folder that keeps compiled programs for later runs; empty: none.",
        flag_values=flag_values,
    )
    flags.DEFINE_multi_string(
        "sweep",
        None,
        "NAME=VALUE,VALUE: runs every value of a setting of the experiment or of the "
        "method; given several times, every combination. Values that are lists "
        "themselves have ';' between them",  # absl adds that it may be repeated
        flag_values=flag_values,
    )
    define_one(
        "choose_by",
        str,
        CRITERIA,
        "personal_nll",
        f"What a sweep with --validation_fraction chooses by: {', '.join(CRITERIA)}.",
        flag_values,
    )


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
    rest = parse_known([argv[0], *flag_files.expanded(argv[1:])], flag_values)
    if len(rest) > 1:
        raise flags.Error(f"{rest[1]!r} is no flag: settings are given as --flag=value")
    flag_values.set_default("name", flag_values.name or flag_files.stem(argv))
    return rest


def parse_known(argv: Sequence[str], flag_values: flags.FlagValues) -> list[str]:
    """What is no flag in a command line, program name first.

    Raises:
      flags.Error: an unknown flag, or a value that it does not take.
    """
    try:
        return flag_values(argv)
    except flags.UnrecognizedFlagError as error:
        flag = f"--{error.flagname}"
        near = names.near(flag, (f"--{name}" for name in flag_values))
        raise flags.Error(f"Unknown command line flag {flag}{near}") from None


def help_text(flag_values: flags.FlagValues, title: str) -> str:
    """The flags in groups, of the chosen methods only, below a title."""
    algorithms = dict.fromkeys(name for name, _ in map(_split, flag_values.algorithm))
    return flag_help.help_text(flag_values, title, list(algorithms))


_BY_IMPORTANCE = "a selection by importance"
_SELECTION_FLAGS = {
    "selection_strata": "stratified",
    "selection_order": "round_robin",
    "selection_temperature": _BY_IMPORTANCE,
    "selection_floor": _BY_IMPORTANCE,
}
"""Which selections read a flag."""


def read(
    flag_values: flags.FlagValues = flags.FLAGS,
) -> list[tuple[ExperimentConfig, RunOptions]]:
    """The runs that parsed flags ask for: one per algorithm and selection.

    Raises:
      flags.Error: an option that no chosen algorithm takes, or one run named twice.
    """
    parts = [_split(name) for name in flag_values.algorithm]
    algorithms = list(dict.fromkeys(algorithm for algorithm, _ in parts))
    takers_of = _algorithm_options(algorithms)
    given = {
        option: flag_values[option].value
        for option in takers_of
        if flag_values[option].value is not None
    }
    for option, value in given.items():
        takers = takers_of[option]
        present = flag_values[option].present  # not a script's default
        if present and not any(name in takers for name in algorithms):
            raise flags.IllegalFlagValueError(
                f"flag --{option}={value}: {', '.join(algorithms)} does not take it; "
                f"{', '.join(takers)} does"
            )
    configs = []
    for algorithm, selection in parts:
        options = {k: v for k, v in given.items() if algorithm in takers_of[k]}
        config = _fill(
            ExperimentConfig,
            flag_values,
            algorithm=algorithm,
            options=options,
            selection=selection or flag_values.selection,
        )
        configs.append(config)
    chosen = {config.selection for config in configs}
    for flag, of in _SELECTION_FLAGS.items():
        readers = chosen - set(RULES) if of == _BY_IMPORTANCE else chosen & {of}
        if flag_values[flag].present and not readers:
            raise flags.IllegalFlagValueError(
                f"flag --{flag}={flag_values[flag].value}: it is of {of}, and "
                f"--selection is {', '.join(sorted(chosen))}"
            )
    folders = [config.method.replace(":", "_") for config in configs]
    for config, folder in zip(configs, folders):
        if folders.count(folder) > 1:
            raise flags.IllegalFlagValueError(
                f"flag --algorithm={','.join(flag_values.algorithm)}: {config.method} "
                "is named twice"
            )
    name = flag_values.name or f"{'-'.join(folders)}_{configs[0].data_name}"
    if flag_values.sweep and not flag_values.name:
        name += "_sweep"
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


def read_sweep(flag_values: flags.FlagValues = flags.FLAGS) -> dict[str, tuple]:
    """The settings that `--sweep` asks for: name to values, each as its flag has it.

    Raises:
      flags.Error: no setting of the experiment or of a chosen algorithm, one named
        twice, or a value that is not allowed.
    """
    algorithms = dict.fromkeys(_split(one)[0] for one in flag_values.algorithm)
    owners = [ExperimentConfig, *map(options_of, algorithms)]
    grid: dict[str, tuple] = {}
    for text in flag_values.sweep or ():
        name, _, listed = text.partition("=")
        try:
            if name in grid:
                raise ValueError(f"{name} is named twice")
            grid[name] = _swept(name, listed, owners, flag_values)
        except ValueError as error:
            raise flags.IllegalFlagValueError(f"flag --sweep={text}: {error}") from None
    return grid


def _swept(
    name: str, listed: str, owners: Sequence[type], flag_values: flags.FlagValues
) -> tuple:
    """The values of one `--sweep`, checked.

    Args:
      name: of the setting.
      listed: what is to be its values.
      owners: the classes that it may be a field of.
      flag_values: has its flag.
    """
    if name in FIXED:
        raise ValueError(f"{name} is one for all cells: give --{name}")
    fields = [(owner, field) for owner in owners for field in dataclasses.fields(owner)]
    own = [(owner, field) for owner, field in fields if field.name == name]
    if not own:
        known = [field.name for _, field in fields]
        raise ValueError(
            f"{name} is no setting of the experiment or of the chosen methods"
            f"{names.near(name, known)}"
        )
    flag = flag_values[name]
    parts = listed.split(";" if several(flag) else ",")
    if "" in parts and not several(flag):
        raise ValueError(f"give values, as in --sweep={name}=VALUE,VALUE")
    values = tuple(flag.parser.parse(part) for part in parts)
    if twice := [value for value in values if values.count(value) > 1]:
        raise ValueError(f"the value {twice[0]} is given twice")
    for owner, field in own:
        for value in values:
            check_one(field, typing.get_type_hints(owner)[name], value)
    return values


def _fill(config: type, flag_values: flags.FlagValues, **given):
    """A dataclass from the flags of its fields' names."""
    names = [f.name for f in dataclasses.fields(config) if f.name not in given]
    return config(**{name: flag_values[name].value for name in names}, **given)


def _algorithm_options(
    others: Iterable[str] = (),
) -> dict[str, dict[str, dataclasses.Field]]:
    """option -> algorithm -> its field, over all registered algorithms and others."""
    options: dict[str, dict[str, dataclasses.Field]] = {}
    for algorithm in dict.fromkeys([*ALGORITHMS, *others]):
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
        shown = f"<{'|'.join(map(str, choices[0]))}>: "
    else:
        shown = ""
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
    text = shown + " ".join(
        f"Option of {', '.join(names)}: {meaning}."
        for meaning, names in algorithms_of.items()
    )
    define_one(option, hints[0], choices[0], None, text, flag_values)


def _default_cache() -> str:
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user id without a home
        return ""
    return str(Path(home) / "fedvi" / "xla")
