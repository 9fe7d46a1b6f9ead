"""Data of clustered federations: the second half of the clients has other data.

cFedBayes (its Table 3) joins X with "reversed" X without saying what that means. Each
of `CLUSTER_TRANSFORMS` is one reading of it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedvi import checks
from fedvi.data.client_data import ClientData, FederatedData, some_examples
from fedvi.data.sources import check_scale

__all__ = ["CLUSTER_TRANSFORMS", "join_halves", "transform_half"]


def _invert(data: ClientData, classes: int) -> ClientData:
    if data.x.dtype != np.uint8:
        raise ValueError(
            f"transform='invert' needs uint8 pixels, but x is {data.x.dtype}: use "
            "'rotate' or 'relabel'"
        )
    return data._replace(x=255 - data.x)


def _rotate(data: ClientData, classes: int) -> ClientData:
    if data.x.ndim != 5:
        raise ValueError(
            "transform='rotate' needs images [height, width, channels], but an example "
            f"of x has shape {data.x.shape[2:]}: use 'relabel'"
        )
    return data._replace(x=data.x[:, :, ::-1, ::-1])


def _relabel(data: ClientData, classes: int) -> ClientData:
    return data._replace(y=classes - 1 - data.y)


CLUSTER_TRANSFORMS: dict[str, Callable[[ClientData, int], ClientData]] = {
    "invert": _invert,
    "rotate": _rotate,
    "relabel": _relabel,
}

_NOTES = {
    "invert": "pixels inverted",
    "rotate": "images rotated by 180 degrees",
    "relabel": "label c called classes - 1 - c",
}


def transform_half(federated: FederatedData, transform: str) -> FederatedData:
    """Makes two clusters: the first half of the clients, and the second, "reversed".

    Training and test data alike. Of an odd number of clients the first half has one
    more. Padded slots stay zero.

    Args:
      federated: the data, of at least two clients.
      transform: "invert": uint8 pixels x become 255 - x; "rotate": images are rotated
        by 180 degrees (IFCA's and CFL's code for two clusters); "relabel": label c
        becomes classes - 1 - c.

    Returns:
      The data with `clusters` `[clients]`: 0 as they were, 1 transformed.

    Raises:
      ValueError: an unknown transform, one that the inputs do not allow, or a single
        client.
    """
    checks.one_of("transform", transform, CLUSTER_TRANSFORMS)
    clusters = _halves(len(federated.train.size))
    second = clusters == 1

    def change(data: ClientData) -> ClientData:
        half = ClientData(*(leaf[second] for leaf in data))
        half = CLUSTER_TRANSFORMS[transform](half, federated.classes)
        # `_fit` clears the padded slots, which a transform fills.
        half = _fit(half, half.y.shape[1])
        return _concatenate(ClientData(*(leaf[~second] for leaf in data)), half)

    return replace(
        federated,
        train=change(federated.train),
        test=change(federated.test),
        fidelity=f"{federated.fidelity}; second half of the clients: "
        f"{_NOTES[transform]}",
        clusters=clusters,
    )


def join_halves(first: FederatedData, second: FederatedData) -> FederatedData:
    """Makes two clusters: half of the clients of one federation, half of another.

    Client i has its data of `first` if it is in the first half, else its data of
    `second`. Of an odd number of clients the first half has one more.

    Args:
      first, second: two data sets, partitioned alike.

    Returns:
      The data with `clusters` `[clients]`: 0 from `first`, 1 from `second`.

    Raises:
      ValueError: they differ in the number of clients or classes, or in the shape,
        type or scale of an example; or there is a single client.
    """
    for what, ours, theirs in (
        ("clients", len(first.train.size), len(second.train.size)),
        ("classes", first.classes, second.classes),
        ("shape of x", first.train.x.shape[2:], second.train.x.shape[2:]),
        ("type of x", first.train.x.dtype, second.train.x.dtype),
    ):
        if ours != theirs:
            raise ValueError(
                f"{first.name!r} and {second.name!r} cannot be joined: {what} is "
                f"{ours} there and {theirs} here; both must agree"
            )
    check_scale(
        f"training inputs of {first.name!r}",
        some_examples(first.train),
        f"those of {second.name!r}",
        some_examples(second.train),
    )
    clusters = _halves(len(first.train.size))
    in_second = clusters == 1

    def join(ours: ClientData, theirs: ClientData) -> ClientData:
        ours = ClientData(*(leaf[~in_second] for leaf in ours))
        theirs = ClientData(*(leaf[in_second] for leaf in theirs))
        capacity = max(1, int(ours.size.max()), int(theirs.size.max()))
        return _concatenate(_fit(ours, capacity), _fit(theirs, capacity))

    return replace(
        first,
        train=join(first.train, second.train),
        test=join(first.test, second.test),
        name=f"{first.name}+{second.name}",
        fidelity=f"first half of the clients: {first.name}, {first.fidelity}; second "
        f"half: {second.name}, {second.fidelity}",
        clusters=clusters,
        ids=_joined_ids(first.ids, second.ids, in_second),
        class_names=first.class_names
        if first.class_names == second.class_names
        else None,
    )


def _joined_ids(
    first: np.ndarray | None, second: np.ndarray | None, in_second: np.ndarray
) -> np.ndarray | None:
    if first is None or second is None:
        return None
    if first.dtype.kind != second.dtype.kind:
        first, second = first.astype(str), second.astype(str)
    return np.where(in_second, second, first)


def _halves(clients: int) -> np.ndarray:
    """Cluster of each client, `[clients]` int32."""
    if clients < 2:
        raise ValueError(f"clients={clients} cannot be halved: give at least 2 clients")
    return (np.arange(clients) * 2 // clients).astype(np.int32)


def _fit(data: ClientData, capacity: int) -> ClientData:
    """The same examples in another capacity, with zeros in the padded slots."""
    kept = min(capacity, data.y.shape[1])
    real = np.arange(kept)[None] < data.size[:, None]

    def fit(leaf):
        fitted = np.zeros((len(leaf), capacity, *leaf.shape[2:]), leaf.dtype)
        fitted[:, :kept][real] = leaf[:, :kept][real]
        return fitted

    return ClientData(fit(data.x), fit(data.y), data.size)


def _concatenate(first: ClientData, second: ClientData) -> ClientData:
    return ClientData(*(np.concatenate(leaves) for leaves in zip(first, second)))
