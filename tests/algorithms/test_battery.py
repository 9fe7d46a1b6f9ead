"""What every registered algorithm must pass, a user's own included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms import ALGORITHMS, build, options_of
from fedvi.cohort import clients_mesh
from fedvi.evaluation import summarise
from fedvi.federation import Federation
from fedvi.local import LocalTraining
from fedvi.selection import uniform

ROUNDS = 8

# The mean-field methods' defaults are for thousands of weights and hundreds of
# examples a client. Here a client holds 1 to 20: the KL term would drown them, and
# SGD at the others' rate is unstable on it, since its curvature is 1/σ².
ADAM = LocalTraining(2, 8, learning_rate=0.02, optimizer="adam")
MEAN_FIELD = {
    "pfedbayes": {"zeta": 0.05},
    "sfedbayes": {"zeta": 0.05},
    "cfedbayes": {"zeta": 0.05},
    "bpfed": {"zeta": 0.05},
    "fedabml": {"kl_weight": 0.001, "nu": -2.0},
}
# The Stein methods hold a posterior of all weights: their prior must be one that the
# network learns under, and KDE's width of the order of the particles' distances. A
# visit of DSVGD is one client, which would drag the global particles to its own data
# with longer steps. Plain SGD: others divide by small gradients, rounding and all.
STEIN = {"particles": 6, "precision": 1.0, "initial": "network", "kde_bandwidth": 2.0}
STEIN_RATES = {"dsvgd": 0.02, "parallel_dsvgd": 0.3}
# Part of their global model is what nobody trains: everything, or the head.
WITHOUT_GLOBAL_MODEL = ("local_only", "bpfed")


def signature(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def assert_close(a, b):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), a, b
    )


@pytest.fixture(scope="module", params=sorted(ALGORITHMS))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def federation(name, task, train, test):
    options = {}
    if name in MEAN_FIELD:
        options = MEAN_FIELD[name]
        task = task._replace(training=ADAM, finetuning=ADAM)
    if name in STEIN_RATES:
        # Particles that start at a network's weights hold no prior.
        options = STEIN | ({"first_t": "prior"} if name == "dsvgd" else {})
        sgd = LocalTraining(1, 20, STEIN_RATES[name], momentum=0.0, steps=10)
        task = task._replace(training=sgd, finetuning=sgd)
    algorithm = build(name, task, **options)
    cohort = {None: 5, "all": 7}.get(algorithm.cohort, algorithm.cohort)
    return Federation(algorithm, train, test, selection=uniform(7, cohort))


@pytest.fixture(scope="module")
def rounds(federation):
    """As many visits for a serial method."""
    return ROUNDS * 5 if federation.algorithm.cohort == 1 else ROUNDS


@pytest.fixture(scope="module")
def run(federation, rounds):
    """(first state, last state, metrics, scores) of one short run."""
    start = federation.init(jax.random.key(0))
    shapes = signature(start._replace(key=()))
    first = summarise(federation.evaluate(start))
    state, metrics = federation.rounds(start, rounds)
    return {
        "shapes": shapes,
        "state": state,
        "metrics": metrics,
        "first": first,
        "global": summarise(federation.evaluate(state)),
        "personal": summarise(federation.evaluate_personal(state)),
    }


def test_the_state_keeps_its_structure_shapes_and_types(run):
    state = run["state"]._replace(key=())
    assert signature(state) == run["shapes"]
    assert all(
        leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state)
    )


def test_it_stays_finite_and_nobody_fails(run):
    for leaf in jax.tree.leaves((run["state"]._replace(key=()), run["metrics"])):
        assert np.isfinite(leaf).all()
    assert not run["metrics"].failed.any()
    assert (run["metrics"].empty == (run["metrics"].client_ids == 4)).all()


def test_it_learns(run, name):
    personal = run["personal"]["accuracy"]
    assert personal > 60  # three classes: chance is 33
    if name not in WITHOUT_GLOBAL_MODEL:
        assert run["global"]["nll"] < 0.8 * run["first"]["nll"]


def test_chunks_and_devices_do_not_matter(federation, rounds, run):  # C11
    # The cohort on two devices in chunks of two: vmap, scan, shard_map and padding.
    other = Federation(
        federation.algorithm,
        federation.train,
        federation.test,
        selection=federation.selection,
        chunk_size=2,
        mesh=clients_mesh(2),
    )
    state, _ = other.rounds(other.init(jax.random.key(0)), rounds)
    assert_close(run["state"]._replace(key=()), state._replace(key=()))


def test_predictions_are_distributions(federation, run, test):
    algorithm, state = federation.algorithm, run["state"]
    client = jax.tree.map(lambda leaf: leaf[1], state.clients)
    data = jax.tree.map(lambda leaf: leaf[1], federation.train)
    x, mask = jnp.asarray(test.x[1]), jnp.arange(10) < 9
    key = jax.random.key(5)

    @jax.jit
    def predict(server, client, data):
        personal = algorithm.personalise(key, server, client, data)
        own = server
        if algorithm.assign is not None:
            _, own = algorithm.assign(key, server, client, data)
        return (
            algorithm.global_predictive(key, own, x, mask),
            algorithm.personal_predictive(key, server, personal, x, mask),
        )

    for log_probs in predict(state.server, client, data):
        assert log_probs.ndim == 3 and log_probs.shape[1:] == (10, 3)
        np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-5)


def test_broadcast_only_empties_fields(federation, run):
    sent = federation.algorithm.broadcast(run["state"].server)
    everything = {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(run["state"].server)
    }
    for path, _ in jax.tree_util.tree_leaves_with_path(sent):
        assert jax.tree_util.keystr(path) in everything


def test_a_registered_builder_has_only_defaulted_options(name):
    for option in options_of(name).values():
        assert option.default is not option.empty
        assert option.annotation is not option.empty
