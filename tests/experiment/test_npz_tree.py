"""Bits survive a round trip, kills never leave half a file, mistakes name the leaf."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fedvi
from fedvi.experiment.npz_tree import read, restore, save

METADATA = {"config": {"lr": 0.1, "model": {"width": 256}}, "round": 7}


class Moments(NamedTuple):
    count: Any
    mean: Any


class State(NamedTuple):
    params: Any
    optimizer: Any
    key: Any
    client: Any


def make_state():
    return State(
        params={
            "a/b": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3),
            "half": jnp.asarray([1.0, -0.0, 3.14159, jnp.inf, jnp.nan], jnp.bfloat16),
            "none": None,
        },
        optimizer=(Moments(jnp.int32(3), [jnp.arange(4, dtype=jnp.uint8)]), ()),
        key=jax.random.key(0),
        client=Moments(
            np.arange(3, dtype=np.int64), {"flags": np.array([True, False])}
        ),
    )


def raw_bytes(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        assert isinstance(a, np.ndarray) == isinstance(b, np.ndarray)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert raw_bytes(a) == raw_bytes(b)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "run [1]").mkdir()
    return tmp_path / "run [1]" / "checkpoint.npz"


def test_round_trip_keeps_structure_dtypes_and_bits(path):
    state = make_state()
    save(path, state, METADATA)
    got, metadata = restore(path, state)
    assert_same(got, state)
    assert metadata == METADATA
    assert os.listdir(path.parent) == ["checkpoint.npz"]


def test_like_may_be_shapes_only(path):
    state = make_state()._replace(client=())
    save(path, state, METADATA)
    got, _ = restore(path, jax.eval_shape(lambda: state))
    assert_same(got, state)


def test_single_array_empty_tree_and_python_numbers(path):
    for tree in (jnp.arange(3.0), (), {"round": 3, "best": 0.1, "done": True}):
        save(path, tree, METADATA)
        got, _ = restore(path, tree)
        jax.tree.map(np.testing.assert_array_equal, got, tree)
        assert jax.tree.map(type, got) == jax.tree.map(type, tree)


def test_next_draw_from_restored_keys_is_identical(path):
    """Case C10: a key, and a `[clients]` array of keys, of two generators."""
    keys = {
        "server": jax.random.key(0),
        "clients": jax.random.split(jax.random.key(1), 5),
        "rbg": jax.random.key(2, impl="rbg"),
    }
    save(path, keys, METADATA)
    got, _ = restore(path, keys)
    for name in ("server", "rbg"):
        draws = [jax.random.normal(k[name], (4,)) for k in (got, keys)]
        np.testing.assert_array_equal(*draws)
    draw = jax.vmap(lambda key: jax.random.normal(key, (4,)))
    np.testing.assert_array_equal(draw(got["clients"]), draw(keys["clients"]))


def test_resumed_run_equals_straight_run_bit_for_bit(path):
    """Case C9 in small: weights, moments and keys after 10 rounds."""

    @jax.jit
    def step(state):
        key, subkey = jax.random.split(state.key)
        gradient = state.params + jax.random.normal(subkey, (8,))
        mean = 0.9 * state.optimizer.mean + gradient
        moments = Moments(state.optimizer.count + 1, mean)
        return State(state.params - 0.1 * mean, moments, key, ())

    moments = Moments(jnp.int32(0), jnp.zeros(8))
    start = State(jnp.ones(8), moments, jax.random.key(3), ())
    straight = start
    for number in range(10):
        straight = step(straight)
        if number == 4:
            save(path, straight, METADATA)
    resumed, _ = restore(path, start)
    for _ in range(5):
        resumed = step(resumed)
    assert_same(resumed, straight)


def test_restored_state_can_be_donated_and_keeps_its_sharding(path):
    mesh = jax.make_mesh(
        (jax.device_count(),), ("clients",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    sharding = NamedSharding(mesh, PartitionSpec("clients"))
    count = 2 * jax.device_count()
    clients = {
        "weights": jax.device_put(jnp.arange(1.0 * count), sharding),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), count), sharding),
    }
    save(path, clients, METADATA)
    got, _ = restore(path, clients)
    assert_same(got, clients)
    assert all(leaf.sharding == sharding for leaf in got.values())
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    np.testing.assert_array_equal(double(got["weights"]), 2.0 * np.arange(count))
    assert got["weights"].is_deleted()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"a": np.zeros(2), "b": np.zeros(3)}, r"lacks leaf state\['b'\]"),
        ({}, r"unexpected leaf state\['a'\]"),
        (
            {"a": np.zeros(3)},
            r"leaf state\['a'\] is float64\[2\], expected float64\[3\]",
        ),
        ({"a": np.zeros(2, np.int8)}, r"state\['a'\] is float64\[2\], expected int8"),
        ({"a": jax.random.split(jax.random.key(0))}, r"state\['a'\].*key<fry>\[2\]"),
    ],
)
def test_another_structure_names_the_leaf(path, like, message):
    save(path, {"a": np.zeros(2)}, METADATA)
    with pytest.raises(ValueError, match=message):
        restore(path, like)


def damage(path, how):
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "npy":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    elif how == "foreign npz":
        with open(path, "wb") as file:
            np.savez(file, x=np.zeros(3))
    else:
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 1])
        changed = {
            "empty": b"",
            "garbage": b"not a checkpoint" * 9,
            "truncated": content[:middle],
            "one bit": content[:middle] + flipped + content[middle + 1 :],
        }
        path.write_bytes(changed[how])


@pytest.mark.parametrize(
    "how",
    ["missing", "npy", "foreign npz", "empty", "garbage", "truncated", "one bit"],
)
def test_damaged_file_is_named(path, how):
    save(path, np.arange(1000.0), METADATA)
    damage(path, how)
    with pytest.raises(ValueError, match="cannot read checkpoint") as error:
        restore(path, np.arange(1000.0))
    assert str(path) in str(error.value)


def test_what_cannot_be_saved_is_refused_and_the_old_file_stays(path):
    save(path, np.zeros(2), METADATA)
    with pytest.raises(ValueError, match=r"leaf state\['name'\] has dtype"):
        save(path, {"name": "mlp"}, METADATA)
    with pytest.raises(ValueError, match="JSON-like"):
        save(path, np.ones(2), METADATA | {"array": np.zeros(2)})
    np.testing.assert_array_equal(restore(path, np.ones(2))[0], np.zeros(2))


def test_failure_before_the_rename_keeps_the_old_file(path, monkeypatch):
    save(path, np.zeros(2), METADATA)

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save(path, np.ones(2), METADATA)
    monkeypatch.undo()
    np.testing.assert_array_equal(restore(path, np.ones(2))[0], np.zeros(2))
    assert os.listdir(path.parent) == ["checkpoint.npz"]


def test_save_removes_stale_temporary_files_and_no_others(path):
    for name in ("checkpoint.npz.tmp.123", "notes.tmp.1", "checkpoint.npz.bak"):
        (path.parent / name).write_text("")
    save(path, np.zeros(2), METADATA)
    left = {"checkpoint.npz", "notes.tmp.1", "checkpoint.npz.bak"}
    assert set(os.listdir(path.parent)) == left


SAVE_LOOP = """
import itertools, sys
import numpy as np
from fedvi.experiment.npz_tree import save
for number in itertools.count(1):
    tree = {"a": np.full(300_000, number), "b": np.full(300_000, -number)}
    save(sys.argv[1], tree, {"round": number})
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_kill_9_leaves_a_whole_checkpoint(tmp_path):
    root = str(Path(fedvi.__path__[0]).parent)
    environment = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    paths = [tmp_path / str(trial) / "checkpoint.npz" for trial in range(3)]
    for path in paths:
        path.parent.mkdir()
    children = [
        subprocess.Popen([sys.executable, "-c", SAVE_LOOP, path], env=environment)
        for path in paths
    ]
    rng = np.random.default_rng(0)
    like = {"a": np.zeros(300_000, int), "b": np.zeros(300_000, int)}
    deadline = time.monotonic() + 90
    try:
        for path, child in zip(paths, children):
            while not path.exists():
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.1))
            child.kill()
            assert child.wait() == -signal.SIGKILL
            tree, metadata = restore(path, like)
            assert (tree["a"] == metadata["round"]).all()
            assert (tree["b"] == -metadata["round"]).all()
            save(path, tree, metadata)
            assert os.listdir(path.parent) == ["checkpoint.npz"]
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_tree_is_read_back_without_a_likeness(tmp_path):
    tree = {
        "scores": {
            "a b": Moments(np.arange(3.0), np.int8([[1]])),
            "x": np.ones(0),
        },
        "pair": (Moments(np.int32(3), np.zeros(1)), jnp.ones(2, jnp.bfloat16)),
    }
    save(tmp_path / "tree.npz", tree, {"note": 1})
    found, note = read(tmp_path / "tree.npz")
    assert note == {"note": 1}
    assert found["pair"][0]._fields == Moments._fields
    found["pair"] = (Moments(*found["pair"][0]), found["pair"][1])
    found["scores"]["a b"] = Moments(*found["scores"]["a b"])
    assert_same(found, jax.tree.map(np.asarray, tree))
