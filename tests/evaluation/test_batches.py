import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import entropy

from fedvi.data import ClientData
from fedvi.evaluation import predictions_in_batches, score_in_batches

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(10, 3)).astype(np.float32), RNG.integers(0, 3, 10)


def predict(number, x, mask):
    return jnp.where(mask[:, None], jax.nn.log_softmax(x), jnp.nan)[None]


# Ten slots in batches of 4: the last slice overlaps the one before it.
@pytest.mark.parametrize("batch_size", [128, 4, 1])
def test_every_real_example_counts_once(batch_size):
    score = jax.jit(lambda data: score_in_batches(predict, data, batch_size))
    for size in (10, 7, 0):
        scores = score(ClientData(X, Y.astype(np.int32), np.int32(size)))
        assert scores.count == size
        assert scores.correct == (X.argmax(1) == Y)[:size].sum()


@pytest.mark.parametrize("capacity", [101, 129])
def test_batches_are_even_whatever_the_other_clients_hold(capacity):
    """101 examples, at most 50 at once: 34, 34 and 33, in any padding."""

    def fewest_and_most(number, x, mask):
        # Log-probabilities whose likelihood tells how many examples went together.
        together = mask.sum().astype(jnp.float32)
        return jnp.broadcast_to(together, (1, x.shape[0], 2))

    data = ClientData(
        jnp.zeros((capacity, 1)), jnp.zeros(capacity, jnp.int32), jnp.int32(101)
    )
    scores = jax.jit(lambda data: score_in_batches(fewest_and_most, data, 50))(data)
    assert scores.count == 101
    assert -scores.nll == 34 * 34 + 34 * 34 + 33 * 33


WEIGHTS = RNG.normal(size=(4, 3, 3)).astype(np.float32)


def predict_draws(number, x, mask):
    """Four draws of a linear model; rows that are not the batch's own are NaN."""
    logits = jnp.einsum("sij,bi->sbj", WEIGHTS, x)
    return jnp.where(mask[None, :, None], jax.nn.log_softmax(logits), jnp.nan)


@pytest.mark.parametrize("batch_size", [128, 4, 1])
def test_every_example_has_its_own_figures(batch_size):
    @jax.jit
    def run(data):
        found = predictions_in_batches(predict_draws, data, batch_size)
        return found, score_in_batches(predict_draws, data, batch_size)

    for size in (10, 7, 0):
        found, scores = run(ClientData(X, np.zeros(10, np.int32), np.int32(size)))
        np.testing.assert_array_equal(found.mask, np.arange(10) < size)
        logits = np.einsum("sij,bi->sbj", WEIGHTS, X[:size]).astype(np.float64)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        total = entropy(p.mean(0), axis=-1)
        information = total - entropy(p, axis=-1).mean(0)
        for values, expected in (
            (found.log_probs, np.log(p.mean(0))),
            (found.entropy, total),
            (found.mutual_information, information),
        ):
            np.testing.assert_allclose(values[:size], expected, rtol=1e-4, atol=1e-6)
            assert not np.any(values[size:])
        np.testing.assert_allclose(scores.entropy, total.sum(), rtol=1e-5)
        np.testing.assert_allclose(
            scores.mutual_information, information.sum(), rtol=1e-4
        )
