"""What the examples do without a flag: their own method, on data that are at hand."""

import dataclasses
import runpy
from pathlib import Path

import pytest
from absl import flags as absl_flags

from fedvi import experiment
from fedvi.experiment import command_line, setup

EXAMPLES = Path(__file__).parents[2] / "examples"
METHODS = {
    "bpfed": ["bpfed"],
    "dsvgd_selection": ["dsvgd", "dsvgd", "dsvgd"],
    "fedabml": ["fedabml"],
    "fedhb_cifar": ["fedhb_niw"],
    "pfedbayes": ["pfedbayes"],
}
EMBEDDED = ("digits", "covertype_standin")


@pytest.fixture
def read(monkeypatch):
    """`(example, arguments) -> configurations` that it would run."""

    def read(example, *arguments):
        given = {}
        monkeypatch.setattr(
            experiment, "start", lambda **defaults: given.update(defaults)
        )
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
        values = absl_flags.FlagValues()
        command_line.define(values, arguments, **given)
        command_line.parse([example, *arguments], values)
        return given, [config for config, _ in command_line.read(values)]

    return read


def test_every_example_is_here():
    others = {"quickstart"}  # which needs its flag file for more than defaults
    assert {file.stem for file in EXAMPLES.glob("*.py")} - others >= METHODS.keys()


@pytest.mark.parametrize("example", METHODS)
def test_an_example_runs_its_own_method_on_embedded_data(read, example):
    given, configs = read(example)
    assert [config.algorithm for config in configs] == METHODS[example]
    for config in configs:
        assert config.dataset in EMBEDDED
        config.validate()
        options = setup.experiment(config).config.options
        fields = [field.name for field in dataclasses.fields(config)]
        for name in given.keys() - fields:
            assert options[name] == given[name]
    _, [config] = read(example, "--algorithm=fedavg")
    assert (config.algorithm, config.dataset) == ("fedavg", configs[0].dataset)
    setup.resolve(config)


@pytest.mark.parametrize("example", METHODS)
def test_a_flag_file_means_the_same_in_every_example(read, example, tmp_path):
    file = tmp_path / "a.flags"
    file.write_text("--algorithm=fedprox\n--epochs=3")
    _, [config] = read(example, f"--flagfile={file}")
    assert config == experiment.ExperimentConfig(algorithm="fedprox", epochs=3)
