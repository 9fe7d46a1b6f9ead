import jax
import numpy as np
import pytest

from fedvi.keys import GENERATOR, Purpose, derive, for_many, root_key


def test_keys_differ_by_purpose_round_and_client():
    root = jax.random.key(0)
    keys = [
        derive(root, purpose, round_index, client)
        for purpose in Purpose
        for round_index in range(3)
        for client in range(3)
    ]
    data = np.array([jax.random.key_data(key) for key in keys])
    assert len(np.unique(data, axis=0)) == len(keys)


def test_a_traced_client_id_gives_the_same_key():
    root = jax.random.key(3)
    ids = np.arange(4)
    traced = jax.jit(
        jax.vmap(lambda i: jax.random.key_data(derive(root, Purpose.SELECT, 2, i)))
    )(ids)
    plain = [jax.random.key_data(derive(root, Purpose.SELECT, 2, int(i))) for i in ids]
    np.testing.assert_array_equal(traced, np.array(plain))


def test_numbers_of_purposes_never_change():
    """Later ones are appended: a resumed run must draw what it would have drawn."""
    assert [purpose.name for purpose in Purpose][:11] == [
        "INIT",
        "INIT_CLIENT",
        "SELECT",
        "CLIENT_UPDATE",
        "SERVER_UPDATE",
        "PERSONALISE",
        "PREDICT_GLOBAL",
        "PREDICT_PERSONAL",
        "REPORT",
        "ASSIGN",
        "ENCODE",
    ]
    assert [int(purpose) for purpose in Purpose] == list(range(len(Purpose)))


def test_the_generator_is_ours_whatever_the_default_is():  # C20
    with jax.default_prng_impl("rbg"):
        key = root_key(3)
        assert str(jax.random.key_impl(key)) == GENERATOR == "threefry2x32"
    np.testing.assert_array_equal(
        jax.random.key_data(key),
        jax.random.key_data(jax.random.key(3, impl="threefry2x32")),
    )


def test_further_numbers_make_further_keys():
    root = root_key(0)
    keys = [
        derive(root, Purpose.PREDICT_GLOBAL, 1, 2, *numbers)
        for numbers in ((), (0,), (1,), (0, 0), (0, 1), (1, 0))
    ]
    data = np.array([jax.random.key_data(key) for key in keys])
    assert len(np.unique(data, axis=0)) == len(keys)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: jax.random.normal(key, (3, 5)),
        lambda key: jax.random.bits(key, (4,), "uint8"),
        jax.random.uniform,
        lambda key: jax.random.permutation(key, 9),
        lambda key: jax.random.bits(key, (0, 2)),
        lambda key: jax.random.key_data(jax.random.split(key, 3)),
        lambda key: jax.random.key_data(jax.random.fold_in(key, 7)),
    ],
)
def test_many_numbers_are_those_of_threefry(draw):
    keys = jax.random.split(root_key(5), 2)
    expected = [draw(key) for key in keys]
    found = jax.jit(jax.vmap(lambda key: draw(for_many(key))))(keys)
    np.testing.assert_array_equal(found, np.array(expected))


def test_where_the_generator_is_another_the_key_stays_as_it_is():
    rbg = jax.random.key(0, impl="rbg")
    assert for_many(rbg) is rbg
    with jax.threefry_partitionable(False):
        assert for_many(root_key(0)).dtype == root_key(0).dtype
    assert for_many(root_key(0)).dtype != root_key(0).dtype
