"""All that a run depends on, and all that it does not, as two frozen dataclasses."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal

import optax

__all__ = ["PARTITION_OPTIONS", "ExperimentConfig", "RunOptions"]

PARTITION_OPTIONS = (
    "shards",
    "alpha",
    "min_size",
    "classes_per_client",
    "train_per_class",
    "test_per_class",
    "pool",
    "retries",
)


def _setting(default, help: str, **bounds) -> Any:
    """A field with its help text and, of `at_least, above, at_most, below`, bounds."""
    return dataclasses.field(default=default, metadata={"help": help, **bounds})


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

    algorithm: str = _setting(
        "fedhb_niw", "A registered algorithm (flag: several, with commas)."
    )
    options: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={"help": "The algorithm's own options; its defaults for the rest."},
    )

    dataset: str = _setting(
        "cifar100",
        "digits (embedded), fashion_mnist, mnist, emnist, cifar10, cifar100 or another "
        "tensorflow-datasets name; with data_file any name.",
    )
    data_file: str | None = _setting(
        None, "An .npz with train_x, train_y, test_x, test_y."
    )
    data_dir: str | None = _setting(
        None, "Folder of idx files or of prepared tensorflow-datasets copies."
    )
    partition: str = _setting(
        "class_shards", "How the data are split over clients (FedHB §6: class_shards)."
    )
    clients: int = _setting(
        100, "N, number of clients; 0 with by_group: all groups.", at_least=0
    )
    shards: int | None = _setting(
        None, "s, shards a client (class_shards, label_sorted_shards).", at_least=1
    )
    alpha: float | None = _setting(
        None, "Concentration of the Dirichlet partition.", above=0
    )
    min_size: int | None = _setting(
        None, "Least training examples of a client (dirichlet).", at_least=0
    )
    classes_per_client: int | None = _setting(
        None, "Classes that a client holds (class_subsets).", at_least=1
    )
    train_per_class: int | None = _setting(
        None, "Training examples a client and class (class_subsets).", at_least=1
    )
    test_per_class: int | None = _setting(
        None, "Test examples a client and class (class_subsets).", at_least=1
    )
    pool: bool | None = _setting(
        None,
        "Deal from both splits pooled, so that training images may come from the "
        "official test split (class_subsets).",
    )
    retries: int | None = _setting(
        None, "Draws until every client has min_size (dirichlet).", at_least=1
    )
    cluster_transform: str = _setting(
        "none",
        "Two clusters: what is done to the data of the second half of the clients. "
        "invert: pixels x become 255 - x; rotate: images rotated by 180 degrees; "
        'relabel: label c becomes classes - 1 - c (cFedBayes\' "reversed" data are one '
        "of the three, it does not say which).",
    )
    second_dataset: str | None = _setting(
        None,
        "Two clusters: the data set of the second half of the clients, partitioned "
        "like dataset, whose pixel mean and deviation serve both.",
    )
    second_data_file: str | None = _setting(None, "The data_file of second_dataset.")
    novel_clients: int = _setting(
        0,
        "Clients, chosen with partition_seed, that never take part in training "
        "(BPFed §VI-C: 1 of 10; FedABML Table 2: 80 of 100).",
        at_least=0,
    )
    partition_seed: int = _setting(
        0, "Seed of the partition, the same for all seeds of a run.", at_least=0
    )
    validation_fraction: float = _setting(
        0.0,
        "0: evaluate on the test data. Above: hold out this part of every client's "
        "training data and evaluate on it; the test data stay untouched.",
        at_least=0,
        below=1,
    )

    model: str = _setting(
        "mobilenet", "The network (FedHB §6: mobilenet; appendix H: mlp)."
    )
    hidden: tuple[int, ...] = _setting(
        (256,), "Widths of the hidden layers of mlp (FedHB appendix H: 256)."
    )
    augment: bool = _setting(
        True, "Random crop and flip in training and fine-tuning (FedBABU)."
    )

    rounds: int = _setting(320, "Rounds (FedHB §6: ⌊320/τ⌋).", at_least=1)
    fraction: float = _setting(
        0.1,
        "f: ⌊N·f⌋ clients take part in a round; novel_clients are no part of N.",
        above=0,
        at_most=1,
    )
    epochs: int = _setting(1, "τ, local epochs a round.", at_least=1)
    batch_size: int = _setting(50, "Examples a step.", at_least=1)
    learning_rate: float = _setting(0.1, "Of the clients' SGD.", above=0)
    lr_decay: float = _setting(
        0.1, "Factor on the learning rate at each of lr_decay_at.", above=0, at_most=1
    )
    lr_decay_at: tuple[float, ...] = _setting(
        (0.5, 0.75), "Fractions of the rounds at which the learning rate decays."
    )
    momentum: float = _setting(
        0.9, "Heavy-ball momentum of SGD, afresh in every round.", at_least=0, below=1
    )
    optimizer: Literal["sgd", "adam"] = _setting(
        "sgd", "Of the clients, in training and fine-tuning."
    )
    local_steps: int | None = _setting(
        None, "R, minibatches a round, in place of epochs.", at_least=1
    )
    finetune_epochs: int = _setting(
        5, "Epochs of personalisation, of body and head.", at_least=0
    )
    finetune_learning_rate: float = _setting(
        1e-3, "Learning rate of personalisation.", above=0
    )

    eval_every: int = _setting(10, "Rounds between evaluations.", at_least=1)
    personal_every: int = _setting(
        0,
        "Rounds between evaluations of the personalised models, a multiple of "
        "eval_every; 0: only at the end. All clients adapt each time.",
        at_least=0,
    )
    eval_batch_size: int = _setting(
        128,
        "Most test examples in one forward pass; matters with batch statistics.",
        at_least=1,
    )
    final_rounds: int = _setting(
        0,
        "F: evaluate after each of the last F rounds too, personalised models "
        "included, and report the mean (FedABML: 10).",
        at_least=0,
    )
    finetune_curve: tuple[int, ...] = _setting(
        (),
        "After training, personalised accuracy after each of these numbers of "
        "fine-tuning epochs (FedABML Table 2: 0,1,2,3,4,5,8,10).",
    )
    ood_dataset: str | None = _setting(
        None,
        "After training, the personalised models' uncertainty on this data set, "
        "partitioned like dataset, beside that on their own test data (FedABML Fig. 5: "
        "mnist against fashion_mnist).",
    )
    ood_data_file: str | None = _setting(None, "The data_file of ood_dataset.")
    seed: int = _setting(0, "Seed of the first run.", at_least=0)
    seeds: int = _setting(1, "Runs, with seeds seed, seed + 1, ...", at_least=1)

    @property
    def participants(self) -> int:
        """⌊N·f⌋, clients in a round."""
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
        _check_bounds(self)
        if self.clients == 0 and self.partition != "by_group":
            raise ValueError(
                "clients=0 must be at least 1; only partition='by_group' takes 0"
            )
        if self.clients:
            _ = self.participants
        if self.second_data_file is not None and self.second_dataset is None:
            raise ValueError(
                f"second_data_file={self.second_data_file!r} needs a name for its "
                "data: give second_dataset"
            )
        if self.second_dataset is not None and self.cluster_transform != "none":
            raise ValueError(
                f"cluster_transform={self.cluster_transform!r} and second_dataset="
                f"{self.second_dataset!r} exclude each other: give one of them"
            )
        if not all(isinstance(width, int) and width >= 1 for width in self.hidden):
            raise ValueError(
                f"hidden={list(self.hidden)} must be widths of at least 1, or none"
            )
        if list(self.lr_decay_at) != sorted(set(self.lr_decay_at)) or not all(
            0 < fraction < 1 for fraction in self.lr_decay_at
        ):
            raise ValueError(
                f"lr_decay_at={list(self.lr_decay_at)} must be rising fractions of the "
                "rounds, between 0 and 1"
            )
        if self.personal_every % self.eval_every:
            raise ValueError(
                f"personal_every={self.personal_every} must be a multiple of "
                f"eval_every={self.eval_every}, or 0: only at the end"
            )
        _check_end(self)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where and how a run is carried out: nothing that changes its results."""

    run_dir: str = _setting("", "Run folder. Default: runs/NAME.")
    overwrite: bool = _setting(False, "Replace the run that lies in the run folder.")
    resume: bool = _setting(False, "Continue the run that lies in the run folder.")
    chunk_size: int | str = _setting(
        "auto",
        "Clients trained at once on a device: a number, whole (the whole cohort) or "
        "auto (1 on CPU, else as many as memory allows).",
    )
    devices: int | None = _setting(
        None, "Devices to use. Default: every accelerator, or one CPU.", at_least=1
    )
    checkpoint_every: int = _setting(
        1, "Evaluations between checkpoints; the last round always has one.", at_least=1
    )
    tensorboard: bool = _setting(
        False, "Write TensorBoard event files too (extra: tensorboard)."
    )

    def validate(self) -> None:
        """Checks every field.

        Raises:
          ValueError: names the argument, its value and what would be right.
        """
        _check_bounds(self)
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


def participants(clients: int, fraction: float, novel: int = 0) -> int:
    """⌊N·f⌋, clients in a round.

    Args:
      clients: number of clients.
      fraction: f.
      novel: clients that never take part, no part of N.

    Raises:
      ValueError: that is less than one client, or no client is left to train.
    """
    if novel >= clients:
        raise ValueError(
            f"novel_clients={novel} of clients={clients} leaves nobody to train: give "
            f"at most {clients - 1}"
        )
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


def _check_end(config: ExperimentConfig) -> None:
    """Checks what is asked of the end of a run."""
    if config.final_rounds > config.rounds:
        raise ValueError(
            f"final_rounds={config.final_rounds} must be at most rounds={config.rounds}"
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


_BOUNDS = {
    "at_least": ("at least", lambda value, bound: value >= bound),
    "above": ("above", lambda value, bound: value > bound),
    "at_most": ("at most", lambda value, bound: value <= bound),
    "below": ("below", lambda value, bound: value < bound),
}


def _check_bounds(config) -> None:
    for field in dataclasses.fields(config):
        bounds = {key: field.metadata[key] for key in _BOUNDS if key in field.metadata}
        value = getattr(config, field.name)
        if not bounds or (value is None and field.default is None):
            continue
        wanted = " and ".join(f"{_BOUNDS[key][0]} {b}" for key, b in bounds.items())
        if not isinstance(value, numbers.Real):
            raise ValueError(f"{field.name}={value!r} must be a number {wanted}")
        if not math.isfinite(value) or not all(
            _BOUNDS[key][1](value, bound) for key, bound in bounds.items()
        ):
            raise ValueError(f"{field.name}={value} must be {wanted}")
