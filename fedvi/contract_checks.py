"""Whether an algorithm keeps the contract, found out from shapes alone.

A user's slip in one function would otherwise show as an error deep inside a scan.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedvi import checks
from fedvi.algorithm import (
    Aggregate,
    Algorithm,
    ClientOutput,
    Importance,
    StackedAggregate,
    upload_itself,
)
from fedvi.codecs import IDENTITY, Codec
from fedvi.keys import root_key
from fedvi.selection import Selection

__all__ = [
    "Messages",
    "check",
    "check_labels",
    "check_normalised",
    "check_population",
    "check_selection",
    "difference",
]

# What every function is called with, by position.
_FUNCTIONS = {
    "init": ("key",),
    "init_client": ("key", "server"),
    "broadcast": ("server",),
    "client_update": ("key", "round_index", "server", "client", "data"),
    "statistics": ("server", "upload"),
    "server_update": ("key", "round_index", "server", "aggregate"),
    "global_predictive": ("key", "server", "x", "mask"),
    "personalise": ("key", "server", "client", "data"),
    "personal_predictive": ("key", "server", "personal", "x", "mask"),
}
_OPTIONAL = {
    "unicast": ("server", "client_id"),
    "assign": ("key", "server", "client", "data"),
    "posterior": ("server",),
    "personal_posterior": ("server", "personal"),
    "kept": ("server", "client"),
}
# What the rows that a run writes have beside a client's metrics.
_COLUMNS = ("round", "seed", "split", "seconds", "bytes_up", "clipped", "adjusted_rand")
_MEASURE = {
    "report": ("key", "server", "client", "data"),
    "score": ("server", "reports", "counts"),
}


class Messages(NamedTuple):
    """States, and what one client and the server send each other, as shapes.

    Attributes:
      server: the server's state.
      client: a client's.
      down: what `broadcast` and `unicast` let one client have.
      upload: of a client, before a codec; beside it goes its weight, [] float32.
      summands: `statistics` of an upload; None with `reduce="stack"`.
      reports: by name of the measure of importance, a client's; no codec.
      metrics: of a client's update, by name, [] each.
      classes: number of classes that the algorithm predicts.
    """

    server: Any
    client: Any
    down: Any
    upload: Any
    summands: Any
    reports: dict[str, Any]
    metrics: dict[str, Any]
    classes: int


def check(
    algorithm: Algorithm, train, test, population: int, codec: Codec = IDENTITY
) -> Messages:
    """Traces every function of an algorithm once; compiles nothing.

    Args:
      algorithm: to be checked.
      train: stacked `ClientData` `[clients, ...]`.
      test: stacked `ClientData` `[clients, ...]`.
      population: N.
      codec: of the uploads.

    Returns:
      What it saw.

    Raises:
      ValueError: names the function, what it returned and what it should. What a
        function itself raises gets a note of which one that was.
    """
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            f"algorithm={type(algorithm).__name__} must be a fedvi.Algorithm: a "
            "builder returns one"
        )
    checks.one_of("reduce", algorithm.reduce, ("sum", "stack"))
    _check_functions(algorithm)
    key = root_key(0)
    data = _one_client(train)
    server = _shapes("init", algorithm.init, key)
    if server is None:
        raise ValueError("init returns None: it must return the server's state")
    down = _shapes("broadcast", algorithm.broadcast, server)
    known = server  # by one client, in an evaluation
    if algorithm.unicast is not None:
        down, known = (
            _shapes("unicast", algorithm.unicast, all_of_it, jnp.int32(0))
            for all_of_it in (down, server)
        )
    client = _shapes("init_client", algorithm.init_client, key, server)
    output, summands = _check_update(
        algorithm, population, codec, server, down, client, data
    )
    reports = {}
    for name, measure in algorithm.importance.items():
        asked = f"importance[{name!r}].report"
        reports[name] = _shapes(asked, measure.report, key, down, client, data)
        _check_score(name, measure, server, reports[name])
    classes = _check_predictions(algorithm, known, client, data, _one_client(test))
    return Messages(
        server,
        client,
        down,
        output.upload,
        summands,
        reports,
        dict(output.metrics),
        classes,
    )


def check_labels(name: str, data, classes: int) -> None:
    """Checks that every real example's label is one of the classes of the model.

    Args:
      name: of the data.
      data: stacked `ClientData` `[clients, ...]`, numpy or jax.
      classes: that the algorithm predicts.

    Raises:
      ValueError: names the first bad label's place and value.
    """
    y, sizes = np.asarray(data.y), np.asarray(data.size)
    real = np.arange(y.shape[1]) < sizes[:, None]
    whose = "the model, by what global_predictive returns"
    checks.labels(f"{name}.y", y, classes, whose, real)


def check_normalised(predictive: str, results: Any) -> None:
    """Checks that an evaluation was of log-probabilities.

    Args:
      predictive: the function that they come from.
      results: `Scores`, or a tuple of `Predictions`, with any leading axes.

    Raises:
      ValueError: for some real examples they do not sum to 1 over the classes.
    """
    results = [results] if hasattr(results, "unnormalised") else results
    off = sum(float(np.sum(one.unnormalised)) for one in results)
    if off:
        raise ValueError(
            f"{predictive} returns no log-probabilities: those of {off:.0f} examples "
            "do not sum to 1 over the classes; end it with jax.nn.log_softmax(logits)"
        )


def check_population(algorithm: Algorithm, sizes: np.ndarray, total: int) -> None:
    """Checks that an algorithm was built for these clients.

    Args:
      algorithm: whose `population` is looked at.
      sizes: numbers of examples of the clients that may take part.
      total: clients of the federation.

    Raises:
      ValueError: its task counts others; names both numbers.
    """
    if algorithm.population is None:
        return
    held = sizes[sizes > 0]
    here = dict(clients=len(held), samples=int(held.sum()), smallest=int(held.min()))
    here["total"] = total
    built = dict(zip(here, algorithm.population, strict=True))
    for name, count in here.items():
        if built[name] not in (None, count):
            raise ValueError(
                f"algorithm={algorithm.name} was built for a task of {name}="
                f"{built[name]}, but {name}={count} of those that may take part here: "
                "make the task by Task.of(model, train), with candidates where a "
                "selection has them"
            )


def check_selection(algorithm: Algorithm, selection: Selection) -> None:
    """Checks that a selection suits an algorithm.

    Raises:
      ValueError: the algorithm needs a cohort of another size, or does not have the
        measure of importance that the selection goes by; a selection of a user's own
        that does not pick as many ids as it says.
    """
    if selection.measure is not None and selection.measure not in algorithm.importance:
        known = ", ".join(algorithm.importance) or "none"
        raise ValueError(
            f"selection by measure={selection.measure!r}: {algorithm.name} has "
            f"{known}; use uniform, stratified or round_robin, or one of those"
        )
    _check_ids(selection)
    everyone = selection.candidates
    wanted = algorithm.cohort
    if wanted == "all":
        wanted = selection.clients if everyone is None else len(everyone)
    if wanted is not None and selection.size != wanted:
        raise ValueError(
            f"selection of {selection.size} clients a round does not suit "
            f"{algorithm.name}, which takes {wanted}: select participants={wanted}"
        )


def _check_ids(selection: Selection) -> None:
    """`select` returns (ids [size], how they were chosen)."""
    told = None, None
    if selection.measure is not None:
        scores = jax.ShapeDtypeStruct((selection.clients,), jnp.float32)
        told = scores, jax.ShapeDtypeStruct((selection.clients,), bool)
    found = _shapes("select", selection.select, root_key(0), jnp.int32(0), *told)
    ids = found[0] if isinstance(found, tuple) and len(found) == 2 else None
    shape, dtype = getattr(ids, "shape", None), getattr(ids, "dtype", None)
    if shape != (selection.size,) or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"selection.select must return (ids int32[{selection.size}], Choice or "
            f"()), but its ids are {dtype}{list(shape or ())}"
        )


def _shapes(name: str, function, *arguments) -> Any:
    with _noting(name):
        return jax.eval_shape(function, *arguments)


@contextlib.contextmanager
def _noting(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"raised while the contract of {name} was checked")
        raise


def _check_update(
    algorithm: Algorithm, population: int, codec: Codec, server, down, client, data
) -> tuple[ClientOutput, Any]:
    """A client's update and the server's after it: (what is sent, its summands)."""
    key, round_index = root_key(0), jnp.int32(0)
    output = _shapes(
        "client_update",
        lambda *args: _as_output(algorithm.client_update(*args)),
        key,
        round_index,
        down,
        client,
        data,
    )
    _check_scalars(output)
    output = output._replace(weight=jax.ShapeDtypeStruct((), jnp.float32))
    _same("client_update", "ClientOutput.client", client, output.client)
    _check_codec(codec, output.upload)
    summands = None
    if algorithm.reduce == "sum":
        summands = _shapes("statistics", algorithm.statistics, down, output.upload)
        _check_summands(algorithm, output.upload, summands)
    after = _shapes(
        "server_update",
        lambda server, *sent: algorithm.server_update(
            key, round_index, server, _aggregate(population, *sent)
        ),
        server,
        output,
        summands,
    )
    _same("server_update", "the server's state", server, after)
    return output, summands


def _check_predictions(algorithm: Algorithm, server, client, data, examples) -> int:
    """What both models predict with and for which examples: the number of classes."""
    key = root_key(0)
    own_server = server
    if algorithm.assign is not None:
        found = _shapes("assign", algorithm.assign, key, server, client, data)
        own_server = _check_assign(found)
    batch = (examples.x, jnp.ones(examples.y.shape, bool))
    personal = _shapes("personalise", algorithm.personalise, key, server, client, data)
    if personal is None:
        raise ValueError(
            "personalise returns None: return what personal_predictive is to be given"
        )
    if algorithm.kept is not None:
        _check_kept(_shapes("kept", algorithm.kept, server, client), personal)
    predictions = {
        name: _shapes(name, getattr(algorithm, name), *arguments, *batch)
        for name, arguments in (
            ("global_predictive", (key, own_server)),
            ("personal_predictive", (key, server, personal)),
        )
    }
    return _classes(predictions, examples.y.shape[0])


def _check_functions(algorithm: Algorithm) -> None:
    """Every field that is called is a function of what it is called with."""
    if not isinstance(algorithm.importance, Mapping):
        raise ValueError(
            f"importance={algorithm.importance!r} must be a dict of fedvi.Importance "
            "by name"
        )
    found = {name: (getattr(algorithm, name), a) for name, a in _FUNCTIONS.items()}
    for name, arguments in _OPTIONAL.items():
        if getattr(algorithm, name) is not None:
            found[name] = getattr(algorithm, name), arguments
    for name, measure in algorithm.importance.items():
        place = f"importance[{name!r}]"
        if not isinstance(measure, Importance):
            raise ValueError(
                f"{place}={measure!r} must be a fedvi.Importance(report, score)"
            )
        for part, arguments in _MEASURE.items():
            found[f"{place}.{part}"] = getattr(measure, part), arguments
    for name, (function, arguments) in found.items():
        _check_function(name, function, arguments)
    cohort = algorithm.cohort
    if isinstance(cohort, str) and cohort != "all":
        raise ValueError(f"cohort={cohort!r} must be a whole number, 'all' or None")
    if cohort not in (None, "all"):
        checks.whole("cohort", cohort)
    if not isinstance(algorithm.name, str):
        raise ValueError(f"name={algorithm.name!r} must be text")


def _check_function(name: str, function: Any, arguments: Sequence[str]) -> None:
    called = f"({', '.join(arguments)})"
    if not callable(function):
        raise ValueError(f"{name}={function!r} must be a function of {called}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some of what is compiled tells none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{name} takes {signature}, but it is called with {called}: {error}"
        ) from None


def _check_scalars(output: ClientOutput | None) -> None:
    """Weight and metrics of what `client_update` returned."""
    if output is None:
        raise ValueError("client_update must return a fedvi.ClientOutput")
    scalars = {"weight": output.weight}
    if not isinstance(output.metrics, Mapping) and output.metrics != ():
        raise ValueError(
            f"ClientOutput.metrics={type(output.metrics).__name__} must be a dict of "
            "scalars"
        )
    for name, value in dict(output.metrics).items():
        if name in _COLUMNS:
            raise ValueError(
                f"ClientOutput.metrics has {name!r}, the name of a column that a run "
                "writes itself: give the metric another name"
            )
        scalars[f"metrics[{name!r}]"] = value
    for name, value in scalars.items():
        dtype = getattr(value, "dtype", None)
        kinds = (jnp.floating, jnp.integer, jnp.bool_)
        number = dtype is not None and any(jnp.issubdtype(dtype, k) for k in kinds)
        if not number or value.shape:
            what = f"{dtype}{list(value.shape)}" if number else value
            raise ValueError(f"ClientOutput.{name} is {what}: it must be one number")


def _classes(predictions: dict[str, Any], examples: int) -> int:
    """The number of classes of both predictives, whose shapes are checked."""
    classes = {}
    for name, found in predictions.items():
        shape, dtype = jnp.shape(found), getattr(found, "dtype", None)
        if len(shape) != 3 or shape[1] != examples or not shape[0]:
            raise ValueError(
                f"{name} returns shape {shape} for {examples} examples: return "
                "log-probabilities [samples, batch, classes]"
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name} returns {dtype}: return log-probabilities, which are floats"
            )
        classes[name] = shape[2]
    if len(set(classes.values())) > 1:
        each = " and ".join(f"{name} {count}" for name, count in classes.items())
        raise ValueError(f"{each} classes: both predict the same labels")
    return classes["global_predictive"]


def _check_codec(codec: Codec, upload) -> None:
    """What is encoded comes out with structure, shapes and types."""
    if not isinstance(codec, Codec):
        raise ValueError(f"codec={codec!r} must be a fedvi.codecs.Codec")
    key = root_key(0)
    arrived = jax.eval_shape(lambda u: codec.decode(codec.encode(key, u)), upload)
    _same(f"codec {codec.name}", "an upload", upload, arrived)


def _check_summands(algorithm: Algorithm, upload, summands) -> None:
    """What is weighted and summed is floats, and there is some if anything is sent."""
    default = algorithm.statistics is upload_itself
    for path, leaf in jax.tree_util.tree_leaves_with_path(summands):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            what = "ClientOutput.upload, without statistics, " if default else ""
            what = what or "statistics returns what "
            raise ValueError(
                f"{what}is {leaf.dtype}{list(leaf.shape)} at "
                f"{jax.tree_util.keystr(path) or 'its root'}: what is weighted and "
                "summed must be floats; give statistics(server, upload) that makes "
                'them, or reduce="stack"'
            )
    if jax.tree.leaves(upload) and not jax.tree.leaves(summands):
        raise ValueError(
            "statistics returns nothing to sum of an upload that is sent: return a "
            "pytree of floats"
        )


def _check_score(name: str, measure, server, report) -> None:
    """`score` gives one float per client."""
    clients = 3  # any number that nothing else is
    reports = jax.tree.map(
        lambda r: jax.ShapeDtypeStruct((clients, *r.shape), r.dtype), report
    )
    counts = jax.ShapeDtypeStruct((clients,), bool)
    asked = f"importance[{name!r}].score"
    scores = _shapes(asked, measure.score, server, reports, counts)
    shape, dtype = jnp.shape(scores), getattr(scores, "dtype", None)
    if shape != (clients,) or dtype != jnp.float32:
        raise ValueError(
            f"importance[{name!r}].score returns {dtype}{list(shape)} for {clients} "
            "clients: return float32 [clients]"
        )


def _check_assign(found):
    """What `assign` returns as a client's global model."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError("assign must return (cluster [] int32, server)")
    cluster, own_server = found
    shapes = [f"{a.dtype}{list(a.shape)}" for a in jax.tree.leaves(cluster)]
    if shapes != ["int32[]"]:
        raise ValueError(
            f"assign returns {', '.join(shapes)} for the cluster: it must be int32[]"
        )
    return own_server


def _check_kept(found: Any, personal) -> None:
    """`kept` returns whether a client has something, as `personalise` makes it."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError("kept must return (known [] bool, personal)")
    known = jnp.shape(found[0]), getattr(found[0], "dtype", None)
    if known != ((), jnp.bool_):
        raise ValueError(
            f"kept returns {known[1]}{list(known[0])} for known: it must be bool[]"
        )
    _same("kept", "what personalise returns", personal, found[1])


def _one_client(data):
    # NumPy's int64 labels are int32 for JAX, which jax 0.12 warns of.
    def one(a):
        dtype = jax.dtypes.canonicalize_dtype(a.dtype)
        return jax.ShapeDtypeStruct(a.shape[1:], dtype)

    return jax.tree.map(one, data)


def _as_output(output: Any) -> ClientOutput | None:
    return output if isinstance(output, ClientOutput) else None


def _aggregate(population, output, summands):
    """What the server would get from a cohort of this one client."""
    one = jnp.ones(())
    if summands is not None:
        return Aggregate(summands, output.weight, one, population)
    stacked = jax.tree.map(lambda s: s[None], output.upload)
    ids = jnp.zeros(1, jnp.int32)
    return StackedAggregate(stacked, output.weight[None], ids, one, population)


def _paths(tree) -> set[str]:
    """The leaves of a tree by their paths; "itself" where it is a single one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "itself" for path, _ in leaves}


def _same(function: str, what: str, expected, found) -> None:
    """Structure, shapes and types of two pytrees of shapes must agree."""
    if problem := difference(expected, found):
        raise ValueError(f"{function} changes {what}: {problem}")


def difference(expected, found) -> str | None:
    """In which leaf two pytrees of shapes differ, in words; None: in none."""
    if jax.tree.structure(expected) != jax.tree.structure(found):
        wanted, given = _paths(expected), _paths(found)
        problems = [
            f"{verb} {', '.join(sorted(paths))}"
            for verb, paths in (("lacks", wanted - given), ("adds", given - wanted))
            if paths
        ]
        return f"it {' and '.join(problems) or 'has containers of other types'}"
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(expected),
        jax.tree.leaves(found),
        strict=True,
    )
    for (path, old), new in leaves:
        if old.shape != new.shape or old.dtype != new.dtype:
            return (
                f"at {jax.tree_util.keystr(path) or 'its root'} expected "
                f"{old.dtype}{list(old.shape)}, got {new.dtype}{list(new.shape)}"
            )
    return None
