import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.client_map import clients_mesh, map_reduce

VALUES = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)


def gradient_of_each(operands, client_id):
    """A gradient with respect to a replicated operand: shard_map's trap."""
    weights, values = operands
    gradient = jax.grad(lambda w: jnp.sin(w * values[client_id]).sum())(weights)
    return {"gradient": gradient, "count": jnp.int32(1)}, gradient


@pytest.fixture(scope="module")
def expected():
    weights = jnp.array([0.5, -1.0, 2.0])
    ids = jnp.array([7, 2, 9, 0, 4, 5, 1])
    each = np.stack([np.cos(weights * VALUES[i]) * VALUES[i] for i in ids])
    return (weights, jnp.asarray(VALUES)), ids, each


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, None, 100])
def test_every_layout_equals_a_numpy_loop(expected, devices, chunk_size):  # C11
    operands, ids, each = expected
    sums, outputs = jax.jit(
        lambda operands, ids: map_reduce(
            gradient_of_each,
            operands,
            ids,
            chunk_size=chunk_size,
            mesh=clients_mesh(devices),
        )
    )(operands, ids)
    np.testing.assert_allclose(outputs, each, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums["gradient"], each.sum(0), rtol=1e-5, atol=1e-6)
    assert sums["count"] == 7 and sums["count"].dtype == jnp.int32


def test_a_padded_slot_adds_nothing_even_if_it_is_not_a_number():
    # Seven clients in chunks of two: the eighth slot is a copy of the last, client 0.
    def fn(operands, client_id):
        value = jnp.where(client_id == 0, jnp.inf, 10.0)
        return value, client_id

    def masked(operands, client_id):
        value, client_id = fn(operands, client_id)
        return jnp.where(client_id == 0, 1.0, value), client_id

    total, ids = map_reduce(masked, (), jnp.arange(7)[::-1], chunk_size=2)
    assert total == 61
    np.testing.assert_array_equal(ids, np.arange(7)[::-1])
    total, _ = map_reduce(fn, (), jnp.array([1, 2, 3]), chunk_size=2)
    assert total == 30
    total, _ = map_reduce(fn, (), jnp.array([3, 2, 0]), chunk_size=2)
    assert total == jnp.inf  # 0 * inf would make it a NaN


@pytest.mark.parametrize("devices", ["2", 2.5])
def test_devices_are_counted_in_whole_numbers(devices):
    with pytest.raises(ValueError, match=f"devices={devices!r} must be a whole number"):
        clients_mesh(devices)


def test_too_many_devices_are_refused():
    with pytest.raises(ValueError, match="devices=9 must lie .* the 8 .*jax_num_cpu_d"):
        clients_mesh(9)
