"""Algorithms by the name that a flag or a table gives them, and their options."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from fedvi import checks
from fedvi.algorithm import Algorithm, Task, own_settings
from fedvi.local import LocalTraining
from fedvi.nn import Model
from fedvi.options import Options, describe

__all__ = ["ALGORITHMS", "build", "builder", "options_of", "register"]

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
            known = [field.name for field in dataclasses.fields(options)]
            for name, value in given.items():
                if name not in known:
                    raise ValueError(
                        f"{name}={value!r} is no option of {make.__name__}, which "
                        f"takes {', '.join(known) or 'none'}"
                    )
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
    if not hasattr(build, "options"):
        raise ValueError(
            f"{getattr(build, '__name__', build)!r} is no builder: decorate it with "
            "fedvi.algorithms.builder(Options)"
        )
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


def options_of(name: str) -> type[Options]:
    """The class of an algorithm's options, a dataclass.

    Raises:
      ValueError: no algorithm of that name.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm={name!r} must be one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[name].options


def build(name: str, task: Task, **options) -> Algorithm:
    """Builds a registered algorithm.

    Raises:
      ValueError: unknown name, or an option that the algorithm does not take or that
        is outside its range.
    """
    options_of(name)
    return ALGORITHMS[name](task, **options)
