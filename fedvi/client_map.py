"""One function, many clients: devices → chunks → vmap, with streaming sums."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

__all__ = ["AXIS", "MODEL_AXIS", "clients_mesh", "map_reduce"]

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
    that does not divide is padded with copies of its last client, whose sums count 0
    and whose stacked outputs are cut off. Results do not depend on `chunk_size` or
    `mesh`, up to the order of float additions.

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
    devices = 1 if mesh is None else mesh.shape[AXIS]
    per_device = -(-cohort // devices)
    chunks = -(-per_device // min(chunk_size or per_device, per_device))
    chunk = -(-per_device // chunks)
    slots = jnp.arange(devices * chunks * chunk)
    if slots.size > cohort:
        items = jax.tree.map(lambda a: a[jnp.minimum(slots, cohort - 1)], items)

    run = partial(_run_chunks, fn, chunks=chunks, chunk=chunk)
    if devices == 1:
        sums, outputs = run(operands, items, slots < count)
    else:
        # With check_vma=True the gradient with respect to a replicated value is summed
        # over the devices, unless every operand AND every constant that an algorithm's
        # loop carries is marked as varying. Algorithms know no devices.
        def on_device(*arguments):
            sums, outputs = run(*arguments)
            return jax.lax.psum(sums, AXIS), outputs

        sums, outputs = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(AXIS)),
            out_specs=(PartitionSpec(), PartitionSpec(AXIS)),
            axis_names={AXIS},
            check_vma=False,
        )(operands, items, slots < count)
    return sums, jax.tree.map(lambda a: a[:cohort], outputs)


def _run_chunks(fn, operands, items, valid, *, chunks, chunk):
    # Traced once for its shapes and for the loop.
    fn = jax.jit(fn)

    def one(item, valid):
        sums, outputs = fn(operands, item)
        return jax.tree.map(lambda s: jnp.where(valid, s, 0), sums), outputs

    def run_chunk(items, valid):
        if chunk == 1:  # a vmap over one client would only slow matrix products down
            sums, outputs = one(jax.tree.map(lambda a: a[0], items), valid[0])
            return sums, jax.tree.map(lambda a: a[None], outputs)
        sums, outputs = jax.vmap(one)(items, valid)
        return jax.tree.map(lambda s: s.sum(0), sums), outputs

    if chunks == 1:
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
        lambda a: a.reshape(chunks * chunk, *a.shape[2:]), outputs
    )
