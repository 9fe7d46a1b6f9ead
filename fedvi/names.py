"""Names that users type: what they nearly are, and what of their own they stand for."""

import contextlib
import difflib
import importlib
import operator
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["imported", "is_path", "near", "told"]

_CLOSE = 0.65  # of difflib: two letters swapped in a name of three
_NOT_THE_USERS = ("<frozen", "site-packages", os.path.dirname(__file__) + os.sep)


def near(name: Any, known: Iterable[Any]) -> str:
    """The end of an error message: what a user may have meant.

    Args:
      name: what is none of `known`.
      known: the names that there are.

    Returns:
      ": did you mean fedavg?" for the closest, apart from capitals, "-" and "_"; empty
      if none is close.
    """
    plain = {_plain(one): one for one in known}
    found = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=_CLOSE)
    return f": did you mean {plain[found[0]]}?" if found else ""


def _plain(name: Any) -> str:
    return str(name).casefold().replace("-", "").replace("_", "")


def is_path(name: Any) -> bool:
    """Whether a name says where to import something: `package.module:name`."""
    return isinstance(name, str) and ":" in name


def imported(argument: str, path: str, known: Iterable[str] = ()) -> Any:
    """What lies at `package.module:name`; the current folder is looked into too.

    Args:
      argument: what the user set to it, for messages.
      path: where it lies; the name may have dots (a class's function).
      known: names that need no module, for a suggestion.

    Raises:
      ValueError: no such module or name, or the module's own code raises.
    """
    module_name, _, name = path.partition(":")
    parts = [*module_name.split("."), *name.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"{argument}={path!r} must be package.module:name")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    importlib.invalidate_caches()  # a file may have been written just now
    missing = None
    with told(argument, path, "importing it"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name
            if not f"{module_name}.".startswith(f"{missing}."):  # one that it imports
                raise
    if missing is not None:
        raise ValueError(
            f"{argument}={path!r}: there is no module {missing}, neither installed nor "
            f"in {os.getcwd()}{near(module_name, known)}"
        )
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        likely = near(name, vars(module))
        raise ValueError(
            f"{argument}={path!r}: {module_name} has no {name}{likely}"
        ) from None


@contextlib.contextmanager
def told(argument: str, path: str, what: str = "it") -> Iterator[None]:
    """Turns what a user's own code raises into one line that says where.

    Args:
      argument: what the user set.
      path: to what.
      what: was done, for the message.

    Raises:
      ValueError: anything was raised, which is its cause.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [one for one in frames if not _foreign(one.filename)]
        place = "".join(
            f" ({os.path.basename(one.filename)}, line {one.lineno})"
            for one in own[-1:]
            if not isinstance(error, SyntaxError)  # which says so itself
        )
        raise ValueError(
            f"{argument}={path!r}: {what} raised {type(error).__name__}: "
            f"{' '.join(str(error).split())}{place}"
        ) from error


def _foreign(file: str) -> bool:
    return any(part in file for part in _NOT_THE_USERS) or file.startswith(
        os.path.dirname(os.__file__)
    )
