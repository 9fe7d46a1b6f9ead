import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from fedvi.evaluation import adjusted_rand_index


@pytest.mark.parametrize("seed", range(5))
def test_it_equals_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    true, found = rng.integers(0, 3, 30), rng.integers(-2, 2, 30)
    found[:20] = true[:20]
    expected = adjusted_rand_score(true, found)
    assert adjusted_rand_index(true, found) == pytest.approx(expected, abs=1e-12)
    assert -1 < expected < 1


@pytest.mark.parametrize(
    ("true", "found"),
    [
        ([0, 0, 1, 1], [1, 1, 0, 0]),  # other names
        ([0, 0, 1, 1], [0, 1, 0, 1]),  # worse than chance
        ([0, 0, 1, 1], [0, 0, 0, 0]),  # a collapsed clustering
        ([0, 0, 0], [5, 5, 5]),
        ([0, 1, 2], [2, 0, 1]),
        ([0, 1], [0, 0]),
        ([3], [0]),
    ],
)
def test_special_cases_equal_scikit_learn(true, found):
    expected = adjusted_rand_score(true, found)
    assert adjusted_rand_index(true, found) == pytest.approx(expected)


def test_shapes_must_agree():
    for true, found in (([0, 1], [0]), ([], []), ([[0]], [[0]])):
        with pytest.raises(ValueError, match=r"must be \[clients\]"):
            adjusted_rand_index(np.array(true), np.array(found))
