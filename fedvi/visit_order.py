"""In which order a round visits its cohort: clients of like sizes share a chunk.

All clients of a chunk (`fedvi.client_map`) take as many steps as the largest of them:
the others' steps beyond their own are padding, computed and thrown away.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedvi.client_map import layout
from fedvi.local import LocalTraining

__all__ = ["VisitOrder", "by_size", "padded_share", "ranks"]


class VisitOrder(NamedTuple):
    """A cohort in another order, and back; the default leaves it as it is.

    Attributes:
      there: [cohort] int32, place in the cohort of the client that is visited first,
        second, and so on.
      back: [cohort] int32, at which visit each client of the cohort has its turn.
    """

    there: jax.Array | None = None
    back: jax.Array | None = None

    def of_visits(self, cohort: Any) -> Any:
        """A pytree of leaves `[cohort, ...]`, in the order of the visits."""
        return _reordered(cohort, self.there)

    def of_cohort(self, visits: Any) -> Any:
        """A pytree of leaves in the order of the visits, in that of the cohort."""
        return _reordered(visits, self.back)


def _reordered(tree: Any, places: jax.Array | None) -> Any:
    return tree if places is None else jax.tree.map(lambda a: a[places], tree)


def ranks(
    slots: int, chunk_size: int | None, devices: int, filled: int | None = None
) -> np.ndarray:
    """`[filled]` which client in order of size, largest first, each slot is for.

    Chunks are of neighbours in size, and dealt to the devices in turn, there and back,
    so that each device has an equal share of the steps. The smallest comes last, since
    copies of the last fill the slots up that are left (`map_reduce`).

    Args:
      slots: clients of which `map_reduce` is told.
      chunk_size: clients in one vmap; None: all of a device.
      devices: over which the clients are spread.
      filled: slots that are to be ranked, the first ones; None: all.
    """
    filled = slots if filled is None else filled
    dealt = _chunks(slots, chunk_size, devices, fill=filled).transpose(1, 0, 2).copy()
    dealt[-2::-2] = dealt[-2::-2, ::-1]
    dealt = dealt[dealt < filled - 1]
    return np.argsort(np.append(dealt, filled - 1))


def _chunks(
    slots: int, chunk_size: int | None, devices: int, fill: int | None = None
) -> np.ndarray:
    """`[devices, chunks, chunk]` slots as `map_reduce` lays them out, and copies of a
    device's last one, or `fill`, where they do not divide."""
    chunks, chunk = layout(slots, chunk_size, devices)
    per_device = -(-slots // devices)
    places = np.arange(chunks * chunk)
    own = np.minimum(places, per_device - 1)
    found = np.arange(devices)[:, None] * per_device + own
    if fill is not None:
        found[:, per_device:] = fill
    return found.reshape(devices, chunks, chunk)


def by_size(sizes: jax.Array, chunk_size: int | None, devices: int = 1) -> VisitOrder:
    """The order in which clients of like sizes share a chunk.

    By the number of examples, since with it grows the number of steps whatever the
    batch size. Nothing is reordered where each client, or the whole cohort, is a chunk.

    Args:
      sizes: [cohort] numbers of examples.
      chunk_size: as of `ranks`.
      devices: likewise.
    """
    cohort = len(sizes)
    chunks, chunk = layout(cohort, chunk_size, devices)
    if chunk == 1 or chunks * devices == 1:
        return VisitOrder()
    rank = ranks(cohort, chunk_size, devices)
    there = jnp.argsort(-sizes, stable=True)[rank].astype(jnp.int32)
    back = (
        jnp.zeros(cohort, jnp.int32).at[there].set(jnp.arange(cohort, dtype=jnp.int32))
    )
    return VisitOrder(there, back)


def padded_share(
    sizes: np.ndarray,
    training: LocalTraining,
    chunk_size: int | None,
    devices: int = 1,
    ordered: bool = True,
) -> float:
    """Which share of the steps that a round computes is padding, from 0 to 1.

    A step is a minibatch of one client. Counted are those of `fold_minibatches`: a
    chunk goes through as many epochs as the client with the most, each as long as the
    longest of those that are still in it.

    Args:
      sizes: [cohort] numbers of examples.
      training: epochs or steps, and batch size.
      chunk_size: as of `ranks`.
      devices: likewise.
      ordered: False: clients are visited in the order of `sizes`.
    """
    cohort = len(sizes)
    _, chunk = layout(cohort, chunk_size, devices)
    sizes = np.asarray(sizes)
    if ordered and chunk > 1:
        sizes = -np.sort(-sizes)[ranks(cohort, chunk_size, devices)]
    an_epoch = -(-sizes // training.batch_size)
    total = training.epochs * an_epoch
    if training.steps is not None:
        total = np.where(an_epoch > 0, training.steps, 0)
    slots = _chunks(cohort, chunk_size, devices).reshape(-1, chunk)
    copied = np.minimum(slots, cohort - 1)
    epochs = -(-total // np.maximum(an_epoch, 1))
    computed = 0
    for epoch in range(epochs.max(initial=0)):
        left = np.clip(total - epoch * an_epoch, 0, an_epoch)
        computed += chunk * left[copied].max(axis=1).sum()
    return 1 - total.sum() / computed if computed else 0.0
