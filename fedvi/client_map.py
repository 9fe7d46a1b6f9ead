"""One function, many clients: devices → chunks → vmap, with streaming sums."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from fedvi import checks
from fedvi.keys import by_bits, is_key

__all__ = [
    "AXIS",
    "MODEL_AXIS",
    "brought",
    "clients_mesh",
    "devices_of",
    "layout",
    "map_reduce",
    "taken_back",
]

AXIS = "clients"
MODEL_AXIS = "model"


def clients_mesh(devices: int | None = None, model_devices: int = 1) -> Mesh:
    """A mesh over devices: `{"clients": devices}`.

    With `model_devices` it is `{"clients": devices / model_devices, "model":
    model_devices}`: every participant's model, and the server's state, are spread
    over the devices of a row (`fedvi.placement`).

    Args:
      devices: of all processes together, as many from each; None: all. Of one
        process, its first ones.
      model_devices: devices that hold one model together.

    Raises:
      ValueError: more devices asked for than there are, or a number that the
        processes, or rows of `model_devices`, cannot share equally.
    """
    for name, number in (("devices", devices), ("model_devices", model_devices)):
        if number is not None:
            checks.whole(name, number, 0)
    available = jax.devices()
    owners = sorted({device.process_index for device in available})
    own = {p: [d for d in available if d.process_index == p] for p in owners}
    if devices is None and len({len(part) for part in own.values()}) > 1:
        raise ValueError(
            f"the processes have {[len(part) for part in own.values()]} devices: give "
            "each as many, or give devices, the number to use of all together"
        )
    devices = len(available) if devices is None else devices
    if not 1 <= devices <= len(available):
        raise ValueError(
            f"devices={devices} must lie between 1 and the {len(available)} "
            f"{available[0].platform} devices that JAX sees" + _more_cpus(available)
        )
    each = devices // len(owners)
    if devices % len(owners) or any(len(part) < each for part in own.values()):
        raise ValueError(
            f"devices={devices} must be a multiple of the {len(owners)} processes, of "
            "which each gives as many; they have "
            f"{[len(part) for part in own.values()]}"
        )
    if not 1 <= model_devices <= devices or devices % model_devices:
        raise ValueError(
            f"model_devices={model_devices} must divide the {devices} devices in use"
        )
    chosen = [device for part in own.values() for device in part[:each]]
    if model_devices == 1:
        shape, names = (devices,), (AXIS,)
    else:
        shape = (devices // model_devices, model_devices)
        names = (AXIS, MODEL_AXIS)
    types = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, devices=chosen, axis_types=types)


def _more_cpus(available) -> str:
    if available[0].platform != "cpu":
        return ""
    return (
        ": a CPU shows as many as jax.config.update('jax_num_cpu_devices', n) asks for "
        "before JAX is first used"
    )


def devices_of(mesh: Mesh | None) -> int:
    """Over how many devices clients are spread; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[AXIS]


def layout(cohort: int, chunk_size: int | None, devices: int) -> tuple[int, int]:
    """(chunks of each device, clients in a chunk), as even as can be."""
    per_device = -(-cohort // devices)
    chunks = -(-per_device // min(chunk_size or per_device, per_device))
    return chunks, -(-per_device // chunks)


def map_reduce(
    fn: Callable,
    operands: Any,
    items: Any,
    *,
    count: jax.Array | int | None = None,
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
):
    """Runs `fn` for every client of a cohort; sums one output, stacks the other.

    Devices → `lax.scan` over chunks on each device → `vmap` inside a chunk. A cohort
    that does not divide is padded with copies of the last client, whose sums count 0
    and whose stacked outputs are cut off. Results do not depend on `chunk_size` or
    `mesh`, up to the order of float additions. Over several devices one all-reduce adds
    up the sums; items that a device holds already stay there, and outputs too, but for
    those of one number a client, which come back whole with the sums.

    Args:
      fn: `(operands, item) -> (sums, outputs)`, two pytrees.
      operands: pytree that every client reads; replicated over the devices.
      items: what each client alone reads, leaves `[cohort, ...]`, spread over the
        devices: ids `[cohort]` to look things up in `operands`, or the clients' data.
      count: only the first `count` items enter the sums; None: all.
      chunk_size: clients in one vmap; None: the whole cohort of a device at once
        (fastest on an accelerator); 1: a plain loop (fastest on CPU, memory of one
        client).
      mesh: from `clients_mesh`; None or one device: no sharding. Its "model" axis is
        left to XLA's partitioner.

    Returns:
      (sums: pytree without, outputs: pytree with a leading [cohort] axis).
    """
    cohort = jax.tree.leaves(items)[0].shape[0]
    count = cohort if count is None else count
    devices = devices_of(mesh)
    per_device = -(-cohort // devices)
    chunks, chunk = layout(cohort, chunk_size, devices)
    slots = jnp.arange(devices * per_device)
    items = _repeated(items, slots.size)

    run = partial(_run_chunks, fn, chunks=chunks, chunk=chunk)
    if devices == 1:
        sums, outputs = run(operands, items, slots < count)
    else:
        # With check_vma=True the gradient with respect to a replicated value is summed
        # over the devices, unless every operand AND every constant that an algorithm's
        # loop carries is marked as varying. Algorithms know no devices.
        structure = None

        def on_device(*arguments):
            nonlocal structure
            sums, outputs = run(*arguments)
            outputs, structure = jax.tree.flatten(outputs)
            numbers = {i: a for i, a in enumerate(outputs) if _is_one_number(a)}
            whole = {i: _in_place(a, slots.size) for i, a in numbers.items()}
            sums, whole = jax.lax.psum((sums, whole), AXIS)
            whole = {i: a.astype(numbers[i].dtype) for i, a in whole.items()}
            rest = {i: a for i, a in enumerate(outputs) if i not in numbers}
            return sums, whole, rest

        sums, whole, spread = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(AXIS)),
            out_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(AXIS)),
            axis_names={AXIS},
            check_vma=False,
        )(operands, items, slots < count)
        leaves = whole | spread
        outputs = structure.unflatten([leaves[i] for i in range(len(leaves))])
    return sums, jax.tree.map(lambda a: a[:cohort], outputs)


def _is_one_number(a: jax.Array) -> bool:
    """Of each client, of a type that a sum with zeros leaves as it is in float32."""
    return a.ndim == 1 and a.dtype in (jnp.float32, jnp.bool_)


def _in_place(part: jax.Array, length: int) -> jax.Array:
    """A device's `[n]` of a float32 vector of all devices, elsewhere 0."""
    first = jax.lax.axis_index(AXIS) * part.size
    whole = jnp.zeros(length, jnp.float32)
    return jax.lax.dynamic_update_slice(whole, part.astype(jnp.float32), (first,))


def _repeated(tree, length: int):
    """The leaves, `[n, ...]`, with copies of the last row until they have a length."""
    n = jax.tree.leaves(tree)[0].shape[0]
    if n == length:
        return tree
    return jax.tree.map(lambda a: a[jnp.minimum(jnp.arange(length), n - 1)], tree)


def _run_chunks(fn, operands, items, valid, *, chunks, chunk):
    # Traced once for its shapes and for the loop.
    fn = jax.jit(fn)
    own = valid.size
    items = _repeated(items, chunks * chunk)
    valid = jnp.pad(valid, (0, chunks * chunk - own))

    def one(item, valid):
        sums, outputs = fn(operands, item)
        return jax.tree.map(lambda s: jnp.where(valid, s, 0), sums), outputs

    def run_chunk(items, valid):
        if chunk == 1:  # a vmap over one client would only slow matrix products down
            sums, outputs = one(jax.tree.map(lambda a: a[0], items), valid[0])
            return sums, jax.tree.map(lambda a: a[None], outputs)
        sums, outputs = jax.vmap(one)(items, valid)
        return jax.tree.map(lambda s: s.sum(0), sums), outputs

    if chunks == 1:  # of all clients
        return run_chunk(items, valid)

    def body(total, chunk_of):
        sums, outputs = run_chunk(*chunk_of)
        return jax.tree.map(jnp.add, total, sums), outputs

    items, valid = jax.tree.map(
        lambda a: a.reshape(chunks, chunk, *a.shape[1:]), (items, valid)
    )
    shapes = jax.eval_shape(
        lambda: run_chunk(*jax.tree.map(lambda a: a[0], (items, valid)))[0]
    )
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, outputs = jax.lax.scan(body, start, (items, valid))
    return total, jax.tree.map(
        lambda a: a.reshape(chunks * chunk, *a.shape[2:])[:own], outputs
    )


# Clients' arrays `[places, ...]`, spread over the devices by their first axis.


def brought(tree, ids, mesh: Mesh, here: bool):
    """Rows of spread arrays, `[len(ids), ...]`, spread in the order of `ids`.

    Args:
      tree: leaves `[places, ...]`, spread.
      ids: `[devices x n]` int32 on every device.
      mesh: from `clients_mesh`.
      here: whether a device's part of `ids` are places of its own: then nothing is
        sent. Else every device sends the others what they ask for, and for a while
        holds as many rows as there are ids.
    """

    def on_device(tree, ids):
        places = jax.tree.leaves(tree)[0].shape[0]
        first = jax.lax.axis_index(AXIS) * places
        if here:
            return jax.tree.map(lambda a: a[ids - first], tree)
        own = (first <= ids) & (ids < first + places)

        def send(a):
            if is_key(a):
                return by_bits(send, a)
            if a.dtype == bool:
                return send(a.astype(jnp.uint8)).astype(bool)
            if jnp.issubdtype(a.dtype, jnp.floating):  # as bits, also of -0 and NaN
                whole = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
                bits = send(jax.lax.bitcast_convert_type(a, whole))
                return jax.lax.bitcast_convert_type(bits, a.dtype)
            mask = own.reshape(-1, *[1] * (a.ndim - 1))
            found = jnp.where(mask, a[jnp.where(own, ids - first, 0)], 0)
            return jax.lax.psum_scatter(found, AXIS, tiled=True)

        return jax.tree.map(send, tree)

    return _spread(on_device, mesh, 1, here)(tree, ids)


def taken_back(tree, ids, rows, mesh: Mesh, here: bool):
    """Spread arrays with some rows replaced: the way back of `brought`.

    Args:
      tree: leaves `[places, ...]`, spread.
      ids: `[devices x n]` int32 on every device; one that is no place is left out.
      rows: leaves `[devices x n, ...]`, spread.
      mesh: as of `brought`.
      here: likewise.
    """

    def on_device(tree, rows, ids):
        places = jax.tree.leaves(tree)[0].shape[0]
        first = jax.lax.axis_index(AXIS) * places
        if not here:
            rows = jax.tree.map(lambda r: jax.lax.all_gather(r, AXIS, tiled=True), rows)
        own = (first <= ids) & (ids < first + places)
        at = jnp.where(own, ids - first, places)
        return jax.tree.map(lambda a, r: a.at[at].set(r, mode="drop"), tree, rows)

    if not jax.tree.leaves(tree):  # clients that keep nothing
        return tree
    return _spread(on_device, mesh, 2, here)(tree, rows, ids)


def _spread(function: Callable, mesh: Mesh, spread: int, last: bool):
    """On every device: its parts of the first arguments; the last one whole, or its
    part too."""
    part = PartitionSpec(AXIS)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*[part] * spread, part if last else PartitionSpec()),
        out_specs=PartitionSpec(AXIS),
        axis_names={AXIS},
        check_vma=False,
    )
