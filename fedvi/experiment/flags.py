"""absl flags for an experiment.

One flag per field of `ExperimentConfig`, `RunOptions` and `HostOptions`, one per
option of every registered algorithm, and a few of the command line's own.
"""

import dataclasses
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from absl import flags

from fedvi.algorithms import ALGORITHMS, options_of
from fedvi.codecs import CODECS
from fedvi.data import CLUSTER_TRANSFORMS, PARTITIONS
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.host_options import HostOptions
from fedvi.experiment.run_options import RunOptions
from fedvi.nn import MODELS

__all__ = ["define", "parse", "read", "read_hosts"]

# `--help` lists the flags under the script that calls `define`.
flags.disclaim_key_flags()

_ENUMS = {
    "partition": PARTITIONS,
    "model": MODELS,
    "codec": CODECS,
    "cluster_transform": ("none", *CLUSTER_TRANSFORMS),
}
_UNSET = inspect.Parameter.empty


class _NumberParser(flags.ArgumentParser):
    """An int or a float; absl's own parsers leave the message to Python."""

    def __init__(self, kind: type):
        super().__init__()
        self._kind = kind
        self.syntactic_help = "an integer" if kind is int else "a number"

    def parse(self, argument) -> int | float:
        try:
            return self._kind(argument)
        except ValueError:
            raise ValueError(f"value should be {self.syntactic_help}") from None


class _NumbersParser(flags.ArgumentParser):
    """Numbers separated by commas."""

    def __init__(self, kind: type):
        super().__init__()
        self._kind = kind
        number = "integers" if kind is int else "numbers"
        self.syntactic_help = f"{number} separated by commas"

    def parse(self, argument) -> tuple:
        parts = argument.split(",") if isinstance(argument, str) else argument
        try:
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
                help = field.metadata["help"]
                _define_one(
                    field.name, hints[field.name], field.default, help, flag_values
                )
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
        cannot be opened, or an argument that is no flag.
    """
    rest = flag_values(argv)
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
    given = {
        option: flag_values[option].value
        for option in _algorithm_options()
        if flag_values[option].value is not None
    }
    for option, value in given.items():
        if not any(option in options_of(name) for name in algorithms):
            raise flags.IllegalFlagValueError(
                f"flag --{option}={value}: {', '.join(algorithms)} does not take it; "
                f"{', '.join(_algorithm_options()[option])} does"
            )
    configs = []
    for algorithm, _, selection in parts:
        options = {k: v for k, v in given.items() if k in options_of(algorithm)}
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
    name = flag_values.name or f"{'-'.join(folders)}_{flag_values.dataset}"
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


def _define_one(name: str, hint: Any, default: Any, help: str, flag_values) -> None:
    """Defines the flag of one field or option from its annotation."""
    kinds = [k for k in _members(hint) if k is not type(None)]
    if typing.get_origin(hint) is Literal:
        flags.DEFINE_enum(
            name, default, typing.get_args(hint), help, flag_values=flag_values
        )
    elif name in _ENUMS:
        flags.DEFINE_enum(
            name, default, list(_ENUMS[name]), help, flag_values=flag_values
        )
    elif typing.get_origin(hint) is tuple:
        parser = _NumbersParser(typing.get_args(hint)[0])
        serializer = flags.CsvListSerializer(",")
        flags.DEFINE(parser, name, default, help, flag_values, serializer)
    elif kinds == [bool]:
        flags.DEFINE_boolean(name, default, help, flag_values=flag_values)
    elif kinds in ([int], [float]):
        parser = _NumberParser(kinds[0])
        serializer = flags.ArgumentSerializer()
        flags.DEFINE(parser, name, default, help, flag_values, serializer)
    elif str in kinds:
        flags.DEFINE_string(name, default, help, flag_values=flag_values)
    else:
        raise ValueError(
            f"option {name} is annotated {hint}: use int, float, bool, str or a Literal"
        )


def _members(hint: Any) -> tuple:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _algorithm_options() -> dict[str, dict[str, inspect.Parameter]]:
    """option -> algorithm -> its parameter, over all registered algorithms."""
    options: dict[str, dict[str, inspect.Parameter]] = {}
    for algorithm in ALGORITHMS:
        for option, parameter in options_of(algorithm).items():
            options.setdefault(option, {})[algorithm] = parameter
    return options


def _define_option(option: str, takers: dict[str, inspect.Parameter], flag_values):
    hints = [parameter.annotation for parameter in takers.values()]
    hint = hints[0]
    if all(typing.get_origin(h) is Literal for h in hints):
        choices = dict.fromkeys(choice for h in hints for choice in typing.get_args(h))
        hint = Literal[tuple(choices)]
    elif any(h != hint for h in hints):
        raise ValueError(
            f"option {option} is annotated differently in {', '.join(takers)}: it can "
            "be one flag only if they agree"
        )
    algorithms_of: dict[str, list[str]] = {}
    for name, parameter in takers.items():
        default = "" if parameter.default is _UNSET else f" ({parameter.default})"
        meaning = _meaning(ALGORITHMS[name], option)
        algorithms_of.setdefault(meaning, []).append(name + default)
    help = " ".join(
        f"Option of {', '.join(names)}{': ' if meaning else '.'}{meaning}"
        for meaning, names in algorithms_of.items()
    )
    _define_one(option, hint, None, help, flag_values)


def _meaning(builder: Callable, option: str) -> str:
    """First sentence of an option's entry in the builder's docstring; may be empty."""
    entry = re.search(
        rf"^Args:$.*?^  {option}: (.+?)(?=^ {{0,2}}\S|^\s*$|\Z)",
        inspect.getdoc(builder) or "",
        re.DOTALL | re.MULTILINE,
    )
    text = " ".join(entry[1].split()) if entry else ""
    return re.sub(r"\. [A-Z].*", ".", text)


def _flagfile_stem(argv: Sequence[str]) -> str | None:
    """The stem of the last `--flagfile` of a command line; absl does not keep it."""
    stem = None
    for argument, following in zip(argv, [*argv[1:], ""]):
        option, _, value = argument.partition("=")
        if option in ("--flagfile", "-flagfile"):
            stem = Path(value or following).stem
    return stem


def _default_cache() -> str:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(home) / "fedvi" / "xla")
