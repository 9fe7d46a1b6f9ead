"""Whether an algorithm keeps the contract, found out from shapes alone.

A user's slip in one function would otherwise show as an error deep inside a scan.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.algorithm import (
    Aggregate,
    Algorithm,
    ClientOutput,
    StackedAggregate,
    upload_itself,
)
from fedvi.codecs import IDENTITY, Codec
from fedvi.selection import Selection

__all__ = ["Messages", "check", "check_population", "check_selection"]


class Messages(NamedTuple):
    """States, and what one client and the server send each other, as shapes.

    Attributes:
      server: the server's state.
      client: a client's.
      down: what `broadcast` lets through.
      upload: of a client, before a codec; beside it goes its weight, [] float32.
      summands: `statistics` of an upload; None with `reduce="stack"`.
      reports: by name of the measure of importance, a client's; no codec.
    """

    server: Any
    client: Any
    down: Any
    upload: Any
    summands: Any
    reports: dict[str, Any]


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
    key, round_index = jax.random.key(0), jnp.int32(0)
    data = _one_client(train)
    server = _shapes("init", algorithm.init, key)
    down = _shapes("broadcast", algorithm.broadcast, server)
    client = _shapes("init_client", algorithm.init_client, key, server)
    output = _shapes(
        "client_update",
        lambda *args: _as_output(algorithm.client_update(*args)),
        key,
        round_index,
        down,
        client,
        data,
    )
    if output is None:
        raise ValueError("client_update must return a fedvi.ClientOutput")
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
    reports = {}
    for name, measure in algorithm.importance.items():
        asked = f"importance[{name!r}].report"
        reports[name] = _shapes(asked, measure.report, key, down, client, data)
        _check_score(name, measure, server, reports[name])
    own_server = server
    if algorithm.assign is not None:
        found = _shapes("assign", algorithm.assign, key, server, client, data)
        own_server = _check_assign(found)
    examples = _one_client(test)
    batch = (examples.x, jnp.ones(examples.y.shape, bool))
    personal = _shapes("personalise", algorithm.personalise, key, server, client, data)
    for name, arguments in (
        ("global_predictive", (key, own_server, *batch)),
        ("personal_predictive", (key, server, personal, *batch)),
    ):
        shape = jnp.shape(_shapes(name, getattr(algorithm, name), *arguments))
        if len(shape) != 3 or shape[1] != examples.y.shape[0]:
            raise ValueError(
                f"{name} returns shape {shape} for {examples.y.shape[0]} examples: "
                "return log-probabilities [samples, batch, classes]"
            )
    return Messages(server, client, down, output.upload, summands, reports)


def check_population(algorithm: Algorithm, clients: int, samples: int) -> None:
    """Checks that an algorithm was built for these clients.

    Raises:
      ValueError: its task counts others; names both numbers.
    """
    if algorithm.population not in (None, (clients, samples)):
        built, counted = algorithm.population
        raise ValueError(
            f"algorithm={algorithm.name} was built for a task of clients={built} and "
            f"samples={counted}, but {clients} clients with {samples} examples may "
            "take part here: make the task by Task.of(model, train), with candidates "
            "where a selection has them"
        )


def check_selection(algorithm: Algorithm, selection: Selection) -> None:
    """Checks that a selection suits an algorithm.

    Raises:
      ValueError: the algorithm needs a cohort of another size, or does not have the
        measure of importance that the selection goes by.
    """
    if selection.measure is not None and selection.measure not in algorithm.importance:
        known = ", ".join(algorithm.importance) or "none"
        raise ValueError(
            f"selection by measure={selection.measure!r}: {algorithm.name} has "
            f"{known}; use uniform or round_robin, or one of those"
        )
    everyone = selection.candidates
    wanted = algorithm.cohort
    if wanted == "all":
        wanted = selection.clients if everyone is None else len(everyone)
    if wanted is not None and selection.size != wanted:
        raise ValueError(
            f"selection of {selection.size} clients a round does not suit "
            f"{algorithm.name}, which takes {wanted}: select participants={wanted}"
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


def _check_codec(codec: Codec, upload) -> None:
    """What is encoded comes out with structure, shapes and types."""
    if not isinstance(codec, Codec):
        raise ValueError(f"codec={codec!r} must be a fedvi.codecs.Codec")
    key = jax.random.key(0)
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
    scores = jax.eval_shape(measure.score, server, reports, counts)
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


def _one_client(data):
    # NumPy's int64 labels are int32 for JAX, which jax 0.12 warns of.
    def one(a):
        dtype = jax.dtypes.canonicalize_dtype(a.dtype)
        return jax.ShapeDtypeStruct(a.shape[1:], dtype)

    return jax.tree.map(one, data)


def _as_output(output: Any) -> ClientOutput | None:
    if not isinstance(output, ClientOutput):
        return None
    return output._replace(weight=jnp.asarray(output.weight, jnp.float32))


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
    if jax.tree.structure(expected) != jax.tree.structure(found):
        wanted, given = _paths(expected), _paths(found)
        problems = [
            f"{verb} {', '.join(sorted(paths))}"
            for verb, paths in (("lacks", wanted - given), ("adds", given - wanted))
            if paths
        ]
        raise ValueError(
            f"{function} changes the structure of {what}: it "
            f"{' and '.join(problems) or 'has containers of other types'}"
        )
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(expected),
        jax.tree.leaves(found),
        strict=True,
    )
    for (path, old), new in leaves:
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError(
                f"{function} changes {what} at {jax.tree_util.keystr(path)}: expected "
                f"{old.dtype}{list(old.shape)}, got {new.dtype}{list(new.shape)}"
            )
