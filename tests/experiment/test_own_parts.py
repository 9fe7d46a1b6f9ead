"""A user's own algorithm, network and optimiser, by path in the configuration."""

import dataclasses
import importlib
import json
import sys

import pytest

from fedvi import LocalTraining, algorithms, codecs, data, nn
from fedvi.experiment import ExperimentConfig, command_line, run_all, setup, sweep
from fedvi.experiment.config import RunOptions

CONFIG = ExperimentConfig(
    algorithm="own_parts:pull",
    options={"strength": 3.0},
    dataset="digits",
    partition="iid",
    clients=4,
    model="own_parts:Net",
    hidden=(3,),
    optimizer="own_parts:rate",
    fraction=0.5,
    rounds=1,
)


def test_the_configuration_keeps_the_path_and_finds_the_same_again(own_module):
    CONFIG.validate()
    there = json.loads(json.dumps(CONFIG.to_dict()))
    parts = importlib.import_module(own_module)
    for config in (CONFIG, ExperimentConfig.from_dict(there)):
        assert config == CONFIG
        built = setup.experiment(config)
        assert built.algorithm.name == "pull"
        assert built.config.options == {"strength": 3.0}
        assert built.task.training.optimizer is parts.rate
        assert built.task.finetuning.optimizer is parts.rate
        assert nn.weight_paths(built.task.model)[0] == "body/Dense_0/bias"
        assert built.numbers().keys() >= {"learning_rate"}
        assert built.config.model == "own_parts:Net"
    assert setup.resolve(dataclasses.replace(CONFIG, options={})).options == {
        "strength": 2.0
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"options": {"strength": 101.0}},
            "algorithm='own_parts:pull': it raised AttributeError: .*own_parts.py, li",
        ),
        ({"options": {"strength": -1.0}}, "strength=-1.0 must be above 0"),
        ({"options": {"strenght": 1.0}}, "own_parts:pull, .*: did you mean strength"),
        ({"algorithm": "own_parts:plain"}, "'own_parts:plain' is no builder: decorate"),
        ({"algorithm": "dsvgd:ksd"}, "give algorithm='dsvgd' and selection='ksd'"),
        ({"optimizer": "own_parts:number"}, "it raised TypeError: 'int' object is not"),
        (
            {"optimizer": "own_parts:ten"},
            "returned Net: it must be a function of the l",
        ),
        ({"model": "own_parts:Nett"}, "own_parts has no Nett: did you mean [nN]et"),
        ({"model": "own_slip:x"}, "model='own_slip:x': importing it raised Attribute"),
    ],
)
def test_a_mistake_is_one_line(own_module, changes, message):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=message) as raised:
        config.validate()
        setup.experiment(config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: setup.resolve(ExperimentConfig(algorithm="FedAvg")), "fedavg"),
        (
            lambda: setup.resolve(ExperimentConfig(options={"penality_scale": 1})),
            "penalty_scale",
        ),
        (lambda: algorithms.build("FedAvg", None), "fedavg"),
        (lambda: algorithms.pfedbayes(None, zetta=1), "zeta"),
        (lambda: nn.build("LeNet", classes=3, input_shape=(28, 28, 1)), "lenet"),
        (lambda: LocalTraining(optimizer="Adam").check(), "adam"),
        (lambda: codecs.named("INT8"), "int8"),
        (lambda: ExperimentConfig(model="MobileNet").validate(), "mobilenet"),
        (lambda: ExperimentConfig(partition="Dirichlet").validate(), "dirichlet"),
        (lambda: ExperimentConfig(optimizer="ADAM").validate(), "adam"),
        (lambda: RunOptions("x", plot_formats=("PNG",)).validate(), "png"),
        (
            lambda: setup.experiment(
                dataclasses.replace(
                    CONFIG,
                    algorithm="fedavg",
                    options={},
                    model="mlp",
                    optimizer="sgd",
                    selection="round-robin",
                )
            ),
            "round_robin",
        ),
        (
            lambda: sweep(ExperimentConfig(), {"penality_scale": [1.0]}),
            "penalty_scale",
        ),
        (lambda: sweep(ExperimentConfig(), {"p_drop": [0.1]}, choose_by="nl"), ""),
    ],
)
def test_python_suggests_names_too(call, meant):
    with pytest.raises(ValueError) as raised:
        call()
    end = f": did you mean {meant}?" if meant else "global_accuracy"
    assert str(raised.value).endswith(end)


def test_a_data_set_that_is_not_found_may_be_another(monkeypatch):
    def nothing(name, data_dir):
        raise ValueError(f"no data set {name!r}")

    monkeypatch.setattr(data.sources.tfds_reader, "read_tfds", nothing)
    for name in ("FashionMNIST", "fashionmnist"):
        with pytest.raises(ValueError, match="did you mean fashion_mnist"):
            data.load(name)
    with pytest.raises(ValueError, match="no data set 'emnist'$"):
        data.load("emnist")


def test_formats_are_a_tuple():
    with pytest.raises(ValueError, match="plot_formats='svg' must be a tuple of any"):
        RunOptions("x", plot_formats="svg").validate()


def test_a_file_may_be_named_as_what_it_registers(tmp_path, monkeypatch):
    """Importing it registers the name, which is no name before a selection then."""
    (tmp_path / "alike.py").write_text(
        "from fedvi.algorithms import builder, fedavg, register\n\n\n"
        "@register\n@builder()\ndef alike(task, options):\n    return fedavg(task)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        for _ in range(2):
            assert algorithms.find("alike:alike").__name__ == "alike"
            assert command_line._split("alike:alike:ksd") == ("alike:alike", "ksd")
        assert algorithms.find("alike").__name__ == "alike"
        assert command_line._split("dsvgd:ksd") == ("dsvgd", "ksd")
    finally:
        algorithms.ALGORITHMS.pop("alike", None)
        sys.modules.pop("alike", None)


def test_an_own_algorithms_slip_is_found_before_another_trains(tmp_path, monkeypatch):
    slip = "from fedvi.algorithms import builder, fedavg\n\n\n@builder()\n"
    slip += "def late(task, options):\n    return fedavg(task)._replace("
    slip += "client_update=lambda *_: None)\n"
    (tmp_path / "own_late.py").write_text(slip)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = dataclasses.replace(CONFIG, model="logistic", hidden=(), options={})
    runs = [
        (dataclasses.replace(config, algorithm=name, optimizer="sgd"), RunOptions(name))
        for name in ("fedavg", "own_late:late")
    ]
    try:
        with pytest.raises(ValueError, match="client_update"):
            run_all(runs)
    finally:
        sys.modules.pop("own_late", None)
    assert not (tmp_path / "fedavg").exists()
