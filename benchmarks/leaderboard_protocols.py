"""What the leaderboard's protocols are, and what each method tries and costs there."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fedvi.experiment import ExperimentConfig
from fedvi.experiment.config import participants

BASELINE = "fedavg"


class Protocol(NamedTuple):
    """What all methods have in common, what those with mean-field posteriors take
    besides the papers' optimiser, and whom it does not suit."""

    text: str
    settings: dict[str, Any]
    unsuited: dict[str, str]
    mean_field: Mapping[str, Any] = MappingProxyType({})


PARTICLES = dict.fromkeys(
    ("dsvgd", "parallel_dsvgd"), "particles of as many weights as the network has"
)
ALL_CLIENTS = {"cfl": "clusters are split by the updates of all clients, in each round"}


PROTOCOLS = {
    "fedhb": Protocol(
        "FedHB's Tables 10 and 11, τ = 1: 100 clients of 5 shards, a tenth of them a "
        "round, one epoch, 100 rounds, MLP-256",
        {
            "partition": "class_shards",
            "clients": 100,
            "shards": 5,
            "model": "mlp",
            "hidden": (256,),
            "rounds": 100,
            "fraction": 0.1,
            "epochs": 1,
        },
        PARTICLES
        | ALL_CLIENTS
        | {
            "pfedgp": "30 chains of kernels of 600 images, for each of 100 clients and "
            "4 levels of classes: hours on two cores"
        },
        # The others' budget: a gradient a minibatch.
        {"personal_steps": 1},
    ),
    "pfedbayes": Protocol(
        "pFedBayes' Table 1, small: 10 clients, all in every round, 5 of 10 labels "
        "each, 50 training images a label, MLP-100; 20 steps of 100 images a round, 60 "
        "rounds",
        {
            "partition": "class_subsets",
            "clients": 10,
            "classes_per_client": 5,
            "train_per_class": 50,
            "test_per_class": 950,
            "pool": True,
            "model": "mlp",
            "hidden": (100,),
            "rounds": 60,
            "fraction": 1.0,
            "local_steps": 20,
            "batch_size": 100,
            "lr_decay_at": (),
            "eval_batch_size": 475,
        },
        PARTICLES,
    ),
    "fedabml": Protocol(
        "FedABML's Table 1: 200 clients of 2 shards, a tenth of them a round, 5 "
        "epochs, 100 rounds, logistic regression",
        {
            "partition": "class_shards",
            "clients": 200,
            "shards": 2,
            "model": "logistic",
            "rounds": 100,
            "fraction": 0.1,
            "epochs": 5,
            "batch_size": 50,
            "momentum": 0.0,
            "lr_decay_at": (),
        },
        PARTICLES
        | ALL_CLIENTS
        | dict.fromkeys(
            (
                *("fedbabu", "fedper", "fedrep", "lg_fedavg", "bpfed", "fedpop"),
                *("fedsoul", "fedhb_niw", "fedhb_mixture", "pfedgp", "pfnm"),
            ),
            "needs a network with a body, at its defaults",
        ),
    ),
}

PROTOCOLS["fedhb_tau5"] = PROTOCOLS["fedhb"]._replace(
    text="FedHB's Tables 10 and 11, τ = 5: as τ = 1, but five epochs, 20 rounds",
    settings=PROTOCOLS["fedhb"].settings | {"rounds": 20, "epochs": 5},
)

RATES = (0.01, 0.03, 0.1)
ADAM = {"optimizer": "adam", "momentum": 0.0}
ADAM_RATES = (0.001, 0.003, 0.01)

# What every method's second axis is: a number of its own, or how fast it fine-tunes.
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "fedprox": {"mu": (0.01, 0.1)},
    "fedhb_niw": {"penalty_scale": (0.03, 0.3)},
    "fedhb_mixture": {"penalty_scale": (0.1, 1.0)},
    "pfedbayes": {"zeta": (0.1, 1.0)},
    "sfedbayes": {"zeta": (0.1, 1.0)},
    "cfedbayes": {"zeta": (0.1, 1.0)},
    "bpfed": {"zeta": (0.1, 1.0)},
    "fedabml": {"kl_weight": (0.01, 0.1)},
    "feddyn": {"alpha_coef": (0.01, 0.1)},
    "ditto": {"personal_penalty": (0.1, 1.0)},
    "pfedme": {"personal_penalty": (5.0, 15.0)},
    "perfedavg": {"inner_learning_rate": (0.01, 0.1)},
    "heurfedamp": {"personal_penalty": (0.1, 1.0)},
    "fedpa": {"shrinkage": (0.01, 1.0)},
    "fedbe": {"distillation_learning_rate": (0.001, 0.01)},
    "fedpop": {"body_steps": (5, 20)},
    "fedrep": {"personal_epochs": (1, 4)},
    "fedem": {"adapt": ("weights", "all")},
    "fedsoul": {"sampler_step_size": (0.0001, 0.001)},
    "pfedgp": {"outputscale": (8.0, 32.0)},
    "fola": {"precision": (1000.0, 10000.0)},
}
FINE_TUNING = {"finetune_learning_rate": (0.01, 0.03)}

# By Adam in their papers, with rates for it.
MEAN_FIELD = ("pfedbayes", "sfedbayes", "cfedbayes", "bpfed", "fedabml")

# What some need besides.
BESIDE: dict[str, dict[str, Any]] = {
    # 1 / (λ (1 - λ)) times a rate of Adam of 0.01 is refused.
    "sfedbayes": {"inclusion_rate": 30.0},
    "fedbe": {"unlabelled": 1000},
    # A kernel of each minibatch.
    "pfedgp": {"whole_data": False},
    # One draw: the others' budget again.
    "fedabml": {"mc_samples": 1, "finetune_steps": 1, "finetune_learning_rate": 0.001},
}

# Gradients of a minibatch for each one of FedAvg's. Half of one is a forward pass, and
# the gradient of a head: nearly all weights of these networks are in the first layer,
# which needs no gradient of its inputs.
GRADIENTS: dict[str, Callable[[ExperimentConfig], float]] = {
    "ditto": lambda config: 2,
    "pfedme": lambda config: 5,
    # Five on halves of a minibatch, of which two share a forward pass.
    "perfedavg": lambda config: 2.25,
    "fedrep": lambda config: (
        1 + config.options["personal_epochs"] / 2 * epoch_share(config)
    ),
    # Three components, and before them the loss of each on all data.
    "fedem": lambda config: 3 + 3 / 2 * epoch_share(config),
    # Ten steps of a head.
    "fedpop": lambda config: (5 + config.options["body_steps"]) / steps_of(config),
    "fedsoul": lambda config: (5 + 5) / steps_of(config),
    # The gate's, and before them the loss of both prototypes on all data.
    "fedhb_mixture": lambda config: 2 + epoch_share(config),
    "fedbe": lambda config: 1 + distillation(config),
    # The information of single examples, all data once.
    "fola": lambda config: 1 + epoch_share(config),
    # The losses of two clusters' models on all data.
    "ifca": lambda config: 1 + epoch_share(config),
    "cfedbayes": lambda config: (
        config.options.get("personal_steps", 5) + epoch_share(config)
    ),
    **dict.fromkeys(
        ("pfedbayes", "sfedbayes", "bpfed", "fedabml"),
        lambda config: config.options.get("personal_steps", 5),
    ),
}


def distillation(config: ExperimentConfig) -> float:
    """FedBE's gradients at the server for one of a visit: of a student in 20 epochs,
    and the forward passes of the average, the clients and ten draws."""
    cohort = participants(config.clients, config.fraction)
    batches = -(-config.unlabelled // config.batch_size)
    return batches * (20 + (1 + cohort + 10) / 2) / (cohort * steps_of(config))


def epoch_share(config: ExperimentConfig) -> float:
    """An epoch's steps for one of a visit."""
    return epoch_of(config) / steps_of(config)


def epoch_of(config: ExperimentConfig) -> int:
    """Steps of an epoch of a client."""
    images = 60_000 // config.clients
    if config.train_per_class:
        images = config.train_per_class * config.classes_per_client
    return -(-images // config.batch_size)


def steps_of(config: ExperimentConfig) -> int:
    """Steps of a visit."""
    return config.local_steps or config.epochs * epoch_of(config)
