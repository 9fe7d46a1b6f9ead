"""Any pytree in one `.npz` file, the form of a checkpoint, written atomically.

A kill at any moment leaves either the previous checkpoint or the new one, never a mix:
the file is written beside its target and renamed over it. Metadata sits inside the
same file, so that state and round number cannot disagree. Nothing is pickled. A `Flat`
is written layer by layer, under the layers' names.

Not Orbax: this is one file, renamed in one step together with its metadata, keeps typed
keys and bits, and names the leaf that does not fit; Orbax's folders would need all of
that around them.
"""

import contextlib
import json
import pickle
import re
import zipfile
import zlib
from collections import namedtuple
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedvi.experiment.folder import write_atomically
from fedvi.flat import Flat, is_flat
from fedvi.keys import is_key
from fedvi.placement import put

__all__ = ["canonical", "read", "read_metadata", "restore", "save"]

_METADATA = "metadata"
# What numpy and zipfile raise on a missing, truncated, damaged or foreign file.
_READ_ERRORS = (
    OSError,
    EOFError,
    KeyError,
    NotImplementedError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
)


def save(path: str | Path, tree: Any, metadata: Mapping[str, Any]) -> None:
    """Writes `tree` and `metadata` to `path`, atomically and durably.

    Args:
      path: target file; an older checkpoint there is replaced. One process at a time
        may write to it: temporary files of killed predecessors are removed.
      tree: pytree of jax or numpy arrays of any shape, typed PRNG keys and Python
        numbers. Shapes, dtypes and bits are kept.
      metadata: JSON-like.

    Raises:
      ValueError: `metadata` is not JSON-like, or a leaf is not numeric.
    """
    arrays, kinds = {}, {}
    for name, leaf in _named_leaves(_by_layer(tree)):
        arrays[name], kinds[name] = _encode(name, leaf)
    header = canonical({"metadata": metadata, "kinds": kinds}).encode()
    arrays[_METADATA] = np.frombuffer(header, np.uint8)
    write_atomically(path, lambda file: np.savez(file, **arrays))


def restore(path: str | Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """Reads back what `save` wrote, bit for bit.

    Args:
      path: the checkpoint.
      like: pytree with the structure, shapes and dtypes that are expected: arrays,
        typed keys, `jax.ShapeDtypeStruct`s or Python numbers. numpy leaves come back
        as numpy, jax leaves as jax arrays with the sharding of `like`.

    Returns:
      `(tree, metadata)`.

    Raises:
      ValueError: the file is missing or damaged (names the file), or a leaf is
        missing, unexpected or of another shape or dtype (names the leaf).
    """
    arrays, kinds, metadata = _read(Path(path))
    by_layer = _by_layer(like)
    leaves = _named_leaves(by_layer)
    expected = {name for name, _ in leaves}
    for problem, names in (
        ("lacks", sorted(expected - arrays.keys())),
        ("has the unexpected", sorted(arrays.keys() - expected)),
    ):
        if names:
            raise ValueError(
                f"checkpoint {path} {problem} leaf {', '.join(names)}: it was written "
                "for a state of another structure; start again with another run folder"
            )
    values = [
        _decode(path, name, leaf, arrays[name], kinds[name]) for name, leaf in leaves
    ]
    tree = jax.tree.unflatten(jax.tree.structure(by_layer), values)
    return jax.tree.map(_placed, like, tree, is_leaf=is_flat), metadata


def read(path: str | Path) -> tuple[Any, dict[str, Any]]:
    """A tree of dicts, tuples and named tuples of arrays, without a likeness of it.

    Returns:
      `(tree, metadata)`; leaves are NumPy, and a named tuple is one of the same fields.

    Raises:
      ValueError: the file is missing or damaged.
    """
    arrays, kinds, metadata = _read(Path(path))
    whole: dict[Any, Any] = {}
    for name, array in arrays.items():
        node = whole
        *outer, last = re.findall(r"\['.*?'\]|\[\d+\]|\.\w+", name)
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = array.view(jnp.dtype(kinds[name]))
    return _of_paths(whole), metadata


def _of_paths(node: Any) -> Any:
    """What nested dicts with the parts of leaves' names as keys stand for."""
    if not isinstance(node, dict):
        return node
    values = [_of_paths(value) for value in node.values()]
    first = next(iter(node), "['']")
    if first.startswith("."):
        return namedtuple("Fields", [part[1:] for part in node])(*values)
    if first.startswith("['"):
        return dict(zip((part[2:-2] for part in node), values))
    return tuple(values)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata that `save` wrote, without the arrays.

    Raises:
      ValueError: the file is missing or damaged.
    """
    with _naming_errors(Path(path)):
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return json.loads(archive[_METADATA].tobytes())["metadata"]


def canonical(value: Any) -> str:
    """The one JSON text of a JSON-like value.

    Raises:
      ValueError: it holds something that JSON cannot express.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(
            f"configuration and metadata must be JSON-like (dict, list, str, number, "
            f"bool, None): {error}"
        ) from error


def _by_layer(tree: Any) -> Any:
    """Every `Flat`, of arrays or shapes, as a tree of its layers, numpy or shapes."""

    def layers(node):
        if not is_flat(node):
            return node
        vector, layout = node.vector, node.layout
        shapes = [(*vector.shape[:-1], *shape) for shape in layout.shapes]
        if isinstance(vector, jax.ShapeDtypeStruct):
            parts = [jax.ShapeDtypeStruct(shape, vector.dtype) for shape in shapes]
        else:
            cuts = np.cumsum(layout.sizes)[:-1]
            parts = np.split(np.asarray(vector), cuts, axis=-1)
            parts = [part.reshape(shape) for shape, part in zip(shapes, parts)]
        return layout.treedef.unflatten(parts)

    return jax.tree.map(layers, tree, is_leaf=is_flat)


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [("state" + jax.tree_util.keystr(keys), leaf) for keys, leaf in leaves]


def _encode(name: str, leaf: Any) -> tuple[np.ndarray, str]:
    """The array that goes into the file, and the dtype or key type it stands for."""
    if is_key(leaf):
        return np.asarray(jax.random.key_data(leaf)), f"key:{jax.random.key_impl(leaf)}"
    array = np.asarray(leaf)
    if array.dtype.kind in "biufc":
        return array, array.dtype.name
    if jnp.issubdtype(array.dtype, jnp.number):
        # npz cannot express bfloat16 and the like: their bits go in as integers.
        return array.view(f"uint{8 * array.dtype.itemsize}"), array.dtype.name
    raise ValueError(
        f"leaf {name} has dtype {array.dtype}: only numbers and typed PRNG keys can "
        "be saved; keep other things in the metadata"
    )


def _decode(
    path: str | Path, name: str, like: Any, array: np.ndarray, kind: str
) -> Any:
    if kind.startswith("key:"):
        value = jax.random.wrap_key_data(jnp.array(array), impl=kind[4:])
    else:
        value = array.view(jnp.dtype(kind))
    wanted = like if hasattr(like, "dtype") else np.asarray(like)
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        raise ValueError(
            f"checkpoint {path}: leaf {name} is {value.dtype}{list(value.shape)}, "
            f"expected {wanted.dtype}{list(wanted.shape)}: it was written for another "
            "model or number of clients; start again with another run folder"
        )
    return value


def _placed(like: Any, value: Any) -> Any:
    """What was read, as the leaf, or `Flat`, of `like` that it stands for."""
    if is_flat(like):
        lead = like.vector.shape[:-1]
        parts = [part.reshape(*lead, -1) for part in jax.tree.leaves(value)]
        vector = np.concatenate(parts, -1) if parts else np.zeros(like.vector.shape)
        vector = _placed(like.vector, vector.astype(like.vector.dtype))
        return Flat(vector, like.layout)
    if isinstance(like, (bool, int, float, complex)):
        return type(like)(value.item())
    if isinstance(like, (np.ndarray, np.generic)):
        return value if isinstance(like, np.ndarray) else value[()]
    # A copy: jax may otherwise borrow numpy's memory, which donation cannot reuse.
    value = value if is_key(value) else jnp.array(value)
    # An uncommitted array must stay free to follow others to their devices.
    committed = getattr(like, "committed", True)
    sharding = getattr(like, "sharding", None) if committed else None
    return value if sharding is None else put(value, sharding)


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any]]:
    with _naming_errors(path):
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = dict(archive)
        header = json.loads(arrays.pop(_METADATA).tobytes())
        return arrays, header["kinds"], header["metadata"]


@contextlib.contextmanager
def _naming_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except _READ_ERRORS as error:
        raise ValueError(
            f"cannot read checkpoint {path} ({type(error).__name__}: {error}): it is "
            "missing, damaged or not a fedvi checkpoint; delete it and start again"
        ) from error
