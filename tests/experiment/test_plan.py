from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fedvi.experiment import plan

GIB = 2**30


class Compiler:
    """Pretends to compile: memory of `each` per client and seed beside `fixed`."""

    def __init__(self, each, fixed=0):
        self.each, self.fixed, self.calls = each, fixed, []

    def __call__(self, chunk_size, seeds_at_once):
        self.calls.append((chunk_size, seeds_at_once))
        memory = SimpleNamespace(
            temp_size_in_bytes=self.fixed + self.each * chunk_size * seeds_at_once,
            output_size_in_bytes=7,
            alias_size_in_bytes=7,
        )
        return SimpleNamespace(memory_analysis=lambda: memory)


def choose(compiler, **arguments):
    settings = dict(cohort=10, seeds=3, platform="gpu", limit=10 * GIB)
    chosen, block = plan.choose(compiler, **(settings | arguments))
    assert compiler.calls[-1] == (chosen.chunk_size, chosen.seeds_at_once)
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
    chosen = choose(Compiler(GIB), platform="cpu", requested=requested)
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


def test_one_client_is_the_least():
    chosen = choose(Compiler(50 * GIB), seeds=1)
    assert chosen[:2] == (1, 1)
    assert "needs 50.00 GiB of 9.00 GiB" in chosen.reason


def test_an_explicit_chunk_size_is_kept_on_an_accelerator():
    assert choose(Compiler(50 * GIB), requested=6)[:2] == (6, 1)
    assert choose(Compiler(50 * GIB), requested="whole")[:2] == (10, 1)


def test_without_a_known_limit_everything_runs_at_once():
    chosen = choose(Compiler(50 * GIB), limit=None)
    assert chosen[:2] == (10, 3)
    assert "tells no memory limit" in chosen.reason


def test_a_real_program_tells_its_temporaries():
    def fn(x):
        return jnp.sort(jnp.outer(x, x), axis=0).sum()

    compiled = jax.jit(fn).lower(jnp.zeros(256)).compile()
    assert 256 * 256 * 4 <= plan.temporary_bytes(compiled) < 10 * 256 * 256 * 4


def test_the_cpu_backend_tells_no_limit():
    assert plan.free_memory(jax.devices("cpu")[0]) is None
