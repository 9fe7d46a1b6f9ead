"""Where a run's arrays lie on a mesh: clients' are spread, the server's whole."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from fedvi.client_map import AXIS, MODEL_AXIS, devices_of
from fedvi.flat import trees
from fedvi.keys import by_bits, is_key
from fedvi.nn import Model

__all__ = [
    "device_memory",
    "layered",
    "on_host",
    "places",
    "put",
    "replicate",
    "replicated",
    "resized",
    "spread",
    "state_shardings",
]


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that lies whole on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def places(mesh: Mesh | None, clients: int) -> int:
    """Length of arrays of all clients: their number, and what makes it divide by the
    devices that clients are spread over."""
    return clients + -clients % devices_of(mesh)


def resized(tree: Any, axis: int, length: int) -> Any:
    """Leaves, or shapes, `[..., clients, ...]` of more places, zeros, or of fewer."""

    def leaf(a):
        shape = (*a.shape[:axis], length, *a.shape[axis + 1 :])
        if a.shape == shape:
            return a
        if isinstance(a, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, a.dtype)
        if is_key(a):
            return by_bits(leaf, a)
        host = np.asarray(a)
        kept = host.take(range(min(length, host.shape[axis])), axis)
        pad = [(0, n - m) for n, m in zip(shape, kept.shape)]
        return np.pad(kept, pad)

    return jax.tree.map(leaf, tree)


def spread(mesh: Mesh, tree: Any) -> Any:
    """Puts clients' arrays `[places, ...]` on the devices, a part of them on each."""
    part = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.tree.map(lambda leaf: put(leaf, part), tree)


def layered(model: Model) -> Model:
    """The model with its layers' arrays as parameters, in place of `Flat`s.

    What is split over devices is split layer by layer: a vector of all layers would
    have to be put together again wherever one of them is used.
    """
    return model._replace(
        init=lambda key: trees(model.init(key)),
        with_classes=lambda classes: layered(model.with_classes(classes)),
        regrouped=lambda group_of: layered(model.regrouped(group_of)),
    )


def state_shardings(
    mesh: Mesh, state: Any, runs: bool = False, spread_clients: bool = True
) -> Any:
    """The sharding of every leaf of a `fedvi.federation.State`.

    The clients' axis of their states is spread over the devices, or whole on each. On a
    mesh with a "model" axis a leaf of the server's or the clients' state is also split
    along its longest axis that the model's devices divide (the last of several); one
    that has none lies whole on every device of a row, as the server's do on other
    meshes. The runs' axis is never split.

    Args:
      mesh: from `fedvi.client_map.clients_mesh`.
      state: the state or its shapes.
      runs: its leaves have a leading `[runs]` axis.
      spread_clients: whether every device has its own clients.

    Returns:
      A State of `NamedSharding`.
    """
    whole = replicated(mesh)
    lead = int(runs)
    first = (*[None] * lead, AXIS) if spread_clients else ()
    return state._replace(
        server=jax.tree.map(lambda s: _split(mesh, s, lead, ()), state.server),
        clients=jax.tree.map(lambda s: _split(mesh, s, lead + 1, first), state.clients),
        round=whole,
        key=whole,
        settings=jax.tree.map(lambda _: whole, state.settings),
    )


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Puts a pytree whole on every device of the mesh; see `put`."""
    return jax.tree.map(lambda leaf: put(leaf, replicated(mesh)), tree)


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """`jax.device_put` that never makes processes talk to each other.

    Over several processes each must hold the same values: that is not checked.
    """
    if getattr(leaf, "sharding", None) == sharding:
        return leaf
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if not getattr(leaf, "is_fully_addressable", True):
        # It lies on the devices of all already, as a rule as it should.
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        return by_bits(lambda bits: put(bits, sharding), leaf)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: jnp.array(host[index])
    )


def on_host(leaf: jax.Array) -> jax.Array | np.ndarray:
    """What a process can read of an array that spans processes: all of it.

    Every process must call it for every leaf, as parts may lie with the others.
    """
    if leaf.is_fully_addressable:
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    if is_key(leaf):
        return by_bits(on_host, leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)


def device_memory() -> int:
    """Bytes of the device, or of the host where the device does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return stats.get("bytes_limit", physical)


def _split(mesh: Mesh, leaf: Any, lead: int, first: tuple) -> NamedSharding:
    """One leaf's sharding: `first` of its `lead` axes, then the model's."""
    whole = NamedSharding(mesh, PartitionSpec(*first))
    if MODEL_AXIS not in mesh.shape or is_key(leaf):
        return whole
    parts = mesh.shape[MODEL_AXIS]
    axes = [a for a in range(lead, leaf.ndim) if leaf.shape[a] % parts == 0]
    axes = [a for a in axes if leaf.shape[a] > 0]
    if not axes:
        return whole
    longest = max(axes, key=lambda a: (leaf.shape[a], a))
    between = [None] * (longest - len(first))
    return NamedSharding(mesh, PartitionSpec(*first, *between, MODEL_AXIS))
