"""The store against a dictionary; what a crash leaves; damaged files."""

import errno
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.client_store import ClientStore
from fedvi.folder_lock import FolderLock

LIKE = jax.eval_shape(
    lambda: {
        "mean": jnp.zeros((2, 3)),
        "half": jnp.zeros(4, jnp.bfloat16),
        "visits": jnp.int32(0),
        "key": jax.random.key(0),
    }
)


def states_of(values):
    values = np.asarray(values, np.int32)
    return {
        "mean": np.broadcast_to(np.float32(values)[:, None, None], (len(values), 2, 3))
        + np.float32(0.5),
        "half": jnp.broadcast_to(jnp.array(values)[:, None], (len(values), 4)).astype(
            jnp.bfloat16
        ),
        "visits": values.astype(np.int32),
        "key": jax.vmap(jax.random.key)(values.astype(np.uint32)),
    }


def check(store, held: dict[int, int], clients: int):
    """Every client's state is what was last written, or reported as unknown."""
    states, known = store.read(np.arange(clients))
    np.testing.assert_array_equal(known, [i in held for i in range(clients)])
    values = np.array([held[i] for i in sorted(held)])
    wanted = states_of(values) if held else None
    for field in states if held else ():
        found, want = states[field], wanted[field]
        if field == "key":
            found, want = map(jax.random.key_data, (found, want))
        found = np.asarray(found)[known]
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, np.asarray(want))
    assert store.visited == len(held)


@pytest.mark.parametrize("on_disk", [False, True])
def test_it_is_a_dictionary_of_the_clients_met_so_far(tmp_path, on_disk):
    clients, rng = 300, np.random.default_rng(0)
    store = ClientStore(LIKE, clients, tmp_path / "s" if on_disk else None)
    check(store, {}, clients)
    held = {}
    for step in range(12):
        ids = rng.choice(150, rng.integers(1, 60), replace=False)
        values = rng.integers(0, 200, len(ids))
        store.write(ids, states_of(values))
        held |= dict(zip(ids.tolist(), values.tolist()))
        check(store, held, clients)
        if step % 3 == 2:
            store.commit()
            store.settle()
            check(store, held, clients)
    # 150 clients at most were met: two slots each, and room to grow by half.
    assert store.bytes <= 1.5 * 2 * 150 * (24 + 8 + 4 + 8)
    ids, known = store.read(np.array([299, 298]))
    assert not known.any() and not ids["mean"].any()


def test_a_killed_run_finds_what_was_last_committed(tmp_path):
    store = ClientStore(LIKE, 20, tmp_path)
    store.write(np.arange(5), states_of(np.arange(5)))
    store.commit({"round": 3})
    for value in (50, 60):  # twice: the second overwrites the first's new slots
        store.write(np.arange(3, 9), states_of(np.full(6, value)))
    del store
    again = ClientStore(LIKE, 20, tmp_path)
    assert again.note == {"round": 3}
    check(again, {i: i for i in range(5)}, 20)
    # It goes on: new writes do not touch what the index refers to.
    again.write(np.array([0, 10]), states_of([7, 8]))
    check(again, {0: 7, 1: 1, 2: 2, 3: 3, 4: 4, 10: 8}, 20)
    check(ClientStore(LIKE, 20, tmp_path), {i: i for i in range(5)}, 20)


@pytest.mark.parametrize("kept", ["the last", "the one before"])
def test_a_commit_that_was_not_settled_can_be_taken_back(tmp_path, kept):
    """Killed between the two: whoever opens the folder says which one holds."""
    store = ClientStore(LIKE, 20, tmp_path)
    for round_index in (1, 2):
        store.write(np.arange(3), states_of(np.full(3, round_index)))
        store.commit({"round": round_index})
    round_index = 2 if kept == "the last" else 1
    before = sorted(tmp_path.iterdir())
    for asked in (1, 2):
        reader = ClientStore(LIKE, 20, tmp_path, read_only=True)
        assert reader.pick({"round": asked}) == (asked == 1)
        check(reader, dict.fromkeys(range(3), asked), 20)
    with pytest.raises(ValueError, match="read only"):
        reader.write(np.arange(1), states_of([7]))
    assert sorted(tmp_path.iterdir()) == before
    again = ClientStore(LIKE, 20, tmp_path)
    assert again.pick({"round": round_index}) == (round_index == 1)
    check(again, dict.fromkeys(range(3), round_index), 20)
    assert not again.pick({"round": 3 - round_index})  # the other one is gone
    for value in (5, 6):
        again.write(np.arange(3), states_of(np.full(3, value)))
        again.rollback()
        check(again, dict.fromkeys(range(3), round_index), 20)
    check(ClientStore(LIKE, 20, tmp_path), dict.fromkeys(range(3), round_index), 20)


def test_slots_are_used_again_after_a_commit(tmp_path):
    store = ClientStore(LIKE, 100, tmp_path)
    for value in range(20):
        store.write(np.arange(30), states_of(np.full(30, value)))
        store.commit()
        store.settle()
    slots = store.bytes / (24 + 8 + 4 + 8)
    assert slots <= 64  # 30 clients, two slots each


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_rollback_goes_back_to_the_last_commit(tmp_path, on_disk):
    store = ClientStore(LIKE, 50, tmp_path if on_disk else None)
    store.write(np.arange(5), states_of(np.arange(5)))
    store.commit()
    for value in range(30):
        store.write(np.arange(3, 9), states_of(np.full(6, value)))
        store.rollback()
        check(store, {i: i for i in range(5)}, 50)
    assert store.bytes <= 64 * (24 + 8 + 4 + 8)  # what was forgotten is used again
    store.write(np.array([4, 7]), states_of([70, 80]))
    check(store, {0: 0, 1: 1, 2: 2, 3: 3, 4: 70, 7: 80}, 50)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    store = ClientStore(LIKE, 50, tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=99)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match="needs 2,816 more bytes .* has 99"):
        store.write(np.arange(5), states_of(np.arange(5)))
    check(store, {}, 50)


def test_nothing_is_stored_for_clients_that_keep_nothing(tmp_path):
    store = ClientStore((), 10, tmp_path)
    states, known = store.read(np.arange(4))
    assert states == () and not known.any() and store.bytes == 0


def test_other_states_and_damaged_files_are_named(tmp_path):
    store = ClientStore(LIKE, 20, tmp_path)
    store.write(np.arange(5), states_of(np.arange(5)))
    store.commit()
    with pytest.raises(ValueError, match="holds states of 20 clients.* not of 21"):
        ClientStore(LIKE, 21, tmp_path)
    with pytest.raises(ValueError, match="give another folder"):
        ClientStore({"mean": LIKE["mean"]}, 20, tmp_path)
    file = tmp_path / "leaf_001.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"leaf_001.bin has .* bytes, not"):
        ClientStore(LIKE, 20, tmp_path)
    file.write_bytes(content)
    index = tmp_path / "index.npz"
    index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"index.npz .*damaged"):
        ClientStore(LIKE, 20, tmp_path)


def test_of_two_stores_of_one_process_the_later_one_writes(tmp_path):
    """C34: as a cell of a notebook that is run again."""
    store = ClientStore(LIKE, 20, tmp_path)
    store.write(np.arange(5), states_of(np.arange(5)))
    store.commit()
    later = ClientStore(LIKE, 20, tmp_path)
    for call in (
        lambda: store.write(np.arange(5), states_of(np.arange(5))),
        lambda: store.commit(),
    ):
        with pytest.raises(
            ValueError, match=f"folder={tmp_path} was opened by a later"
        ):
            call()
    later.write(np.arange(2), states_of([7, 8]))
    later.commit()
    with pytest.raises(ValueError, match="of 20 clients"):
        ClientStore(LIKE, 21, tmp_path)  # takes nothing away
    later.write(np.arange(1), states_of([9]))
    check(later, {0: 9, 1: 8, 2: 2, 3: 3, 4: 4}, 20)


def test_a_folder_that_was_removed_is_made_and_locked_again(tmp_path):
    """As `--overwrite` does while an interrupted run of this process is still held."""
    store = ClientStore(LIKE, 20, tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    later = ClientStore(LIKE, 20, tmp_path / "s")
    del store  # whose lock is not that one
    with pytest.raises(ValueError, match="is in use"):
        FolderLock(tmp_path / "s")
    later.write(np.arange(2), states_of([7, 8]))
    later.commit()
    check(later, {0: 7, 1: 8}, 20)


def test_another_process_is_refused_while_a_store_lives(tmp_path):
    """C34; what another process would find is what a lock of our own finds."""
    store = ClientStore(LIKE, 20, tmp_path)
    with pytest.raises(ValueError, match=f"folder={tmp_path} is in use: process"):
        FolderLock(tmp_path)
    del store
    lock = FolderLock(tmp_path)
    with pytest.raises(ValueError, match=f"folder={tmp_path} is in use: process"):
        ClientStore(LIKE, 20, tmp_path)
    lock.release()


def test_a_disk_that_fills_up_is_an_error_and_not_the_end(tmp_path, monkeypatch):
    """C31: the room is taken before anything is written to the mapped file."""
    store = ClientStore(LIKE, 20, tmp_path)
    store.write(np.arange(5), states_of(np.arange(5)))
    store.commit()

    def full(*arguments):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=f"folder={tmp_path} cannot hold .*quota"):
        for _ in range(30):
            store.write(np.arange(20), states_of(np.arange(20)))
            store.commit()
    monkeypatch.undo()
    assert ClientStore(LIKE, 20, tmp_path).visited >= 5
