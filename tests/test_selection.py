"""Who is chosen how often, and what a user gets told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import selection as rules
from fedvi.selection import full, proportional, round_robin, stratified, uniform


def chosen(selection, key, round_index=0):
    """Ids of a rule that looks at nobody's importance."""
    ids, choice = selection.select(key, round_index, None, None)
    assert choice == ()
    return ids


@pytest.mark.parametrize("selection", [full(5), uniform(5, 5)])
def test_everyone_takes_part_in_order(selection):
    ids = chosen(selection, jax.random.key(0))
    assert selection.size == 5
    np.testing.assert_array_equal(ids, np.arange(5))


def test_uniform_without_candidates_draws_as_ever():
    """Runs that lie in run folders must go on with the same cohorts."""
    for seed in range(5):
        key = jax.random.key(seed)
        expected = jax.random.permutation(key, 50)[:7]
        for candidates in (None, range(50)):
            ids = chosen(uniform(50, 7, candidates), key)
            assert ids.dtype == expected.dtype
            np.testing.assert_array_equal(ids, expected)


def test_uniform_draws_different_candidates_uniformly():
    selection = uniform(9, 2, candidates=[7, 1, 4])
    assert (selection.clients, selection.size) == (9, 2)
    assert selection.candidates.tolist() == [1, 4, 7]
    keys = jax.random.split(jax.random.key(0), 3000)
    ids = np.asarray(jax.vmap(lambda key: chosen(selection, key))(keys))
    assert (ids[:, 0] != ids[:, 1]).all()
    counts = np.bincount(ids.ravel(), minlength=9)
    assert set(np.flatnonzero(counts)) == {1, 4, 7}
    # Each takes part with probability 2/3; 4.5 standard errors.
    share = counts[[1, 4, 7]] / len(keys)
    assert np.abs(share - 2 / 3).max() < 4.5 * np.sqrt(2 / 9 / len(keys))


@pytest.fixture
def never_permuted(monkeypatch):
    """Small populations are drawn from as large ones are."""
    monkeypatch.setattr(rules, "PERMUTED_BELOW", 0)


def test_every_ordered_cohort_is_as_likely_without_a_permutation(never_permuted):
    """The 120 of three out of six, of which 2 % of the draws begin anew."""
    selection = uniform(9, 3, candidates=[8, 1, 2, 3, 5, 7])
    keys = jax.random.split(jax.random.key(0), 24_000)
    draw = jax.jit(jax.vmap(lambda key: chosen(selection, key)))
    ids = draw(keys)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, draw(keys))
    cohorts, counts = np.unique(np.asarray(ids), axis=0, return_counts=True)
    assert {len(set(cohort)) for cohort in cohorts.tolist()} == {3}
    assert set(cohorts.ravel().tolist()) == {1, 2, 3, 5, 7, 8}
    assert len(cohorts) == 120
    # χ² with 119 degrees of freedom: 119 ± 15.4.
    assert abs(((counts - 200) ** 2 / 200).sum() - 119) < 4.5 * 15.4


def test_too_few_different_draws_are_drawn_anew(never_permuted, monkeypatch):
    drawn, randint = [], jax.random.randint

    def poor_at_first(key, shape, *limits):
        drawn.append(jax.random.key_data(key))
        values = randint(key, shape, *limits)
        return jnp.where(len(drawn) < 3, values[0], values)

    monkeypatch.setattr(jax.random, "randint", poor_at_first)
    with jax.disable_jit():
        ids = chosen(uniform(1000, 4), jax.random.key(3))
    assert len(set(ids.tolist())) == 4
    assert len(np.unique(np.stack(drawn), axis=0)) == len(drawn) == 3


def test_the_first_different_draws_are_kept_in_their_order():
    draws = jnp.int32([5, 3, 5, 9, 3, 0, 9, 7])
    ids, different = rules._first_different(draws, 4)
    assert ids.tolist() == [5, 3, 9, 0] and different == 5
    assert rules._first_different(draws[:5], 4)[1] == 3


@pytest.mark.parametrize("rule", [uniform, round_robin, full])
def test_no_program_of_a_rule_holds_the_ids_of_ten_million_clients(rule):
    """Nor does it look at all of them: its arrays are of the cohort."""
    clients = 10_000_000
    selection = rule(clients, *(() if rule is full else (1000,)))
    assert selection.candidates is None
    program = jax.make_jaxpr(lambda key: chosen(selection, key))(jax.random.key(0))
    assert not any(np.size(constant) > 2000 for constant in program.consts)
    assert rule is full or f"[{clients}]" not in str(program)


def test_a_large_population_is_drawn_from_as_well_by_candidates():
    """Seeds one after another, as several runs are."""
    odd = np.arange(1, 300_000, 2)
    selection = uniform(300_000, 3000, odd)
    keys = jax.random.split(jax.random.key(0), 20)
    draw = jax.jit(lambda keys: jax.lax.map(functools.partial(chosen, selection), keys))
    ids = np.asarray(draw(keys))
    assert (ids % 2 == 1).all() and ids.min() >= 1 and ids.max() < 300_000
    assert all(len(np.unique(cohort)) == 3000 for cohort in ids)
    assert len(np.unique(ids[:, 0])) == 20
    # The mean of 60,000 places, uniform in 0 to 1.
    assert abs((ids / 300_000).mean() - 0.5) < 4.5 / np.sqrt(12 * ids.size)


@pytest.mark.parametrize("rule", [full, lambda n, ids: uniform(n, 3, ids)])
def test_all_candidates_take_part_in_order(rule):
    selection = rule(9, np.array([7, 1, 4]))
    ids = chosen(selection, jax.random.key(0))
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


def turns(selection, rounds):
    key = jax.random.key(0)
    return [np.asarray(chosen(selection, key, r)).tolist() for r in range(rounds)]


def test_round_robin_gives_everyone_a_turn_over_and_over():
    assert turns(round_robin(3, 1), 5) == [[0], [1], [2], [0], [1]]
    assert turns(round_robin(3, 2), 4) == [[0, 1], [2, 0], [1, 2], [0, 1]]
    assert turns(round_robin(5, 2, [4, 0, 3]), 3) == [[4, 0], [3, 4], [0, 3]]
    selection = round_robin(5, 2, np.array([4, 0, 3]))
    assert selection.candidates.tolist() == [0, 3, 4]
    assert (selection.clients, selection.size, selection.measure) == (5, 2, None)


def test_round_robin_may_be_traced():
    selection = round_robin(4, 1, [2, 0, 3])
    ids = jax.jit(lambda round_index: chosen(selection, jax.random.key(0), round_index))
    assert [int(ids(jnp.int32(r))[0]) for r in range(4)] == [2, 0, 3, 2]
    assert ids(jnp.int32(0)).dtype == jnp.int32


def test_mistaken_turns_are_named():
    with pytest.raises(ValueError, match=r"candidates=\[0, 0\] must be different"):
        round_robin(3, 1, [0, 0])
    with pytest.raises(ValueError, match=r"participants=3.*\(2\)"):
        round_robin(3, 3, [0, 1])


SCORES = np.array([3.0, 1.0, -4.0, 2.0, 0.0, 2.0], np.float32)
EVERYONE = np.ones(6, bool)
DRAWS = 4000


@functools.cache
def sampler(size, floor):
    """`(scores, counts) -> (ids [DRAWS, size], choices)`, compiled once."""
    selection = proportional(6, size, "ksd", floor=floor)
    keys = jax.random.split(jax.random.key(0), DRAWS)

    @jax.jit
    def run(scores, counts):
        return jax.vmap(lambda key: selection.select(key, 0, scores, counts))(keys)

    return run


def sample(size, floor, scores=SCORES, counts=EVERYONE):
    """(ids [DRAWS, size], the choice of the first draw)."""
    ids, choice = sampler(size, floor)(jnp.float32(scores), jnp.asarray(counts))
    return np.asarray(ids), jax.tree.map(lambda leaf: np.asarray(leaf[0]), choice)


def draw(selection, scores=SCORES, counts=EVERYONE, draws=1):
    """The same of few draws of any selection, not compiled."""
    scores, counts = jnp.float32(scores), jnp.asarray(counts)
    keys = jax.random.split(jax.random.key(0), draws)
    found = [selection.select(key, 0, scores, counts) for key in keys]
    ids = np.stack([ids for ids, _ in found])
    assert ids.dtype == jnp.int32
    return ids, jax.tree.map(np.asarray, found[0][1])


@pytest.mark.parametrize(
    ("temperature", "floor", "weights"),
    [
        (1.0, 0.0, [3, 1, 0, 2, 0, 2]),
        (1.0, 0.3, [3, 1, 0, 2, 0, 2]),
        (0.5, 0.3, [9, 1, 0, 4, 0, 4]),
        (2.0, 0.0, [3**0.5, 1, 0, 2**0.5, 0, 2**0.5]),
        (float("inf"), 0.3, [1, 1, 0, 1, 0, 1]),
        (0, 0.0, [1, 0, 0, 0, 0, 0]),
    ],
)
def test_probabilities_are_in_proportion(temperature, floor, weights):
    """(1 - f) s^(1/T) / Σ + f / N, whatever the scale of the scores."""
    selection = proportional(6, 1, "ksd", temperature=temperature, floor=floor)
    assert selection.measure == "ksd"
    expected = (1 - floor) * np.array(weights) / np.sum(weights) + floor / 6
    for scale in (1, 1e-35, 1e35):
        _, choice = draw(selection, np.float32(scale) * SCORES)
        np.testing.assert_allclose(choice.probabilities, expected, rtol=1e-4, atol=1e-8)
    _, choice = draw(selection)
    np.testing.assert_allclose(choice.clipped, 4 / 12, rtol=1e-6)
    assert not choice.uniform and not choice.invalid.any()


def test_clients_are_drawn_as_often_as_their_probabilities_say():
    ids, choice = sample(1, 0.3)
    share = np.bincount(ids[:, 0], minlength=6) / DRAWS
    p = choice.probabilities
    assert (np.abs(share - p) <= 4.5 * np.sqrt(p * (1 - p) / DRAWS)).all()


def test_a_cohort_is_drawn_without_replacement():
    """Successive draws: P(first, second) = P_i P_j / (1 - P_i)."""
    ids, choice = sample(2, 0.0)
    assert (ids[:, 0] != ids[:, 1]).all()
    p = choice.probabilities
    joint = np.outer(p, p) / (1 - p)[:, None]
    np.fill_diagonal(joint, 0)
    found = np.zeros((6, 6))
    np.add.at(found, (ids[:, 0], ids[:, 1]), 1 / DRAWS)
    errors = np.sqrt(joint * (1 - joint) / DRAWS)
    assert (np.abs(found - joint) <= 4.5 * errors + 1e-9).all()


def test_a_greedy_cohort_is_that_of_the_largest_scores():
    """Whatever the floor; only ties are left to chance. A tiny T comes to the same."""
    greedy = proportional(6, 3, "ksd", temperature=0, floor=0.3)
    ids, choice = draw(greedy, draws=20)
    assert (ids[:, 0] == 0).all() and (np.sort(ids[:, 1:], axis=1) == [3, 5]).all()
    assert set(ids[:, 1]) == {3, 5}
    assert choice.probabilities.tolist() == [1, 0, 0, 0, 0, 0]
    ids, _ = draw(proportional(6, 4, "ksd", temperature=1e-3, floor=0.0), draws=20)
    assert (ids[:, 0] == 0).all() and (ids[:, 3] == 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_never_drawn_and_reported(bad):
    scores = SCORES.copy()
    scores[0] = bad
    ids, choice = sample(1, 0.3, scores)
    assert choice.probabilities[0] == 0 and 0 not in ids
    assert choice.invalid.tolist() == [True] + 5 * [False]
    expected = 0.7 * np.array([0, 1, 0, 2, 0, 2]) / 5 + 0.06 * (np.arange(6) > 0)
    np.testing.assert_allclose(choice.probabilities, expected, rtol=1e-5)
    np.testing.assert_allclose(choice.clipped, 4 / 9, rtol=1e-6)


@pytest.mark.parametrize("scores", [np.zeros(6), -SCORES.clip(0)])
def test_without_a_positive_score_all_have_the_same_chance(scores):
    counts = EVERYONE.copy()
    counts[1] = False
    ids, choice = sample(1, 0.3, scores, counts)
    assert choice.uniform and not choice.invalid.any()
    expected = counts / 5
    np.testing.assert_allclose(choice.probabilities, expected, rtol=1e-6)
    share = np.bincount(ids[:, 0], minlength=6) / DRAWS
    assert np.abs(share - expected).max() < 4.5 * np.sqrt(0.16 / DRAWS)


def test_if_no_report_is_finite_the_round_still_finds_someone_with_data():
    counts = EVERYONE.copy()
    counts[1] = False
    ids, choice = sample(2, 0.0, np.full(6, np.nan), counts)
    assert choice.uniform and choice.invalid.tolist() == counts.tolist()
    assert set(ids.ravel().tolist()) == {0, 2, 3, 4, 5}


def test_empty_clients_are_never_chosen_before_others():
    counts = np.array([False, True, True, False, True, True])
    four = proportional(6, 4, "ksd", floor=0.0)
    ids, choice = draw(four, SCORES, counts, draws=20)
    assert set(ids.ravel().tolist()) == {1, 2, 4, 5}
    np.testing.assert_allclose(choice.probabilities, [0, 1 / 3, 0, 0, 0, 2 / 3])
    assert not choice.invalid.any()  # without data is not without a finite report
    # Those of positive probability come first: 1 and 5 are in every cohort of two.
    ids, _ = sample(2, 0.0, SCORES, counts)
    assert (np.sort(ids, axis=1) == [1, 5]).all()


def test_only_candidates_are_drawn():
    selection = proportional(6, 2, "ksd", floor=0.5, candidates=[5, 2, 1])
    mine = np.isin(np.arange(6), [1, 2, 5])
    scores = np.where(mine, SCORES, 1e9)
    ids, choice = draw(selection, scores, draws=50)
    assert set(ids.ravel().tolist()) == {1, 2, 5}
    expected = 0.5 * np.array([0, 1, 0, 0, 0, 2]) / 3 + 0.5 * mine / 3
    np.testing.assert_allclose(choice.probabilities, expected, rtol=1e-5)
    np.testing.assert_allclose(choice.clipped, 4 / 7, rtol=1e-6)
    assert selection.candidates.tolist() == [1, 2, 5]
    # A cohort larger than the candidates with data: never anyone else.
    three = proportional(6, 3, "ksd", candidates=[5, 2, 1])
    counts = np.array([True, False, True, True, True, True])
    ids, _ = draw(three, scores, counts, draws=20)
    assert (np.sort(ids, axis=1) == [1, 2, 5]).all() and (ids[:, 2] == 1).all()


def test_mistakes_of_a_proportional_selection_are_named():
    for value in (-0.5, float("nan")):
        with pytest.raises(ValueError, match=f"temperature={value!r} must be at least"):
            proportional(6, 1, "ksd", temperature=value)
    for value in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=f"floor={value!r} must lie in"):
            proportional(6, 1, "ksd", floor=value)
    with pytest.raises(ValueError, match=r"participants=7.*\(6\)"):
        proportional(6, 7, "ksd")


def test_each_stratum_gives_as_many_of_its_candidates():
    keys = jax.random.split(jax.random.key(0), 2000)
    selection = stratified(12, 6, np.delete(np.arange(12), 5), strata=3)
    ids = np.asarray(jax.vmap(lambda key: chosen(selection, key))(keys))
    np.testing.assert_array_equal(ids // 4, np.tile([0, 0, 1, 1, 2, 2], (2000, 1)))
    counts = np.bincount(ids.ravel(), minlength=12)
    assert counts[5] == 0
    # Two of four, or of the three candidates left of the second.
    expected = np.full(12, 1000.0)
    expected[[4, 6, 7]] = 2000 * 2 / 3
    expected[5] = 0
    np.testing.assert_allclose(counts, expected, atol=5 * 500**0.5)
    assert all(len(set(row)) == 6 for row in ids[:50])


@pytest.mark.parametrize(
    ("numbers", "strata", "message"),
    [
        ((12, 6, None), None, "strata=None .selection_strata.: give a num"),
        (
            (12, 6, None),
            4,
            "selection_strata. must divide the 12 clients and the 6 partic",
        ),
        ((10, 6, None), 3, "strata=3 .selection_strata. must divide the 10 clients"),
        ((12, 6, range(5, 12)), 2, "strata=2: one of them has 1 candidates and 3"),
    ],
)
def test_strata_that_do_not_fit_are_refused(numbers, strata, message):
    with pytest.raises(ValueError, match=message):
        stratified(*numbers, strata=strata)
