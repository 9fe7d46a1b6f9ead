import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.flat import Flat, Layout, flatten, in_one_piece, like_flats, trees

TREE = {"bias": jnp.arange(3.0), "kernel": 3 + jnp.arange(6.0).reshape(2, 3)}


def test_a_tree_and_its_vector_are_views_of_each_other():
    flat = flatten(TREE)
    np.testing.assert_array_equal(flat.vector, np.arange(9))
    assert flat.layout.shapes == ((3,), (2, 3)) and flat.layout.sizes == (3, 6)
    jax.tree.map(np.testing.assert_array_equal, flat.tree(), TREE)
    assert [leaf.shape for leaf in jax.tree.leaves(flat)] == [(9,)]
    doubled = jax.tree.map(jnp.add, flat, flat)
    np.testing.assert_array_equal(doubled.tree()["kernel"], 2 * TREE["kernel"])
    empty = flatten({})
    assert empty.vector.shape == (0,) and empty.tree() == {}


def test_gradients_flow_back_as_one_vector():
    def loss(flat):
        return jnp.sum(flat.tree()["kernel"] ** 2)

    gradient = jax.grad(loss)(flatten(TREE))
    assert isinstance(gradient, Flat) and gradient.layout == flatten(TREE).layout
    np.testing.assert_array_equal(
        gradient.vector, [0] * 3 + [2 * x for x in range(3, 9)]
    )


def test_leading_axes_are_the_vectors():
    stacked = jax.vmap(lambda s: jax.tree.map(lambda v: s * v, flatten(TREE)))(
        jnp.arange(4.0)
    )
    assert stacked.vector.shape == (4, 9)
    assert stacked.tree()["kernel"].shape == (4, 2, 3)
    one = jax.vmap(lambda flat: flat.tree()["bias"].sum())(stacked)
    np.testing.assert_array_equal(one, 3 * np.arange(4))


def test_views_of_a_whole_pytree_and_back():
    params = {"body": flatten(TREE), "head": flatten({"w": jnp.ones((1, 2))}), "n": 3}
    seen = trees(params)
    assert seen["body"]["kernel"].shape == (2, 3) and seen["n"] == 3
    back = like_flats(seen, params)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    sizes = jax.tree.map(jnp.size, trees(params))
    assert sizes["body"] == {"bias": 3, "kernel": 6}
    wrong = {**seen, "body": {**seen["body"], "kernel": jnp.ones((3, 2))}}
    with pytest.raises(ValueError, match=r"\(3, 2\).* stands where .*\(2, 3\)"):
        like_flats(wrong, params)


def test_vectors_in_one_piece_and_layers_as_they_are():
    params = {"body": flatten(TREE), "head": flatten({"w": jnp.ones((1, 2))})}
    whole = in_one_piece(params)
    assert whole.vector.shape == (11,)
    jax.tree.map(np.testing.assert_array_equal, whole.tree(), trees(params))
    layers = trees(params)  # of a model that several devices hold
    assert in_one_piece(layers) is layers


def test_one_value_a_layer_makes_a_vector():
    layout = flatten(TREE).layout
    np.testing.assert_array_equal(layout.vector([1.0, 2.0]), [1.0] * 3 + [2.0] * 6)
    assert hash(layout) == hash(Layout(layout.treedef, layout.shapes))
    with pytest.raises(ValueError, match="zip"):
        layout.vector([1.0])


def test_several_dtypes_are_refused():
    with pytest.raises(ValueError, match="bfloat16, float32 make no one vector"):
        flatten({"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)})
