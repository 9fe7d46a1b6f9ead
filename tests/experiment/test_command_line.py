import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from absl import flags as absl_flags

from fedvi import algorithms
from fedvi.experiment import command_line, setup
from fedvi.experiment.config import ExperimentConfig, HostOptions, RunOptions
from fedvi.options import Options, option, range_of

FLAGFILES = Path(__file__).parents[2] / "examples" / "flagfiles"


def parsed(*arguments, **defaults):
    values = absl_flags.FlagValues()
    arguments = list(map(str, arguments))
    command_line.define(values, arguments, **defaults)
    command_line.parse(["program", *arguments], values)
    return values


def read(*arguments, **defaults):
    return command_line.read(parsed(*arguments, **defaults))


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
        (["--algorithm=fedfoo"], "algorithm='fedfoo' must be one of fedavg"),
        (["--algorithm=fedavg,fedavg"], "fedavg is named twice"),
        (
            ["--algorithm=dsvgd,dsvgd:ksd", "--selection=ksd"],
            "dsvgd,dsvgd:ksd: dsvgd:ksd is named twice",
        ),
        (["--algorithm=dsvgd:"], "'dsvgd:' names nothing after its colon"),
        (["--plot_formats=png,eps"], "png,eps: value should be one of <png.svg.pdf>"),
        (["--selection_strata=2"], "=2: it is of stratified, and --selection is uni"),
        (["--selection_floor=0.1"], "=0.1: it is of a selection by importance, and"),
        (["--selection_order=sideways"], "=sideways: value should be one of <id|so"),
        (["--algorithm=fedavg", "--mu=1"], "--mu=1.0: fedavg does not take it; fedpr"),
        (["--partition=stripes"], "partition=stripes: value should be one of"),
        (["--prior_mean=one"], "prior_mean=one: value should be one of"),
        (["--cluster_transform=mirror"], "=mirror: value should be one of <none|inv"),
        (["--rounds=ten"], "--rounds=ten: value should be an integer"),
        (["--p_drop=no"], "--p_drop=no: value should be a number"),
        (["--hidden=2,x"], "--hidden=2,x: value should be integers separated by"),
        (["--lr_decay_at=half"], "lr_decay_at=half: value should be numbers"),
        (
            ["--raunds=10"],
            r"Unknown command line flag --raunds: did you mean --rounds\?",
        ),
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
    files = {file.name: file.read_text() for file in (FLAGFILES / "fedhb").iterdir()}
    cut = {name for name, text in files.items() if "leaderboard.py --cut" in text}
    assert set(files) - cut == expected


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


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--algorithm=FedAvg", "fedavg"),
        ("--algorithm=fedhb-niw", "fedhb_niw"),
        ("--model=MobileNet", "mobilenet"),
        ("--partition=class-shards", "class_shards"),
        ("--optimizer=Adam", "adam"),
        ("--codec=INT-8", "int8"),
        ("--plot_formats=svg,PDF", "pdf"),
        ("--prior_mean=Zero", "zero"),
        ("--learning_rat=1", "--learning_rate"),
        ("--penality_scale=1", "--penalty_scale"),
        ("--sweep=penality_scale=1", "penalty_scale"),
        ("--choose_by=personal-nll", "personal_nll"),
    ],
)
def test_a_name_that_nearly_matches_is_suggested(argument, meant):
    with pytest.raises(absl_flags.Error) as raised:
        command_line.read_sweep(parsed(argument))
    assert str(raised.value).endswith(f": did you mean {meant}?")
    assert "\n" not in str(raised.value)


def test_the_formats_of_pictures_are_a_run_option():
    [(_, options)] = read()
    assert options.plot_formats == ("png",)
    [(_, options)] = read("--plot_formats=svg,pdf")
    options.validate()
    assert options.plot_formats == ("svg", "pdf")
    [(_, options)] = read("--plot_formats=")
    options.validate()
    assert options.plot_formats == ()


# Sweeps.


def test_a_sweep_has_values_as_their_flags_have_them():
    values = parsed(
        "--algorithm=fedavg,fedhb_niw",
        "--sweep=penalty_scale=0.1,1",
        "--sweep=head=frozen,trained",
        "--sweep=rounds=3",
        "--sweep=hidden=64;128,32;",
        "--sweep=augment=true,false",
    )
    assert command_line.read_sweep(values) == {
        "penalty_scale": (0.1, 1.0),
        "head": ("frozen", "trained"),
        "rounds": (3,),
        "hidden": ((64,), (128, 32), ()),
        "augment": (True, False),
    }
    assert command_line.read_sweep(parsed()) == {}
    [(_, options)] = read("--algorithm=fedavg", "--sweep=rounds=3")
    assert options.run_dir == "runs/fedavg_cifar100_sweep"


@pytest.mark.parametrize(
    ("sweeps", "message"),
    [
        (["mu=1"], "--sweep=mu=1: mu is no setting of the experiment or of the chosen"),
        (["run_dir=a,b"], "run_dir is no setting"),
        (["seeds=1,2"], "seeds is one for all cells: give --seeds"),
        (["algorithm=fedavg,fedprox"], "algorithm is one for all cells: give --algo"),
        (["rounds=1,ten"], "=rounds=1,ten: value should be an integer"),
        (["rounds=0,1"], "rounds=0 must be at least 1"),
        (["p_drop=0.5,1"], "p_drop=1.0 must be at least 0 and below 1"),
        (["model=mlp,mpl"], "value should be one of <.*: did you mean mlp"),
        (["rounds=1", "rounds=2"], "rounds is named twice"),
        (["rounds=1,1"], "the value 1 is given twice"),
        (["rounds"], "give values, as in --sweep=rounds=VALUE,VALUE"),
        (["rounds="], "give values"),
    ],
)
def test_a_mistake_in_a_sweep_is_named(sweeps, message):
    with pytest.raises(absl_flags.Error, match=message):
        command_line.read_sweep(parsed(*(f"--sweep={text}" for text in sweeps)))


# A script's defaults.


def test_a_scripts_defaults_hold_without_a_flag_file(tmp_path):
    defaults = {"algorithm": "bpfed", "rounds": 7, "hidden": (9,), "zeta": 0.5}
    [(config, _)] = read(**defaults)
    assert (config.algorithm, config.rounds, config.hidden) == ("bpfed", 7, (9,))
    assert config.options == {"zeta": 0.5}
    [(config, _)] = read("--rounds=3", "--algorithm=fedavg", **defaults)
    assert (config.algorithm, config.rounds, config.options) == ("fedavg", 3, {})
    file = tmp_path / "a.flags"
    file.write_text("--epochs=2")
    [(config, _)] = read(f"--flagfile={file}", **defaults)
    assert config == ExperimentConfig(algorithm="bpfed", epochs=2)
    with pytest.raises(ValueError, match="round=3 is that of no flag: did you mean ro"):
        read(round=3)
    with pytest.raises(absl_flags.Error, match="rounds=many"):
        read(rounds="many")


# Help.


def help_of(*arguments, **defaults):
    values = parsed(*arguments, **defaults)
    text = command_line.help_text(values, "A title.")
    assert all(len(line) <= 100 for line in text.splitlines())
    return text, " ".join(text.split())


def test_the_help_has_every_setting_with_default_choices_and_range():
    text, flat = help_of()
    for config in (ExperimentConfig, RunOptions, HostOptions):
        for field in dataclasses.fields(config):
            if field.name == "options":
                continue
            no = "[no]" * (field.type in (bool, "bool", bool | None))
            start = text.index(f"\n  --{no}{field.name}: ")
            end = f"{text}\n  --".index("\n  --", start + 1)
            entry = " ".join(text[start:end].split())
            assert "default" in entry.lower()
            assert range_of(field) in entry if "bounds" in field.metadata else True
            for choice in field.metadata.get("choices") or ():
                assert choice in entry
    for name in ("name", "sweep", "choose_by", "compilation_cache"):
        assert f"  --{name}: " in text
    assert "(frozen | trained, default frozen, FedBABU; FedHB §6)" in flat


def test_the_help_is_in_groups_and_of_the_chosen_methods():
    text, _ = help_of()
    heads = [line for line in text.splitlines() if line[:1].isalpha()]
    assert heads == [
        "A title.",
        "method:",
        "this method, fedhb_niw:",
        "data:",
        "model:",
        "training:",
        "evaluation:",
        "run:",
        "devices:",
        "Options of other methods: --algorithm=NAME --help, or --helpfull.",
    ]
    data = text[text.index("\ndata:") : text.index("\nmodel:")]
    assert "--dataset:" in data and "--partition_seed:" in data
    assert "--zeta:" not in text and "--p_drop:" in text
    assert "  FedHB with a normal-inverse-Wishart posterior." in text
    text, _ = help_of("--algorithm=pfedbayes,dsvgd:ksd")
    assert "--zeta:" in text and "--particles:" in text and "--p_drop:" not in text
    _, flat = help_of(algorithm="bpfed", zeta=0.25, rounds=77, hidden=(3, 4))
    for default in ("77, at least 1", "3,4)", "0.25, ", "bpfed)"):
        assert f"(default {default}" in flat


# A user's own.


def test_an_own_algorithms_options_become_flags(own_module, tmp_path):
    file = tmp_path / "own.flags"
    file.write_text("--algorithm=fedavg,own_parts:pull\n--strength=4")
    runs = read(f"--flagfile={file}")
    assert [config.options for config, _ in runs] == [{}, {"strength": 4.0}]
    [(config, options)] = read("--algorithm=own_parts:pull:ksd", "--strength=3")
    assert (config.algorithm, config.selection) == ("own_parts:pull", "ksd")
    assert config.options == {"strength": 3.0}
    assert options.run_dir == "runs/own_parts_pull_ksd_cifar100"
    _, flat = help_of("--algorithm", "own_parts:pull")
    assert "strength: How hard. (default 2.0, above 0)" in flat
    [first, second] = read("--algorithm=own_parts:pull,fedprox", "--mu=1")
    assert (first[0].options, second[0].options) == ({}, {"mu": 1.0})
    [(config, _)] = read(algorithm="own_parts:pull", strength=1)
    assert config.options == {"strength": 1.0}
    values = parsed("--algorithm=own_parts:pull", "--sweep=strength=1,2")
    assert command_line.read_sweep(values) == {"strength": (1.0, 2.0)}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--algorithm=own_parts:pul", "own_parts has no pul: did you mean pull"),
        ("--algorithm=own_parts:plain", "algorithm='own_parts:plain' is no builder"),
        ("--algorithm=dsvg:ksd", "there is no module dsvg, .*: did you mean dsvgd"),
        ("--algorithm=own_parts:pull:", "names nothing after its colon"),
        ("--algorithm=own_parts", "algorithm='own_parts' must be one of fedavg"),
        ("--optimizer=:x", "optimizer=':x' must be package.module:name"),
        ("--model=own_parts:net.", "model='own_parts:net.' must be package.module:"),
    ],
)
def test_a_mistake_in_a_path_is_named(own_module, argument, message):
    with pytest.raises((absl_flags.Error, ValueError), match=message):
        [(config, _)] = read(argument)
        config.validate()
