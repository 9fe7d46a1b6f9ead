"""A streamed federation computes what one in memory does, whatever the blocks."""

import chex
import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import Federation, StreamedFederation, codecs, data
from fedvi.algorithm import Algorithm, ClientOutput, Importance
from fedvi.algorithms import local_only
from fedvi.client_map import clients_mesh
from fedvi.federation import BaseFederation, take
from fedvi.folder_lock import FolderLock
from fedvi.selection import proportional, round_robin, uniform


def counting(poisoned: int = -1, reduce: str = "sum") -> Algorithm:
    """Uploads a number of the client's data and visits; cheap to compile.

    A client keeps its number of visits, the server that it was first made from, and a
    key of its own.
    """

    def client_update(key, round_index, server, client, data):
        visits = client["visits"] + 1
        noise = jax.random.uniform(client["key"])
        value = data.x[:, 0].sum() * visits + noise + 0.1 * server
        value = jnp.where(jnp.isclose(data.x[0, 0], poisoned), jnp.nan, value)
        client = {**client, "visits": visits, "key": jax.random.fold_in(key, 1)}
        return ClientOutput(value, data.size, client, {"value": value})

    def server_update(key, round_index, server, aggregate):
        if reduce == "stack":
            weights = aggregate.weight / aggregate.weight.sum()
            return (aggregate.uploads * weights).sum()
        return aggregate.mean()

    def predictive(key, server, *rest):
        x = rest[-2]
        logits = x[:, :3] * (server + rest[0]["visits"] if len(rest) == 3 else server)
        return jax.nn.log_softmax(logits)[None]

    return Algorithm(
        name="counting",
        init=lambda key: jax.random.normal(key),
        init_client=lambda key, server: {
            "visits": jnp.int32(0),
            "made_from": server,
            "key": key,
        },
        client_update=client_update,
        server_update=server_update,
        global_predictive=predictive,
        personalise=lambda key, server, client, data: client,
        personal_predictive=predictive,
        importance={"size": Importance(lambda *a: jnp.float32(1), lambda s, r, c: r)},
        reduce=reduce,
    )


def in_memory(algorithm, train, test, rounds, **options):
    federation = Federation(algorithm, train, test, **options)
    state, metrics = federation.rounds(federation.init(jax.random.key(3)), rounds)
    return federation, state, metrics


def streamed(algorithm, train, test, rounds, **options):
    federation = StreamedFederation(
        algorithm, data.ClientArrays(train), data.ClientArrays(test), **options
    )
    state, metrics = federation.rounds(federation.init(jax.random.key(3)), rounds)
    return federation, state, metrics


def states_of(federation, ids):
    states, known = federation.store.read(np.asarray(ids))
    return jax.tree.map(raw, states), known


def raw(leaf):
    typed = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if typed else leaf)


@pytest.mark.parametrize("reduce", ["sum", "stack"])
@pytest.mark.parametrize(
    "layout",
    [
        {"block_size": 100},
        {"block_size": 2, "chunk_size": None},
        {"block_size": 3, "chunk_size": 2},
        {"block_size": 3, "devices": 2},
    ],
)
def test_blocks_equal_one_call_in_memory(
    train, test, tmp_path, layout, reduce, optimised, monkeypatch
):
    # Both federations' programs: to the last digits, they must be rounded alike.
    monkeypatch.setattr(
        BaseFederation,
        "_jit",
        lambda self, name, function, **options: self._jits.setdefault(
            name, optimised(function, **options)
        ),
    )
    # Client 4 is empty; the uploads of client 1 are not a number.
    algorithm = counting(train.x[1, 0, 0], reduce)
    selection = uniform(7, 5)
    layout = dict(layout)
    mesh = clients_mesh(layout.pop("devices")) if "devices" in layout else None
    memory, expected, seen = in_memory(algorithm, train, test, 4, selection=selection)
    stream, state, metrics = streamed(
        algorithm,
        train,
        test,
        4,
        selection=selection,
        store=tmp_path / "states",
        mesh=mesh,
        **layout,
    )
    chex.assert_trees_all_close(state.server, expected.server, rtol=1e-6)
    chex.assert_trees_all_close(metrics, seen, rtol=1e-5)
    assert metrics.failed.any() and metrics.empty.any()
    states, known = states_of(stream, range(7))
    visits = np.asarray(expected.clients["visits"])
    np.testing.assert_array_equal(known, visits > 0)
    kept = jax.tree.map(lambda a: raw(a)[known], expected.clients)
    chex.assert_trees_all_close(
        jax.tree.map(lambda a: a[known], states), kept, rtol=1e-6
    )
    for evaluate in ("evaluate", "evaluate_personal"):
        scores = getattr(stream, evaluate)(state)
        wanted = getattr(memory, evaluate)(expected)
        chex.assert_trees_all_close(scores, wanted)
    some = stream.evaluate_personal(state, np.array([6, 0]))
    everyone = memory.evaluate_personal(expected)
    chex.assert_trees_all_close(
        some,
        jax.tree.map(lambda a: a[np.array([6, 0])], everyone),
    )


def test_a_real_method_agrees_too(train, test, task):
    algorithm = local_only(task)  # clients keep vectors
    options = {"selection": round_robin(7, 4), "codec": codecs.INT8}
    _, expected, _ = in_memory(algorithm, train, test, 3, **options)
    stream, state, _ = streamed(algorithm, train, test, 3, block_size=2, **options)
    chex.assert_trees_all_close(state.server, expected.server, rtol=1e-4, atol=1e-5)
    states, known = states_of(stream, range(7))
    expected = jax.tree.map(np.asarray, expected.clients)
    chex.assert_trees_all_close(
        jax.tree.map(lambda a: a[known], states),
        jax.tree.map(lambda a: a[known], expected),
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_other_calls_agree_too(train, test):
    """Of two runs: clusters, predictions, whole runs; of one of them: posteriors."""
    algorithm = counting()._replace(
        assign=lambda key, server, client, data: (data.size % 3, server),
        personal_posterior=lambda server, personal: distrax.Normal(
            server + personal["visits"], 1.0
        ),
    )
    options = {"selection": uniform(7, 5)}
    sources = data.ClientArrays(train), data.ClientArrays(test)
    memory = Federation(algorithm, train, test, **options)
    stream = StreamedFederation(algorithm, *sources, block_size=3, **options)
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    state, metrics, scores = stream.run(stream.init(keys), 4, 2, personal=True)
    expected, seen, wanted = memory.run(memory.init(keys), 4, 2, personal=True)
    chex.assert_trees_all_close(state.server, expected.server, rtol=1e-5)
    chex.assert_trees_all_close(metrics, seen, rtol=1e-5)
    chex.assert_trees_all_close(scores, wanted, rtol=1e-4)
    np.testing.assert_array_equal(stream.clusters(state), memory.clusters(expected))
    chex.assert_trees_all_close(
        stream.predictions_personal(state, sources[1]),
        memory.predictions_personal(expected, test),
        rtol=1e-3,
        atol=1e-6,
    )
    assert stream.finite(state).tolist() == [True, True]
    one, _ = stream.rounds(stream.init(keys[1]), 4)
    np.testing.assert_allclose(one.server, state.server[1], rtol=1e-5)
    np.testing.assert_allclose(
        stream.posterior(one, 2).mean(),
        memory.posterior(take(expected, 1), 2).mean(),
        rtol=1e-5,
    )


def test_a_round_compiles_once(train, test):
    algorithm, traces = counting(), []

    def client_update(*arguments):
        traces.append(1)
        return counting().client_update(*arguments)

    algorithm = algorithm._replace(client_update=client_update)
    stream, state, _ = streamed(
        algorithm, train, test, 1, selection=uniform(7, 5), block_size=2
    )
    before = len(traces)
    stream.rounds(state, 3)
    assert len(traces) == before


def saved(state):
    """A copy that donation does not reach."""
    key = np.asarray(jax.random.key_data(state.key))
    state = jax.tree.map(np.asarray, state._replace(key=key))
    return lambda: state._replace(key=jax.random.wrap_key_data(state.key))


def test_a_run_goes_on_from_its_last_commit(train, test, tmp_path):
    options = {"selection": uniform(7, 3), "block_size": 2}
    _, expected, _ = in_memory(
        counting(), train, test, 6, selection=options["selection"]
    )
    options["store"] = tmp_path / "states"
    stream, state, _ = streamed(counting(), train, test, 2, **options)
    stream.commit(state)
    committed = saved(state)
    state, _ = stream.rounds(state, 2)  # lost: killed before the next commit
    del stream
    sources = data.ClientArrays(train), data.ClientArrays(test)
    again = StreamedFederation(counting(), *sources, **options)
    with pytest.raises(ValueError, match="after round 4, but .* after round 2"):
        again.rounds(state, 1)
    with pytest.raises(ValueError, match="committed after round 2"):
        again.init(jax.random.key(9))
    state, _ = again.rounds(committed(), 4)
    chex.assert_trees_all_close(state.server, expected.server, rtol=1e-6)
    states, _ = states_of(again, range(7))
    np.testing.assert_array_equal(states["visits"], expected.clients["visits"])


def test_runs_and_rounds_are_not_mixed(train, test):
    stream, state, _ = streamed(counting(), train, test, 2, selection=uniform(7, 3))
    later = saved(state)
    state, _ = stream.rounds(state, 1)
    with pytest.raises(
        ValueError, match="after round 2, but .* this run after round 3"
    ):
        stream.rounds(later(), 1)
    fresh = stream.init(jax.random.key(8))  # the next seed: nothing is left of the last
    assert stream.store.visited == 0
    fresh, _ = stream.rounds(fresh, 3)
    with pytest.raises(ValueError, match="a run of another key"):
        stream.rounds(state, 1)
    states, known = states_of(stream, range(7))
    assert states["visits"].sum() <= 3 * 3 and known.any()
    sources = data.ClientArrays(train), data.ClientArrays(test)
    other = StreamedFederation(counting(), *sources, selection=uniform(7, 3))
    with pytest.raises(ValueError, match="after round 3, .* holds no clients' states"):
        other.rounds(state, 1)


def test_a_round_that_fails_leaves_the_last_commit(train, test):
    stream, state, _ = streamed(
        counting(), train, test, 2, selection=uniform(7, 5), block_size=2
    )
    stream.commit(state)
    committed, (before, _) = saved(state), states_of(stream, range(7))
    read = stream.train.read
    reads = iter([read, read])  # the third block cannot be read
    stream.train.read = lambda ids: next(reads)(ids)
    with pytest.raises((StopIteration, RuntimeError)):
        stream.rounds(state, 1)
    chex.assert_trees_all_equal(states_of(stream, range(7))[0], before)
    stream.train.read = read
    state, _ = stream.rounds(committed(), 1)
    assert state.round == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": uniform(6, 2)}, "chooses from 6 clients, but train holds 7"),
        ({"selection": proportional(7, 2, "size")}, "measure='size'"),
        ({"block_size": 0}, "block_size=0"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"eval_batch_size": 0}, "eval_batch_size=0"),
    ],
)
def test_mistakes_are_named(train, test, options, message):
    sources = data.ClientArrays(train), data.ClientArrays(test)
    with pytest.raises(ValueError, match=message):
        StreamedFederation(counting(), *sources, **options)


def test_other_clients_and_missing_data_are_named(train, test):
    sources = data.ClientArrays(train), data.ClientArrays(test)
    few = jax.tree.map(lambda leaf: leaf[:5], test)
    with pytest.raises(ValueError, match="test holds 5 clients and train 7"):
        StreamedFederation(counting(), sources[0], data.ClientArrays(few))
    empty = data.ClientArrays(train._replace(size=np.zeros(7, np.int32)))
    with pytest.raises(ValueError, match="no example"):
        StreamedFederation(counting(), empty, sources[1])
    federation = StreamedFederation(counting(), sources[0])
    with pytest.raises(ValueError, match="typed key"):
        federation.init(np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="test=None"):
        federation.evaluate(federation.init(jax.random.key(0)))
    federation = StreamedFederation(counting(), *sources)
    with pytest.raises(ValueError, match="0 to 6"):
        federation.evaluate(federation.init(jax.random.key(0)), np.array([0.5]))
    for ids in ([], [-1], [7]):
        with pytest.raises(ValueError, match="0 to 6"):
            federation.evaluate(federation.init(jax.random.key(0)), np.array(ids, int))
    with pytest.raises(ValueError, match="test=ClientData must be a ClientSource"):
        StreamedFederation(counting(), sources[0], test)
    with pytest.raises(ValueError, match="splits models over devices"):
        StreamedFederation(counting(), *sources, mesh=clients_mesh(4, 2))


def test_of_two_federations_on_one_store_the_later_one_goes_on(tmp_path, train, test):
    """C34, in one process; another one's is refused before anything is compiled."""
    sources = [data.ClientArrays(one) for one in (train, test)]
    with FolderLock(tmp_path / "states"):
        with pytest.raises(ValueError, match="states is in use: process"):
            StreamedFederation(counting(), *sources, store=tmp_path / "states")
    options = {"store": tmp_path / "states", "block_size": 7}
    first, state, _ = streamed(counting(), train, test, 1, **options)
    StreamedFederation(counting(), *sources, **options)
    with pytest.raises(ValueError, match="opened by a later store of this process"):
        first.rounds(state, 1)


def test_data_in_files_are_checked_like_those_in_memory(train, test):
    """C23: sizes at once, labels as they are read."""
    sources = data.ClientArrays(train), data.ClientArrays(test)
    large = data.ClientArrays(train._replace(size=train.size + 1))
    with pytest.raises(ValueError, match=r"train.size\[0\]=21 must lie in 0..20"):
        StreamedFederation(counting(), large, sources[1])
    wrong = train.y.copy()
    wrong[5, 3] = -1
    wrong[6, 9] = 7  # padding of a client of five
    bad = data.ClientArrays(train._replace(y=wrong))
    stream = StreamedFederation(counting(), bad, sources[1], block_size=3)
    message = r"train.read\(3..5\).y\[2, 3\] = -1 is outside 0..2"
    with pytest.raises(ValueError, match=message):
        stream.round(stream.init(jax.random.key(0)))


def test_states_and_predictions_are_checked_too(train, test):
    sources = data.ClientArrays(train), data.ClientArrays(test)
    plain = counting()
    algorithm = plain._replace(
        personal_predictive=lambda *a: jnp.exp(plain.personal_predictive(*a))
    )
    stream = StreamedFederation(algorithm, *sources, block_size=3)
    state = stream.init(jax.random.key(0))
    for call in (
        stream.evaluate_personal,
        lambda state: stream.predictions_personal(state, sources[1]),
    ):
        with pytest.raises(ValueError, match="personal_predictive returns no log-pro"):
            call(state)
    for call in (stream.evaluate, stream.round, stream.commit):
        with pytest.raises(ValueError, match="state=tuple must be a fedvi.State"):
            call(tuple(state))
