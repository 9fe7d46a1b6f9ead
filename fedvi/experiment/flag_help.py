"""What `--help` prints: the flags in groups, those of the chosen methods only."""

import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Sequence

from absl import flags

from fedvi.algorithms import find, options_of
from fedvi.experiment.config import ExperimentConfig, HostOptions, RunOptions
from fedvi.options import groups_of, shown, text_of

__all__ = ["ASKING", "help_text"]

# What asks for it; absl's own --help would not know what stands behind it.
ASKING = frozenset(("--help", "-help", "--helpshort", "-helpshort", "-h", "-?"))
_WIDEST = 100  # letters in a line


def help_text(
    flag_values: flags.FlagValues, title: str, algorithms: Sequence[str]
) -> str:
    """The flags in groups, each with its meaning, choices, default, range and source.

    Args:
      flag_values: all flags, parsed.
      title: what stands above them.
      algorithms: those whose options are listed.
    """
    groups: dict[str, list[str]] = {"method": [_own(flag_values["algorithm"])]}
    about: dict[str, str] = {}
    for name in algorithms:
        group = f"this method, {name}"
        about[group] = _about(name)
        groups[group] = _entries(options_of(name), flag_values)
    for config in (ExperimentConfig, RunOptions, HostOptions):
        group_of = groups_of(config)
        for name, entry in zip(_names(config), _entries(config, flag_values)):
            groups.setdefault(group_of[name], []).append(entry)
    own = ("name", "sweep", "choose_by", "compilation_cache")
    groups["run"] += [_own(flag_values[name]) for name in own]
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    lines = [
        textwrap.fill(line, width, break_long_words=False, replace_whitespace=False)
        for line in inspect.cleandoc(title).splitlines()
    ]
    for group, entries in groups.items():
        if entries or about.get(group):
            lines += ["", f"{group}:"]
            lines += textwrap.indent(about.get(group, ""), "  ").split("\n")
        for entry in entries:
            lines += textwrap.wrap(
                entry,
                width,
                initial_indent="  ",
                subsequent_indent=" " * 6,
                break_on_hyphens=False,
                break_long_words=False,
            )
    lines += ["", "Options of other methods: --algorithm=NAME --help, or --helpfull."]
    return "\n".join(lines)


def _about(name: str) -> str:
    """What a method computes: its module's docstring, its builder's up to the errors
    and options; empty if it has none."""
    build = inspect.unwrap(find(name))
    own, _, _ = (inspect.getdoc(build) or "").partition("\n\nRaises:")
    texts = inspect.getdoc(inspect.getmodule(build)) or "", own
    return "\n\n".join(text for text in texts if text) + "\n"


def _names(options: type) -> list[str]:
    fields = dataclasses.fields(options)
    return [one.name for one in fields if one.name not in ("algorithm", "options")]


def _entries(options: type, flag_values: flags.FlagValues) -> list[str]:
    """A text for every option of a dataclass that is a flag."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints = typing.get_type_hints(options)
    entries = []
    for name in _names(options):
        field, flag = fields[name], flag_values[name]
        default = field.default if flag.default is None else flag.default
        defaults = [default]
        if default in (None, "") and "Default:" in field.metadata["help"]:
            defaults = []
        entries.append(f"{_flag(flag)}: {text_of(field, hints[name], *defaults)}")
    return entries


def _own(flag: flags.Flag) -> str:
    """The text of a flag that is no field of a dataclass."""
    default = "" if flag.default is None else f" (default {shown(flag.default)})"
    return f"{_flag(flag)}: {' '.join(flag.help.split())}{default}"


def _flag(flag: flags.Flag) -> str:
    return f"--{'[no]' * flag.boolean}{flag.name}"
