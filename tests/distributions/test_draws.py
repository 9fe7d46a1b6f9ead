import jax
import jax.numpy as jnp
import numpy as np

from fedvi.distributions.draws import standard_normal_like


def test_draws_follow_the_tree_and_differ_between_leaves():
    tree = {
        "a": jnp.zeros((50, 40)),
        "b": [jnp.zeros(2000), jnp.zeros((), jnp.float32)],
        "c": jnp.zeros(2000, jnp.bfloat16),
    }
    draw = jax.jit(standard_normal_like)(jax.random.key(0), tree)
    kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (draw, tree))
    assert kinds[0] == kinds[1]
    columns = [np.ravel(draw["a"]), draw["b"][0], np.float32(draw["c"])]
    np.testing.assert_allclose(np.cov(columns), np.eye(3), atol=0.12)
