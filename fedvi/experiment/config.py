"""What is asked for: all that a run's result depends on, and how it is carried out."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import optax

from fedvi.codecs import CODECS
from fedvi.data import CLUSTER_TRANSFORMS, NORMALISATIONS, PARTITIONS, FederatedData
from fedvi.data.partitions import options_of
from fedvi.data.sources import file_name
from fedvi.evaluation import BINS
from fedvi.experiment.folder import FORMATS
from fedvi.local import OPTIMIZERS
from fedvi.nn import MODELS
from fedvi.options import check, option
from fedvi.selection import RULES

__all__ = [
    "ExperimentConfig",
    "HostOptions",
    "RunOptions",
    "check_novel",
    "participants",
]


# FedHB's data and N (§6), and the data that its and FedBABU's augmentation is for.
PROTOCOL_DATASET, PROTOCOL_CLIENTS = "cifar100", 100
AUGMENTED = ("cifar10", "cifar100")

# What a sweep may choose by, on held-out data.
CRITERIA = ("personal_nll", "personal_accuracy", "global_nll", "global_accuracy")

OUT_OF_DISTRIBUTION = ("ood_dataset", "ood_data_file", "ood_classes")


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """All that the result of a run depends on, as plain values that JSON can hold.

    The defaults are the protocol of FedHB §6 (N=100, f=0.1, τ=1, batch 50, learning
    rate 0.1, five epochs of personalisation) and, where the paper is silent, that of
    FedBABU's code, which it follows (decay at ½ and ¾ of the rounds, momentum 0.9,
    crop and flip, fine-tuning rate 1e-3, test batch 128). What suits only some data is
    None by default and comes from the data (`for_data`).

    Each field's meaning and bounds stand beside it; they are the help texts of the
    flags too.
    """

    algorithm: str = option(
        "fedhb_niw",
        "A registered algorithm, or your own: package.module:builder.",
        group="method",
    )
    options: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={"help": "The algorithm's own options; its defaults for the rest."},
    )

    dataset: str | None = option(
        None,
        "digits (embedded), fashion_mnist, mnist, emnist, cifar10, cifar100 or another "
        "tensorflow-datasets name; with data_file any name. Default: the file's name "
        f"and classes; without a file {PROTOCOL_DATASET}.",
        group="data",
    )
    data_file: str | None = option(
        None, "An .npz with train_x, train_y, test_x, test_y."
    )
    data_dir: str | None = option(
        None, "Folder of idx files or of prepared tensorflow-datasets copies."
    )
    keep_classes: tuple[int, ...] = option(
        (),
        "Only examples of these classes, relabelled in this order (DSVGD: digits 0 "
        "to 8).",
    )
    one_against_rest: int | None = option(
        None,
        "Two classes: 1 for this one, 0 for the rest (Covertype: 1, lodgepole pine, as "
        "in LIBSVM's covtype.binary).",
    )
    partition: str = option(
        "class_shards",
        "How the data are split over clients (FedHB §6: class_shards).",
        choices=PARTITIONS,
    )
    clients: int | None = option(
        None,
        f"N, number of clients. Default: {PROTOCOL_CLIENTS}; with by_group, as with 0, "
        "all groups.",
        at_least=0,
    )
    shards: int | None = option(
        None, "s, shards a client (class_shards, label_sorted_shards).", at_least=1
    )
    alpha: float | None = option(
        None, "Concentration of the Dirichlet partition.", above=0
    )
    min_size: int | None = option(
        None, "Least training examples of a client (dirichlet).", at_least=0
    )
    classes_per_client: int | None = option(
        None, "Classes that a client holds (class_subsets).", at_least=1
    )
    train_per_class: int | None = option(
        None, "Training examples a client and class (class_subsets).", at_least=1
    )
    test_per_class: int | None = option(
        None, "Test examples a client and class (class_subsets).", at_least=1
    )
    pool: bool | None = option(
        None,
        "Deal from both splits pooled, so that training images may come from the "
        "official test split (class_subsets).",
    )
    retries: int | None = option(
        None, "Draws until every client has min_size (dirichlet).", at_least=1
    )
    majority: float | None = option(
        None, "Share of a client's majority class (class_majority).", above=0, below=1
    )
    cluster_transform: str = option(
        "none",
        "Two clusters: what is done to the data of the second half of the clients. "
        "invert: pixels x become 255 - x; rotate: images rotated by 180 degrees; "
        'relabel: label c becomes classes - 1 - c (cFedBayes\' "reversed" data are one '
        "of the three, it does not say which).",
        choices=("none", *CLUSTER_TRANSFORMS),
    )
    second_dataset: str | None = option(
        None,
        "Two clusters: the data set of the second half of the clients, partitioned "
        "like dataset, whose pixel mean and deviation serve both.",
    )
    second_data_file: str | None = option(None, "The data_file of second_dataset.")
    novel_clients: int = option(
        0,
        "Clients, chosen with partition_seed, that never take part in training "
        "(BPFed §VI-C: 1 of 10; FedABML Table 2: 80 of 100).",
        at_least=0,
    )
    unlabelled: int = option(
        0,
        "Training inputs, evenly from the clients that train, that the server has too, "
        "without their labels, for methods that distil there (FedBE).",
        at_least=0,
    )
    partition_seed: int = option(
        0, "Seed of the partition, the same for all seeds of a run.", at_least=0
    )
    validation_fraction: float = option(
        0.0,
        "0: evaluate on the test data. Above: hold out this part of every client's "
        "training data and evaluate on it; the test data stay untouched.",
        at_least=0,
        below=1,
    )
    calibration_fraction: float = option(
        0.0,
        "Above 0: this part of every client's training data is trained on by nobody; "
        "after training it fits temperatures and conformal thresholds "
        "(docs/calibration.md).",
        at_least=0,
        below=1,
    )

    normalise: str = option(
        "standardise",
        "What the network sees of pixels in 0..1 and of features: standardise: (x - "
        "mean) / std of the training split; half: (x - 0.5) / 0.5 (the public code of "
        "pFedBayes); unit: as they are.",
        choices=NORMALISATIONS,
        group="model",
    )
    model: str | None = option(
        None,
        "The network (FedHB §6: mobilenet; appendix H: mlp). Default: mobilenet for "
        "images whose sides are multiples of 32, else mlp.",
        choices=MODELS,
        importable=True,
    )
    hidden: tuple[int, ...] = option(
        (256,),
        "Widths of the hidden layers of mlp (FedHB appendix H: 256), or of your own.",
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "Of the activations: float32 or bfloat16, half the memory on an accelerator. "
        "Parameters stay float32 (docs/performance.md).",
    )
    augment: bool | None = option(
        None,
        "Random crop and flip in training and fine-tuning (FedBABU). Default: for "
        f"{' and '.join(AUGMENTED)} only.",
    )

    rounds: int = option(
        320, "Rounds (FedHB §6: ⌊320/τ⌋).", at_least=1, group="training"
    )
    fraction: float = option(
        0.1,
        "f: ⌊N·f⌋ clients take part in a round; novel_clients are no part of N. "
        "Methods that say how many (dsvgd: 1; parallel_dsvgd, cfl: all) ignore it.",
        above=0,
        at_most=1,
    )
    selection: str = option(
        "uniform",
        f"Who takes part: {', '.join(RULES)}, or in proportion to a measure of "
        "importance that the algorithm has (dsvgd: ksd, hip). Methods that take all "
        "clients ignore it (flag: for names of --algorithm without one).",
    )
    selection_strata: int | None = option(
        None,
        "Of selection=stratified: equal parts of the clients, in order of id, of which "
        "each gives as many participants. Where devices divide them, clients train "
        "where their data lie.",
        at_least=1,
    )
    selection_temperature: float = option(
        1.0,
        "T of a selection by importance, P_k in proportion to s_k^(1/T) (1: the "
        "paper; 0: the clients of the largest scores).",
        at_least=0,
    )
    selection_floor: float = option(
        1e-6,
        "Share of a selection by importance that is uniform, so that no client is lost "
        "for good.",
        at_least=0,
        at_most=1,
    )
    selection_order: Literal["id", "sorted", "shuffled"] = option(
        "id",
        "Turns of round_robin: by id; sorted by the clients' most frequent training "
        "class; shuffled once with partition_seed.",
    )
    codec: str = option(
        "identity",
        "How uploads are written (docs/communication.md): identity; bfloat16, rounded "
        "to nearest; int8, rounded up or down at random without bias.",
        choices=CODECS,
    )
    epochs: int = option(1, "τ, local epochs a round.", at_least=1)
    batch_size: int = option(50, "Examples a step.", at_least=1)
    learning_rate: float = option(
        0.1, "Of the clients' optimiser.", traced=True, above=0
    )
    lr_decay: float = option(
        0.1, "Factor on the learning rate at each of lr_decay_at.", above=0, at_most=1
    )
    lr_decay_at: tuple[float, ...] = option(
        (0.5, 0.75), "Fractions of the rounds at which the learning rate decays."
    )
    momentum: float = option(
        0.9,
        "Heavy-ball momentum of SGD; afresh in every round, but for methods that keep "
        "their clients' moments (pFedBayes and its kin).",
        traced=True,
        at_least=0,
        below=1,
    )
    optimizer: str = option(
        "sgd",
        "Of the clients, in training and fine-tuning; your own is a function of the "
        "learning rate, such as optax:adamw.",
        choices=OPTIMIZERS,
        importable=True,
    )
    local_steps: int | None = option(
        None, "R, minibatches a round, in place of epochs.", at_least=1
    )
    finetune_epochs: int = option(
        5,
        "Epochs of personalisation, of body and head.",
        evaluation="rows",
        at_least=0,
    )
    finetune_learning_rate: float = option(
        1e-3,
        "Learning rate of personalisation.",
        traced=True,
        evaluation="rows",
        above=0,
    )

    eval_every: int = option(
        10, "Rounds between evaluations.", at_least=1, group="evaluation"
    )
    personal_every: int = option(
        0,
        "Rounds between evaluations of the personalised models, a multiple of "
        "eval_every; 0: only at the end. All clients adapt each time.",
        at_least=0,
    )
    eval_batch_size: int = option(
        128,
        "Most test examples in one forward pass; matters with batch statistics.",
        evaluation="rows",
        at_least=1,
    )
    calibration_bins: int = option(
        BINS,
        "Equally wide bins of confidence of ECE and MCE.",
        evaluation="rows",
        at_least=1,
    )
    final_rounds: int = option(
        0,
        "F: evaluate after each of the last F rounds too, personalised models "
        "included, and report the mean (FedABML: 10).",
        at_least=0,
    )
    window: int = option(
        0,
        "W: report the mean over the evaluations of the last W rounds of the global "
        "model's figures, and the standard deviation of its accuracy between them "
        "(client selection: 50).",
        at_least=0,
    )
    finetune_curve: tuple[int, ...] = option(
        (),
        "After training, personalised accuracy after each of these numbers of "
        "fine-tuning epochs (FedABML Table 2: 0,1,2,3,4,5,8,10).",
        evaluation="after",
    )
    conformal_level: float = option(
        0.1,
        "α of the conformal prediction sets, which miss the true class with at most "
        "this probability (with calibration_fraction).",
        evaluation="after",
        above=0,
        below=1,
    )
    risk_coverage: bool = option(
        False,
        "After training, the risk-coverage curve, and ECE of equally full bins and "
        "without bins: one more pass over the evaluated data. With "
        "calibration_fraction always.",
        evaluation="after",
    )
    ood_dataset: str | None = option(
        None,
        "After training, the personalised models' uncertainty on this data set, "
        "partitioned like dataset, beside that on their own test data (FedABML Fig. 5: "
        "mnist against fashion_mnist).",
        evaluation="after",
    )
    ood_data_file: str | None = option(
        None, "The data_file of ood_dataset.", evaluation="after"
    )
    ood_classes: tuple[int, ...] = option(
        (),
        "The keep_classes of ood_dataset, dealt out at random: where it is dataset "
        "itself, classes that no client trains on. Empty: keep_classes, partitioned "
        "like dataset.",
        evaluation="after",
    )
    seed: int = option(0, "Seed of the first run.", at_least=0, group="run")
    seeds: int = option(1, "Runs, with seeds seed, seed + 1, ...", at_least=1)

    def __post_init__(self):
        _expand(self, "data_file", "second_data_file", "ood_data_file", "data_dir")

    @property
    def data_name(self) -> str:
        """The name of the data set: given, its file's, or that of FedHB's protocol."""
        if self.dataset is not None:
            return self.dataset
        return PROTOCOL_DATASET if self.data_file is None else file_name(self.data_file)

    @property
    def parts(self) -> int | None:
        """N as asked for; None: as many as there are groups."""
        if self.clients is None and self.partition != "by_group":
            return PROTOCOL_CLIENTS
        return self.clients or None

    def for_data(self, federated: FederatedData) -> "ExperimentConfig":
        """The configuration with every default that the data decide filled in.

        Args:
          federated: what this configuration loads, or a user's own data.
        """
        input_shape = federated.train.x.shape[2:]
        asked = (self.dataset, self.data_file, self.second_dataset)
        name = federated.name if asked == (None, None, None) else self.data_name
        tiles = len(input_shape) == 3 and not any(s % 32 for s in input_shape[:2])
        filled = {
            "dataset": name,
            "clients": len(federated.train.size),
            "model": "mobilenet" if tiles else "mlp",
            "augment": name in AUGMENTED and len(input_shape) == 3,
        }
        missing = {k: v for k, v in filled.items() if getattr(self, k) is None}
        return dataclasses.replace(self, **missing)

    def of_data(self) -> tuple[Any, ...]:
        """All that decides what is loaded and how it is dealt out."""
        names = [f.name for f in dataclasses.fields(self)]
        first, last = names.index("dataset"), names.index("normalise")
        names = [*names[first : last + 1], "augment", *OUT_OF_DISTRIBUTION]
        return tuple(getattr(self, name) for name in names)

    @property
    def method(self) -> str:
        """The algorithm, with its selection where that is not uniform: `dsvgd:ksd`."""
        if self.selection == "uniform":
            return self.algorithm
        return f"{self.algorithm}:{self.selection}"

    @property
    def evaluated_on(self) -> str:
        """The split that every figure comes from: `validation` or `test`."""
        return "validation" if self.validation_fraction else "test"

    @property
    def measured_after(self) -> bool:
        """Whether something is measured once, after training, and told of."""
        asked = self.finetune_curve, self.ood_dataset, self.calibration_fraction
        return any(asked) or self.risk_coverage

    @property
    def ood_name(self) -> str | None:
        """What is out of distribution, for prints and plots: `digits 8, 9`."""
        if not self.ood_classes:
            return self.ood_dataset
        return f"{self.ood_dataset} {', '.join(map(str, self.ood_classes))}"

    def partition_options(self) -> dict[str, Any]:
        """Those options of the partition that are given; other partitions' are not
        looked at."""
        given = {key: getattr(self, key) for key in options_of(self.partition)}
        return {key: value for key, value in given.items() if value is not None}

    def idle_options(self) -> list[str]:
        """Given options of other partitions, which nothing looks at."""
        options = dict.fromkeys(key for name in PARTITIONS for key in options_of(name))
        idle = options.keys() - options_of(self.partition).keys()
        return [k for k in options if k in idle and getattr(self, k) is not None]

    def decay_rounds(self) -> list[int]:
        """The rounds after which the learning rate decays."""
        # Not from round 0, where a run of a few rounds would put it.
        return [max(1, math.floor(f * self.rounds)) for f in self.lr_decay_at]

    def learning_rate_schedule(self) -> Callable:
        """The learning rate as a function of the round, counted from 0."""
        factors: dict[int, float] = {}
        for boundary in self.decay_rounds():
            factors[boundary] = factors.get(boundary, 1.0) * self.lr_decay
        return optax.piecewise_constant_schedule(self.learning_rate, factors)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON holds it."""
        fields = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ExperimentConfig":
        """The configuration that `to_dict` gave.

        Raises:
          ValueError: fields of another version of fedvi; names them.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        problems = [
            f"{verb} {', '.join(sorted(names))}"
            for verb, names in (
                ("has the unknown", fields.keys() - known),
                ("lacks", known - fields.keys()),
            )
            if names
        ]
        if problems:
            raise ValueError(" and ".join(problems))
        return cls(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        )

    # When a run is evaluated: every `eval_every` rounds and after each of the last.

    def blocks(self, done: int = 0) -> Iterator[int]:
        """Numbers of rounds between the evaluations after round `done`, in order.

        The rounds of evaluations do not depend on `done`, so a resumed run has those of
        a straight one. There are at most three different numbers.
        """
        while done < self.rounds:
            end = min(done - done % self.eval_every + self.eval_every, self.rounds)
            if self.final_rounds:
                first_final = self.rounds - self.final_rounds + 1
                end = min(end, max(done + 1, first_final))
            yield end - done
            done = end

    def is_final(self, round_index: int) -> bool:
        """Whether a round, counted from 1, is one of the last `final_rounds`."""
        return round_index > self.rounds - self.final_rounds

    def in_window(self, round_index: int) -> bool:
        """Whether a round, counted from 1, is one of the last `window`."""
        return round_index > self.rounds - self.window

    def personal_too(self, round_index: int) -> bool:
        """Whether the evaluation after a round includes the personalised models."""
        regular = self.personal_every > 0 and round_index % self.personal_every == 0
        return regular or self.is_final(round_index) or round_index == self.rounds

    def validate(self) -> None:
        """Checks every field on its own and those that must agree.

        Raises:
          ValueError: names the argument, its value and what would be right.
        """
        check(self)
        _check_agreement(self)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where and how a run is carried out: nothing that changes its results."""

    run_dir: str = option("", "Run folder. Default: runs/NAME.", group="run")
    overwrite: bool = option(False, "Replace the run that lies in the run folder.")
    resume: bool = option(False, "Continue the run that lies in the run folder.")
    checkpoint_every: int = option(
        1, "Evaluations between checkpoints; the last round always has one.", at_least=1
    )
    tensorboard: bool = option(
        False, "Write TensorBoard event files too (extra: tensorboard)."
    )
    plot_formats: tuple[str, ...] = option(
        ("png",),
        "Formats of the pictures (extra: plots); empty: none are drawn.",
        choices=FORMATS,
    )
    chunk_size: int | str = option(
        "auto",
        "Clients trained at once on a device: a number, whole (the whole cohort) or "
        "auto (1 on CPU, else as many as memory allows).",
        group="devices",
    )
    devices: int | None = option(
        None,
        "Devices to use, of all processes together; a CPU shows as many as are asked "
        "for. Default: every accelerator; of a CPU one for each core and client of a "
        "round, or one of each process.",
        at_least=1,
    )
    model_devices: int = option(
        1,
        "Devices that hold one model together: for models that do not fit on one. "
        "Must divide the number of devices.",
        at_least=1,
    )
    stream: bool = option(
        False,
        "Keep data and clients' states on the host, on disk beside the checkpoint, and "
        "give the devices a block of clients at a time (docs/scale.md).",
    )
    block_size: int = option(256, "Clients in a block of --stream.", at_least=1)

    def __post_init__(self):
        _expand(self, "run_dir")

    def validate(self) -> None:
        """Checks every field.

        Raises:
          ValueError: names the argument, its value and what would be right.
        """
        check(self)
        if self.overwrite and self.resume:
            raise ValueError(
                "overwrite=True and resume=True exclude each other: give one of them"
            )
        if not self.run_dir:
            raise ValueError("run_dir='' is empty: give the name of a run folder")
        whole = isinstance(self.chunk_size, int) and self.chunk_size >= 1
        if not whole and self.chunk_size not in ("auto", "whole"):
            raise ValueError(
                f"chunk_size={self.chunk_size!r} must be auto, whole or a number of at "
                "least 1"
            )


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """How the processes of a run find each other; by default there is one."""

    distributed: Literal["off", "auto"] = option(
        "off",
        "auto: one of several processes that JAX finds by itself (Slurm, Open MPI, "
        "Kubernetes, TPU pod).",
        group="devices",
    )
    coordinator_address: str | None = option(
        None, "HOST:PORT of process 0, where the processes of a run meet."
    )
    num_processes: int | None = option(
        None, "Processes of the run; each gets its own --process_id.", at_least=1
    )
    process_id: int | None = option(
        None, "Of this process, from 0; process 0 writes the files.", at_least=0
    )
    start_timeout: int = option(
        300, "Seconds that the processes wait for each other at the start.", at_least=1
    )
    lost_timeout: int = option(
        100,
        "Seconds without a sign of life after which a process counts as lost (JAX's "
        "own figure).",
        at_least=3,
    )

    @property
    def several(self) -> bool:
        """Whether JAX's distributed service is asked for."""
        return self.distributed == "auto" or self.coordinator_address is not None

    def validate(self, devices: int | None = None) -> None:
        """Checks every field, before anything starts.

        Args:
          devices: of all processes together, if asked for.

        Raises:
          ValueError: names the flag, its value and what would be right.
        """
        check(self)
        three = ("coordinator_address", "num_processes", "process_id")
        given = [name for name in three if getattr(self, name) is not None]
        missing = [name for name in three if name not in given]
        if self.distributed == "off" and given and missing:
            raise ValueError(
                f"{_named(given)} without {_named(missing)}: several processes need "
                "all three, or --distributed=auto where JAX can find them"
            )
        if self.coordinator_address is not None:
            host, _, port = self.coordinator_address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(
                    f"coordinator_address={self.coordinator_address!r} must be "
                    "HOST:PORT, such as node1:12345"
                )
        if self.num_processes is None:
            return
        if self.process_id is not None and self.process_id >= self.num_processes:
            raise ValueError(
                f"process_id={self.process_id} must be at most "
                f"{self.num_processes - 1}: the ids of "
                f"num_processes={self.num_processes} count from 0"
            )
        if devices is not None and devices % self.num_processes:
            raise ValueError(
                f"devices={devices} must be a multiple of "
                f"num_processes={self.num_processes}: each gives as many"
            )


def _expand(config: Any, *names: str) -> None:
    """Puts the home folder in the place of ~ in the paths of a frozen dataclass."""
    for name in names:
        path = getattr(config, name)
        if isinstance(path, str) and path.startswith("~"):
            whole = os.path.expanduser(path)
            if whole == path:
                raise ValueError(
                    f"{name}={path!r}: there is no home folder of that name: give the "
                    "whole path"
                )
            object.__setattr__(config, name, whole)


def check_novel(clients: int, novel: int) -> None:
    """Raises `ValueError` if of `clients` clients `novel` ones leave none to train."""
    if novel >= clients:
        raise ValueError(
            f"novel_clients={novel} of clients={clients} leaves nobody to train: give "
            f"at most {clients - 1}"
        )


def participants(clients: int, fraction: float, novel: int = 0) -> int:
    """⌊N·f⌋, clients in a round.

    Args:
      clients: number of clients.
      fraction: f.
      novel: clients that never take part, no part of N.

    Raises:
      ValueError: that is less than one client, or no client is left to train.
    """
    check_novel(clients, novel)
    trained = clients - novel
    # 100 · 0.29 is 28.999999999999996 in floating point.
    count = math.floor(trained * fraction + 1e-9)
    if count < 1:
        less = f" less novel_clients={novel}" if novel else ""
        raise ValueError(
            f"fraction={fraction} of clients={clients}{less} is less than one "
            f"participant: give a fraction of at least {1 / trained:.4g}, or more "
            "clients"
        )
    return count


def _check_agreement(config: ExperimentConfig) -> None:
    """What no field's own kind, choices and bounds can say."""
    if config.clients == 0 and config.partition != "by_group":
        raise ValueError(
            "clients=0 must be at least 1; only partition='by_group' takes 0"
        )
    if config.parts:
        check_novel(config.parts, config.novel_clients)
    if config.validation_fraction + config.calibration_fraction >= 1:
        raise ValueError(
            f"validation_fraction={config.validation_fraction} and "
            f"calibration_fraction={config.calibration_fraction} leave nothing to "
            "train on: give fractions whose sum is below 1"
        )
    if config.data_dir is not None and config.dataset is config.data_file is None:
        raise ValueError(
            f"data_dir={config.data_dir!r} needs a name for its data: give dataset"
        )
    if config.seed + config.seeds > 2**32:
        raise ValueError(
            f"seed={config.seed} is too large for seeds={config.seeds} runs: the last "
            "one must be below 2^32"
        )
    if config.second_data_file is not None and config.second_dataset is None:
        raise ValueError(
            f"second_data_file={config.second_data_file!r} needs a name for its "
            "data: give second_dataset"
        )
    if config.second_dataset is not None and config.cluster_transform != "none":
        raise ValueError(
            f"cluster_transform={config.cluster_transform!r} and second_dataset="
            f"{config.second_dataset!r} exclude each other: give one of them"
        )
    widths = config.hidden if isinstance(config.hidden, (tuple, list)) else [None]
    if not all(isinstance(width, int) and width >= 1 for width in widths):
        raise ValueError(
            f"hidden={config.hidden!r} must be a tuple of widths of at least 1, or ()"
        )
    if list(config.lr_decay_at) != sorted(set(config.lr_decay_at)) or not all(
        0 < fraction < 1 for fraction in config.lr_decay_at
    ):
        raise ValueError(
            f"lr_decay_at={list(config.lr_decay_at)} must be rising fractions of the "
            "rounds, between 0 and 1"
        )
    if config.personal_every % config.eval_every:
        raise ValueError(
            f"personal_every={config.personal_every} must be a multiple of "
            f"eval_every={config.eval_every}, or 0: only at the end"
        )
    _check_end(config)


def _check_end(config: ExperimentConfig) -> None:
    """Checks what is asked of the end of a run."""
    if config.final_rounds > config.rounds:
        raise ValueError(
            f"final_rounds={config.final_rounds} must be at most rounds={config.rounds}"
        )
    if config.window > config.rounds:
        raise ValueError(
            f"window={config.window} must be at most rounds={config.rounds}: give a "
            "smaller window, or 0 for the last round's figures"
        )
    if config.window and config.final_rounds:
        raise ValueError(
            f"window={config.window} and final_rounds={config.final_rounds} exclude "
            "each other: both are a mean over the last rounds; give one of them"
        )
    curve = list(config.finetune_curve)
    if curve != sorted(set(curve)) or any(
        not isinstance(epochs, int) or epochs < 0 for epochs in curve
    ):
        raise ValueError(
            f"finetune_curve={curve} must be rising numbers of epochs, at least 0"
        )
    if config.ood_data_file is not None and config.ood_dataset is None:
        raise ValueError(
            f"ood_data_file={config.ood_data_file!r} needs a name for its data: "
            "give ood_dataset"
        )
    _check_ood_classes(config)


def _check_ood_classes(config: ExperimentConfig) -> None:
    classes = list(config.ood_classes)
    if classes and config.ood_dataset is None:
        raise ValueError(f"ood_classes={classes} needs ood_dataset: give it")
    if (config.ood_dataset, config.ood_data_file) == (
        config.data_name,
        config.data_file,
    ):
        kept = config.keep_classes or classes  # none named: all are kept
        if trained := [label for label in classes if label in kept]:
            raise ValueError(
                f"ood_classes={classes}: the clients train on {trained} of "
                f"{config.data_name!r}: give keep_classes, without them"
            )


def _named(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)
