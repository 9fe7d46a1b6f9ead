"""All that the result of a run depends on, as a frozen dataclass."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import optax

from fedvi.experiment.settings import check_bounds, setting
from fedvi.experiment.validation import check_agreement, participants

__all__ = ["PARTITION_OPTIONS", "ExperimentConfig"]

PARTITION_OPTIONS = (
    "shards",
    "alpha",
    "min_size",
    "classes_per_client",
    "train_per_class",
    "test_per_class",
    "pool",
    "retries",
    "majority",
)


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """All that the result of a run depends on, as plain values that JSON can hold.

    The defaults are the protocol of FedHB §6 (N=100, f=0.1, τ=1, batch 50, learning
    rate 0.1, five epochs of personalisation) and, where the paper is silent, that of
    FedBABU's code, which it follows (decay at ½ and ¾ of the rounds, momentum 0.9,
    crop and flip, fine-tuning rate 1e-3, test batch 128).

    Each field's meaning and bounds stand beside it; they are the help texts of the
    flags too.
    """

    algorithm: str = setting(
        "fedhb_niw", "A registered algorithm (flag: several, with commas)."
    )
    options: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={"help": "The algorithm's own options; its defaults for the rest."},
    )

    dataset: str = setting(
        "cifar100",
        "digits (embedded), fashion_mnist, mnist, emnist, cifar10, cifar100 or another "
        "tensorflow-datasets name; with data_file any name.",
    )
    data_file: str | None = setting(
        None, "An .npz with train_x, train_y, test_x, test_y."
    )
    data_dir: str | None = setting(
        None, "Folder of idx files or of prepared tensorflow-datasets copies."
    )
    keep_classes: tuple[int, ...] = setting(
        (),
        "Only examples of these classes, relabelled in this order (DSVGD: digits 0 "
        "to 8).",
    )
    one_against_rest: int | None = setting(
        None,
        "Two classes: 1 for this one, 0 for the rest (Covertype: 1, lodgepole pine, as "
        "in LIBSVM's covtype.binary).",
    )
    partition: str = setting(
        "class_shards", "How the data are split over clients (FedHB §6: class_shards)."
    )
    clients: int = setting(
        100, "N, number of clients; 0 with by_group: all groups.", at_least=0
    )
    shards: int | None = setting(
        None, "s, shards a client (class_shards, label_sorted_shards).", at_least=1
    )
    alpha: float | None = setting(
        None, "Concentration of the Dirichlet partition.", above=0
    )
    min_size: int | None = setting(
        None, "Least training examples of a client (dirichlet).", at_least=0
    )
    classes_per_client: int | None = setting(
        None, "Classes that a client holds (class_subsets).", at_least=1
    )
    train_per_class: int | None = setting(
        None, "Training examples a client and class (class_subsets).", at_least=1
    )
    test_per_class: int | None = setting(
        None, "Test examples a client and class (class_subsets).", at_least=1
    )
    pool: bool | None = setting(
        None,
        "Deal from both splits pooled, so that training images may come from the "
        "official test split (class_subsets).",
    )
    retries: int | None = setting(
        None, "Draws until every client has min_size (dirichlet).", at_least=1
    )
    majority: float | None = setting(
        None, "Share of a client's majority class (class_majority).", above=0, below=1
    )
    cluster_transform: str = setting(
        "none",
        "Two clusters: what is done to the data of the second half of the clients. "
        "invert: pixels x become 255 - x; rotate: images rotated by 180 degrees; "
        'relabel: label c becomes classes - 1 - c (cFedBayes\' "reversed" data are one '
        "of the three, it does not say which).",
    )
    second_dataset: str | None = setting(
        None,
        "Two clusters: the data set of the second half of the clients, partitioned "
        "like dataset, whose pixel mean and deviation serve both.",
    )
    second_data_file: str | None = setting(None, "The data_file of second_dataset.")
    novel_clients: int = setting(
        0,
        "Clients, chosen with partition_seed, that never take part in training "
        "(BPFed §VI-C: 1 of 10; FedABML Table 2: 80 of 100).",
        at_least=0,
    )
    partition_seed: int = setting(
        0, "Seed of the partition, the same for all seeds of a run.", at_least=0
    )
    validation_fraction: float = setting(
        0.0,
        "0: evaluate on the test data. Above: hold out this part of every client's "
        "training data and evaluate on it; the test data stay untouched.",
        at_least=0,
        below=1,
    )

    model: str = setting(
        "mobilenet", "The network (FedHB §6: mobilenet; appendix H: mlp)."
    )
    hidden: tuple[int, ...] = setting(
        (256,), "Widths of the hidden layers of mlp (FedHB appendix H: 256)."
    )
    dtype: str = setting(
        "float32",
        "Of the activations: float32 or bfloat16, half the memory on an accelerator. "
        "Parameters stay float32 (docs/performance.md).",
    )
    augment: bool = setting(
        True, "Random crop and flip in training and fine-tuning (FedBABU)."
    )

    rounds: int = setting(320, "Rounds (FedHB §6: ⌊320/τ⌋).", at_least=1)
    fraction: float = setting(
        0.1,
        "f: ⌊N·f⌋ clients take part in a round; novel_clients are no part of N. "
        "Methods that say how many (dsvgd: 1, parallel_dsvgd: all) ignore it.",
        above=0,
        at_most=1,
    )
    selection: str = setting(
        "uniform",
        "Who takes part: uniform, round_robin, or in proportion to a measure of "
        "importance that the algorithm has (dsvgd: ksd, hip). Methods that take all "
        "clients ignore it (flag: for names of --algorithm without one).",
    )
    selection_temperature: float = setting(
        1.0,
        "T of a selection by importance, P_k in proportion to s_k^(1/T) (1: the "
        "paper; 0: the clients of the largest scores).",
        at_least=0,
    )
    selection_floor: float = setting(
        1e-6,
        "Share of a selection by importance that is uniform, so that no client is lost "
        "for good.",
        at_least=0,
        at_most=1,
    )
    selection_order: Literal["id", "sorted", "shuffled"] = setting(
        "id",
        "Turns of round_robin: by id; sorted by the clients' most frequent training "
        "class; shuffled once with partition_seed.",
    )
    codec: str = setting(
        "identity",
        "How uploads are written (docs/communication.md): identity; bfloat16, rounded "
        "to nearest; int8, rounded up or down at random without bias.",
    )
    epochs: int = setting(1, "τ, local epochs a round.", at_least=1)
    batch_size: int = setting(50, "Examples a step.", at_least=1)
    learning_rate: float = setting(0.1, "Of the clients' optimiser.", above=0)
    lr_decay: float = setting(
        0.1, "Factor on the learning rate at each of lr_decay_at.", above=0, at_most=1
    )
    lr_decay_at: tuple[float, ...] = setting(
        (0.5, 0.75), "Fractions of the rounds at which the learning rate decays."
    )
    momentum: float = setting(
        0.9,
        "Heavy-ball momentum of SGD; afresh in every round, but for methods that keep "
        "their clients' moments (pFedBayes and its kin).",
        at_least=0,
        below=1,
    )
    optimizer: Literal["sgd", "adam", "adagrad", "rmsprop"] = setting(
        "sgd", "Of the clients, in training and fine-tuning."
    )
    local_steps: int | None = setting(
        None, "R, minibatches a round, in place of epochs.", at_least=1
    )
    finetune_epochs: int = setting(
        5, "Epochs of personalisation, of body and head.", at_least=0
    )
    finetune_learning_rate: float = setting(
        1e-3, "Learning rate of personalisation.", above=0
    )

    eval_every: int = setting(10, "Rounds between evaluations.", at_least=1)
    personal_every: int = setting(
        0,
        "Rounds between evaluations of the personalised models, a multiple of "
        "eval_every; 0: only at the end. All clients adapt each time.",
        at_least=0,
    )
    eval_batch_size: int = setting(
        128,
        "Most test examples in one forward pass; matters with batch statistics.",
        at_least=1,
    )
    final_rounds: int = setting(
        0,
        "F: evaluate after each of the last F rounds too, personalised models "
        "included, and report the mean (FedABML: 10).",
        at_least=0,
    )
    window: int = setting(
        0,
        "W: report the mean over the evaluations of the last W rounds of the global "
        "model's figures, and the standard deviation of its accuracy between them "
        "(client selection: 50).",
        at_least=0,
    )
    finetune_curve: tuple[int, ...] = setting(
        (),
        "After training, personalised accuracy after each of these numbers of "
        "fine-tuning epochs (FedABML Table 2: 0,1,2,3,4,5,8,10).",
    )
    ood_dataset: str | None = setting(
        None,
        "After training, the personalised models' uncertainty on this data set, "
        "partitioned like dataset, beside that on their own test data (FedABML Fig. 5: "
        "mnist against fashion_mnist).",
    )
    ood_data_file: str | None = setting(None, "The data_file of ood_dataset.")
    seed: int = setting(0, "Seed of the first run.", at_least=0)
    seeds: int = setting(1, "Runs, with seeds seed, seed + 1, ...", at_least=1)

    @property
    def method(self) -> str:
        """The algorithm, with its selection where that is not uniform: `dsvgd:ksd`."""
        if self.selection == "uniform":
            return self.algorithm
        return f"{self.algorithm}:{self.selection}"

    @property
    def participants(self) -> int:
        """⌊N·f⌋, clients in a round, unless the algorithm says how many."""
        return participants(self.clients, self.fraction, self.novel_clients)

    @property
    def evaluated_on(self) -> str:
        """The split that every figure comes from: `validation` or `test`."""
        return "validation" if self.validation_fraction else "test"

    def partition_options(self) -> dict[str, Any]:
        """Those options of the partition that are given."""
        given = {key: getattr(self, key) for key in PARTITION_OPTIONS}
        return {key: value for key, value in given.items() if value is not None}

    def learning_rate_schedule(self) -> Callable:
        """The learning rate as a function of the round, counted from 0."""
        factors: dict[int, float] = {}
        for fraction in self.lr_decay_at:
            # Not from round 0, where a run of a few rounds would put it.
            boundary = max(1, math.floor(fraction * self.rounds))
            factors[boundary] = factors.get(boundary, 1.0) * self.lr_decay
        return optax.piecewise_constant_schedule(self.learning_rate, factors)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON holds it."""
        fields = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    def validate(self) -> None:
        """Checks every field on its own and those that must agree.

        Raises:
          ValueError: names the argument, its value and what would be right.
        """
        check_bounds(self)
        check_agreement(self)
