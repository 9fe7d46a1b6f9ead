import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import Federation, algorithms
from fedvi.cohort import clients_mesh
from fedvi.experiment.programs import Programs, state_shapes

SEEDS, FIRST, ROUNDS = 3, 5, 2


@pytest.fixture(scope="module")
def make(task, train, test):
    def make(chunk_size, devices, seeds_at_once):
        mesh = clients_mesh(devices)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        federation = Federation(
            algorithms.build("fedavg", task),
            *jax.device_put((train, test), sharding),
            chunk_size=chunk_size,
            mesh=mesh,
        )
        return federation, Programs(federation, mesh, SEEDS, seeds_at_once)

    return make


@pytest.fixture(scope="module")
def plain(make):
    """One seed and one client at a time, on one device."""
    federation, programs = make(1, 1, 1)
    states, metrics = programs.rounds(programs.init(FIRST), ROUNDS)
    assert programs.run_seconds > 0 and programs.compile_seconds > 0
    return federation, programs, jax.device_get((states.server, metrics.metrics))


def test_a_seed_runs_as_it_would_alone(plain):
    federation, _, (servers, metrics) = plain
    state, own = federation.rounds(federation.init(jax.random.key(FIRST + 1)), ROUNDS)
    for left, right in (
        (jax.tree.map(lambda a: a[1], servers), state.server),
        (jax.tree.map(lambda a: a[1], metrics), own.metrics),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), left, right)


def test_grouping_and_devices_do_not_change_the_result(make, plain):
    _, programs = make(chunk_size=2, devices=4, seeds_at_once=SEEDS)
    states = programs.init(FIRST)
    # Twice: the second call gets the first one's output, sharding included.
    for _ in range(ROUNDS):
        states, _ = programs.rounds(states, 1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        jax.device_get(states.server),
        plain[2][0],
    )


def test_a_program_is_compiled_once(plain):
    _, programs, _ = plain
    states = programs.init(FIRST)
    programs.evaluate(states)
    before = programs.compile_seconds
    programs.evaluate(states)
    states, _ = programs.rounds(states, ROUNDS)
    assert programs.compile_seconds == before


def test_a_server_that_is_not_finite_is_found(plain):
    _, programs, _ = plain
    states = programs.init(FIRST)
    broken = jax.tree.map(lambda a: a.at[1].set(jnp.nan), states.server)
    evaluation = programs.evaluate(states._replace(server=broken))
    assert evaluation.finite.tolist() == [True, False, True]
    assert evaluation.clusters is None


def test_shapes_are_those_of_init(plain):
    federation, programs, _ = plain
    shapes = state_shapes(federation, clients_mesh(1), SEEDS)
    states = programs.init(FIRST)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), states) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )
