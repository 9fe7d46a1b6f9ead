"""States spread over devices: where leaves lie, and that results do not change."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fedvi import algorithms
from fedvi.algorithm import Task
from fedvi.client_map import brought, clients_mesh
from fedvi.federation import Federation, State
from fedvi.nn import build
from fedvi.placement import (
    layered,
    on_host,
    put,
    replicate,
    replicated,
    resized,
    spread,
    state_shardings,
)
from fedvi.selection import full, stratified, uniform


def shapes(**leaves):
    return {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in leaves.items()}


def specs(mesh, **options):
    state = State(
        shapes(wide=(3, 4, 8), odd=(3, 5), both=(4, 4), scalar=(), none=(2, 0)),
        shapes(ids_only=(6,), own=(6, 4)),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.eval_shape(jax.random.key, 0),
    )
    placed = state_shardings(mesh, state, **options)
    return jax.tree.map(lambda sharding: tuple(sharding.spec), placed)


def test_the_longest_axis_that_divides_is_split_and_clients_are_spread():
    found = specs(clients_mesh(8, model_devices=2))
    assert found.server == {
        "wide": (None, None, "model"),
        "odd": (),
        "both": (None, "model"),
        "scalar": (),
        "none": ("model",),
    }
    assert found.clients == {"ids_only": ("clients",), "own": ("clients", "model")}
    assert (found.round, found.key) == ((), ())


def test_the_runs_axis_is_never_split_and_a_mesh_of_clients_splits_no_model():
    runs = specs(clients_mesh(4, model_devices=4), runs=True)
    assert runs.server["both"] == (None, "model")
    assert set(runs.clients.values()) == {(None, "clients")}
    plain = specs(clients_mesh(8))
    assert set(plain.server.values()) == {()}
    assert set(plain.clients.values()) == {("clients",)}


@pytest.mark.parametrize(("devices", "model_devices"), [(8, 3), (4, 8), (8, 0), (6, 4)])
def test_model_devices_must_divide_the_devices(devices, model_devices):
    with pytest.raises(ValueError, match=f"model_devices={model_devices} must divide"):
        clients_mesh(devices, model_devices)


def test_on_one_process_placing_is_device_put():
    mesh = clients_mesh(2)
    tree = {"x": np.arange(3.0, dtype=np.float32), "key": jax.random.key(1)}
    placed = replicate(mesh, tree)
    for leaf in jax.tree.leaves(placed):
        assert leaf.sharding == replicated(mesh)
    split = put(
        np.arange(4.0, dtype=np.float32),
        jax.NamedSharding(mesh, PartitionSpec("clients")),
    )
    np.testing.assert_array_equal(on_host(split), np.arange(4.0))


def test_vectors_cannot_be_split(task, train, test):
    with pytest.raises(ValueError, match="fedavg has vectors, .*layered"):
        Federation(algorithms.fedavg(task), train, test, mesh=clients_mesh(4, 2))


@pytest.mark.parametrize(
    "name", ["fedhb_niw", pytest.param("local_only", marks=pytest.mark.long)]
)
def test_models_spread_over_devices_give_the_result_of_one(task, train, test, name):
    """FedHB's server is a Normal-Inverse-Wishart; the other keeps clients' states."""
    model = build("mlp", classes=3, input_shape=(6,), hidden=(6,))
    algorithm = algorithms.build(name, task._replace(model=layered(model)))
    results = {}
    for mesh in (clients_mesh(1), clients_mesh(8, model_devices=2)):
        federation = Federation(algorithm, train, test, mesh=mesh)
        state, metrics = federation.rounds(federation.init(jax.random.key(0)), 2)
        state, _ = federation.rounds(state, 2)
        assert federation._jits["rounds", False]._cache_size() == 1  # where it was
        scores = federation.evaluate(state)
        placed = jax.tree.leaves(state.server)
        state = federation.portable(state)
        state = state._replace(key=jax.random.key_data(state.key))
        results[mesh.size] = jax.device_get((state, metrics.metrics, scores))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        results[1],
        results[8],
    )
    total = sum(leaf.nbytes for leaf in placed)
    for device in range(8):
        held = sum(leaf.addressable_shards[device].data.nbytes for leaf in placed)
        assert held < 0.6 * total


SELECTIONS = {
    "everyone": full,
    "anyone": lambda clients: uniform(clients, 3),
    "stratified": lambda clients: stratified(clients, 4, strata=4),
}


@pytest.mark.parametrize("which", SELECTIONS)
def test_clients_spread_over_devices_give_the_result_of_one(task, train, test, which):
    """Seven clients in eight places, or eight; those of Ditto keep a model."""
    if which == "stratified":  # which needs equal parts
        train, test = (
            jax.tree.map(lambda a: np.concatenate([a, a[:1]]), data)
            for data in (train, test)
        )
        task = Task.of(task.model, train, task.training, task.finetuning)
    clients = len(train.size)
    algorithm, selection = algorithms.ditto(task), SELECTIONS[which](clients)
    results = []
    for mesh in (None, clients_mesh(4)):
        how = {"selection": selection, "mesh": mesh, "spread_clients": True}
        federation = Federation(algorithm, train, test, **how)
        state, metrics = federation.rounds(federation.init(jax.random.key(0)), 3)
        scores = federation.evaluate_personal(state)
        placed = jax.tree.leaves((state.clients, federation.train, federation.test))
        whole = federation.portable(state)
        back = federation.placed(jax.tree.map(jnp.copy, whole))
        jax.tree.map(
            np.testing.assert_array_equal,
            federation.portable(back).clients,
            whole.clients,
        )
        if mesh is not None:
            assert jax.tree.map(lambda a: a.sharding, back) == jax.tree.map(
                lambda a: a.sharding, state
            )
        own = federation.predict(state, np.asarray(test.x[1]), client=1)
        key = jax.random.key_data(state.key)
        found = whole._replace(key=key), metrics, scores, own
        results.append(jax.device_get(found))
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)
    assert all(a.addressable_shards[0].data.shape[0] * 4 == len(a) for a in placed)
    compiled = federation.compile("rounds", federation.shapes(), n=1).as_text()
    sent = re.findall(r" (all-\w+|reduce-scatter|collective-permute)\(", compiled)
    assert ("reduce-scatter" in sent) == (which == "anyone")
    if which != "anyone":
        assert sent == ["all-reduce"]


def test_what_is_brought_from_another_device_is_as_it_was():
    mesh = clients_mesh(4)
    rows = {
        "key": jax.random.split(jax.random.key(3), 8),
        "flag": np.arange(8) % 3 == 0,
        "byte": np.arange(16, dtype=np.uint8).reshape(8, 2),
        "number": np.array([np.nan, np.inf, -1, -0.0, 3, 4, 5, 6], np.float32),
        "half": jnp.arange(8, dtype=jnp.bfloat16) / 3,
    }
    ids = jnp.array([7, 0, 3, 3])
    found = jax.jit(partial(brought, mesh=mesh, here=False))(spread(mesh, rows), ids)
    assert found["key"].sharding.spec[0] == "clients"
    for name, leaf in found.items():
        wanted, leaf = rows[name][np.asarray(ids)], leaf
        if name == "key":
            wanted, leaf = map(jax.random.key_data, (wanted, leaf))
        np.testing.assert_array_equal(leaf, wanted)
    assert np.signbit(np.asarray(found["number"]))[2]


def test_places_of_no_client_are_added_and_left_out():
    rows = {"key": jax.random.split(jax.random.key(3), 7), "number": np.arange(7)}
    more = resized(rows, 0, 8)
    assert more["key"].shape == (8,) and more["number"].tolist() == [*range(7), 0]
    back = resized(more, 0, 7)
    assert (back["key"] == rows["key"]).all()
    np.testing.assert_array_equal(back["number"], rows["number"])
