"""Upload codecs: their errors, their bytes, and the rounds that use them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import codecs
from fedvi.algorithm import Algorithm, ClientOutput
from fedvi.algorithms import fedavg
from fedvi.client_map import clients_mesh
from fedvi.data import ClientArrays
from fedvi.federation import Federation
from fedvi.flat import flatten
from fedvi.streaming import StreamedFederation
from fedvi.visit import Call, Visit, participate

KEY = jax.random.key(5)
LOSSY = [codecs.BFLOAT16, codecs.INT8]


def by_name(codec):
    return codec.name


def through(codec, key, tree):
    return codec.decode(codec.encode(key, tree))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def upload():
    """Leaves of several sizes, ranges and types; three layers in one vector."""
    rng = np.random.default_rng(0)
    layers = {
        "large": jnp.asarray(rng.normal(0, 30, (3, 4)).astype(np.float32)),
        "small": jnp.asarray(rng.normal(0, 1e-4, 5).astype(np.float32)),
        "zero": jnp.zeros(2),
    }
    return {
        "layers": flatten(layers),
        "empty": flatten({}),
        "wide": jnp.asarray(rng.normal(0, 3, (20, 7)).astype(np.float32)),
        "narrow": jnp.asarray(rng.uniform(1e-6, 1e-5, 50).astype(np.float32)),
        "one": jnp.float32(-0.3),
        "half": jnp.asarray(rng.normal(size=9).astype(np.float16)),
        "zeros": jnp.zeros((3, 2)),
        "none": jnp.zeros((0, 4)),
        "count": jnp.arange(4),
    }


@pytest.mark.parametrize("codec", codecs.CODECS.values(), ids=by_name)
def test_structure_shapes_types_and_integers_are_kept(codec, upload):
    arrived = jax.jit(lambda tree: through(codec, KEY, tree))(upload)
    assert jax.tree.structure(arrived) == jax.tree.structure(upload)
    for old, new in zip(jax.tree.leaves(upload), jax.tree.leaves(arrived)):
        assert old.shape == new.shape and old.dtype == new.dtype
    np.testing.assert_array_equal(arrived["count"], upload["count"])
    np.testing.assert_array_equal(arrived["zeros"], 0)
    assert jax.tree.leaves(through(codec, KEY, ())) == []


@pytest.mark.parametrize("jit", [False, True])
def test_bfloat16_rounds_to_nearest(jit, upload):
    """Under `jit` too, where XLA may drop a cast and its reverse."""
    call = lambda tree: through(codecs.BFLOAT16, KEY, tree)  # noqa: E731
    arrived = (jax.jit(call) if jit else call)(upload)
    for name in ("wide", "narrow", "one"):
        given, found = np.asarray(upload[name]), np.asarray(arrived[name])
        # By hand: the upper 16 of the 32 bits, ties to even.
        raw = given.reshape(-1).view(np.uint32)
        rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) & np.uint32(0xFFFF0000)
        np.testing.assert_array_equal(found.reshape(-1).view(np.uint32), rounded)
        assert (np.abs(found - given) <= 2.0**-8 * np.abs(given)).all()
        assert (found != given).any()


def test_int8_is_off_by_less_than_a_step_and_has_255_of_them(upload):
    keys = jax.random.split(KEY, 50)
    arrived = jax.jit(jax.vmap(lambda k: through(codecs.INT8, k, upload)))(keys)
    for name in ("wide", "narrow", "one"):
        scale = np.abs(upload[name]).max() / 127
        found = np.asarray(arrived[name])
        error = np.abs(found - np.asarray(upload[name]))
        assert error.max() <= scale * (1 + 1e-5)
        steps = found / scale
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
        assert np.abs(np.round(steps)).max() == 127
    assert (np.ptp(arrived["wide"], axis=0) > 0).mean() > 0.9  # it is random


def test_every_layer_of_a_vector_has_its_own_scale(upload):
    """Else the small layer's values would all be lost beside the large one's."""
    arrived = jax.jit(lambda tree: through(codecs.INT8, KEY, tree))(upload)
    given, found = upload["layers"].tree(), arrived["layers"].tree()
    for name in ("large", "small"):
        scale = np.abs(given[name]).max() / 127
        assert np.abs(found[name] - given[name]).max() <= scale * (1 + 1e-5)
    np.testing.assert_array_equal(found["zero"], 0)
    ill = flatten({"a": jnp.array([jnp.nan, 1.0]), "b": jnp.ones(2)})
    a, b = jax.tree.leaves(through(codecs.INT8, KEY, ill).tree())
    assert not np.isfinite(a).all() and (b == 1).all()


def test_zeros_are_not_divided_by_zero():
    with jax.debug_nans(True):
        arrived = through(codecs.INT8, KEY, {"zeros": jnp.zeros(4)})
    np.testing.assert_array_equal(arrived["zeros"], 0)


def test_int8_is_unbiased(upload):
    """Mean over keys within five standard errors, of every value and of their mean."""
    draws = 2000
    keys = jax.random.split(KEY, draws)
    arrived = jax.jit(jax.vmap(lambda k: through(codecs.INT8, k, upload)))(keys)
    for name in ("wide", "narrow"):
        given, found = np.asarray(upload[name], float), np.asarray(arrived[name], float)
        scale = np.abs(given).max() / 127
        fraction = given / scale - np.floor(given / scale)
        deviation = scale * np.sqrt(fraction * (1 - fraction) / draws)
        bias = found.mean(0) - given
        # The largest value is a whole number of steps but for rounding.
        assert (np.abs(bias) <= 5 * deviation + 1e-4 * scale).all()
        pooled = np.sqrt((deviation**2).sum()) / given.size
        assert abs(bias.mean()) <= 5 * pooled + 1e-5 * scale
        # The draws of the values of a leaf are independent of one another.
        z = (found - given) / scale
        assert abs(np.corrcoef(z[:, :8].reshape(draws, -1).T)[0, 1]) < 0.12


@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(codec, bad):
    tree = {"ill": jnp.array([0.0, bad, 1.0]), "well": jnp.ones(3)}
    arrived = jax.jit(lambda tree: through(codec, KEY, tree))(tree)
    assert not np.isfinite(arrived["ill"]).all()
    np.testing.assert_array_equal(arrived["well"], 1)


def test_bytes_are_those_of_the_payload(upload):
    values = {"a": jnp.zeros((10, 100)), "b": jnp.zeros(24)}
    sizes = {c.name: codecs.payload_bytes(c, values) for c in codecs.CODECS.values()}
    assert sizes == {"identity": 4096, "bfloat16": 2048, "int8": 1024 + 2 * 4}
    flat = {"body": flatten(values)}  # a scale a layer, as of a tree
    assert sizes == {
        c.name: codecs.payload_bytes(c, flat) for c in codecs.CODECS.values()
    }
    each = {c.name: codecs.bytes_per_value(c) for c in codecs.CODECS.values()}
    assert each == {"identity": 4, "bfloat16": 2, "int8": 1}
    payload = codecs.INT8.encode(KEY, upload)
    counted = sum(leaf.nbytes for leaf in jax.tree.leaves(payload))
    assert codecs.payload_bytes(codecs.INT8, upload) == counted


def test_an_unknown_codec_names_those_there_are():
    with pytest.raises(ValueError, match="codec='int4' must be one of .*bfloat16"):
        codecs.named("int4")


# In a round.


def vectors(reduce: str = "sum", poisoned: int | None = None) -> Algorithm:
    """Clients upload the same 100 numbers; one of size `poisoned`, a NaN too."""

    def client_update(key, round_index, server, client, data):
        values = jnp.linspace(-1, 1, 100) / 3
        if poisoned is not None:
            values = values.at[40].set(jnp.where(data.size == poisoned, jnp.nan, 0))
        return ClientOutput(values, 1.0)

    def server_update(key, round_index, server, aggregate):
        if reduce == "stack":
            return server.at[aggregate.client_ids].set(aggregate.uploads)
        return aggregate.mean()[None].repeat(7, 0)

    def predictive(key, server, *rest):
        x = rest[-2]
        return jnp.zeros((1, x.shape[0], 3)) - jnp.log(3.0)

    return Algorithm(
        name="vectors",
        init=lambda key: jnp.zeros((7, 100)),
        client_update=client_update,
        server_update=server_update,
        global_predictive=predictive,
        personalise=lambda key, server, client, data: (),
        personal_predictive=predictive,
        reduce=reduce,
    )


def run(algorithm, train, test, codec, rounds=1, **options):
    federation = Federation(algorithm, train, test, codec=codec, **options)
    return federation.rounds(federation.init(jax.random.key(0)), rounds)


def test_identity_adds_nothing_to_the_program(train, test, task):
    algorithm = fedavg(task)
    call = Call(KEY, jnp.int32(0), algorithm.broadcast(algorithm.init(KEY)))
    visit = Visit(jnp.int32(1), (), jax.tree.map(lambda leaf: leaf[1], train))

    def program(algorithm, **options):
        return str(
            jax.make_jaxpr(lambda c, v: participate(algorithm, c, v, **options))(
                call, visit
            )
        )

    plain = program(algorithm)
    assert program(algorithm, codec=codecs.IDENTITY) == plain
    assert program(algorithm, codec=codecs.BFLOAT16) != plain


@pytest.mark.parametrize("reduce", ["sum", "stack"])
def test_chunks_and_devices_do_not_matter(reduce, train, test):
    one, _ = run(vectors(reduce), train, test, codecs.INT8, rounds=2)
    for options in ({"chunk_size": None}, {"chunk_size": 2, "mesh": clients_mesh(2)}):
        other, _ = run(vectors(reduce), train, test, codecs.INT8, rounds=2, **options)
        np.testing.assert_allclose(one.server, other.server, rtol=1e-6, atol=1e-7)


def test_streamed_clients_send_what_others_do(train, test):
    one, _ = run(vectors("stack"), train, test, codecs.INT8, rounds=2)
    federation = StreamedFederation(
        vectors("stack"), ClientArrays(train), block_size=3, codec=codecs.INT8
    )
    state, _ = federation.rounds(federation.init(jax.random.key(0)), 2)
    np.testing.assert_array_equal(one.server, state.server)


def test_participants_and_rounds_draw_for_themselves(train, test):
    """With equal uploads, equal draws would make equal errors."""
    first, _ = run(vectors("stack"), train, test, codecs.INT8)
    second, _ = run(vectors("stack"), train, test, codecs.INT8, rounds=2)
    for one, other in (
        (first.server[0], first.server[1]),
        (first.server[0], second.server[0]),
    ):
        assert (np.asarray(one) != np.asarray(other)).mean() > 0.2


@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
@pytest.mark.parametrize("reduce", ["sum", "stack"])
def test_a_client_with_a_nan_has_failed(codec, reduce, train, test):
    state, metrics = run(vectors(reduce, poisoned=13), train, test, codec)
    np.testing.assert_array_equal(metrics.failed[0], np.arange(7) == 1)
    assert np.isfinite(state.server).all() and (state.server != 0).any()


@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
def test_a_round_learns_nearly_the_same(codec, train, test, task):
    federation = Federation(fedavg(task), train, test)
    start = jax.device_get(federation.init(jax.random.key(0)).server)
    after = run(fedavg(task), train, test, codecs.IDENTITY)[0].server
    coded, metrics = run(fedavg(task), train, test, codec)
    assert not metrics.failed.any()
    moved, apart = (
        np.concatenate([np.ravel(a - b) for a, b in zip(*map(jax.tree.leaves, pair))])
        for pair in ((after, start), (coded.server, after))
    )
    assert np.isfinite(apart).all() and (apart != 0).any()
    # Steps of 1/127 of the largest of a client's differences, or 2⁻⁸ of each.
    assert np.abs(apart).max() < 0.05 * np.abs(moved).max()


def test_statistics_are_made_of_what_arrives(train, test):
    """A bound of the codec on the upload bounds its square too, at the server."""
    algorithm = vectors()._replace(
        statistics=lambda server, upload: {"x": upload, "xx": upload**2},
        server_update=lambda key, round_index, server, aggregate: jnp.tile(
            aggregate.mean()["xx"] - aggregate.mean()["x"] ** 2, (7, 1)
        ),
    )
    state, _ = run(algorithm, train, test, codecs.BFLOAT16)
    np.testing.assert_allclose(state.server, 0, atol=1e-7)  # all sent the same


def test_a_codec_that_loses_its_shape_is_named(train, test, task):
    cut = codecs.INT8._replace(name="cut", decode=lambda payload: payload)
    with pytest.raises(ValueError, match="codec cut changes an upload: it "):
        Federation(fedavg(task), train, test, codec=cut)
    with pytest.raises(ValueError, match="codec='int8' must be a fedvi.codecs.Codec"):
        Federation(fedavg(task), train, test, codec="int8")
