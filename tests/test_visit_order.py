"""Clients of like sizes share a chunk; nothing but the time depends on it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import Federation, LocalTraining, StreamedFederation, data
from fedvi.algorithm import Algorithm, ClientOutput
from fedvi.client_map import clients_mesh, map_reduce
from fedvi.data import ClientData
from fedvi.local import fold_minibatches
from fedvi.selection import round_robin
from fedvi.visit_order import by_size, padded_share

SIZES = np.array([4, 0, 9, 1, 7, 12, 3, 12, 2, 6, 5], np.int32)


def chunks_of(order, chunk, devices=1):
    """Sizes by device and chunk."""
    return SIZES[np.asarray(order.there)].reshape(devices, -1, chunk).tolist()


def test_chunks_are_of_neighbours_in_size():
    order = by_size(SIZES[:10], 5)
    assert chunks_of(order, 5) == [[[12, 12, 9, 7, 6], [4, 3, 2, 1, 0]]]
    cohort = np.arange(10)
    assert sorted(order.there.tolist()) == cohort.tolist()
    assert order.of_cohort(order.of_visits(cohort)).tolist() == cohort.tolist()


def test_sorted_chunks_are_dealt_to_the_devices_there_and_back():
    order = by_size(SIZES[:8], 2, 2)
    assert chunks_of(order, 2, 2) == [[[9, 7], [4, 3]], [[12, 12], [1, 0]]]


def test_what_fills_the_slots_up_is_a_copy_of_the_smallest():
    training = LocalTraining(epochs=1, batch_size=1)
    # (9, 8), (2, 1) and (0, 0): 22 steps for 20.
    assert padded_share([1, 9, 0, 2, 8], training, 2) == pytest.approx(2 / 22)
    # A third device has nothing but copies: 18 + 4 + 2 for 20.
    assert padded_share([1, 9, 2, 8], training, 2, 3) == pytest.approx(4 / 24)
    # Four devices have three clients each, the last one of them alone in a chunk.
    order = by_size(SIZES[:10], 2, 4)
    assert SIZES[order.there].tolist() == [6, 4, 3, 9, 7, 2, 12, 12, 1, 0]


@pytest.mark.parametrize(("chunk", "devices"), [(1, 1), (1, 4), (None, 1), (20, 1)])
def test_where_every_or_the_only_client_is_a_chunk_none_is_moved(chunk, devices):
    order = by_size(SIZES, chunk, devices)
    assert order.of_visits(SIZES) is SIZES and order.of_cohort(SIZES) is SIZES


def steps_really_run(sizes, training, chunk, devices):
    """How often the body of the loop over minibatches ran, for all clients."""
    calls = []

    def one(operands, size):
        examples = ClientData(jnp.zeros((12, 1)), jnp.zeros(12, jnp.int32), size)

        def step(key, carry, batch):
            jax.debug.callback(lambda carry: calls.append(carry.shape), carry)
            return carry + 1

        key = jax.random.key(0)
        return (), fold_minibatches(key, examples, training, step, jnp.int32(0))

    @jax.jit
    def run(sizes):
        mesh = clients_mesh(devices)
        return map_reduce(one, (), sizes, chunk_size=chunk, mesh=mesh)[1]

    useful = run(jnp.asarray(sizes)).sum()
    jax.effects_barrier()
    assert set(calls) == {()}  # one call a client
    return int(useful), len(calls)


@pytest.mark.parametrize(
    ("chunk", "devices", "training"),
    [
        (4, 1, LocalTraining(epochs=3, batch_size=2)),
        (2, 2, LocalTraining(epochs=2, batch_size=5)),
        (3, 1, LocalTraining(steps=7, batch_size=4)),
        (None, 4, LocalTraining(steps=3, batch_size=20)),
        (1, 2, LocalTraining(epochs=1, batch_size=3)),
    ],
)
def test_the_share_of_padding_is_that_of_the_steps_which_run(chunk, devices, training):
    for ordered in (True, False):
        visited = SIZES
        if ordered:
            visited = by_size(SIZES, chunk, devices).of_visits(SIZES)
        useful, run = steps_really_run(visited, training, chunk, devices)
        share = padded_share(SIZES, training, chunk, devices, ordered)
        assert share == pytest.approx(1 - useful / run)


def test_the_share_of_padding_by_hand():
    training = LocalTraining(epochs=2, batch_size=1)
    sizes = [1, 9, 2, 8]
    # In chunks (1, 9) and (2, 8) 34 steps an epoch for 20; in (1, 2) and (8, 9) 22.
    assert padded_share(sizes, training, 2, ordered=False) == pytest.approx(14 / 34)
    assert padded_share(sizes, training, 2) == pytest.approx(2 / 22)
    assert padded_share(sizes, training, 1) == 0
    assert padded_share([0, 0], training, 2) == 0


def noting(reduce: str) -> Algorithm:
    """Uploads something of each client's data and visits, which it counts."""

    def client_update(key, round_index, server, client, data):
        value = data.x[:, 0].sum() + jax.random.normal(key) + client
        value = jnp.where(data.size == 7, jnp.nan, value)
        return ClientOutput(value, data.size, client + 1, {"value": value})

    def server_update(key, round_index, server, aggregate):
        if reduce == "stack":
            places = jnp.arange(1.0, len(aggregate.uploads) + 1)
            return server + (aggregate.uploads * aggregate.client_ids / places).sum()
        return server + aggregate.mean()

    def predictive(key, *models_x_mask):
        *models, x, _ = models_x_mask
        return jax.nn.log_softmax(x[:, :3] * sum(models))[None]

    return Algorithm(
        name="noting",
        init=lambda key: jnp.float32(0),
        init_client=lambda key, server: jnp.float32(0),
        client_update=client_update,
        server_update=server_update,
        global_predictive=predictive,
        personalise=lambda key, server, client, data: client + data.x[0, 0],
        personal_predictive=predictive,
        reduce=reduce,
    )


def federation_of(make, sizes, reduce="sum", chunk=3, devices=1, **options):
    train, test = make(sizes), make(sizes[::-1], seed=1)
    selection = round_robin(len(sizes), 8, [7, 2, 9, 0, 4, 1, 3, 10, 5, 8, 6])
    options |= {"chunk_size": chunk, "mesh": clients_mesh(devices)}
    if "block_size" in options:
        train, test = data.ClientArrays(train), data.ClientArrays(test)
        made = StreamedFederation
    else:
        made = Federation
    return made(noting(reduce), train, test, selection=selection, **options)


def everything(federation):
    """What a user sees of two rounds and of the evaluations."""
    state, metrics = federation.rounds(federation.init(jax.random.key(0)), 2)
    scores = federation.evaluate(state), federation.evaluate_personal(state)
    states = [federation._client_state(state, i) for i in range(len(SIZES))]
    return jax.tree.map(np.asarray, (state.server, states, metrics, scores))


@pytest.mark.parametrize(
    ("reduce", "chunk", "devices", "more"),
    [
        ("sum", 3, 1, {}),
        ("stack", 2, 2, {}),
        ("stack", 2, 1, {"block_size": 3}),
        ("sum", 2, 2, {"block_size": 6}),
    ],
)
def test_results_do_not_depend_on_the_order_of_visits(
    clients_of, reduce, chunk, devices, more
):
    federation = federation_of(clients_of, SIZES, reduce, chunk, devices, **more)
    found = everything(federation)
    assert found[2].failed.any() and found[2].empty.any()
    assert found[2].client_ids[0].tolist() == [7, 2, 9, 0, 4, 1, 3, 10]
    unsorted = federation_of(clients_of, SIZES, reduce, chunk, devices, **more)
    unsorted.sorts_visits = False
    chex.assert_trees_all_close(found, everything(unsorted), rtol=2e-5, atol=1e-5)


def test_only_chunks_of_unequal_clients_are_reordered(clients_of):
    def program(sizes, chunk):
        federation = federation_of(clients_of, sizes, chunk=chunk)
        shapes = federation.shapes(), federation.train
        sorts = jax.make_jaxpr(lambda *a: federation.pure_rounds(*a, n=1))(*shapes)
        return str(sorts).count("= sort")

    assert program(SIZES, 3) == 1
    assert program(SIZES, 1) == program(np.full(11, 4), 3) == 0


def test_a_stream_reads_clients_of_like_sizes_together(clients_of):
    federation = federation_of(clients_of, SIZES, chunk=2, block_size=4)
    ids = np.arange(11)
    sizes = [
        SIZES[block[:count]].tolist()
        for block, count, _ in federation._blocks(
            ids[federation._order(ids)], federation.train
        )
    ]
    assert sizes == [[12, 12, 9, 7], [6, 5, 4, 3], [2, 1, 0]]
