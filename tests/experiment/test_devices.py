"""The devices of a run."""

import pytest

from fedvi.experiment import devices


def test_devices_by_default_and_more_than_there_are(monkeypatch):
    assert devices.mesh(None).size == 1
    monkeypatch.setattr(devices, "usable_cores", lambda: 3)
    assert [devices.mesh(None, together=n).size for n in (1, 2, 9)] == [1, 2, 3]
    monkeypatch.setattr(devices, "usable_cores", lambda: 99)
    assert devices.mesh(None, together=99).size == 8  # all that JAX shows
    assert devices.mesh(4).size == 4
    with pytest.raises(ValueError, match="devices=99"):
        devices.mesh(99)
