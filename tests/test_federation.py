"""The round itself: padding, empty and failing clients, state, compilation, seeds."""

import math
from collections import Counter

import chex
import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from fedvi import nn
from fedvi.algorithm import Algorithm, ClientOutput, Importance, Task
from fedvi.algorithms import fedavg
from fedvi.client_map import clients_mesh
from fedvi.data import ClientArrays
from fedvi.federation import Federation, repeated, take
from fedvi.keys import root_key
from fedvi.selection import Selection, proportional, uniform
from fedvi.streaming import StreamedFederation

TRACES = Counter()


def mean_of_data(
    poisoned: int | None = None, reduce: str = "sum", poison: float = math.nan
) -> Algorithm:
    """Clients upload the mean of their first feature and count their visits."""

    def client_update(key, round_index, server, client, data):
        TRACES["client_update"] += 1
        real = jnp.arange(data.y.shape[0]) < data.size
        value = jnp.where(real, data.x[:, 0], 0).sum() / data.size
        if poisoned is not None:
            value = jnp.where(client["id"] == poisoned, poison, value)
        client = {**client, "visits": client["visits"] + 1}
        client["key"] = jax.random.fold_in(client["key"], 1)
        return ClientOutput(value, data.size, client, {"value": value})

    def server_update(key, round_index, server, aggregate):
        if reduce == "stack":
            total = (aggregate.uploads * aggregate.weight).sum()
            return total / aggregate.weight.sum()
        return aggregate.mean()

    def predictive(key, server, x, mask):
        logits = x[:, :3] + jnp.broadcast_to(server, (x.shape[0], 3))
        return jax.nn.log_softmax(logits)[None]

    def personal_predictive(key, server, personal, x, mask):
        """A client of size n always predicts class n mod 3."""
        classes = jax.nn.one_hot(personal % 3, 3) * 9
        return jax.nn.log_softmax(jnp.broadcast_to(classes, (1, x.shape[0], 3)))

    return Algorithm(
        name="mean_of_data",
        init=lambda key: jnp.float32(-5.0),
        init_client=lambda key, server: {
            "visits": jnp.int32(0),
            "id": jnp.int32(-1),
            "key": key,
        },
        client_update=client_update,
        server_update=server_update,
        global_predictive=predictive,
        personalise=lambda key, server, client, data: data.size,
        personal_predictive=personal_predictive,
        reduce=reduce,
    )


def number_clients(state):
    """Writes every client's id into its state."""
    ids = jnp.arange(state.clients["id"].shape[0], dtype=jnp.int32)
    return state._replace(clients={**state.clients, "id": ids})


def fixed(ids) -> Selection:
    ids = jnp.asarray(ids, jnp.int32)
    return Selection(7, len(ids), lambda key, round_index, scores, counts: (ids, ()))


def numpy_mean(train, ids):
    weights = train.size[ids]
    means = [train.x[i, : train.size[i], 0].mean() if train.size[i] else 0 for i in ids]
    return np.dot(weights, means) / weights.sum()


@pytest.mark.parametrize("reduce", ["sum", "stack"])
def test_an_empty_client_counts_nothing_and_is_reported(train, test, reduce):  # C1
    federation = Federation(mean_of_data(reduce=reduce), train, test)
    state, metrics = federation.round(federation.init(jax.random.key(0)))
    others = np.array([0, 1, 2, 3, 5, 6])
    np.testing.assert_allclose(state.server, numpy_mean(train, others), rtol=1e-5)
    np.testing.assert_array_equal(metrics.empty, np.arange(7) == 4)
    assert not metrics.failed.any()
    np.testing.assert_array_equal(state.clients["visits"], np.arange(7) != 4)


def test_a_round_of_empty_clients_changes_nothing(train, test):  # C1
    federation = Federation(mean_of_data(), train, test, selection=fixed([4]))
    state, metrics = federation.round(federation.init(jax.random.key(0)))
    assert state.server == -5.0 and state.round == 1
    assert metrics.empty.all() and np.isfinite(metrics.metrics["value"])


@pytest.mark.parametrize(
    "reduce, poison", [("sum", math.nan), ("stack", math.nan), ("sum", -1e14)]
)
def test_a_client_that_diverged_is_left_out_and_reported(train, test, reduce, poison):
    """C16, and C21: what is finite can be absurd."""
    federation = Federation(mean_of_data(1, reduce, poison), train, test)
    state = number_clients(federation.init(jax.random.key(0)))
    state, metrics = federation.rounds(state, 2)
    others = np.array([0, 2, 3, 5, 6])
    np.testing.assert_allclose(state.server, numpy_mean(train, others), rtol=1e-5)
    np.testing.assert_array_equal(metrics.failed[1], np.arange(7) == 1)
    assert (np.abs(metrics.metrics["value"]) < 99).all()
    np.testing.assert_array_equal(state.clients["visits"][:3], [2, 0, 2])


def test_states_of_absent_clients_survive_unchanged(train, test):  # C7
    cohorts = jnp.array([[2, 0], [1, 0], [2, 1]])
    selection = Selection(
        7, 2, lambda key, round_index, scores, counts: (cohorts[round_index], ())
    )
    federation = Federation(mean_of_data(), train, test, selection=selection)
    start = federation.init(jax.random.key(0))
    before = jax.device_get(jax.random.key_data(start.clients["key"]))
    state, _ = federation.rounds(start, 3)
    np.testing.assert_array_equal(state.clients["visits"], [2, 2, 2, 0, 0, 0, 0])
    after = jax.device_get(jax.random.key_data(state.clients["key"]))
    np.testing.assert_array_equal(after[3:], before[3:])
    assert (after[:3] != before[:3]).any(axis=1).all()


def test_the_order_of_the_cohort_does_not_matter(train, test, task):  # C8
    servers = []
    for ids in ([0, 2, 5, 6], [6, 2, 0, 5]):
        federation = Federation(fedavg(task), train, test, selection=fixed(ids))
        state, _ = federation.rounds(federation.init(jax.random.key(1)), 2)
        servers.append(jax.device_get(state.server.params))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *servers
    )


def test_a_round_compiles_once_whatever_the_data(train, test):
    federation = Federation(mean_of_data(), train, test, selection=uniform(7, 3))
    state, _ = federation.round(federation.init(jax.random.key(0)))
    traced = TRACES["client_update"]
    assert traced > 0
    for _ in range(3):
        state, _ = federation.round(state)
    federation.train = jax.tree.map(lambda a: a + 0, federation.train)
    state, _ = federation.round(state)
    assert TRACES["client_update"] == traced


def test_the_state_is_donated(train, test):
    federation = Federation(mean_of_data(), train, test)
    state = federation.init(jax.random.key(0))
    federation.round(state)
    assert state.server.is_deleted()


def test_rounds_equals_round_after_round(train, test, task):
    federation = Federation(fedavg(task), train, test, selection=uniform(7, 3))
    scanned, metrics = federation.rounds(federation.init(jax.random.key(0)), 3)
    stepped = federation.init(jax.random.key(0))
    for round_index in range(3):
        stepped, one = federation.round(stepped)
        np.testing.assert_array_equal(one.client_ids, metrics.client_ids[round_index])
    assert len(np.unique(metrics.client_ids, axis=0)) > 1
    jax.tree.map(
        np.testing.assert_array_equal, scanned._replace(key=0), stepped._replace(key=0)
    )


@pytest.fixture(scope="module")
def runs(train, test, task):
    """Three seeds, two rounds, scores; one seed and one client after another."""
    federation = Federation(fedavg(task), train, test, selection=uniform(7, 3))
    keys = jax.vmap(jax.random.key)(jnp.arange(5, 8))
    state, metrics = federation.rounds(federation.init(keys), 2)
    return federation, keys, jax.device_get(state.server), jax.device_get(metrics)


def test_each_of_several_runs_is_as_it_would_be_alone(runs):
    federation, keys, servers, metrics = runs
    state, own = federation.rounds(federation.init(jax.random.key(6)), 2)
    chex.assert_trees_all_close(take(servers, 1), state.server, rtol=1e-5)
    chex.assert_trees_all_close(take(metrics, 1), own, rtol=1e-5)
    scores = federation.evaluate(state)
    states = federation.init(keys)
    states, _ = federation.rounds(states, 2)
    together = federation.evaluate(states)
    chex.assert_trees_all_close(take(together, 1), scores, rtol=1e-4)
    broken = jax.tree.map(lambda a: a.at[1].set(jnp.nan), states.server)
    assert federation.finite(states._replace(server=broken)).tolist() == [
        True,
        False,
        True,
    ]
    assert federation.finite(state).shape == ()


def test_groups_and_devices_do_not_change_several_runs(runs):
    federation, keys, servers, _ = runs
    other = Federation(
        federation.algorithm,
        jax.device_get(federation.train),
        jax.device_get(federation.test),
        selection=federation.selection,
        chunk_size=2,
        mesh=clients_mesh(2),
        runs_at_once=3,
    )
    states = other.init(keys)
    for _ in range(2):
        states, metrics = other.round(states)
    assert metrics.client_ids.shape == (3, 3)
    assert other._jits["rounds", True]._cache_size() == 1  # it came back where it was
    chex.assert_trees_all_close(jax.device_get(states.server), servers, rtol=1e-4)


def test_what_is_compiled_ahead_is_what_runs(train, test):
    federation = Federation(mean_of_data(), train, test).variant(chunk_size=2)
    shapes = federation.shapes(runs=2)
    compiled = federation.compile("rounds", shapes, n=2)
    assert compiled.memory_analysis().temp_size_in_bytes > 0
    seconds, traced = federation.compile_seconds, TRACES["client_update"]
    assert seconds > 0
    states = federation.init(jax.random.split(jax.random.key(0), 2))
    chex.assert_trees_all_equal_shapes_and_dtypes(states, shapes)
    federation.rounds(states, 2)
    assert TRACES["client_update"] == traced


def scaled(settings) -> Algorithm:
    """The server's state is the mean of the data times a setting."""
    algorithm = mean_of_data()
    factor = settings["factor"]
    return algorithm._replace(
        server_update=lambda *arguments: factor * algorithm.server_update(*arguments),
        personalise=lambda key, server, client, data: jnp.int32(data.size + factor),
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_runs_that_differ_in_numbers_share_one_program(train, test, devices):
    mesh = None if devices == 1 else clients_mesh(devices)
    federation = Federation(scaled, train, test, settings={"factor": 1}, mesh=mesh)
    keys = repeated(jax.random.key(0), 3)
    factors = np.array([1, 2, 3])
    states = federation.init(keys, {"factor": factors})
    shapes = federation.shapes(runs=3)
    chex.assert_trees_all_equal_shapes_and_dtypes(states, shapes)
    for _ in range(2):
        states, _ = federation.rounds(states, 1)
    assert federation._jits["rounds", True]._cache_size() == 1
    np.testing.assert_array_equal(states.settings["factor"], factors)
    alone = Federation(mean_of_data(), train, test)
    expected = alone.rounds(alone.init(jax.random.key(0)), 2)[0].server
    np.testing.assert_allclose(states.server, factors * expected, rtol=1e-6)
    # Personal models too, of all runs and of one.
    correct = federation.evaluate_personal(states).correct
    classes = (np.asarray(train.size) + factors[:, None]) % 3
    expected = (np.asarray(test.y) == classes[..., None]).sum(-1)
    np.testing.assert_array_equal(correct, expected)
    one = take(states, 2)
    np.testing.assert_array_equal(federation.evaluate_personal(one).correct, correct[2])
    # The settings of a run that names none.
    assert federation.init(jax.random.key(0)).settings == {"factor": 1}


def test_settings_that_do_not_fit_are_named(train, test):
    for algorithm, settings in ((scaled, ()), (mean_of_data(), {"factor": 1.0})):
        with pytest.raises(ValueError, match="give a function of settings"):
            Federation(algorithm, train, test, settings=settings)
    federation = Federation(scaled, train, test, settings={"factor": 1.0})
    keys = repeated(jax.random.key(0), 3)
    for wrong in ({"factor": [1.0, 2.0]}, {"other": [1.0] * 3}, {"factor": [1, 2, 3]}):
        wrong = {name: jnp.array(values) for name, values in wrong.items()}
        with pytest.raises(ValueError, match="settings are none of this federation's"):
            federation.init(keys, wrong)
    state = federation.init(jax.random.key(0))
    with pytest.raises(ValueError, match="state is none of this federation's"):
        federation.evaluate(state._replace(settings=()))


def test_personal_evaluation_gives_every_client_its_own_model(train, test):
    federation = Federation(mean_of_data(), train, test)
    scores = federation.evaluate_personal(federation.init(jax.random.key(0)))
    expected = (test.y == train.size[:, None] % 3).sum(1)
    np.testing.assert_array_equal(scores.correct, expected)
    assert len(set(expected.tolist())) > 1


def with_assign(assign) -> Algorithm:
    """The model of a cluster always predicts the class of the cluster's number."""

    def own_model(*arguments):
        cluster = assign(*arguments)
        return cluster, cluster.astype(jnp.float32)

    def predictive(key, server, x, mask):
        classes = jax.nn.one_hot(server.astype(jnp.int32), 3) * 9
        return jax.nn.log_softmax(jnp.broadcast_to(classes, (1, x.shape[0], 3)))

    return mean_of_data()._replace(assign=own_model, global_predictive=predictive)


def test_with_assign_every_client_has_its_own_global_model(train, test):
    algorithm = with_assign(
        lambda key, server, client, data: (data.size + client["id"]) % 3
    )
    federation = Federation(algorithm, train, test)
    state = number_clients(federation.init(jax.random.key(0)))
    expected = (train.size + np.arange(7)) % 3
    np.testing.assert_array_equal(federation.clusters(state), expected)
    scores = federation.evaluate(state)
    np.testing.assert_array_equal(scores.correct, (test.y == expected[:, None]).sum(1))
    assert len(set(expected)) > 1


def test_evaluate_and_clusters_assign_with_the_same_key(train, test):
    """Each client's own, and another one in another round."""
    algorithm = with_assign(
        lambda key, server, client, data: jax.random.randint(key, (), 0, 3)
    )
    federation = Federation(algorithm, train, test)
    state = federation.init(jax.random.key(0))
    drawn = np.asarray(federation.clusters(state))
    scores = federation.evaluate(state)
    np.testing.assert_array_equal(scores.correct, (test.y == drawn[:, None]).sum(1))
    later = np.asarray(federation.clusters(state._replace(round=state.round + 1)))
    assert len(set(drawn)) > 1 and (drawn != later).any()


def with_posteriors():
    """N(server, 1), and N(number of the client's examples, 1)."""

    def normal(mean):
        return distrax.Normal(jnp.float32(mean), 1.0)

    return mean_of_data()._replace(
        posterior=normal, personal_posterior=lambda server, personal: normal(personal)
    )


def test_posteriors_are_distributions(train, test):
    federation = Federation(with_posteriors(), train, test)
    state = federation.init(jax.random.key(0))
    assert federation.posterior(state).mean() == -5.0
    assert federation.posterior(state, client=2).mean() == train.size[2]
    assert federation.posterior(state, np.int64(4)).mean() == 0


def test_a_posterior_that_there_is_not_is_named(train, test):
    plain = Federation(mean_of_data(), train, test)
    state = plain.init(jax.random.key(0))
    with pytest.raises(ValueError, match="mean_of_data has no posterior: its models"):
        plain.posterior(state)
    with pytest.raises(ValueError, match="mean_of_data has no posterior of a client"):
        plain.posterior(state, 1)
    federation = Federation(with_posteriors(), train, test)
    for client in (7, -1, 1.5):
        with pytest.raises(ValueError, match=f"client={client} must be an id, 0 to 6"):
            federation.posterior(state, client)
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(ValueError, match="that of 2 runs"):
        federation.posterior(federation.init(keys))
    clustered = with_posteriors()._replace(
        assign=lambda key, server, client, data: (jnp.int32(0), server)
    )
    federation = Federation(clustered, train, test)
    with pytest.raises(ValueError, match="several global posteriors"):
        federation.posterior(state)
    assert federation.posterior(state, 0).mean() == 20


def test_inputs_to_be_scored_are_finite(train, test, task):
    """A NaN in padding is nobody's; one in training data is left out by the round."""
    x = np.array(test.x)
    x[2, 3, 0] = np.nan
    padded = test._replace(x=x, size=np.minimum(test.size, 3))
    Federation(fedavg(task), train, padded)
    with pytest.raises(ValueError, match=r"test.x\[2, 3\] is not finite"):
        Federation(fedavg(task), train, test._replace(x=x))


def test_a_negative_weight_counts_nothing(train, test):
    plain = mean_of_data()

    def client_update(*arguments):
        output = plain.client_update(*arguments)
        sign = jnp.where(output.client["id"] == 1, -1, 1)
        return output._replace(weight=sign * output.weight)

    algorithm = plain._replace(client_update=client_update)
    federation = Federation(algorithm, train, test)
    state = number_clients(federation.init(jax.random.key(0)))
    state, metrics = federation.round(state)
    others = np.array([0, 2, 3, 5, 6])
    np.testing.assert_allclose(state.server, numpy_mean(train, others), rtol=1e-5)
    np.testing.assert_array_equal(metrics.failed, np.arange(7) == 1)


def test_an_algorithm_built_for_other_clients_is_refused(train, test, task):
    assert Task.of(task.model, train).population == (6, 67, 1, 7)
    assert Task.of(task.model, train, candidates=[1, 4, 5]).population == (2, 33, 13, 7)
    for name, count, other in (("samples", 67, 66), ("smallest", 1, 9)):
        message = f"a task of {name}={other}, but {name}={count} of those that may take"
        with pytest.raises(ValueError, match=message):
            Federation(fedavg(task._replace(**{name: other})), train, test)
    some = uniform(7, 2, candidates=[1, 4, 5])
    with pytest.raises(ValueError, match="task of clients=6, but clients=2 of those"):
        Federation(fedavg(task), train, test, selection=some)
    Federation(
        fedavg(Task.of(task.model, train, candidates=[1, 4, 5])),
        train,
        test,
        selection=some,
    )


def kept_by_the_server(task: Task) -> Algorithm:
    """The server keeps what every client sent last, and tells it to that one alone."""

    def client_update(key, round_index, server, client, data):
        return ClientOutput(data.size + server["own"], 1.0)

    def server_update(key, round_index, server, aggregate):
        ids = jnp.where(aggregate.weight > 0, aggregate.client_ids, task.ids)
        return {"own": server["own"].at[ids].set(aggregate.uploads, mode="drop")}

    def predictive(key, server, *others):
        x = others[-2]
        own = jax.nn.one_hot(server["own"].astype(int) % 3, 3) * 9
        return jax.nn.log_softmax(jnp.broadcast_to(own, (1, x.shape[0], 3)))

    return mean_of_data("stack")._replace(
        init=lambda key: {"own": jnp.zeros(task.ids)},
        init_client=lambda key, server: (),
        client_update=client_update,
        server_update=server_update,
        unicast=lambda server, client_id: {"own": server["own"][client_id]},
        global_predictive=predictive,
        personal_predictive=predictive,
        reduce="stack",
    )


def test_a_server_tells_a_client_what_it_keeps_for_it(train, test, task):
    algorithm = kept_by_the_server(Task.of(task.model, train))
    places = {
        "memory": Federation(algorithm, train, test, selection=fixed([5, 0, 4])),
        "stream": StreamedFederation(
            algorithm,
            ClientArrays(train),
            ClientArrays(test),
            selection=fixed([5, 0, 4]),
            block_size=2,
        ),
    }
    for where, federation in places.items():
        state, _ = federation.rounds(federation.init(jax.random.key(0)), 2)
        own = np.array([40, 0, 0, 0, 0, 40, 0])  # 4 is empty
        np.testing.assert_array_equal(state.server["own"], own, where)
        assert federation.messages.down["own"].shape == ()
        for scores in (federation.evaluate(state), federation.evaluate_personal(state)):
            right = [(y == n % 3).mean() for y, n in zip(test.y, own)]
            np.testing.assert_allclose(scores.correct / scores.count, right)
        predicted = federation.predict(state, test.x[5], client=5)
        assert (predicted.log_probs.argmax(-1) == 40 % 3).all()
        with pytest.raises(ValueError, match="several global models"):
            federation.predict(state, test.x[5])


def test_without_assign_there_are_no_clusters(train, test):
    federation = Federation(mean_of_data(), train, test)
    with pytest.raises(ValueError, match="mean_of_data knows no clusters"):
        federation.clusters(federation.init(jax.random.key(0)))


@pytest.mark.parametrize("model", ["global", "personal"])
def test_predictions_of_examples_are_those_of_the_scores(train, test, task, model):
    """Two data sets of different capacities, with the draws of the evaluation."""
    plain = fedavg(task)

    def noisy(key, server, *arguments):
        *personal, x, mask = arguments
        params = personal[0] if personal else server.params
        logits = task.model.apply(params, x, mask)
        noise = jax.random.normal(key, (4, *logits.shape))
        return jax.nn.log_softmax(logits[None] + noise)

    algorithm = plain._replace(**{f"{model}_predictive": noisy})
    federation = Federation(
        algorithm, train, test, eval_batch_size=4, calibration_bins=7
    )
    evaluate, predictions = {
        "global": (federation.evaluate, federation.predictions),
        "personal": (federation.evaluate_personal, federation.predictions_personal),
    }[model]
    state = federation.init(jax.random.key(0))
    of_test, of_train = predictions(state, test, train)
    np.testing.assert_array_equal(of_train.mask.sum(1), train.size)
    scores = evaluate(state)
    nll = -np.take_along_axis(np.asarray(of_test.log_probs), test.y[..., None], 2)
    found = {
        "nll": nll[..., 0],
        "entropy": of_test.entropy,
        "mutual_information": of_test.mutual_information,
    }
    for name, values in found.items():
        summed = np.where(of_test.mask, values, 0).sum(1)
        np.testing.assert_allclose(summed, getattr(scores, name), rtol=1e-5)
    assert of_test.mutual_information.min() > 0
    confidence = np.exp(np.asarray(of_test.log_probs).max(2))
    counts = [np.histogram(c, np.linspace(0, 1, 8))[0] for c in confidence]
    np.testing.assert_array_equal(scores.bin_count, counts)


class Normalised(linen.Module):
    """A network whose batch statistics a padded example would spoil."""

    @linen.compact
    def __call__(self, x, mask=None):
        x = linen.relu(nn.BatchNorm()(nn.Dense(5)(x), mask))
        return nn.Dense(3, name="classifier")(x)


def test_padding_changes_nothing_whatever_it_holds(train, test, task):
    """The same clients with thirteen more slots of NaN, through batch norm."""
    model = nn.from_flax(Normalised(), (6,), head="classifier")
    algorithm = fedavg(task._replace(model=model))

    def padded(data):
        slots = np.arange(data.y.shape[1] + 13) < data.size[:, None]
        x = np.pad(data.x, ((0, 0), (0, 13), (0, 0)))
        return data._replace(
            x=np.where(slots[..., None], x, np.nan).astype(np.float32),
            y=np.pad(data.y, ((0, 0), (0, 13))),
        )

    results = []
    for clients, examples in ((train, test), (padded(train), padded(test))):
        federation = Federation(algorithm, clients, examples, eval_batch_size=4)
        state, metrics = federation.rounds(federation.init(jax.random.key(0)), 3)
        assert not metrics.failed.any()
        scores = federation.evaluate(state), federation.evaluate_personal(state)
        results.append((state.server.params, scores))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results
    )


def with_importance(report, score=lambda server, reports, counts: reports):
    return mean_of_data()._replace(importance={"size": Importance(report, score)})


def by_size(key, server, client, data):
    return data.size.astype(jnp.float32)


def test_a_selection_may_go_by_importance(train, test):
    """Its rule gets every client's score, and who holds data; its choice is kept."""

    def select(key, round_index, scores, counts):
        return jnp.argsort(-scores)[:2].astype(jnp.int32), (scores, counts)

    selection = Selection(7, 2, select, measure="size")
    federation = Federation(with_importance(by_size), train, test, selection=selection)
    _, metrics = federation.round(federation.init(jax.random.key(0)))
    assert set(metrics.client_ids.tolist()) == {0, 5}
    scores, counts = metrics.choice
    np.testing.assert_array_equal(scores, train.size)
    np.testing.assert_array_equal(counts, train.size > 0)


def test_who_is_not_asked_reports_nothing(train, test):
    """Without a measure no report is computed; with candidates, theirs alone."""
    asked = []

    def report(key, server, client, data):
        asked.append(1)
        return client["id"].astype(jnp.float32)

    def score(server, reports, counts):
        assert reports.shape == counts.shape and reports.shape[0] in (3, 4)
        return reports + counts

    algorithm = with_importance(report, score)
    plain = Federation(algorithm, train, test, selection=uniform(7, 1))
    traced = len(asked)  # the contract's
    _, metrics = plain.round(plain.init(jax.random.key(0)))
    assert len(asked) == traced and metrics.choice == ()
    selection = proportional(7, 1, "size", floor=0.0, candidates=[6, 4, 2, 3])
    federation = Federation(algorithm, train, test, selection=selection)
    state = number_clients(federation.init(jax.random.key(0)))
    _, metrics = federation.round(state)
    # Scores id + 1 of those with data; client 4 has none.
    expected = np.array([0, 0, 3, 4, 0, 0, 7]) / 14
    np.testing.assert_allclose(metrics.choice.probabilities, expected, rtol=1e-5)


def test_a_report_that_is_not_finite_counts_in_no_mean_and_is_reported(train, test):
    """Client 1's is infinite; the mean is over the five others with data."""

    def report(key, server, client, data):
        bad = client["id"] == 1
        return {"x": jnp.where(bad, jnp.inf, client["id"].astype(jnp.float32))}

    def score(server, reports, counts):
        total = jnp.where(counts, reports["x"], 0.0).sum()
        scores = jnp.where(reports["x"] == 0, 1.6, total / counts.sum())
        return jnp.where(reports["x"] == 3, jnp.nan, scores)

    selection = proportional(7, 1, "size", floor=0.0)
    algorithm = with_importance(report, score)
    federation = Federation(algorithm, train, test, selection=selection)
    state = number_clients(federation.init(jax.random.key(0)))
    _, metrics = federation.rounds(state, 30)
    choice = jax.tree.map(lambda leaf: np.asarray(leaf[0]), metrics.choice)
    assert choice.invalid.tolist() == [i in (1, 3) for i in range(7)]
    # The mean is (0 + 2 + 3 + 5 + 6) / 5 = 3.2: client 0 has half of it.
    expected = np.array([0.5, 0, 1, 0, 0, 1, 1]) / 3.5
    np.testing.assert_allclose(choice.probabilities, expected, rtol=1e-6)
    assert set(np.ravel(metrics.client_ids).tolist()) <= {0, 2, 5, 6}
    assert not metrics.empty.any() and not metrics.failed.any()


def test_what_the_score_sees_of_an_unusable_report_is_zero(train, test):
    seen = Selection(
        7,
        1,
        lambda key, round_index, scores, counts: (jnp.zeros(1, jnp.int32), scores),
        measure="size",
    )

    def report(key, server, client, data):
        return jnp.where(client["id"] == 1, jnp.nan, 5.0)

    def score(server, reports, counts):
        return jnp.where(jnp.isnan(reports).any(), -1.0, reports + reports.sum())

    algorithm = with_importance(report, score)
    federation = Federation(algorithm, train, test, selection=seen)
    state = number_clients(federation.init(jax.random.key(0)))
    _, metrics = federation.round(state)
    np.testing.assert_array_equal(metrics.choice, [35, np.nan, 35, 35, 35, 35, 35])


def test_reports_have_keys_of_round_and_client(train, test):
    def report(key, server, client, data):
        return jax.random.uniform(key)

    def select(key, round_index, scores, counts):
        return jnp.zeros(1, jnp.int32), scores

    selection = Selection(7, 1, select, measure="size")
    federation = Federation(with_importance(report), train, test, selection=selection)
    _, metrics = federation.rounds(federation.init(jax.random.key(0)), 2)
    assert len(np.unique(metrics.choice)) == 14


def test_pythons_own_numbers_in_a_state_are_compiled_for_once(train, test):
    algorithm = mean_of_data()._replace(init=lambda key: jnp.full((), -5.0))
    federation = Federation(algorithm, train, test)
    state = federation.init(jax.random.key(0))
    federation.compile("rounds", federation.shapes(), n=1)
    assert not state.server.weak_type
    for _ in range(2):
        state, _ = federation.rounds(state, 1)
    assert federation._jits["rounds", False]._cache_size() == 1


def test_chunks_and_devices_choose_the_same_clients(train, test):
    """Random reports, so that only the keys could make them agree."""

    def report(key, server, client, data):
        return jax.random.uniform(key, (3,))

    def score(server, reports, counts):
        return reports.sum(1) / reports.sum()

    algorithm = with_importance(report, score)
    results = []
    for options in ({}, {"chunk_size": 3}, {"chunk_size": 2, "mesh": clients_mesh(2)}):
        selection = proportional(7, 2, "size")
        federation = Federation(algorithm, train, test, selection=selection, **options)
        _, metrics = federation.rounds(federation.init(jax.random.key(0)), 5)
        results.append(metrics)
    for other in results[1:]:
        np.testing.assert_array_equal(other.client_ids, results[0].client_ids)
        np.testing.assert_allclose(
            other.choice.probabilities, results[0].choice.probabilities, rtol=1e-5
        )
    assert len(np.unique(results[0].client_ids)) > 3


def test_mistakes_are_named_before_compilation(train, test):
    few = jax.tree.map(lambda a: a[:3], test)
    empty = train._replace(size=np.zeros_like(train.size))
    algorithm = mean_of_data()
    with pytest.raises(ValueError, match="test holds 3 clients and train 7"):
        Federation(algorithm, train, few)
    with pytest.raises(ValueError, match="every client is empty"):
        Federation(algorithm, empty, test)
    with pytest.raises(ValueError, match="chunk_size=0"):
        Federation(algorithm, train, test, chunk_size=0)
    with pytest.raises(ValueError, match="eval_batch_size=0"):
        Federation(algorithm, train, test, eval_batch_size=0)
    with pytest.raises(ValueError, match="selection chooses from 40 clients, .* 7"):
        Federation(algorithm, train, test, selection=uniform(40, 5))
    with pytest.raises(ValueError, match="by measure='ksd': mean_of_data has none"):
        Federation(algorithm, train, test, selection=proportional(7, 1, "ksd"))
    serial = algorithm._replace(cohort=1)
    with pytest.raises(ValueError, match="selection of 7 clients .* participants=1"):
        Federation(serial, train, test)
    federation = Federation(algorithm, train, test)
    with pytest.raises(ValueError, match="n=1.5 must be a whole number"):
        federation.rounds(federation.init(jax.random.key(0)), 1.5)
    for key in (0, jax.random.PRNGKey(0)):
        with pytest.raises(ValueError, match="must be a typed key: jax.random.key"):
            federation.init(key)


def test_a_cohort_of_weight_zero_changes_nothing(train, test):
    algorithm = mean_of_data()

    def client_update(*args):
        return algorithm.client_update(*args)._replace(weight=0.0)

    federation = Federation(
        algorithm._replace(client_update=client_update), train, test
    )
    state, _ = federation.round(federation.init(jax.random.key(0)))
    assert state.server == -5.0


@pytest.mark.parametrize("reduce", ["sum", "stack"])
def test_the_population_is_who_may_take_part(train, test, reduce):
    """Client 4 is empty; 0, 2 and 6 stay out."""
    algorithm = mean_of_data(reduce=reduce)._replace(
        server_update=lambda key, round_index, server, aggregate: jnp.float32(
            aggregate.population
        )
    )
    few = uniform(7, 2, candidates=[1, 3, 4, 5])
    federation = Federation(algorithm, train, test, selection=few)
    state, metrics = federation.rounds(federation.init(jax.random.key(0)), 20)
    assert federation.population == state.server == 3
    assert set(np.ravel(metrics.client_ids).tolist()) == {1, 3, 4, 5}
    np.testing.assert_array_equal(
        state.clients["visits"] > 0, [False, True, False, True, False, True, False]
    )
    with pytest.raises(ValueError, match="or every one that selection may pick"):
        Federation(algorithm, train, test, selection=uniform(7, 1, candidates=[4]))


def test_a_second_round_over_devices_compiles_nothing(train, test):
    federation = Federation(mean_of_data(), train, test, mesh=clients_mesh(2))
    state, _ = federation.round(federation.init(jax.random.key(0)))
    compiled = []

    def note(event, seconds, **_):
        compiled.append(event) if event.endswith("backend_compile_duration") else None

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        state, _ = federation.rounds(state, 1)
        assert not compiled
        jax.jit(lambda x: x + 1.5)(jnp.zeros(3))
        assert compiled  # the event is still called so
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_a_whole_run_is_one_call(train, test):
    federation = Federation(mean_of_data(), train, test, selection=uniform(7, 3))

    def start():
        return federation.init(jax.random.key(5))

    def stack(trees, join):
        return jax.tree.map(lambda *a: join(a), *trees)

    state, seen, scores = federation.run(start(), 6, eval_every=2)
    expected, metrics, all_scores = start(), [], []
    for _ in range(3):
        expected, block = federation.rounds(expected, 2)
        metrics.append(block)
        all_scores.append(federation.evaluate(expected))
    chex.assert_trees_all_close(state.server, expected.server, rtol=1e-6)
    chex.assert_trees_all_close(seen, stack(metrics, jnp.concatenate), rtol=1e-6)
    chex.assert_trees_all_close(scores, stack(all_scores, jnp.stack), rtol=1e-5)
    *_, personal = federation.run(start(), 2, eval_every=2, personal=True)
    state, _ = federation.rounds(start(), 2)
    wanted = federation.evaluate_personal(state)
    chex.assert_trees_all_close(stack([personal], lambda a: a[0][0]), wanted)


def test_a_whole_run_of_several_seeds_is_traced_once(train, test):
    federation = Federation(mean_of_data(), train, test, selection=uniform(7, 3))
    keys = jax.vmap(jax.random.key)(jnp.array([4, 5]))
    state, metrics, scores = federation.run(federation.init(keys), 6, 3)
    traced = TRACES["client_update"]
    federation.run(federation.init(keys), 6, 3)
    assert TRACES["client_update"] == traced
    assert metrics.client_ids.shape == (2, 6, 3) and scores.count.shape == (2, 2, 7)
    alone, *_ = federation.run(federation.init(jax.random.key(5)), 6, 3)
    np.testing.assert_allclose(state.server[1], alone.server, rtol=1e-6)


@pytest.mark.parametrize(
    ("rounds", "eval_every", "message"),
    [(0, 1, "rounds=0"), (4, 0, "eval_every=0"), (5, 2, "multiple of eval_every=2")],
)
def test_a_run_of_odd_lengths_is_refused(train, test, rounds, eval_every, message):
    federation = Federation(mean_of_data(), train, test)
    with pytest.raises(ValueError, match=message):
        federation.run(federation.init(jax.random.key(0)), rounds, eval_every)


def one(field, index, value):
    """`ClientData` with one value of a field changed."""

    def change(data):
        changed = np.array(getattr(data, field))
        changed[index] = value
        return data._replace(**{field: changed})

    return change


BAD_DATA = {
    "a label below 0": (one("y", (2, 7), -1), r"y\[2, 7\] = -1 is outside 0..2"),
    "labels 1..3 of 3": (
        lambda data: data._replace(y=data.y + 1),
        r"y\[\d+, \d+\] = 3 is outside 0..2, the labels of the 3 classes of the model",
    ),
    "more than fit": (one("size", 1, 99), r"size\[1\]=99 must lie in 0..(20|10): a cl"),
    "a negative size": (one("size", 6, -1), r"size\[6\]=-1 must lie in 0.."),
    "y of fewer clients": (
        lambda data: data._replace(y=data.y[:3]),
        r"x has shape \(7, \d+, 6\), (train|test).y \(3, \d+\) and",
    ),
    "sizes of fewer": (lambda data: data._replace(size=data.size[:3]), r"size \(3,\)"),
    "no capacity": (
        lambda data: data._replace(x=data.x[:, :0], y=data.y[:, :0]),
        r"y \(7, 0\)",
    ),
    "sizes that are floats": (
        lambda data: data._replace(size=data.size * 1.0),
        "size is float32: it must be integers",
    ),
    "labels that are names": (
        lambda data: data._replace(y=data.y.astype(str)),
        "y is <U.*: it must be numbers",
    ),
    "an array": (lambda data: data.x, "=.* must be a fedvi.ClientData of arrays"),
    "a list": (lambda data: list(data), "=list must be a fedvi.ClientData of arrays"),
    "other inputs": (
        lambda data: data._replace(x=data.x[..., :5]),
        r"of shape \((5|6),\) and train.x of \((5|6),\): they must be the same",
    ),
}


@pytest.mark.parametrize("argument", ["train", "test"])
@pytest.mark.parametrize("case", BAD_DATA)
def test_data_made_by_hand_are_checked_like_the_loaders(train, test, case, argument):
    """C23."""
    change, message = BAD_DATA[case]
    data = {"train": train, "test": test}
    data[argument] = change(data[argument])
    with pytest.raises(ValueError, match=message) as found:
        Federation(mean_of_data(), **data)
    assert argument in str(found.value) and "\n" not in str(found.value)
    if case != "labels that are names":  # JAX has no text
        data = jax.tree.map(jnp.asarray, data)
        with pytest.raises(ValueError, match=message.replace("float64", "float32")):
            Federation(mean_of_data(), **data)


def test_padding_may_hold_anything(train, test):  # C23
    padding = np.arange(20) >= train.size[:, None]
    odd = train._replace(
        y=np.where(padding, -7, train.y),
        x=np.where(padding[..., None], np.nan, train.x),
    )
    Federation(mean_of_data(), odd, test)


def test_one_logit_is_no_classifier_of_two_classes(train, test, task):  # C23
    binary = [data._replace(y=data.y % 2) for data in (train, test)]
    model = nn.build("mlp", classes=1, input_shape=(6,), hidden=(5,))
    with pytest.raises(ValueError, match=r"= 1 is outside 0..0, the labels of the 1 c"):
        Federation(fedavg(task._replace(model=model)), *binary)
    model = nn.build("binary_logistic", classes=2, input_shape=(6,))
    Federation(fedavg(task._replace(model=model)), *binary)


def test_a_model_for_other_inputs_is_named(train, test, task):
    model = nn.build("mlp", classes=3, input_shape=(2, 4), hidden=(5,))
    with pytest.raises(ValueError, match=r"shape \(6,\), and the model mlp was built "):
        Federation(fedavg(task._replace(model=model)), train, test)


def test_arguments_of_another_kind_are_named(train, test):
    for options, message in (
        ({"chunk_size": 2.5}, "chunk_size=2.5 must be a whole number, at least 1"),
        ({"chunk_size": "a"}, "chunk_size='a' must be a whole number"),
        ({"calibration_bins": 0}, "calibration_bins=0 must be a whole number"),
        ({"eval_batch_size": True}, "eval_batch_size=True must be a whole number"),
        ({"runs_at_once": None}, "runs_at_once=None must be a whole number"),
        ({"spread_clients": "yes"}, "spread_clients='yes' must be True, False or None"),
        ({"selection": "uniform"}, "selection='uniform' must be a fedvi.selection.Sel"),
        ({"mesh": "x"}, "mesh='x' must be one over clients: fedvi.clients_mesh"),
        ({"codec": "int8"}, "codec='int8' must be a fedvi.codecs.Codec"),
    ):
        with pytest.raises(ValueError, match=message):
            Federation(mean_of_data(), train, test, **options)


def test_a_state_of_another_federation_is_named(train, test, task):
    federation = Federation(mean_of_data(), train, test)
    state = federation.init(jax.random.key(0))
    others = [jax.tree.map(lambda leaf: leaf[:5], data) for data in (train, test)]
    five = Federation(mean_of_data(), *others).init(jax.random.key(0))
    other = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        Federation(fedavg(task), train, test).shapes()._replace(key=()),
    )
    for given, message in (
        (None, "state=NoneType must be a fedvi.State"),
        (tuple(state), "state=tuple must be a fedvi.State"),
        ((state, ()), "state=tuple must be a fedvi.State"),
        (five, r"state is none of this federation's: at .clients\['id'\] expected int"),
        (other._replace(key=state.key), "none of this federation's: it lacks"),
        (state._replace(key=0), "key=0 must be a typed key"),
        (state._replace(server=jnp.zeros(2)), r"at .server expected float32\[\], got"),
    ):
        for call in (
            lambda s: federation.rounds(s, 1),
            federation.round,
            lambda s: federation.run(s, 1),
            federation.evaluate,
            federation.predictions,
            federation.predictions_personal,
            federation.finite,
            federation.posterior,
        ):
            with pytest.raises(ValueError, match=message):
                call(given)


def test_a_state_that_a_round_used_up_is_named(train, test):
    federation = Federation(mean_of_data(), train, test)
    state = federation.init(jax.random.key(0))
    federation.round(state)
    for call in (federation.round, federation.evaluate, federation.finite):
        with pytest.raises(ValueError, match="state was given to round, .* go on with"):
            call(state)


def test_a_key_of_another_generator_is_refused(train, test):
    """C20: with XLA's own generator results would depend on the chunk size."""
    federation = Federation(mean_of_data(), train, test)
    for generator in ("rbg", "unsafe_rbg"):
        key = jax.random.key(0, impl=generator)
        with pytest.raises(ValueError, match=f"generator '{generator}', with which re"):
            federation.init(key)
        with jax.default_prng_impl(generator):
            with pytest.raises(ValueError, match="impl='threefry2x32'"):
                federation.init(jax.random.key(0))
            assert federation.shapes().key.dtype == root_key(0).dtype


def predicting(change) -> Algorithm:
    """Both models predict what `change` makes of log-probabilities."""
    plain = mean_of_data()
    functions = {
        name: lambda *arguments, name=name: change(getattr(plain, name)(*arguments))
        for name in ("global_predictive", "personal_predictive")
    }
    return plain._replace(**functions)


@pytest.mark.parametrize("change", [jnp.exp, lambda p: p + 3.0], ids=["p", "logits"])
def test_predictions_that_are_no_log_probabilities_are_refused(train, test, change):
    federation = Federation(predicting(change), train, test, eval_batch_size=4)
    state = federation.init(jax.random.key(0))
    for call, function in (
        (federation.evaluate, "global_predictive"),
        (federation.evaluate_personal, "personal_predictive"),
        (lambda s: federation.predictions(s, test), "global_predictive"),
        (lambda s: federation.predictions_personal(s, test), "personal_predictive"),
        (lambda s: federation.run(s, 1), "global_predictive"),
    ):
        message = f"{function} returns no log-probabilities: those of 70 examples do "
        with pytest.raises(ValueError, match=message):
            call(state)


def test_rounded_and_diverged_predictions_are_not_blamed(train, test):
    for change in (
        lambda p: p.astype(jnp.bfloat16),
        lambda p: jax.nn.log_softmax(p * jnp.inf),  # NaN, as of infinite logits
        lambda p: jax.nn.log_softmax(p * 1e30),
    ):
        federation = Federation(predicting(change), train, test)
        scores = federation.evaluate(federation.init(jax.random.key(0)))
        assert not np.any(scores.unnormalised)


def test_every_batch_of_every_client_has_its_own_key(train, test):
    """And the same one in any chunks, and on any devices."""

    def noise(key, server, *arguments):
        x = arguments[-2]
        return jax.nn.log_softmax(4 * jax.random.normal(key, (1, x.shape[0], 3)))

    algorithm = mean_of_data()._replace(
        global_predictive=noise, personal_predictive=noise
    )
    found = []
    for options in ({}, {"chunk_size": 3, "mesh": clients_mesh(2)}):
        federation = Federation(algorithm, train, test, eval_batch_size=5, **options)
        state = federation.init(jax.random.key(0))
        both = federation.predictions_personal(state, test, test)
        found.append((federation.evaluate(state), both))
    chex.assert_trees_all_close(*found, rtol=1e-6)
    scores, both = found[0]
    assert len(np.unique(scores.entropy)) == 7  # of the global model too
    # Two batches of five in two data sets of seven clients: nothing twice.
    values = np.stack([one.entropy for one in both])
    assert values.shape == (2, 7, 10) and len(np.unique(values)) == 2 * 7 * 10


def test_a_posterior_is_a_distribution(train, test):
    wrong = mean_of_data()._replace(
        posterior=lambda server: server, personal_posterior=lambda server, own: own
    )
    federation = Federation(wrong, train, test)
    state = federation.init(jax.random.key(0))
    with pytest.raises(ValueError, match="posterior returns ArrayImpl: it must return"):
        federation.posterior(state)
    with pytest.raises(ValueError, match="personal_posterior returns ArrayImpl"):
        federation.posterior(state, jnp.int32(3))
    for client in (True, 2.0, "a"):
        with pytest.raises(ValueError, match=f"client={client!r} must be an id, 0 to"):
            federation.posterior(state, client)


def test_float64_and_strict_types_change_nothing(train, test, task):  # C24
    federation = Federation(fedavg(task), train, test)

    def run(federation):
        state, metrics = federation.rounds(federation.init(jax.random.key(0)), 2)
        assert federation.finite(state)
        scores = federation.evaluate(state), federation.evaluate_personal(state)
        return state.server, metrics, scores

    expected = run(federation)
    wide = train._replace(
        x=train.x.astype(np.float64), y=train.y.astype(np.int64), size=train.size
    )
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = run(Federation(fedavg(task), wide, test))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    chex.assert_trees_all_equal(found, expected)
