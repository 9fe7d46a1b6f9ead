"""The command `fedvi`.

fedvi run --flag=value ...       trains: every flag of the examples' scripts
fedvi sweep --sweep=NAME=V,V ... trains with every value of a setting
fedvi compare FOLDER ...         one table and one picture of finished runs
fedvi report FOLDER ...          a finished run's table, and its pictures again

FOLDER is a run folder, or one that holds some. `fedvi COMMAND --help` says more.
"""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags

from fedvi import __version__, names, plots
from fedvi.experiment import flag_help, folder, processes, report
from fedvi.experiment.command_line import parse_known, start
from fedvi.experiment.config import RunOptions
from fedvi.experiment.ending import Ending
from fedvi.experiment.flag_kinds import define_one
from fedvi.experiment.loaded_run import LoadedRun, LoadedRuns, load_run, load_runs
from fedvi.options import choices_of, text_of

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command that a command line names, as `start` ends a script.

    Args:
      argv: the command line, program name first; default: this process's.
    """
    argv = sys.argv if argv is None else argv
    name, rest = next(iter(argv[1:]), "--help"), argv[2:]
    program = f"fedvi {name}"
    if name == "run":
        start(argv=[program, *rest], title=_title(program, _RUN))
    if name == "sweep":
        start(_nothing_swept, argv=[program, *rest], title=_title(program, _SWEEP))
    with processes.any_letter(sys.stdout), processes.any_letter(sys.stderr):
        try:
            if name in _COMMANDS:
                _of_folders(_COMMANDS[name], program, rest)
            elif name in flag_help.ASKING | {"--helpfull"}:
                print(inspect.cleandoc(__doc__))
            elif name == "--version":
                print(__version__)
            else:
                known = ("run", "sweep", *_COMMANDS)
                raise flags.Error(
                    f"{name!r} is none of the commands {', '.join(known)}"
                    f"{names.near(name, known)}"
                )
            sys.stdout.flush()
        except flags.Error as error:
            Ending().leave(2, error)
        except ValueError as error:
            Ending().leave(1, error)
        except BrokenPipeError:  # whoever read what was printed has left
            pass
        Ending().leave(0)


_RUN = "Trains one or several methods and compares them; flags and flag files say how."
_SWEEP = (
    "Trains with every combination of the values that --sweep=NAME=VALUE,VALUE lists, "
    "given once for each setting."
)


def _title(program: str, text: str) -> str:
    return f"{text}\n\nusage: {program} [--flagfile=FILE] --flag=value ..."


def _nothing_swept(_: Any) -> NoReturn:
    raise flags.Error("fedvi sweep needs --sweep=NAME=VALUE,VALUE")


def _of_folders(
    command: Callable[..., None], program: str, arguments: Sequence[str]
) -> None:
    """Calls a command with the runs in folders, and with its flags by name."""
    flag_values = flags.FlagValues()
    flag_values.set_gnu_getopt(True)  # flags may stand behind folders
    keywords = list(inspect.signature(command).parameters)[1:]
    for name in keywords:
        _FLAGS[name](flag_values)
    if flag_help.ASKING & set(arguments):
        lines = [f"  --{name}: {flag_values[name].help}" for name in keywords]
        usage = f"usage: {program} FOLDER ... [--flag=value ...]"
        print("\n".join([inspect.cleandoc(command.__doc__), "", usage, *lines]))
        return
    _, *folders = parse_known([program, *arguments], flag_values)
    if not folders:
        raise flags.Error(f"{program} needs a run folder, or one that holds some")
    found = _runs(folders)
    command(found, **{name: flag_values[name].value for name in keywords})


def _runs(folders: Sequence[str]) -> list[LoadedRun]:
    """The finished runs of run folders, and of all below other folders."""
    found = {}
    for one in map(Path, folders):
        several = one.is_dir() and not (one / folder.CONFIG).exists()
        for run in load_runs(one) if several else [load_run(one)]:
            if run.finished:
                found.setdefault(run.folder.resolve(), run)
            elif several:
                print(f"{run.folder} is not finished: left out")
            else:
                raise ValueError(f"{one} is not finished: --resume goes on with it")
    if not found:
        raise ValueError(f"{', '.join(folders)}: no run there is finished")
    return list(found.values())


def _compare(runs: Sequence[LoadedRun], out: str | None) -> None:
    """Prints one table of finished runs, and what they differ by from the first.

    With --out it leaves both there, with a picture of the learning curves.
    """
    text = LoadedRuns(runs).comparison()
    print(text)
    if out is not None:
        folder.make(Path(out))
        report.write_comparison(Path(out), runs, text)


def _report(runs: Sequence[LoadedRun], plot_formats: Sequence[str]) -> None:
    """Prints the table of every finished run, and draws its pictures again."""
    for run in runs:
        print(f"{run.folder}\n{LoadedRuns([run]).comparison()}")
        for path in plots.draw(run, plot_formats):
            print(f"  {path}")
        print()


_COMMANDS = {"compare": _compare, "report": _report}


def _define_out(flag_values: flags.FlagValues) -> None:
    text = "Folder that gets comparison.txt and the picture."
    flags.DEFINE_string("out", None, text, flag_values=flag_values)


def _define_plot_formats(flag_values: flags.FlagValues) -> None:
    hints, name = typing.get_type_hints(RunOptions), "plot_formats"
    [field] = [one for one in dataclasses.fields(RunOptions) if one.name == name]
    text = text_of(field, hints[name], field.default)
    choices = choices_of(field, hints[name])
    define_one(name, hints[name], choices, field.default, text, flag_values)


_FLAGS = {"out": _define_out, "plot_formats": _define_plot_formats}
