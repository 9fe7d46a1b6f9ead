import jax
import numpy as np
import pytest

from fedvi.selection import full, uniform


def test_full_is_everyone_in_order():
    selection = full(5)
    ids = selection.select(jax.random.key(0), 0, None)
    assert selection.size == 5
    np.testing.assert_array_equal(ids, np.arange(5))


def test_uniform_draws_different_clients_uniformly():
    selection = uniform(6, 2)
    keys = jax.random.split(jax.random.key(0), 3000)
    ids = np.asarray(jax.vmap(lambda key: selection.select(key, 0, None))(keys))
    assert (ids[:, 0] != ids[:, 1]).all()
    share = np.bincount(ids.ravel(), minlength=6) / len(keys)
    # Each client takes part with probability 1/3; 4.5 standard errors.
    assert np.abs(share - 1 / 3).max() < 4.5 * np.sqrt(2 / 9 / len(keys))


def test_uniform_of_everyone_is_full_participation():
    ids = uniform(4, 4).select(jax.random.key(0), 0, None)
    np.testing.assert_array_equal(ids, np.arange(4))


@pytest.mark.parametrize("participants", [0, 7, -1, 2.5])
def test_more_participants_than_clients_is_refused(participants):
    with pytest.raises(ValueError, match=rf"participants={participants}.*\(6\)"):
        uniform(6, participants)
