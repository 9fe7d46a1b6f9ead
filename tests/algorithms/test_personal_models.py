"""Ditto, pFedMe and HeurFedAMP: clients that keep a model of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithm import StackedAggregate, Task
from fedvi.algorithms import ditto, heurfedamp, local_only, pfedme
from fedvi.algorithms.heurfedamp import Server
from fedvi.data import ClientData
from fedvi.federation import take
from fedvi.flat import flatten, trees
from fedvi.local import LocalTraining
from fedvi.nn import Model

KEY = jax.random.key(0)
CENTRE = np.array([3.0, -1.0])
CURVATURES = np.array([1.0, 4.0])


def quadratic_model() -> Model:
    """f(θ) = ½ Σ_j a_j (θ_j - c_j)², whatever the data."""

    def apply(params, x, mask=None):
        return jnp.broadcast_to(params["body"]["w"], (x.shape[0], 2))

    def loss(outputs, y, mask):
        return 0.5 * jnp.sum(CURVATURES * (outputs[0] - CENTRE) ** 2)

    return Model(
        init=lambda key: {"body": {"w": jnp.zeros(2)}, "head": {}},
        apply=apply,
        with_classes=None,
        name="quadratic",
        classes=2,
        loss=loss,
    )


def one_client(examples=8) -> ClientData:
    return ClientData(
        jnp.zeros((examples, 1)), jnp.zeros(examples, jnp.int32), jnp.int32(examples)
    )


def task_of(model, **training) -> Task:
    local = LocalTraining(**{"batch_size": 8, "momentum": 0.0, **training})
    return Task(model, local, local, clients=3, samples=24)


def test_ditto_without_a_penalty_is_local_training(task, train, optimised):
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    algorithm, local = ditto(task, personal_penalty=0.0), local_only(task)
    server = algorithm.init(KEY)
    client = algorithm.init_client(KEY, server)
    output = optimised(algorithm.client_update)(KEY, 0, server, client, data)
    own_key = jax.random.split(KEY)[1]
    alone = optimised(local.client_update)(own_key, 0, (), server.params, data)
    jax.tree.map(np.testing.assert_array_equal, output.client.params, alone.client)
    known, kept = algorithm.kept(server, output.client)
    assert known and kept is output.client.params
    assert not algorithm.kept(server, client)[0]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_dittos_own_model_is_the_minimiser_of_its_objective(momentum):
    task = task_of(quadratic_model(), epochs=300, learning_rate=0.05, momentum=momentum)
    algorithm = ditto(task, personal_penalty=2.0)
    server = algorithm.init(KEY)
    client = algorithm.init_client(KEY, server)
    output = algorithm.client_update(KEY, 0, server, client, one_client())
    best = CURVATURES * CENTRE / (CURVATURES + 2.0)  # θ = 0
    found = output.client.params["body"]["w"]
    np.testing.assert_allclose(found, best, rtol=1e-4)
    newcomer = algorithm.personalise(KEY, server, client, one_client())
    np.testing.assert_allclose(newcomer["body"]["w"], best, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_pfedme_descends_the_moreau_envelope(optimizer):
    task = task_of(quadratic_model(), learning_rate=0.02, optimizer=optimizer)
    algorithm = pfedme(
        task, personal_penalty=5.0, personal_steps=400, inner_learning_rate=0.05
    )
    server = algorithm.init(KEY)
    client = algorithm.init_client(KEY, server)
    output = algorithm.client_update(KEY, 0, server, client, one_client())
    theta = CURVATURES * CENTRE / (CURVATURES + 5.0)  # w = 0
    np.testing.assert_allclose(output.client.params["body"]["w"], theta, rtol=1e-3)
    # One minibatch: w moves by -η ∇F(w), and ∇F(w) = λ (w - θ) = ∇f(θ).
    gradient = CURVATURES * (theta - CENTRE)
    moved = output.upload["body"]["w"]
    np.testing.assert_allclose(moved, -0.02 * gradient, rtol=1e-3)


def test_pfedme_stays_near_its_moving_w():
    """Three minibatches: θ goes on from where it was, near w_i and not near itself."""
    task = task_of(quadratic_model(), epochs=3, learning_rate=0.1)
    algorithm = pfedme(task, personal_penalty=5.0, personal_steps=2)
    server = algorithm.init(KEY)
    client = algorithm.init_client(KEY, server)
    output = algorithm.client_update(KEY, 0, server, client, one_client())
    theta = w = np.zeros(2)
    for _ in range(3):
        for _ in range(2):
            theta = theta - 0.1 * CURVATURES * (theta - CENTRE)
            theta = (theta + 0.1 * 5 * w) / (1 + 0.1 * 5)
        w = w - 0.1 * 5 * (w - theta)
    np.testing.assert_allclose(output.client.params["body"]["w"], theta, rtol=1e-5)
    np.testing.assert_allclose(output.upload["body"]["w"], w, rtol=1e-5)


def test_a_step_of_w_that_would_diverge_is_refused(task):
    training = task.training._replace(learning_rate=0.2, optimizer="adam")
    with pytest.raises(ValueError, match="smaller, or give a smaller personal_penalty"):
        pfedme(task._replace(training=training))


def cloud_models(models, known, own_share, sharpness, first):
    """u_i of every client, one by one."""
    clouds = []
    for i, own in enumerate(models):
        others = [j for j in range(len(models)) if known[j] and j != i]
        if not others:
            clouds.append(own if known[i] else first)
            continue
        likeness = np.zeros(len(others))
        if known[i]:
            likeness = [
                own @ models[j] / np.linalg.norm(own) / np.linalg.norm(models[j])
                for j in others
            ]
        shares = np.exp(sharpness * np.array(likeness))
        rest = shares / shares.sum() @ models[others]
        clouds.append(own_share * own + (1 - own_share) * rest if known[i] else rest)
    return np.array(clouds)


@pytest.mark.parametrize(
    "known", [[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], ids=["three", "one", "none"]
)
def test_cloud_models_are_those_of_a_loop(task, known):
    task = task._replace(total=4)
    algorithm = heurfedamp(task, own_share=0.3, sharpness=7.0)
    start = algorithm.init(KEY)
    known = np.array(known, bool)
    models = np.random.default_rng(0).normal(size=start.models.shape) * known[:, None]
    server = Server(start.cloud, jnp.asarray(models, jnp.float32), jnp.int32(known))
    first = np.asarray(flatten(trees(start.cloud)).vector)
    expected = cloud_models(models, known, 0.3, 7.0, first)
    for i in range(4):
        found = flatten(trees(algorithm.unicast(server, i).cloud)).vector
        np.testing.assert_allclose(found, expected[i], rtol=2e-5, atol=1e-6)


def test_heurfedamp_of_the_own_model_alone_is_local_training(task, train):
    task = task._replace(total=7)
    options = {"own_share": 1.0, "personal_penalty": 0.0}
    algorithm, local = heurfedamp(task, **options), local_only(task)
    server = algorithm.init(KEY)
    client, alone = algorithm.init_client(KEY, server), server.cloud
    for turn in range(2):
        visited = [0, 1] if turn == 0 else [0]
        outputs = []
        for i in visited:
            data = take(jax.tree.map(jnp.asarray, train), i)
            sent = algorithm.unicast(server, i)
            own = client if i == 0 else algorithm.init_client(KEY, server)
            outputs.append(algorithm.client_update(KEY, turn, sent, own, data))
            if i == 0:
                alone = local.client_update(KEY, turn, (), alone, data).client
        # The first client's model in the first round is where the second one starts
        # only from the next round on.
        client = outputs[0].client
        uploads = jax.tree.map(lambda *a: jnp.stack(a), *[o.upload for o in outputs])
        ids = jnp.array(visited)
        weight = jnp.ones(len(visited))
        stacked = StackedAggregate(uploads, weight, ids, len(visited), 7)
        server = algorithm.server_update(KEY, turn, server, stacked)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        client.params,
        alone,
    )
    assert list(server.updates) == [2, 1, *[0] * 5]


def test_who_failed_keeps_the_model_that_the_server_has(task):
    algorithm = heurfedamp(task._replace(total=3))
    server = algorithm.init(KEY)
    server = server._replace(models=server.models + 1.0, updates=jnp.array([1, 1, 0]))
    moved = jax.tree.map(lambda leaf: jnp.ones((2, *leaf.shape)), server.cloud)
    stacked = StackedAggregate(moved, jnp.array([1.0, 0]), jnp.array([0, 1]), 1, 3)
    after = algorithm.server_update(KEY, 0, server, stacked)
    np.testing.assert_allclose(after.models[0], 2.0, rtol=1e-6)
    np.testing.assert_array_equal(after.models[1:], server.models[1:])
    assert list(after.updates) == [2, 1, 0]
