"""Other classification problems from a data set's labels: fewer classes, or two."""

from collections.abc import Sequence

import numpy as np

from fedvi.data.sources import Dataset, settled

__all__ = ["keep_classes", "one_against_rest"]


def keep_classes(dataset: Dataset, classes: Sequence[int]) -> Dataset:
    """Only the examples of some classes, relabelled 0..k-1 in the order given.

    Args:
      dataset: the data set; natural ids stay with their examples.
      classes: k >= 2 different labels of it (DSVGD: the digits 0 to 8).

    Returns:
      A data set of k classes, whose fidelity line names those that were kept.

    Raises:
      ValueError: an unknown or repeated class, fewer than two, or no training example
        of any of them.
    """
    dataset, kept = settled(dataset), list(classes)
    for label in kept:
        if label not in range(dataset.classes):
            raise ValueError(
                f"keep_classes={kept}: {label} is no class of {dataset.name!r}, whose "
                f"labels are 0..{dataset.classes - 1}"
            )
    if len(set(kept)) < len(kept):
        raise ValueError(f"keep_classes={kept} repeats a class: name each once")
    if len(kept) < 2:
        raise ValueError(f"keep_classes={kept} must name at least 2 classes")
    new = np.full(dataset.classes, -1, np.int32)
    new[kept] = np.arange(len(kept))
    parts = {}
    for split in ("train", "test"):
        y = new[getattr(dataset, f"{split}_y")]
        where = y >= 0
        group = getattr(dataset, f"{split}_group")
        parts[f"{split}_x"] = getattr(dataset, f"{split}_x")[where]
        parts[f"{split}_y"] = y[where]
        parts[f"{split}_group"] = None if group is None else group[where]
    if not len(parts["train_y"]):
        raise ValueError(
            f"keep_classes={kept} leaves {dataset.name!r} no training example: name "
            "classes that it has"
        )
    names = dataset.class_names and tuple(dataset.class_names[c] for c in kept)
    return dataset._replace(
        **parts,
        classes=len(kept),
        class_names=names,
        fidelity=f"{dataset.fidelity}; only classes {', '.join(map(str, kept))}, as "
        f"0..{len(kept) - 1}",
    )


def one_against_rest(dataset: Dataset, positive: int) -> Dataset:
    """Two classes: label 1 for one class, 0 for all others.

    Args:
      dataset: the data set.
      positive: the class that becomes 1 (Covertype: 1, lodgepole pine, as in LIBSVM's
        covtype.binary).

    Returns:
      A data set of 2 classes, whose fidelity line says so.

    Raises:
      ValueError: `positive` is no label of the data set.
    """
    dataset = settled(dataset)
    if positive not in range(dataset.classes):
        raise ValueError(
            f"one_against_rest={positive} is no class of {dataset.name!r}, whose "
            f"labels are 0..{dataset.classes - 1}"
        )
    return dataset._replace(
        train_y=(dataset.train_y == positive).astype(np.int32),
        test_y=(dataset.test_y == positive).astype(np.int32),
        classes=2,
        class_names=None,
        fidelity=f"{dataset.fidelity}; label 1 is class {positive}, 0 the rest",
    )
