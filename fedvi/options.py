"""Options: name, default, range, help and source of each, stated once.

A family of options is a frozen dataclass; a method that takes another's inherits from
it. Builders, checks, flags, `--help`, `config.json` and docstrings read these fields.
"""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import jax

from fedvi import checks, names

__all__ = [
    "Options",
    "check",
    "check_names",
    "check_one",
    "choices_of",
    "describe",
    "groups_of",
    "inherited",
    "kinds_of",
    "option",
    "range_of",
    "shown",
    "text_of",
]

_BOUNDS = {
    "at_least": ("at least", lambda value, bound: value >= bound),
    "above": ("above", lambda value, bound: value > bound),
    "at_most": ("at most", lambda value, bound: value <= bound),
    "below": ("below", lambda value, bound: value < bound),
}
_KINDS = {
    bool: ("True or False", bool),
    int: ("a whole number", numbers.Integral),
    float: ("a number", numbers.Real),
    str: ("text", str),
}


def option(
    default: Any,
    meaning: str,
    *,
    source: str = "",
    choices: Any = None,
    importable: bool = False,
    group: str = "",
    traced: bool = False,
    evaluation: Literal["", "rows", "after"] = "",
    only_with: Mapping[str, Any] = types.MappingProxyType({}),
    **bounds: float,
) -> Any:
    """One option: a dataclass field.

    Args:
      default: its value unless given. None is a value only where it is the default.
      meaning: what it means, in one line or a few; first sentence alone in `--help`.
      source: where the default is from: a paper's section, its code, our measurement.
      choices: the values it may take, or its parts if it is a tuple, if not all of the
        annotation's type; a `Literal[...]` says so by itself.
      importable: beside its choices it may name something of the user's own,
        `package.module:name`.
      group: that it opens: it and those after it stand together in `--help`.
      traced: it is a number in a formula, and may be a value that JAX traces; else it
        decides shapes or which functions run, and is static.
      evaluation: nothing but evaluations reads it, so that a trained run can be
        measured anew with another value: "rows", every evaluation does; "after", only
        what is measured once, after training. Empty: training depends on it.
      **bounds: of `at_least, above, at_most, below`.
    """
    if unknown := set(bounds) - set(_BOUNDS):
        raise TypeError(f"option has no bound {sorted(unknown)}")
    return dataclasses.field(
        default=default,
        metadata={
            "help": meaning,
            "source": source,
            "choices": choices,
            "importable": importable,
            "group": group,
            "traced": traced,
            "evaluation": evaluation,
            "only_with": only_with,
            "bounds": bounds,
        },
    )


def inherited(options: type, name: str, default: Any, source: str = "") -> Any:
    """The option `name` of another class of options, with a default of one's own."""
    metadata = options.__dataclass_fields__[name].metadata
    return dataclasses.field(default=default, metadata={**metadata, "source": source})


@typing.dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(option, inherited)
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the options of algorithms: a subclass is a frozen dataclass of keywords.

    They are checked when they are made.

    Raises:
      ValueError: a value of another kind than its option's, outside its range, not
        among its choices or read by nothing; names option, value and what would be
        right.
    """

    def __init_subclass__(cls):
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        for field in dataclasses.fields(cls):
            if "bounds" not in field.metadata:
                raise ValueError(
                    f"{cls.__name__}.{field.name} must be an option, that the flags "
                    f'and texts know: {field.name} = option(default, "what it means")'
                )

    def __post_init__(self):
        check(self)


def kinds_of(hint: Any) -> tuple[type, ...]:
    """The types of an annotation, None left out; a `Literal` stands for its values'."""
    if typing.get_origin(hint) is Literal:
        return tuple({type(value) for value in typing.get_args(hint)})
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [kinds_of(part) for part in typing.get_args(hint)]
        return tuple(kind for part in parts for kind in part if kind is not type(None))
    return (typing.get_origin(hint) or hint,)


def choices_of(field: dataclasses.Field, hint: Any) -> tuple[Any, ...] | None:
    """The values that an option may take; None: all of its type."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    choices = field.metadata.get("choices")
    return None if choices is None else tuple(choices)


def range_of(field: dataclasses.Field) -> str:
    """An option's bounds in words, such as "at least 0 and below 1"; empty: none."""
    bounds = field.metadata["bounds"].items()
    return " and ".join(f"{_BOUNDS[key][0]} {bound}" for key, bound in bounds)


def check(options: Any) -> None:
    """Checks every option of a dataclass.

    Raises:
      ValueError: as `Options`.
    """
    hints = typing.get_type_hints(type(options))
    fields = [f for f in dataclasses.fields(options) if "bounds" in f.metadata]
    for field in fields:
        check_one(field, hints[field.name], getattr(options, field.name))
    for field in fields:
        value = getattr(options, field.name)
        if isinstance(value, jax.core.Tracer) or value == field.default:
            continue
        for other, needed in field.metadata["only_with"].items():
            if (found := getattr(options, other)) != needed:
                raise ValueError(
                    f"{field.name}={shown(value)} has no effect with {other}={found}: "
                    f"leave it out, or use {other}={needed}"
                )


def check_names(given: Mapping[str, Any], options: type, owner: str) -> None:
    """Checks that options exist.

    Args:
      given: option to value.
      options: dataclass of those that there are.
      owner: whose options they are.

    Raises:
      ValueError: one is no field of the class.
    """
    known = [field.name for field in dataclasses.fields(options)]
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"{name}={value!r} is no option of {owner}, which takes "
                f"{', '.join(known) or 'none'}{names.near(name, known)}"
            )


def check_one(field: dataclasses.Field, hint: Any, value: Any) -> None:
    """Checks the value of one option.

    Args:
      field: of the option.
      hint: its annotation.
      value: that it is to have.

    Raises:
      ValueError: as `Options`.
    """
    name, bounds = field.name, field.metadata["bounds"]
    if value is None and field.default is None:
        return
    if isinstance(value, jax.core.Tracer):
        if not field.metadata["traced"]:
            raise ValueError(
                f"{name} is static and cannot be traced: give a plain value"
            )
        return
    if isinstance(value, jax.Array) and value.ndim == 0:
        value = value.item()
    choices = choices_of(field, hint)
    if choices is not None:
        if field.metadata["importable"] and names.is_path(value):
            names.imported(name, value)
            return
        several = tuple in kinds_of(hint)
        if several and not isinstance(value, tuple | list):
            known = ", ".join(map(str, choices))
            raise ValueError(f"{name}={value!r} must be a tuple of any of {known}")
        for one in value if several else (value,):
            checks.one_of(name, one, choices)
        return
    wanted = range_of(field)
    kinds = [kind for kind in kinds_of(hint) if kind in _KINDS]
    if kinds and not any(_is(value, kind) for kind in kinds):
        what = " or ".join(_KINDS[kind][0] for kind in kinds)
        raise ValueError(f"{name}={value!r} must be {what} {wanted}".rstrip())
    if isinstance(value, str) or not isinstance(value, numbers.Real):
        return
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number {wanted}".rstrip())
    if not all(_BOUNDS[key][1](value, bound) for key, bound in bounds.items()):
        raise ValueError(f"{name}={value} must be {wanted}")


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, _KINDS[kind][1])


def text_of(field: dataclasses.Field, hint: Any, *defaults: Any) -> str:
    """An option as texts show it: `Pull. (a | b, default a, above 0, a paper, §3)`.

    Args:
      field: of the option.
      hint: its annotation.
      *defaults: what to show as its default; none: nothing.
    """
    facts = [f"default {shown(default)}" for default in defaults]
    if choices := choices_of(field, hint):
        own = ["package.module:name"] if field.metadata["importable"] else []
        facts.insert(0, " | ".join(map(str, [*choices, *own])))
    with_others = field.metadata["only_with"].items()
    facts += [f"only with {other}={value}" for other, value in with_others]
    facts += filter(None, [range_of(field), field.metadata["source"]])
    text = field.metadata["help"]
    return f"{text} ({', '.join(facts)})" if facts else text


def shown(value: Any) -> str:
    """An option's value as a flag has it."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value)) or "empty"
    return "empty" if value == "" else str(value)


def describe(options: type) -> str:
    """The options of a class as a docstring lists them: default, help and source."""
    hints = typing.get_type_hints(options)
    return "\n".join(
        f"  {field.name}: {text_of(field, hints[field.name], field.default)}"
        for field in dataclasses.fields(options)
    )


def groups_of(options: type) -> dict[str, str]:
    """The group of every option of a dataclass: the last one that was opened."""
    group, result = "", {}
    for field in dataclasses.fields(options):
        group = field.metadata.get("group") or group
        result[field.name] = group
    return result
