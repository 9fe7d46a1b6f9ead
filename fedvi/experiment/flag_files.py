"""Flag files: what they say goes in the place of each `--flagfile`."""

import codecs
import os
import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags

__all__ = ["expanded", "stem"]


def stem(argv: Sequence[str]) -> str | None:
    """The stem of the last `--flagfile` of a command line; absl does not keep it."""
    found = None
    for argument, following in zip(argv, [*argv[1:], ""]):
        option, _, value = argument.partition("=")
        if option in ("--flagfile", "-flagfile"):
            found = Path(value or following).stem
    return found


def expanded(arguments: Sequence[str], above: tuple[str, ...] = ()) -> list[str]:
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
        found += expanded(_lines(name), (*above, name))
    return found


def _lines(name: str) -> list[str]:
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
