import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from absl import flags as absl_flags

from fedvi import algorithms
from fedvi.experiment import command_line, setup
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.options import Options, option

FLAGFILES = Path(__file__).parents[2] / "examples" / "flagfiles"


def read(*arguments):
    values = absl_flags.FlagValues()
    command_line.define(values)
    command_line.parse(["program", *map(str, arguments)], values)
    return command_line.read(values)


def test_without_flags_the_configuration_is_the_default():
    [(config, options)] = read()
    assert config == ExperimentConfig()
    assert options.run_dir == "runs/fedhb_niw_cifar100"


def test_flags_set_fields_options_and_run_options():
    [(config, options)] = read(
        "--algorithm=fedhb_niw",
        "--p_drop=0.25",
        "--prior_mean=zero",
        "--rounds=7",
        "--lr_decay_at=0.25,0.5",
        "--noaugment",
        "--data_file=a.npz",
        "--chunk_size=4",
        "--run_dir=elsewhere",
        "--resume",
    )
    assert config.options == {"p_drop": 0.25, "prior_mean": "zero"}
    assert (config.rounds, config.augment, config.data_file) == (7, False, "a.npz")
    assert config.lr_decay_at == (0.25, 0.5)
    assert (options.chunk_size, options.run_dir, options.resume) == (
        4,
        "elsewhere",
        True,
    )


def test_clusters_and_novel_clients_are_flags():
    [(config, _)] = read("--cluster_transform=relabel", "--novel_clients=3")
    assert (config.cluster_transform, config.novel_clients) == ("relabel", 3)
    [(config, _)] = read("--second_dataset=mnist", "--second_data_file=b.npz")
    assert (config.second_dataset, config.second_data_file) == ("mnist", "b.npz")
    assert config.cluster_transform == "none"


def test_several_algorithms_share_all_but_their_own_options():
    runs = read("--algorithm=fedavg,fedprox", "--mu=0.5", "--name=both")
    (first, first_options), (second, second_options) = runs
    assert (first.options, second.options) == ({}, {"mu": 0.5})
    assert first_options.run_dir == "runs/both/fedavg"
    assert second_options.run_dir == "runs/both/fedprox"


def test_an_algorithm_may_come_with_its_selection():
    names = "dsvgd:round_robin,dsvgd,dsvgd:uniform,dsvgd:hip,fedavg"
    runs = read(f"--algorithm={names}", "--selection=ksd", "--particles=3", "--name=x")
    assert [(config.algorithm, config.selection) for config, _ in runs] == [
        ("dsvgd", "round_robin"),
        ("dsvgd", "ksd"),
        ("dsvgd", "uniform"),
        ("dsvgd", "hip"),
        ("fedavg", "ksd"),
    ]
    assert [options.run_dir for _, options in runs] == [
        "runs/x/dsvgd_round_robin",
        "runs/x/dsvgd_ksd",
        "runs/x/dsvgd",
        "runs/x/dsvgd_hip",
        "runs/x/fedavg_ksd",
    ]
    assert [config.options for config, _ in runs] == [{"particles": 3}] * 4 + [{}]
    [(config, options)] = read("--algorithm=dsvgd:hip", "--selection_temperature=0")
    assert (config.selection, config.selection_temperature) == ("hip", 0.0)
    assert options.run_dir == "runs/dsvgd_hip_cifar100"


def test_every_algorithm_option_is_a_flag():
    values = absl_flags.FlagValues()
    command_line.define(values)
    for name in algorithms.ALGORITHMS:
        for field in dataclasses.fields(algorithms.options_of(name)):
            assert f"{name} ({field.default}" in values[field.name].help


class Mine(Options):
    strength: float = option(2.0, "Pull. A second sentence.", source="Eq. 3", above=0)
    other: int = option(1, "Another.")
    mode: Literal["a", "b"] = option("a", "How.")


class Yours(Options):
    other: int = option(5, "Not the same.")
    mode: Literal["b", "c"] = option("b", "How.")


@pytest.fixture
def own(monkeypatch):
    """Registers algorithms of a user's own."""

    def register(**classes):
        for name, options in classes.items():
            make = algorithms.builder(options)(lambda task, options: None)
            monkeypatch.setitem(algorithms.ALGORITHMS, name, make)

    return register


def test_the_help_of_an_option_says_what_it_means_and_whence_it_is(own):
    own(mine=Mine, yours=Yours)
    values = absl_flags.FlagValues()
    command_line.define(values)
    assert values["strength"].help == "Option of mine (2.0; above 0; Eq. 3): Pull."
    assert values["other"].help == (
        "Option of mine (1): Another. Option of yours (5): Not the same."
    )
    assert values["mode"].help == "<a|b|c>: Option of mine (a), yours (b): How."
    assert values["mode"].parser.enum_values == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm=fedfoo"], "'fedfoo' is none of fedavg"),
        (["--algorithm=fedavg,fedavg"], "fedavg is named twice"),
        (
            ["--algorithm=dsvgd,dsvgd:ksd", "--selection=ksd"],
            "dsvgd,dsvgd:ksd: dsvgd:ksd is named twice",
        ),
        (["--algorithm=dsvgd:"], "'dsvgd:' names no selection"),
        (["--algorithm=ksd:dsvgd"], "'ksd' is none of fedavg"),
        (["--selection_order=sideways"], "=sideways: value should be one of <id|so"),
        (["--algorithm=fedavg", "--mu=1"], "--mu=1.0: fedavg does not take it; fedpr"),
        (["--partition=stripes"], "partition=stripes: value should be one of"),
        (["--prior_mean=one"], "prior_mean=one: value should be one of"),
        (["--cluster_transform=mirror"], "=mirror: value should be one of <none|inv"),
        (["--rounds=ten"], "--rounds=ten: value should be an integer"),
        (["--p_drop=no"], "--p_drop=no: value should be a number"),
        (["--hidden=2,x"], "--hidden=2,x: value should be integers separated by"),
        (["--lr_decay_at=half"], "lr_decay_at=half: value should be numbers"),
        (["--raunds=10"], "Unknown command line flag 'raunds'. Did you mean: rounds"),
        (["fedavg"], "'fedavg' is no flag"),
        (["--flagfile=missing.flags"], "missing.flags"),
    ],
)
def test_a_mistake_is_a_flag_error_that_names_it(arguments, message):
    with pytest.raises(absl_flags.Error, match=message):
        read(*arguments)


def test_a_users_own_option_becomes_a_flag(own):
    own(mine=Mine)
    [(config, _)] = read("--algorithm=mine", "--strength=3")
    assert config.options == {"strength": 3.0}
    with pytest.raises(ValueError, match="strength=-1.0 must be above 0"):
        setup.resolve(dataclasses.replace(config, options={"strength": -1.0}))


def test_options_of_one_name_must_agree(own):
    class Other(Options):
        mu: bool = option(True, "Whether.")

    own(mine=Other)
    with pytest.raises(ValueError, match="option mu is annotated differently"):
        command_line.define(absl_flags.FlagValues())


def test_the_flag_file_names_the_run(tmp_path):
    file = tmp_path / "my_setting.flags"
    file.write_text("# a comment\n--rounds=3\n")
    [(config, options)] = read(f"--flagfile={file}", "--epochs=2")
    assert (config.rounds, config.epochs) == (3, 2)
    assert options.run_dir == "runs/my_setting"
    [(_, options)] = read("--flagfile", file, "--name=other")
    assert options.run_dir == "runs/other"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_flag_file_is_read_in_any_unicode(tmp_path, encoding):
    """C30: as editors and shells of other systems write it, comments anywhere."""
    file, inner = tmp_path / "größe.flags", tmp_path / "inner.flags"
    inner.write_text("--epochs=4  # of the inner one\r\n")
    text = [
        "# ± a comment",
        "   # an indented one",
        "// another",
        "",
        "--run_dir=größe  # ± a note",
        "\t--rounds=3\t",
        f"--flagfile={inner}",
        "--data_file=a#b.npz",
    ]
    file.write_bytes("\r\n".join(text).encode(encoding))
    for arguments in ([f"--flagfile={file}"], ["-flagfile", file]):
        [(config, options)] = read(*arguments)
        assert (config.rounds, config.epochs, options.run_dir) == (3, 4, "größe")
        assert config.data_file == "a#b.npz"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("--run_dir=größe".encode("latin-1"), "is not text in UTF-8"),
        ("--rounds=3".encode("utf-16-le"), "is not text in UTF-8"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
        (b"--flagfile={}", "leads back to itself"),
        (None, "cannot be read"),
    ],
)
def test_another_flag_file_is_refused_in_one_line(tmp_path, content, message):
    """C30."""
    file = tmp_path / "a.flags"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content.replace(b"{}", str(file).encode()))
    with pytest.raises(absl_flags.Error, match=f"--flagfile={file}: .*{message}"):
        read(f"--flagfile={file}")


def test_the_home_folder_stands_for_a_tilde(tmp_path, monkeypatch):
    """C27: in every path flag, in a flag file, and from Python."""
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = ("data_file", "second_data_file", "ood_data_file", "data_dir")
    given = [f"--{name}=~/{name}" for name in paths]
    (tmp_path / "a.flags").write_text("\n".join(given))
    for arguments in (given, ["--flagfile=~/a.flags"], ["--flagfile", "~/a.flags"]):
        runs = read(*arguments, "--run_dir=~/runs", "--algorithm=fedavg,fedprox")
        for name, (config, options) in zip(("fedavg", "fedprox"), runs):
            assert options.run_dir == str(tmp_path / "runs" / name)
            for path in paths:
                assert getattr(config, path) == str(tmp_path / path)
    config = ExperimentConfig(**{name: "~/x" for name in paths})
    assert {getattr(config, name) for name in paths} == {str(tmp_path / "x")}
    assert RunOptions("~/x").run_dir == str(tmp_path / "x")
    assert RunOptions("a/~").run_dir == "a/~"
    with pytest.raises(ValueError, match="run_dir='~nobody_here/x': there is no home"):
        RunOptions("~nobody_here/x")


def test_without_a_home_there_is_no_cache(monkeypatch):
    """C28: a user id without one."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(command_line.Path, "home", homeless)
    values = absl_flags.FlagValues()
    command_line.define(values)
    command_line.parse(["program"], values)
    assert values.compilation_cache == ""


def test_a_cache_that_cannot_be_made_is_told_of_once(tmp_path, capsys, monkeypatch):
    """C28."""
    updates = {}
    monkeypatch.setattr(command_line.jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(
        type(command_line.jax.config), "jax_compilation_cache_dir", None, raising=False
    )
    (tmp_path / "file").touch()
    command_line._use_cache(str(tmp_path / "file" / "cache"))
    assert f"no compilation cache in {tmp_path}" in capsys.readouterr().out
    assert not updates


@pytest.mark.parametrize(
    "file",
    sorted(FLAGFILES.rglob("*.flags")),
    ids=lambda file: file.relative_to(FLAGFILES).with_suffix("").as_posix(),
)
def test_every_flag_file_is_valid(file):
    runs = read(f"--flagfile={file}")
    for config, options in runs:
        config.validate()
        options.validate()
        setup.resolve(config)
    header = file.read_text(encoding="utf-8")
    assert "\n# ours: " in header
    if file.parent.name == "fedhb":
        assert "\n# paper: " in header
        config = runs[0][0]
        # The name says what is inside: method_data_sS_fF_tauT.
        assert file.stem.endswith(
            f"{config.dataset}_s{config.shards}_f{config.fraction}_tau{config.epochs}"
        )
        assert config.clients == 100


def test_there_is_a_flag_file_for_every_cell():
    methods = ("niw", "mixture_k2", "fedbabu", "fedavg", "fedprox")
    cells = [
        f"{data}_s5_f0.1_tau{tau}"
        for data in ("mnist", "fashion_mnist")
        for tau in (1, 5)
    ]
    cells += [
        f"cifar100_s{s}_f{f}_tau{tau}"
        for s in (100, 10)
        for f in ("0.1", "1.0")
        for tau in (1, 10)
    ]
    expected = {f"{method}_{cell}.flags" for method in methods for cell in cells}
    assert {file.name for file in (FLAGFILES / "fedhb").iterdir()} == expected


def test_a_mistake_is_no_loss():
    alone = command_line.Ending()
    alone.check(ValueError("Gloo all-reduce failed"))  # there is nobody to lose
    alone.done()
    with pytest.raises(SystemExit) as left:
        alone.leave(5, "two\nlines")
    assert left.value.code == 5


@pytest.mark.parametrize("name", ["momentum", "run_dir", "name", "help"])
def test_an_option_that_is_a_flag_of_the_driver_is_named(monkeypatch, name):
    taken = {name: option(0.5, "A number.")}
    slip = type("Slip", (Options,), {"__annotations__": {name: float}, **taken})

    @algorithms.builder(slip)
    def own(task, options):
        """Never built."""

    monkeypatch.setitem(algorithms.ALGORITHMS, "own", own)
    with pytest.raises(ValueError, match=f"option {name} of own: the command line has"):
        read("--algorithm=own")
