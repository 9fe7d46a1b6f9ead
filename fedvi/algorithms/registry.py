"""Algorithms by the name that a flag or a table gives them, and their options."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from fedvi import checks, names
from fedvi.algorithm import Algorithm, Task, own_settings
from fedvi.local import LocalTraining
from fedvi.nn import Model
from fedvi.options import Options, check_names, describe

__all__ = [
    "ALGORITHMS",
    "build",
    "builder",
    "find",
    "is_registered",
    "options_of",
    "register",
]

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {}


def builder(options: type[Options] = Options) -> Callable:
    """Decorator: makes a builder that users call with keywords.

    `make(task, options)` becomes `make(task, **options)`; the options are made, and by
    that checked, of the keywords, and their texts are appended to the docstring. The
    class is the attribute `options` of the result.

    Args:
      options: class of the algorithm's options.
    """

    def decorate(
        make: Callable[[Task, Options], Algorithm],
    ) -> Callable[..., Algorithm]:
        @functools.wraps(make)
        def build(task: Task, **given) -> Algorithm:
            check_names(given, options, make.__name__)
            _check_task(make.__name__, task)
            with own_settings():
                algorithm = make(task, options(**given))
            if not isinstance(algorithm, Algorithm):
                return algorithm  # which the federation refuses by name
            return algorithm._replace(population=task.population)

        build.options = options
        keywords = inspect.signature(options).parameters.values()
        task = inspect.Parameter("task", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        build.__signature__ = inspect.Signature(
            [task.replace(annotation=Task), *keywords], return_annotation=Algorithm
        )
        if texts := describe(options):
            build.__doc__ = f"{inspect.getdoc(make)}\n\nOptions:\n{texts}"
        return build

    return decorate


def register(build: Callable[..., Algorithm], name: str | None = None) -> Callable:
    """Makes a builder known to `build`, the flags, the driver and the test battery.

    Args:
      build: what `builder` makes.
      name: default the builder's `__name__`.

    Raises:
      ValueError: not a builder, a name that no flag can give, or one of an algorithm
        that another module registered.
    """
    _check_builder(build, repr(getattr(build, "__name__", build)))
    name = build.__name__ if name is None else name
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise ValueError(
            f"name={name!r} must be of letters, digits, '_' and '-', as a flag gives it"
        )
    known = ALGORITHMS.get(name, build)
    # A cell of a notebook that runs again registers its own.
    if known.__module__ != build.__module__:
        raise ValueError(
            f"name={name!r} is that of {known.__module__}.{known.__name__}: give "
            "another one, register(build, name=...)"
        )
    ALGORITHMS[name] = build
    return build


def _check_builder(build: Any, name: str) -> None:
    if not hasattr(build, "options") or not callable(build):
        raise ValueError(
            f"{name} is no builder: decorate it with fedvi.algorithms.builder(Options)"
        )


def _check_task(builder_name: str, task: Any) -> None:
    if not isinstance(task, Task):
        raise ValueError(
            f"task={task!r} must be a fedvi.Task: {builder_name}(Task.of(model, train))"
        )
    if not isinstance(task.model, Model):
        raise ValueError(
            f"task.model={task.model!r} must be a fedvi.nn.Model, of fedvi.nn.build or "
            "fedvi.nn.from_flax"
        )
    for name in ("training", "finetuning"):
        local = getattr(task, name)
        if not isinstance(local, LocalTraining):
            raise ValueError(f"task.{name}={local!r} must be a fedvi.LocalTraining")
        local.check()
    for name in ("clients", "samples"):
        checks.whole(f"task.{name}", getattr(task, name))


def is_registered(name: str) -> bool:
    """Whether an algorithm has this name, other than by its own module of that name,
    which `name:builder` means."""
    return name in ALGORITHMS and ALGORITHMS[name].__module__ != name


def find(name: str) -> Callable[..., Algorithm]:
    """The builder of a registered algorithm, or of a user's own.

    Args:
      name: that it is registered under, or where it lies, `package.module:builder`.

    Raises:
      ValueError: there is none, or no builder, or its module cannot be imported. A
        builder of a user's own raises nothing else.
    """
    if not names.is_path(name):
        checks.one_of("algorithm", name, ALGORITHMS)
        return ALGORITHMS[name]
    first, _, selection = name.partition(":")
    if is_registered(first):
        raise ValueError(
            f"algorithm={name!r} names a selection: give algorithm={first!r} and "
            f"selection={selection!r}"
        )
    found = names.imported("algorithm", name, ALGORITHMS)
    _check_builder(found, f"algorithm={name!r}")

    @functools.wraps(found)
    def build_own(task: Task, **options) -> Algorithm:
        with names.told("algorithm", name):
            return found(task, **options)

    return build_own


def options_of(name: str) -> type[Options]:
    """The class of an algorithm's options, a dataclass.

    Raises:
      ValueError: as `find`.
    """
    return find(name).options


def build(name: str, task: Task, **options) -> Algorithm:
    """Builds an algorithm by its name, as of `find`.

    Raises:
      ValueError: unknown name, or an option that the algorithm does not take or that
        is outside its range.
    """
    return find(name)(task, **options)
