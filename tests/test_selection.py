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


def test_uniform_without_candidates_draws_as_ever():
    """Runs that lie in run folders must go on with the same cohorts."""
    for seed in range(5):
        key = jax.random.key(seed)
        expected = jax.random.permutation(key, 50)[:7]
        for candidates in (None, range(50)):
            ids = uniform(50, 7, candidates).select(key, 0, None)
            assert ids.dtype == expected.dtype
            np.testing.assert_array_equal(ids, expected)


def test_uniform_draws_among_the_candidates_only():
    selection = uniform(9, 2, candidates=[7, 1, 4])
    assert (selection.clients, selection.size) == (9, 2)
    assert selection.candidates.tolist() == [1, 4, 7]
    keys = jax.random.split(jax.random.key(0), 3000)
    ids = np.asarray(jax.vmap(lambda key: selection.select(key, 0, None))(keys))
    assert (ids[:, 0] != ids[:, 1]).all()
    counts = np.bincount(ids.ravel(), minlength=9)
    assert set(np.flatnonzero(counts)) == {1, 4, 7}
    # Each takes part with probability 2/3; 4.5 standard errors.
    share = counts[[1, 4, 7]] / len(keys)
    assert np.abs(share - 2 / 3).max() < 4.5 * np.sqrt(2 / 9 / len(keys))


@pytest.mark.parametrize("rule", [full, lambda n, ids: uniform(n, 3, ids)])
def test_all_candidates_take_part_in_order(rule):
    selection = rule(9, np.array([7, 1, 4]))
    ids = selection.select(jax.random.key(0), 0, None)
    np.testing.assert_array_equal(ids, [1, 4, 7])


@pytest.mark.parametrize("candidates", [[1, 1, 2], [0, 6], [-1, 2]])
def test_candidates_that_are_no_different_ids_are_refused(candidates):
    with pytest.raises(ValueError, match=r"candidates=\[.*\] must be different .* 5"):
        uniform(6, 1, candidates)


def test_more_participants_than_candidates_is_refused():
    with pytest.raises(ValueError, match=r"participants=3.*\(2\)"):
        uniform(6, 3, [2, 4])
    with pytest.raises(ValueError, match=r"participants=0.*\(0\)"):
        full(6, [])


@pytest.mark.parametrize("participants", [0, 7, -1, 2.5])
def test_more_participants_than_clients_is_refused(participants):
    with pytest.raises(ValueError, match=rf"participants={participants}.*\(6\)"):
        uniform(6, participants)
