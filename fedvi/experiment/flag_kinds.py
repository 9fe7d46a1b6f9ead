"""Flags of a kind each: numbers, choices, several of them, names of a user's own."""

import typing
from collections.abc import Sequence
from typing import Any

from absl import flags

from fedvi import names
from fedvi.options import kinds_of

__all__ = ["define_one", "several"]

# The flags are those of the script that calls `start`.
flags.disclaim_key_flags()


class _NumberParser(flags.ArgumentParser):
    """An int or a float, or several separated by commas; absl's own parsers leave the
    message to Python."""

    def __init__(self, kind: type, several: bool = False):
        super().__init__()
        self._kind, self.several = kind, several
        self.syntactic_help = "an integer" if kind is int else "a number"
        if several:
            numbers = "integers" if kind is int else "numbers"
            self.syntactic_help = f"{numbers} separated by commas"

    def parse(self, argument) -> Any:
        try:
            if not self.several:
                return self._kind(argument)
            return tuple(self._kind(part) for part in _parts(argument))
        except ValueError:
            raise ValueError(f"value should be {self.syntactic_help}") from None


class _ChoiceParser(flags.EnumParser):
    """One of several words, or several of them separated by commas, or perhaps the
    path of something of the user's own."""

    def __init__(self, choices: Sequence[str], importable: bool, several: bool):
        super().__init__(choices)
        self._importable, self.several = importable, several

    def parse(self, argument) -> Any:
        parts = _parts(argument) if self.several else [argument]
        for part in parts:
            own = self._importable and names.is_path(part)
            if not own and part not in self.enum_values:
                raise ValueError(
                    f"value should be one of <{'|'.join(self.enum_values)}>"
                    f"{names.near(part, self.enum_values)}"
                )
        return tuple(parts) if self.several else argument


def _parts(argument: Any) -> list[Any]:
    parts = argument.split(",") if isinstance(argument, str) else argument
    return [part for part in parts if part != ""]


def several(flag: flags.Flag) -> bool:
    """Whether a flag's value is a tuple, whose parts have commas between them."""
    return getattr(flag.parser, "several", False)


def define_one(
    name: str,
    hint: Any,
    choices: Sequence[str] | None,
    default: Any,
    text: str,
    flag_values: flags.FlagValues,
    importable: bool = False,
) -> None:
    """Defines the flag of one field or option.

    Args:
      name: of the flag.
      hint: the option's annotation.
      choices: the words that it may be, or be made of; None: any.
      default: of the flag.
      text: that explains it.
      flag_values: where it is defined.
      importable: beside `choices`, `package.module:name` may be given.
    """
    kinds = kinds_of(hint)
    many = kinds == (tuple,)
    if choices is not None and all(isinstance(choice, str) for choice in choices):
        parser = _ChoiceParser(list(choices), importable, many)
    elif many:
        parser = _NumberParser(typing.get_args(hint)[0], several=True)
    elif kinds in ((int,), (float,)):
        parser = _NumberParser(kinds[0])
    elif kinds == (bool,):
        flags.DEFINE_boolean(name, default, text, flag_values=flag_values)
        return
    elif str in kinds:
        parser = flags.ArgumentParser()
    else:
        raise ValueError(
            f"option {name} is annotated {hint}: use int, float, bool, str or a Literal"
        )
    serializer = flags.CsvListSerializer(",") if many else flags.ArgumentSerializer()
    flags.DEFINE(parser, name, default, text, flag_values, serializer)
