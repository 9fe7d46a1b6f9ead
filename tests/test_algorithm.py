import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithm import Aggregate, Algorithm, ClientOutput, StackedAggregate, Task
from fedvi.data import ClientArrays


def test_the_mean_of_an_aggregate_divides_by_the_weight():
    statistics = {"a": jnp.array([2.0, 4.0]), "b": jnp.float32(6)}
    aggregate = Aggregate(statistics, jnp.float32(4), jnp.float32(2), 10)
    np.testing.assert_array_equal(aggregate.mean()["a"], [0.5, 1.0])
    assert aggregate.mean()["b"] == 1.5


def test_a_server_notes_the_rows_of_whose_upload_arrived():
    weight, ids = jnp.array([2.0, 0.0]), jnp.array([3, 1])
    aggregate = StackedAggregate((), weight, ids, jnp.float32(1), 4)
    found = aggregate.noted(jnp.zeros((4, 2)), jnp.ones((2, 2)))
    np.testing.assert_array_equal(found, [[0, 0], [0, 0], [0, 0], [1, 1]])


def test_by_default_clients_keep_nothing_and_servers_send_everything():
    unused = [lambda: None] * 6
    algorithm = Algorithm("bare", *unused)
    server = {"params": jnp.ones(2)}
    assert algorithm.init_client(None, server) == ()
    assert algorithm.broadcast(server) is server
    assert algorithm.reduce == "sum" and algorithm.cohort is None
    assert algorithm.importance == {}
    with pytest.raises(TypeError):  # all algorithms share the default
        algorithm.importance["ksd"] = None
    assert ClientOutput(1.0, 1.0).client == () == ClientOutput(1.0, 1.0).metrics


def test_a_task_counts_the_clients_that_hold_data(task, train):
    whole = Task.of(task.model, train)
    assert (whole.clients, whole.samples, whole.smallest) == (6, 67, 1)
    part = Task.of(task.model, train, candidates=[0, 1, 4])  # 4 is empty
    assert (part.clients, part.samples, part.smallest) == (2, 33, 13)
    nobody = Task.of(task.model, train, candidates=[4])
    assert (nobody.clients, nobody.samples, nobody.smallest) == (0, 0, None)


def test_a_server_may_have_some_of_the_training_inputs(task, train):
    given = Task.of(task.model, train, candidates=[0, 1, 4], unlabelled=11).unlabelled
    owned = np.concatenate([train.x[0], train.x[1, :13]])  # 4 is empty
    np.testing.assert_array_equal(given, owned[::3])
    streamed = Task.of(task.model, ClientArrays(train), None, None, [0, 1, 4], 11)
    np.testing.assert_array_equal(streamed.unlabelled, given)
    assert Task.of(task.model, train).unlabelled is None
    with pytest.raises(ValueError, match="unlabelled=68 is more than the 67 training"):
        Task.of(task.model, train, unlabelled=68)
