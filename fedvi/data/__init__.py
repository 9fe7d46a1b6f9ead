"""Data: sources, partitions over clients, padded client data, augmentation."""

from fedvi.data.client_data import (
    ClientData,
    FederatedData,
    calibration_split,
    class_histogram,
    empty_clients,
    federate,
    hold_out,
    settled_clients,
    some_examples,
)
from fedvi.data.client_files import (
    ClientArrays,
    ClientFiles,
    ClientSource,
    write_client_files,
)
from fedvi.data.clusters import CLUSTER_TRANSFORMS, join_halves, transform_half
from fedvi.data.label_filters import keep_classes, one_against_rest
from fedvi.data.partitions import (
    PARTITIONS,
    Partition,
    by_group,
    class_majority,
    class_shards,
    class_subsets,
    dirichlet,
    iid,
    label_sorted_shards,
    partition,
)
from fedvi.data.sources import Dataset, check_scale, load, settled, validate
from fedvi.data.transforms import (
    NORMALISATIONS,
    crop_and_flip,
    normalisation,
    pixel_statistics,
    standardise,
)

__all__ = [
    "CLUSTER_TRANSFORMS",
    "NORMALISATIONS",
    "PARTITIONS",
    "ClientArrays",
    "ClientData",
    "ClientFiles",
    "ClientSource",
    "Dataset",
    "FederatedData",
    "Partition",
    "by_group",
    "calibration_split",
    "check_scale",
    "class_histogram",
    "class_majority",
    "class_shards",
    "class_subsets",
    "crop_and_flip",
    "dirichlet",
    "empty_clients",
    "federate",
    "hold_out",
    "iid",
    "join_halves",
    "keep_classes",
    "label_sorted_shards",
    "load",
    "normalisation",
    "one_against_rest",
    "partition",
    "pixel_statistics",
    "settled",
    "settled_clients",
    "some_examples",
    "standardise",
    "transform_half",
    "validate",
    "write_client_files",
]
