import dataclasses
import json
from itertools import accumulate

import numpy as np
import pytest

from fedvi.experiment.config import (
    ExperimentConfig,
    HostOptions,
    RunOptions,
    participants,
)


def test_the_defaults_are_valid_and_survive_json():
    config = ExperimentConfig()
    config.validate()
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_every_field_has_a_help_text():
    for cls in (ExperimentConfig, RunOptions):
        assert all(f.metadata["help"] for f in dataclasses.fields(cls))


def test_the_configuration_as_json_follows_every_field():
    base = ExperimentConfig()
    changed = [
        dataclasses.replace(base, rounds=321),
        dataclasses.replace(base, options={"p_drop": 0.1}),
        dataclasses.replace(base, lr_decay_at=(0.5,)),
    ]
    prints = {json.dumps(c.to_dict()) for c in [base, *changed]}
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fraction": 0.0}, "fraction=0.0 must be above 0 and at most 1"),
        ({"codec": "int4"}, "codec='int4' must be one of"),
        ({"fraction": 1.5}, "fraction=1.5 must be"),
        ({"fraction": float("nan")}, "fraction=nan must be"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"rounds": "many"}, "rounds='many' must be a whole number at least 1"),
        ({"clients": 0}, "clients=0 must be at least 1"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1 must be above 0"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"lr_decay_at": (0.7, 0.5)}, r"lr_decay_at=\[0.7, 0.5\] must be rising"),
        ({"lr_decay_at": (0.5, 1.0)}, "must be rising fractions"),
        ({"eval_every": 10, "personal_every": 15}, "personal_every=15 must be a mult"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0 must be"),
        ({"calibration_fraction": 1.0}, "calibration_fraction=1.0 must be"),
        (
            {"validation_fraction": 0.5, "calibration_fraction": 0.5},
            "validation_fraction=0.5 and calibration_fraction=0.5 leave nothing",
        ),
        ({"calibration_bins": 0}, "calibration_bins=0 must be at least 1"),
        ({"conformal_level": 1.0}, "conformal_level=1.0 must be above 0"),
        ({"shards": 0}, "shards=0 must be at least 1"),
        ({"seeds": 0}, "seeds=0 must be at least 1"),
        ({"seed": 2**32 - 1, "seeds": 2}, "seed=4294967295 is too large for seeds=2"),
        ({"rounds": 5, "final_rounds": 6}, "final_rounds=6 must be at most rounds=5"),
        ({"final_rounds": -1}, "final_rounds=-1 must be at least 0"),
        ({"rounds": 5, "window": 6}, "window=6 must be at most rounds=5"),
        ({"window": -1}, "window=-1 must be at least 0"),
        ({"window": 2, "final_rounds": 3}, "window=2 and final_rounds=3 exclude"),
        ({"selection_temperature": -1}, "selection_temperature=-1 must be at least 0"),
        ({"selection_floor": 1.1}, "selection_floor=1.1 must be at least 0 and at mo"),
        ({"finetune_curve": (0, 2, 1)}, r"finetune_curve=\[0, 2, 1\] must be rising"),
        ({"finetune_curve": (-1, 0)}, r"finetune_curve=\[-1, 0\] must be rising"),
        ({"ood_data_file": "a.npz"}, "ood_data_file='a.npz' needs a name"),
        ({"ood_classes": (8, 9)}, r"ood_classes=\[8, 9\] needs ood_dataset"),
        (
            {"ood_classes": (2, 1), "ood_dataset": "cifar100", "keep_classes": (0, 1)},
            r"ood_classes=\[2, 1\]: the clients train on \[1\] of 'cifar100'",
        ),
        (
            {"ood_classes": (2,), "ood_dataset": "cifar100"},
            r"ood_classes=\[2\]: the clients train on \[2\]",
        ),
        ({"novel_clients": -1}, "novel_clients=-1 must be at least 0"),
        ({"novel_clients": 100}, "novel_clients=100 of clients=100 leaves nobody"),
        ({"second_data_file": "a.npz"}, "'a.npz' needs a name .* give second_dataset"),
        (
            {"cluster_transform": "invert", "second_dataset": "mnist"},
            "cluster_transform='invert' and second_dataset='mnist' exclude each other",
        ),
    ],
)
def test_a_wrong_value_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ExperimentConfig(), **changes).validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "run_dir='' is empty"),
        ({"chunk_size": 0}, "chunk_size=0 must be auto, whole or a number"),
        ({"chunk_size": "half"}, "chunk_size='half' must be"),
        ({"devices": 0}, "devices=0 must be at least 1"),
        ({"overwrite": True, "resume": True}, "exclude each other"),
    ],
)
def test_a_wrong_run_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        RunOptions(**({"run_dir": "runs/x"} | options if options else {})).validate()


def test_the_method_names_a_selection_that_is_not_uniform():
    config = ExperimentConfig(algorithm="dsvgd")
    assert config.method == "dsvgd"
    assert dataclasses.replace(config, selection="ksd").method == "dsvgd:ksd"


def test_a_fraction_may_be_too_small_for_methods_that_do_not_ask():
    """Whether it matters shows when the experiment is set up."""
    ExperimentConfig(clients=5, fraction=0.1).validate()


def test_participants_are_the_floor_in_spite_of_rounding():
    assert participants(100, 0.29) == 29
    assert participants(100, 0.999) == 99
    assert participants(7, 0.5) == 3


def test_participants_are_a_part_of_the_clients_that_train():
    assert participants(100, 0.1, novel=80) == 2
    assert participants(100, 0.1, novel=35) == 6


def test_the_learning_rate_decays_after_half_and_three_quarters():
    schedule = ExperimentConfig(rounds=20).learning_rate_schedule()
    rates = [float(schedule(round_index)) for round_index in range(20)]
    expected = [0.1] * 10 + [0.01] * 5 + [0.001] * 5
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_short_run_starts_at_the_full_learning_rate(rounds):
    schedule = ExperimentConfig(rounds=rounds).learning_rate_schedule()
    assert float(schedule(0)) == pytest.approx(0.1)


def rounds_of(config, done=0):
    """Rounds after which the run is evaluated."""
    return [done + total for total in accumulate(config.blocks(done))]


@pytest.mark.parametrize(
    ("rounds", "every", "final", "expected"),
    [
        (10, 5, 0, [5, 10]),
        (7, 5, 0, [5, 7]),
        (3, 5, 0, [3]),
        (12, 5, 3, [5, 10, 11, 12]),
        (13, 5, 5, [5, 9, 10, 11, 12, 13]),
        (6, 10, 2, [5, 6]),
        (3, 5, 3, [1, 2, 3]),
        (3, 1, 1, [1, 2, 3]),
    ],
)
def test_evaluations_are_regular_and_then_after_every_round(
    rounds, every, final, expected
):
    config = ExperimentConfig(rounds=rounds, eval_every=every, final_rounds=final)
    assert rounds_of(config) == expected
    for place, done in enumerate(expected):
        assert rounds_of(config, done) == expected[place + 1 :]


@pytest.mark.parametrize("final", range(0, 24))
def test_few_blocks_have_to_be_compiled(final):
    config = ExperimentConfig(rounds=23, eval_every=5, final_rounds=final)
    assert sum(config.blocks()) == 23
    assert len(set(config.blocks())) <= 3
    lasts = [
        round_index for round_index in rounds_of(config) if config.is_final(round_index)
    ]
    assert len(lasts) == final


def test_personal_models_are_evaluated_in_the_last_rounds_too():
    config = ExperimentConfig(rounds=10, eval_every=2, personal_every=4, final_rounds=2)
    chosen = [
        round_index
        for round_index in rounds_of(config)
        if config.personal_too(round_index)
    ]
    assert rounds_of(config) == [2, 4, 6, 8, 9, 10] and chosen == [4, 8, 9, 10]
    plain = ExperimentConfig(rounds=4, eval_every=2)
    assert [plain.personal_too(round_index) for round_index in (2, 4)] == [False, True]


def test_the_window_is_the_last_rounds():
    config = ExperimentConfig(rounds=6, window=2)
    assert [config.in_window(round_index) for round_index in range(1, 7)] == [
        False
    ] * 4 + [True] * 2
    assert not ExperimentConfig(rounds=6).in_window(6)


THREE = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2}, "--num_processes without --coordinator_address, --pro"),
        ({"coordinator_address": "a:1", "process_id": 0}, "without --num_processes"),
        (THREE | {"process_id": 2}, "process_id=2 must be at most 1: the ids of num_"),
        (THREE | {"process_id": -1}, "process_id=-1 must be at least 0"),
        (THREE | {"num_processes": 0}, "num_processes=0 must be at least 1"),
        (THREE | {"coordinator_address": "host"}, "'host' must be HOST:PORT"),
        (THREE | {"coordinator_address": ":1"}, "':1' must be HOST:PORT"),
        (THREE | {"coordinator_address": "a:70000"}, "'a:70000' must be HOST:PORT"),
        (THREE | {"start_timeout": 0}, "start_timeout=0 must be at least 1"),
        (THREE | {"lost_timeout": 1}, "lost_timeout=1 must be at least 3"),
    ],
)
def test_flags_that_do_not_agree_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        HostOptions(**options).validate()


def test_devices_are_shared_equally():
    HostOptions(**THREE).validate(devices=4)
    HostOptions(distributed="auto").validate(devices=3)  # of how many, JAX finds out
    with pytest.raises(ValueError, match="devices=3 must be a multiple of num_proc"):
        HostOptions(**THREE).validate(devices=3)


def test_one_process_is_the_default():
    HostOptions().validate(devices=3)
    assert not HostOptions().several
    assert HostOptions(**THREE).several
    assert HostOptions(distributed="auto").several
