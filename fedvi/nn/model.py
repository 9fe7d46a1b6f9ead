"""A classifier as pure functions, split into body and head."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import errors, nnx
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from fedvi import checks
from fedvi.flat import Flat, flatten, trees
from fedvi.keys import root_key
from fedvi.local import cross_entropy
from fedvi.nn import local_reparameterisation

__all__ = [
    "ANY_NUMBER",
    "Model",
    "Params",
    "from_flax",
    "parameter_count",
    "preprocessed",
    "regroup",
    "weight_paths",
]

Params = dict[str, Flat]

# Parameters of a function that may be given any number of times.
ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _no_local_draws(*_, **__) -> jax.Array:
    raise ValueError(
        "Model.apply_local is not given: build the model with from_flax, or draw its "
        "weights instead of its activations"
    )


def _no_features(*_, **__) -> jax.Array:
    raise ValueError(
        "Model.features is not given: build the model with from_flax, whose head is a "
        "layer that is called"
    )


def _no_other_groups(_) -> "Model":
    raise ValueError(
        "Model.regrouped is not given: build the model with from_flax to share other "
        "weights than body and head"
    )


class Model(NamedTuple):
    """A classifier whose parameters are `{"body": Flat, "head": Flat}`.

    Each group is one vector (`fedvi.flat`); `trees(params)` gives the layers. Functions
    take either. A model made by hand may have plain trees in place of the vectors: all
    algorithms work on them too, and compile longer.
    """

    init: Callable[[jax.Array], Params]  # key -> float32 parameters
    # apply(params, x, mask=None) -> logits [batch, classes]; x raw [batch, ...];
    # mask [batch] bool: the examples that enter batch statistics
    apply: Callable[..., jax.Array]
    with_classes: Callable[[int], "Model"]  # same body, another number of outputs
    name: str
    classes: int
    # apply_local(key, mean, scale, x, mask=None) -> logits [batch, classes]: one draw
    # under weights N(mean, scale²), two of parameters, by activations; see
    # `local_reparameterisation`
    apply_local: Callable[..., jax.Array] = _no_local_draws
    # loss(outputs, y, mask) -> scalar: mean of -log p(y|x, θ) over the real examples;
    # another likelihood makes it a regression, which can be trained but not evaluated:
    # predictions are log class probabilities
    loss: Callable[..., jax.Array] = cross_entropy
    # regrouped(group_of): the same model with other groups than body and head;
    # group_of: path of a weight, such as "head/classifier/kernel" -> its group's name
    regrouped: Callable[[Callable[[str], str]], "Model"] = _no_other_groups
    # features(params, x, mask=None) -> what the head is given, [batch, ...]; params may
    # lack the head
    features: Callable[..., jax.Array] = _no_features


def from_flax(
    module: nn.Module,
    input_shape: tuple[int, ...],
    *,
    head: str | tuple[str, ...],
    preprocess: Callable[[jax.Array], jax.Array] | None = None,
    name: str | None = None,
    with_classes: Callable[[int], nn.Module] | None = None,
    dtype: jnp.dtype | str = "float32",
    initialiser: Callable[[Callable], Callable] | None = None,
) -> Model:
    """Turns any `flax.linen` classifier into a `Model`.

    Args:
        module: maps `[batch, ...]` to logits `[batch, classes]` with parameters only
            (no running statistics, no noise of its own such as dropout). If its
            `__call__` has an argument `mask`, it gets the mask `[batch]` of real
            examples, or None. A `flax.nnx.Module` becomes one by
            `flax.nnx.bridge.to_linen(Net, ...)`.
        input_shape: shape of one raw example, such as `(32, 32, 3)`.
        head: top-level name, or names, in the module's parameters that form the
            classifier head, such as "Dense_2"; the rest is the body.
        preprocess: applied to the raw batch `[batch, *input_shape]`, for instance to
            normalise pixels. Default: conversion to float32, without scaling.
        name: name of the model; default: the name of the module's class.
        with_classes: builds the module for another number of classes. Default:
            `module.clone(classes=...)`, if the module has a field `classes`.
        dtype: of the activations, "float32" or "bfloat16". Parameters and all that an
            optimiser keeps stay float32, and logits are float32. The body's weights
            are rounded each time they are used, and so are their gradients. A layer
            with a dtype of its own keeps it.
        initialiser: makes, of the function from a key to the module's parameters,
            another with the same distribution, such as `fedvi.nn.initialise.one_draw`.

    Raises:
        ValueError: no `flax.linen` module, or one that takes further arguments, has no
            top-level name `head`, has variables that are not parameters, has parameters
            that are not float32, draws random numbers, or does not return
            `[batch, classes]`; another dtype.
    """
    _check_module(module)
    heads = (head,) if isinstance(head, str) else tuple(head)
    dtype = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    checks.one_of("dtype", dtype, ("float32", "bfloat16"))
    name = name or type(module).__name__
    preprocess = preprocess or _as_float
    masked = "mask" in inspect.signature(type(module).__call__).parameters
    empty = {"mask": None} if masked else {}
    example = jnp.zeros((1, *input_shape), jnp.float32)

    logits = _look_at(name, module, heads, lambda: preprocess(example), empty)

    # Eager initialisers would compile one by one; XLA drops the forward pass.
    @jax.jit
    def init(key: jax.Array) -> dict[str, Any]:
        return module.init(key, preprocess(example), **empty)["params"]

    init = initialiser(init) if initialiser else init

    def group_of_top(path: str) -> str:
        return "head" if path.split("/")[0] in heads else "body"

    def options_of(mask: jax.Array | None) -> dict[str, Any]:
        return {"mask": mask} if masked else {}

    def weights_of(params: Params) -> dict[str, Any]:
        """The module's parameters; the body's rounded to `dtype`."""
        flat = {}
        for tree in trees(params).values():
            flat |= flatten_dict(tree, sep="/")
        body = (path for path in flat if group_of_top(path) == "body")
        rounded = {path: _round(flat[path], dtype) for path in body}
        return unflatten_dict(flat | rounded, sep="/")

    def check_shape(x: jax.Array) -> None:
        if jnp.shape(x)[1:] != tuple(input_shape):
            raise ValueError(
                f"x has examples of shape {jnp.shape(x)[1:]}, and the model {name} was "
                f"built for input_shape={tuple(input_shape)}"
            )

    def apply(params: Params, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        check_shape(x)
        x = _round(preprocess(x), dtype)
        variables = {"params": weights_of(params)}
        return module.apply(variables, x, **options_of(mask)).astype(jnp.float32)

    def features(
        params: Params, x: jax.Array, mask: jax.Array | None = None
    ) -> jax.Array:
        given = []

        def stop_at_head(call, arguments, keywords, context):
            if context.module.path and context.module.path[0] in heads:
                given.extend(arguments[:1])
                return arguments[0]
            return call(*arguments, **keywords)

        with nn.intercept_methods(stop_at_head):
            apply(params, x, mask)
        return given[0].astype(jnp.float32) if given else _no_features()

    def apply_local(
        key: jax.Array,
        mean: Params,
        scale: Params,
        x: jax.Array,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        check_shape(x)
        x = _round(preprocess(x), dtype)
        return local_reparameterisation.apply_local(
            key, module, weights_of(mean), weights_of(scale), x, **options_of(mask)
        ).astype(jnp.float32)

    def rebuild(classes: int) -> Model:
        if with_classes is not None:
            other = with_classes(classes)
        elif "classes" in module.__dataclass_fields__:
            other = module.clone(classes=classes)
        else:
            raise ValueError(
                f"with_classes={classes}: {name} has no field 'classes'; give "
                "from_flax a function with_classes(classes) that returns the module"
            )
        return from_flax(
            other,
            input_shape,
            head=head,
            preprocess=preprocess,
            name=name,
            with_classes=with_classes,
            dtype=dtype,
            initialiser=initialiser,
        )

    def grouped(group_of: Callable[[str], str], names: tuple[str, ...]) -> Model:
        """The model whose groups of weights are named by their paths."""

        @jax.jit
        def init_groups(key: jax.Array) -> Params:
            groups = {group: {} for group in names}
            for path, leaf in flatten_dict(init(key), sep="/").items():
                groups[group_of(f"{group_of_top(path)}/{path}")][path] = leaf
            return {g: flatten(unflatten_dict(t, sep="/")) for g, t in groups.items()}

        def regrouped(group_of: Callable[[str], str]) -> Model:
            paths = flatten_dict(jax.eval_shape(init, root_key(0)), sep="/")
            found = (group_of(f"{group_of_top(path)}/{path}") for path in paths)
            return grouped(group_of, tuple(sorted(set(found))))

        return Model(
            init_groups,
            apply,
            rebuild,
            name,
            logits.shape[-1],
            apply_local,
            regrouped=regrouped,
            features=features,
        )

    return grouped(lambda path: path.split("/")[0], ("body", "head"))


def regroup(model: Model, group_of: Callable[[str], str]) -> Model:
    """The same model, its parameters grouped in another way.

    Args:
        model: from `from_flax` or `fedvi.nn.build`.
        group_of: path of a weight, such as `head/classifier/kernel`, to the name of
            its group, of which the parameters then are a dict.

    Raises:
        ValueError: a model made by hand that does not say how.
    """
    return model.regrouped(group_of)._replace(loss=model.loss)


def preprocessed(model: Model, preprocess: Callable[[jax.Array], jax.Array]) -> Model:
    """The same model behind a function of its raw inputs.

    Args:
        model: any.
        preprocess: `x [batch, ...]` to what the model takes.
    """

    def apply(params: Params, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return model.apply(params, preprocess(x), mask)

    def apply_local(
        key: jax.Array,
        mean: Params,
        scale: Params,
        x: jax.Array,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        return model.apply_local(key, mean, scale, preprocess(x), mask)

    def features(
        params: Params, x: jax.Array, mask: jax.Array | None = None
    ) -> jax.Array:
        return model.features(params, preprocess(x), mask)

    return model._replace(
        apply=apply,
        apply_local=apply_local,
        features=features,
        with_classes=lambda classes: preprocessed(
            model.with_classes(classes), preprocess
        ),
        regrouped=lambda group_of: preprocessed(model.regrouped(group_of), preprocess),
    )


def weight_paths(model: Model) -> list[str]:
    """The paths of a model's weights as `regroup` sees them, in order."""
    shapes = jax.eval_shape(model.init, root_key(0))
    paths = flatten_dict(jax.eval_shape(trees, shapes), sep="/")
    return list(paths)


def parameter_count(params: Any) -> int:
    """Number of weights in a pytree of arrays (or of their shapes)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _round(x: jax.Array, dtype: str) -> jax.Array:
    # Not what is no float: a network of tokens looks them up.
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _as_float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _check_module(module: Any) -> None:
    if isinstance(module, nn.Module):
        _, *others = inspect.signature(type(module).__call__).parameters.values()
        for one in others[1:]:
            optional = one.default is not one.empty or one.kind in ANY_NUMBER
            if one.name != "mask" and not optional:
                raise ValueError(
                    f"module={type(module).__name__} takes {one.name!r}, which it is "
                    "not called with: only x, and mask if it has one; give the others "
                    "a default"
                )
        return
    kind = module if isinstance(module, type) else type(module)
    if issubclass(kind, nnx.Module):
        raise ValueError(
            f"module={kind.__name__} is of flax.nnx: give what "
            f"flax.nnx.bridge.to_linen({kind.__name__}, ...) returns, the arguments of "
            "its __init__ but rngs in place of the dots"
        )
    if issubclass(kind, nn.Module):
        raise ValueError(
            f"module={kind.__name__} is a class: give an instance, {kind.__name__}(...)"
        )
    raise ValueError(
        f"module={module!r} must be a flax.linen.Module: put a function into the "
        "__call__ of one"
    )


def _look_at(
    name: str,
    module: nn.Module,
    heads: tuple[str, ...],
    example: Callable[[], jax.Array],
    options: dict[str, Any],
) -> Any:
    """The shape of a module's logits; all else about it is checked."""
    dropout = []
    with nn.intercept_methods(partial(_note_dropout, dropout)):
        try:
            logits, variables = jax.eval_shape(
                lambda key: module.init_with_output(key, example(), **options),
                root_key(0),
            )
        except KeyError as error:  # what flax.nnx says through its bridge
            if "RngStream" not in str(error):
                raise
            raise _draws(name) from None
    if dropout:
        raise ValueError(
            f"module={name} has Dropout, which would never be active, not even in "
            "training: leave it out"
        )
    _check(name, heads, logits, variables)
    try:
        jax.eval_shape(lambda v: module.apply(v, example(), **options), variables)
    except errors.InvalidRngError:
        raise _draws(name) from None
    return logits


def _draws(name: str) -> ValueError:
    return ValueError(
        f"module={name} draws random numbers (make_rng), for which it gets no key: "
        "leave them out"
    )


def _note_dropout(found: list[Any], call: Callable, arguments, keywords, context):
    """A `flax.linen` interceptor: finds dropout, switched off by a flag or not."""
    if isinstance(context.module, nn.Dropout) and context.module.rate > 0:
        found.append(context.module)
    return call(*arguments, **keywords)


def _check(name: str, heads: tuple[str, ...], logits: Any, variables: Any) -> None:
    params = variables.get("params", {})
    missing = [head for head in heads if head not in params]
    if missing:
        raise ValueError(
            f"head={missing[0]!r} is not a part of {name}: choose from {sorted(params)}"
        )
    extra = sorted(set(variables) - {"params"})
    if extra:
        raise ValueError(
            f"module={name} keeps variables in {extra}: use layers with parameters "
            "only, such as fedvi.nn.BatchNorm"
        )
    for path, leaf in flatten_dict(params, sep="/").items():
        if leaf.dtype != jnp.float32:
            raise ValueError(
                f"module={name} has parameters of {leaf.dtype} at {path}: keep its "
                "param_dtype at float32; from_flax(..., dtype='bfloat16') rounds "
                "where they are used"
            )
    if len(logits.shape) != 2:
        raise ValueError(
            f"module={name} returns shape {logits.shape} for one example: return "
            "logits [batch, classes]"
        )
