"""Clients on disk: read back whole, in any order, and checked."""

import json

import numpy as np
import pytest

from fedvi.data import ClientArrays, ClientData, ClientFiles, write_client_files
from fedvi.folder_lock import FolderLock


def block(clients, seed, capacity=4):
    rng = np.random.default_rng(seed)
    return ClientData(
        rng.integers(0, 255, (clients, capacity, 2, 3), np.uint8),
        rng.integers(0, 9, (clients, capacity)).astype(np.int32),
        rng.integers(0, capacity + 1, clients).astype(np.int32),
    )


BLOCKS = [block(3, 0), block(1, 1), block(5, 2)]


@pytest.fixture
def folder(tmp_path):
    write_client_files(tmp_path / "clients", iter(BLOCKS))
    return tmp_path / "clients"


@pytest.mark.parametrize("ids", [[0], [8, 0, 3, 4, 2], list(range(9)), []])
def test_any_clients_are_read_in_the_order_asked_for(folder, ids):
    files = ClientFiles(folder)
    arrays = ClientArrays(ClientData(*map(np.concatenate, zip(*BLOCKS))))
    ids = np.array(ids, int)
    for found, wanted in zip(files.read(ids), arrays.read(ids), strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(files.size, arrays.size)
    for found, wanted in zip(files.shapes, arrays.shapes, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def test_the_digest_names_the_data(folder, tmp_path):
    write_client_files(tmp_path / "same", BLOCKS)
    write_client_files(tmp_path / "other", [*BLOCKS[:2], block(5, 9)])
    digest = ClientFiles(folder).sha256
    assert ClientFiles(tmp_path / "same").sha256 == digest
    assert ClientFiles(tmp_path / "other").sha256 != digest


def test_a_changed_byte_is_found_and_the_file_named(folder):
    path = folder / "x_00002.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"data shard .*x_00002.npy has the SHA-256"):
        ClientFiles(folder)
    ClientFiles(folder, verify=False)  # only lengths are looked at


@pytest.mark.parametrize("verify", [True, False])
def test_short_and_missing_files_are_found_and_named(folder, verify):
    path = folder / "y_00001.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"y_00001.npy has \d+ bytes, not"):
        ClientFiles(folder, verify)
    path.unlink()
    with pytest.raises(ValueError, match=r"y_00001.npy is missing"):
        ClientFiles(folder, verify)


def test_an_unfinished_folder_is_not_opened(folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no clients.json"):
        ClientFiles(tmp_path)
    header = folder / "clients.json"
    header.write_text(json.dumps({"format": 2, "shards": [1]}), encoding="utf-8")
    with pytest.raises(ValueError, match="format 2, not 1"):
        ClientFiles(folder)
    shard = {"clients": 3, "files": {"x": {"name": "x"}}}
    text = json.dumps({"format": 1, "shards": [shard]})
    header.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="cannot read .*'bytes'"):
        ClientFiles(folder)
    header.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot read"):
        ClientFiles(folder)


def test_a_folder_is_not_written_twice(folder):
    with pytest.raises(ValueError, match="holds clients already"):
        write_client_files(folder, BLOCKS)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "blocks is empty"),
        ([block(3, 0), block(2, 1, capacity=5)], r"blocks\[1\].x .*one capacity"),
        (
            [BLOCKS[0]._replace(size=np.full(3, 5, np.int32))],
            r"size\[0\]=5 must lie",
        ),
        ([BLOCKS[0]._replace(size=np.int32([1, 1]))], r"size \(2,\)"),
        (
            [BLOCKS[0]._replace(y=BLOCKS[0].y[:, :3])],
            r"x has shape \(3, 4, 2, 3\), blocks\[0\].y \(3, 3\)",
        ),
        ([BLOCKS[0]._replace(y=BLOCKS[0].y * 1.0)], "y is float64 .* int32"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(tmp_path, blocks, message):
    with pytest.raises(ValueError, match=message):
        write_client_files(tmp_path / "new", blocks)
    with pytest.raises(ValueError, match="no clients.json"):
        ClientFiles(tmp_path / "new")


def test_two_cannot_write_one_folder_at_once(tmp_path):
    """C34."""
    with FolderLock(tmp_path):
        with pytest.raises(ValueError, match="is in use: process"):
            write_client_files(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_of_and_leaves_nothing_complete(tmp_path, monkeypatch):
    """C31."""

    def full(*arguments, **more):
        raise OSError("99 requested and 3 written")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ValueError, match="x_00000.npy cannot be written .99 requested"):
        write_client_files(tmp_path, BLOCKS)
    assert not (tmp_path / "clients.json").exists()
