from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.client_map import clients_mesh
from fedvi.experiment import RunOptions, chunking
from fedvi.local import LocalTraining

GIB = 2**30


class Compiler:
    """Pretends to compile: memory of `each` per client and seed beside `fixed`."""

    def __init__(self, each, fixed=0):
        self.each, self.fixed, self.calls = each, fixed, []

    def __call__(self, chunk_size, runs_at_once):
        self.calls.append((chunk_size, runs_at_once))
        memory = SimpleNamespace(
            temp_size_in_bytes=self.fixed + self.each * chunk_size * runs_at_once,
            output_size_in_bytes=7,
            alias_size_in_bytes=7,
        )
        return SimpleNamespace(memory_analysis=lambda: memory)


def choose(compiler, **arguments):
    settings = dict(cohort=10, seeds=3, platform="gpu", limit=10 * GIB)
    chosen, block = chunking.choose(compiler, **(settings | arguments))
    assert compiler.calls[-1] == (chosen.chunk_size, chosen.runs_at_once)
    assert block is not None
    return chosen


def test_on_cpu_one_client_and_one_seed_at_a_time():
    chosen = choose(Compiler(GIB), platform="cpu", limit=None)
    assert chosen[:2] == (1, 1)
    assert chosen.reason == (
        "chunk_size=1 of 10 clients a round and device, 1 of 3 seeds at once: "
        "fastest on CPU"
    )


@pytest.mark.parametrize(("requested", "chunk"), [("whole", 10), (4, 4), (99, 10)])
def test_an_explicit_chunk_size_wins_on_cpu(requested, chunk):
    chosen = choose(Compiler(1), platform="cpu", requested=requested)
    assert chosen[:2] == (chunk, 1)


def test_all_at_once_where_memory_allows():
    assert choose(Compiler(GIB // 10))[:2] == (10, 3)


def test_seeds_one_after_another_before_chunks():
    compiler = Compiler(GIB // 2)
    assert choose(compiler)[:2] == (10, 1)
    assert compiler.calls == [(10, 3), (10, 1)]


def test_chunks_shrink_until_they_fit():
    # 9 GiB are usable, of which 5 are needed whatever the chunk: 4 clients fit.
    compiler = Compiler(GIB, fixed=5 * GIB)
    assert choose(compiler, seeds=1)[:2] == (4, 1)
    assert len(compiler.calls) > 2


def test_one_client_that_does_not_fit_is_an_error():
    message = (
        r"chunk_size=1 needs 50.00 GiB .* with 9.00 GiB usable: spread the model over "
        r"devices \(model_devices\)"
    )
    with pytest.raises(ValueError, match=message):
        choose(Compiler(50 * GIB), seeds=1)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_an_explicit_chunk_size_is_kept_or_said_not_to_fit(platform):
    compiler = Compiler(GIB)
    assert choose(compiler, requested=6, platform=platform)[:2] == (6, 1)
    assert choose(compiler, requested=9, platform=platform)[:2] == (9, 1)
    message = r"chunk_size=10 needs 10.00 GiB .* 9.00 GiB .*: about chunk_size=9 would"
    for requested in (10, "whole"):
        with pytest.raises(ValueError, match=message):
            choose(compiler, requested=requested, platform=platform)


def test_without_a_known_limit_everything_runs_at_once():
    chosen = choose(Compiler(50 * GIB), limit=None)
    assert chosen[:2] == (10, 3)
    assert "tells no memory limit" in chosen.reason


def test_a_real_program_tells_its_temporaries():
    def fn(x):
        return jnp.sort(jnp.outer(x, x), axis=0).sum()

    compiled = jax.jit(fn).lower(jnp.zeros(256)).compile()
    assert 256 * 256 * 4 <= chunking.temporary_bytes(compiled) < 10 * 256 * 256 * 4


def test_the_memory_of_a_cpu_is_what_the_system_could_give(monkeypatch, tmp_path):
    device = jax.devices("cpu")[0]
    monkeypatch.setattr(chunking, "_MEMINFO", tmp_path / "meminfo")
    assert chunking.free_memory(device) is None
    text = "MemTotal: 9 kB\nMemAvailable:    12345 kB\n"
    (tmp_path / "meminfo").write_text(text)
    assert chunking.free_memory(device) == 12345 * 1024


def test_the_padding_of_a_round_is_that_of_its_cohorts():
    experiment = SimpleNamespace(
        data=SimpleNamespace(train=SimpleNamespace(size=np.array([1, 9, 99, 2, 8]))),
        trained=np.array([0, 1, 3, 4]),
        task=SimpleNamespace(training=LocalTraining(batch_size=1)),
        selection=SimpleNamespace(size=4),
    )
    assert chunking.padding(experiment, 2, 1) == pytest.approx(2 / 22)
    assert chunking.padding(experiment, 1, 1) == 0
    # Of the six pairs: 8/18 of (1, 9), 1/4 of (1, 2), 7/16, 7/18, 6/16 and 1/18.
    experiment.selection.size = 2
    mean = (8 / 18 + 1 / 4 + 7 / 16 + 7 / 18 + 6 / 16 + 1 / 18) / 6
    assert chunking.padding(experiment, 2, 1) == pytest.approx(mean, abs=0.1)


@pytest.mark.parametrize(("chunk_size", "told"), [(2, "9 %"), (1, None)])
def test_the_plan_tells_how_much_of_a_round_is_padding(chunk_size, told):
    compiled = Compiler(1)(1, 1)
    variant = SimpleNamespace(compile=lambda *_, **__: compiled)
    federation = SimpleNamespace(
        mesh=clients_mesh(1), homes=None, variant=lambda **_: variant
    )
    experiment = SimpleNamespace(
        config=SimpleNamespace(seeds=1, blocks=lambda: iter([1])),
        data=SimpleNamespace(train=SimpleNamespace(size=np.array([1, 9, 2, 8]))),
        trained=np.arange(4),
        task=SimpleNamespace(training=LocalTraining(batch_size=1)),
        selection=SimpleNamespace(size=4),
        together=4,
    )
    options = RunOptions(run_dir="none", chunk_size=chunk_size)
    plan, chosen = chunking.grouped(federation, experiment, options, {})
    assert chosen is variant
    line = f"chunk_size={chunk_size} of 4 clients a round and device: as asked"
    if told:
        line += f"; {told} of a round's steps are padding"
    assert plan.reason == line
