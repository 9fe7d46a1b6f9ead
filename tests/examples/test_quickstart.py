"""The quickstart's own settings: every method has some, and the user's go before."""

import runpy
from pathlib import Path

import pytest
from absl import flags

from fedvi.experiment import command_line, setup

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
FLAGFILE = f"--flagfile={ROOT / 'examples' / 'flagfiles' / 'quickstart.flags'}"


@pytest.fixture
def read(monkeypatch):
    """`(arguments) -> configurations`, with the settings that the example adds."""

    def read(*arguments):
        values = flags.FlagValues()
        command_line.define(values)
        command_line.parse(["quickstart", FLAGFILE, *arguments], values)
        monkeypatch.setattr(flags, "FLAGS", values)
        return [
            EXAMPLE["with_chosen"](config) for config, _ in command_line.read(values)
        ]

    return read


def test_every_method_has_its_own_settings(read):
    configs = read()
    assert {config.algorithm for config in configs} <= set(EXAMPLE["CHOSEN"])
    for config in configs:
        config.validate()
        fields, options = EXAMPLE["CHOSEN"][config.algorithm]
        assert fields and fields.items() <= config.to_dict().items()
        assert options.items() <= setup.resolve(config).options.items()


def test_what_the_user_gives_goes_before(read):
    arguments = ("--algorithm=pfedbayes,fedprox", "--learning_rate=0.5", "--zeta=7")
    first, other = read(*arguments)
    assert (first.learning_rate, first.options["zeta"]) == (0.5, 7.0)
    assert other.learning_rate == 0.5  # a method that the example does not know
