import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.data import ClientData
from fedvi.evaluation import score_in_batches

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(10, 3)).astype(np.float32), RNG.integers(0, 3, 10)


@pytest.mark.parametrize("batch_size", [128, 10, 4, 3, 1])
@pytest.mark.parametrize("size", [10, 7, 0])
def test_every_real_example_counts_once_in_even_batches(batch_size, size):
    # Ten slots in batches of 4: 4, 4 and 2 would be uneven and unpadded; the last
    # batch overlaps the one before instead.
    seen = []

    def predict(x, mask):
        seen.append(x.shape[0])
        return jnp.where(mask[:, None], jax.nn.log_softmax(x), jnp.nan)[None]

    data = ClientData(jnp.asarray(X), jnp.asarray(Y, jnp.int32), jnp.int32(size))
    scores = score_in_batches(predict, data, batch_size)
    assert scores.count == size
    assert scores.correct == (X.argmax(1) == Y)[:size].sum()
    assert max(seen) <= batch_size
