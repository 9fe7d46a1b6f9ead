import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import entropy
from sklearn.metrics import roc_auc_score

from fedvi.data import ClientData
from fedvi.evaluation import auroc, score_in_batches, uncertainty_in_batches

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 3)).astype(np.float32)
WEIGHTS = RNG.normal(size=(4, 3, 3)).astype(np.float32)


def predict(x, mask):
    """Four draws of a linear model; rows that are not the batch's own are NaN."""
    logits = jnp.einsum("sij,bi->sbj", WEIGHTS, x)
    return jnp.where(mask[None, :, None], jax.nn.log_softmax(logits), jnp.nan)


@pytest.mark.parametrize("batch_size", [128, 4, 1])
def test_every_example_has_its_own_figures(batch_size):
    @jax.jit
    def run(data):
        found = uncertainty_in_batches(predict, data, batch_size)
        return found, score_in_batches(predict, data, batch_size)

    for size in (10, 7, 0):
        found, scores = run(ClientData(X, np.zeros(10, np.int32), np.int32(size)))
        np.testing.assert_array_equal(found.mask, np.arange(10) < size)
        logits = np.einsum("sij,bi->sbj", WEIGHTS, X[:size]).astype(np.float64)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        total = entropy(p.mean(0), axis=-1)
        information = total - entropy(p, axis=-1).mean(0)
        for values, expected in ((found[0], total), (found[1], information)):
            np.testing.assert_allclose(values[:size], expected, rtol=1e-4, atol=1e-6)
            assert not np.any(values[size:])
        np.testing.assert_allclose(scores.entropy, total.sum(), rtol=1e-5)
        np.testing.assert_allclose(
            scores.mutual_information, information.sum(), rtol=1e-4
        )


@pytest.mark.parametrize("decimals", [0, 1, 8])  # with many, some and no ties
def test_auroc_equals_scikit_learn(decimals):
    inside = np.round(RNG.normal(size=50), decimals)
    outside = np.round(RNG.normal(size=80) + 0.7, decimals)
    expected = roc_auc_score(np.repeat([0, 1], [50, 80]), np.append(inside, outside))
    assert auroc(inside, outside) == pytest.approx(expected)
    assert auroc(outside, inside) == pytest.approx(1 - expected)
    assert 0.5 < expected < 1


def test_auroc_of_extreme_cases():
    assert auroc([0, 1], [2, 3]) == 1 and auroc([2, 3], [0, 1]) == 0
    assert auroc([0, 0, 0], [0, 0]) == 0.5
    assert np.isnan(auroc([0, np.nan], [1])) and np.isnan(auroc([0], [np.nan]))
    with pytest.raises(ValueError, match="out_values is empty"):
        auroc([1.0], [])
    with pytest.raises(ValueError, match="in_values is empty"):
        auroc([], [1.0])
