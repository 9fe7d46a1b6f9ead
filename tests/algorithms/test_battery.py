"""What every registered algorithm must pass, a user's own included.

A method compiles five programs here: the first state, one round, predictions of either
kind, and a round in chunks on two devices. Whatever else is checked is read off what
they return or off shapes: eight seconds a method is the budget.
"""

import dataclasses

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms import ALGORITHMS, build, options_of
from fedvi.client_map import clients_mesh
from fedvi.experiment.calibration import Examples, measure
from fedvi.federation import Federation
from fedvi.flat import trees
from fedvi.local import LocalTraining
from fedvi.selection import uniform

ROUNDS = 8
CLASSES = 3
PARTS = 10  # data sets to calibrate with, and as many to cover

# The mean-field methods' defaults are for thousands of weights and hundreds of
# examples a client. Here a client holds 1 to 20: the KL term would drown them, and
# SGD at the others' rate is unstable on it, since its curvature is 1/σ².
ADAM = LocalTraining(2, 8, learning_rate=0.02, optimizer="adam")
MEAN_FIELD = {
    "pfedbayes": {"zeta": 0.05},
    "sfedbayes": {"zeta": 0.05, "inclusion_rate": 10.0},
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


# A Langevin step is γ n of the mean loss: the default is for hundreds of examples. So
# is that FOLA's prior holds the 67 of all clients back.
OTHERS = {"fedsoul": {"sampler_step_size": 5e-3}, "fola": {"precision": 10.0}}


def signature(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def without_key(state):
    return state._replace(key=())


def accuracy(examples):
    return 100 * np.mean(examples.log_probs.argmax(-1) == examples.labels)


def nll(examples):
    own = np.take_along_axis(examples.log_probs, examples.labels[..., None], -1)
    return -np.mean(own)


@pytest.fixture(scope="module", params=sorted(ALGORITHMS))
def name(request):
    yield request.param
    jax.clear_caches()  # of no use to the next method


@pytest.fixture(scope="module")
def federation(name, task, train, test):
    options = OTHERS.get(name, {})
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


def predict(federation, state, data, seed=0):
    """`Examples` of some data, by model."""
    return {
        kind: Examples.of(jax.device_get(predictions(state, data)[0]), data.y, seed)
        for kind, predictions in (
            ("global", federation.predictions),
            ("personal", federation.predictions_personal),
        )
    }


@pytest.fixture(scope="module")
def run(federation, test, clients_of):
    """One short run: states before, after a round and at the end, metrics, scores."""
    # As many visits for a serial method.
    rounds = ROUNDS * (5 if federation.algorithm.cohort == 1 else 1)
    state = federation.init(jax.random.key(0))
    # A round donates its state.
    start = jax.device_get(without_key(state))
    first = predict(federation, state, test)
    state, metrics = federation.rounds(state, 1)
    after_one, turns = jax.device_get(without_key(state)), [metrics]
    for _ in range(rounds - 1):
        state, metrics = federation.rounds(state, 1)
        turns.append(metrics)
    # Of the shapes of the test data: half to calibrate with, half to cover.
    fresh = [clients_of((10,) * 7, seed=2 + part) for part in range(2 * PARTS)]
    examples = [
        predict(federation, state, data, seed) for seed, data in enumerate(fresh)
    ]
    return {
        "start": start,
        "after_one": after_one,
        "state": state,
        "metrics": jax.tree.map(lambda *leaves: np.concatenate(leaves), *turns),
        "first": first,
        "last": predict(federation, state, test),
        "examples": jax.tree.map(lambda *parts: np.concatenate(parts, 1), *examples),
    }


@pytest.fixture(scope="module")
def shapes(federation):
    """What each function of the algorithm returns, by shape; compiles nothing."""
    algorithm, key = federation.algorithm, jax.random.key(0)
    one = jax.tree.map(lambda leaf: leaf[0], (federation.train, federation.test))

    def trace(key, train, test):
        server = algorithm.init(key)
        broadcast = sent = algorithm.broadcast(server)
        known = server
        if algorithm.unicast is not None:
            sent, known = (algorithm.unicast(s, jnp.int32(0)) for s in (sent, server))
        client = algorithm.init_client(key, server)
        upload = algorithm.client_update(key, jnp.int32(0), sent, client, train).upload
        own = known
        if algorithm.assign is not None:
            _, own = algorithm.assign(key, known, client, train)
        personal = algorithm.personalise(key, known, client, train)
        x, mask = test.x, jnp.ones(test.y.shape, bool)
        samples = {}
        if algorithm.posterior is not None:
            posterior = algorithm.posterior(own)
            assert isinstance(posterior, distrax.Distribution)
            samples["global"] = posterior.sample(seed=key)
        if algorithm.personal_posterior is not None:
            posterior = algorithm.personal_posterior(known, personal)
            assert isinstance(posterior, distrax.Distribution)
            samples["personal"] = posterior.sample(seed=key)
        return {
            "server": server,
            "broadcast": broadcast,
            "upload": upload,
            "statistics": algorithm.statistics(sent, upload),
            "predictions": (
                algorithm.global_predictive(key, own, x, mask),
                algorithm.personal_predictive(key, known, personal, x, mask),
            ),
            "samples": samples,
        }

    return jax.eval_shape(trace, key, *one)


def test_the_state_keeps_its_structure_shapes_and_types(run):
    state = without_key(run["state"])
    assert signature(state) == signature(run["start"])
    assert all(
        leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state)
    )


def test_it_stays_finite_and_nobody_fails(run):
    for leaf in jax.tree.leaves((without_key(run["state"]), run["metrics"])):
        assert np.isfinite(leaf).all()
    assert not run["metrics"].failed.any()
    assert (run["metrics"].empty == (run["metrics"].client_ids == 4)).all()


def test_it_learns(federation, run):
    assert accuracy(run["last"]["personal"]) > 60  # three classes: chance is 33
    if federation.algorithm.global_model:
        assert nll(run["last"]["global"]) < 0.8 * nll(run["first"]["global"])


def test_chunks_and_devices_do_not_matter(federation, run):  # C11
    # The cohort on two devices in chunks of two: vmap, scan, shard_map and padding.
    def other_with(mesh):
        return Federation(
            federation.algorithm,
            federation.train,
            federation.test,
            selection=federation.selection,
            chunk_size=2,
            mesh=mesh,
        )

    if federation.algorithm.host:
        with pytest.raises(ValueError, match="wait for ever: use one"):
            other_with(clients_mesh(2))
    other = other_with(clients_mesh(1 if federation.algorithm.host else 2))
    # One round: what comes after it multiplies rounding errors.
    start = run["start"]._replace(key=jax.random.key(0))
    state, _ = other.rounds(start, 1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
        run["after_one"],
        without_key(state),
    )


def test_predictions_are_distributions(run, shapes):
    for log_probs in shapes["predictions"]:
        assert log_probs.ndim == 3 and log_probs.shape[1:] == (10, CLASSES)
    for kind, examples in run["examples"].items():
        total = np.exp(examples.log_probs).sum(axis=-1)
        np.testing.assert_allclose(total, 1, rtol=1e-5, err_msg=kind)


def test_prediction_sets_cover_what_they_should(federation, run):
    """All clients' examples are of one distribution and exchangeable, for the network
    has no batch statistics. Quantiles of quantiles need one model of all clients too:
    with their own the clients' scores are of several distributions."""
    level, groups = 0.2, {"": np.arange(7)}
    algorithm = federation.algorithm
    shared = algorithm.assign is None and algorithm.unicast is None
    for kind, examples in run["examples"].items():
        half = 10 * PARTS
        calibration, test = (
            Examples(*(leaf[:, part] for leaf in examples))
            for part in (slice(half), slice(half, None))
        )
        found = measure(test, calibration, groups, level=level, bins=15)["conformal"]
        # Of two samples of as many examples, four standard errors; the median of the
        # clients' quantiles has π/2 of the pooled one's variance.
        error = 4 * np.sqrt(2 * level * (1 - level) / (7 * half))
        rules = {"global": error, "client": error}
        if kind == "global" and shared:
            rules["quantile_of_quantiles"] = error * np.sqrt((1 + np.pi / 2) / 2)
        for score, figures in found.figures.items():
            for rule, allowed in rules.items():
                covered = figures[rule]["coverage_micro"]
                assert covered >= 1 - level - allowed, (kind, score, rule)
            # A client's own threshold is for that client alone.
            worst = figures["client"]["worst_client"]
            assert worst >= 1 - level - error * np.sqrt(7), (kind, score)
        if not np.ptp(examples.log_probs):
            continue  # uniform predictions: all scores are equal
        # Sets are no larger than they need be, where scores have no ties.
        assert found.figures["lac"]["global"]["coverage_micro"] < 1 - level + 2 * error


def test_broadcast_only_empties_fields(shapes):
    paths = [
        {jax.tree_util.keystr(path) for path, _ in found}
        for found in map(
            jax.tree_util.tree_leaves_with_path, (shapes["broadcast"], shapes["server"])
        )
    ]
    assert paths[0] <= paths[1]


def test_what_the_server_sums_are_floats(federation, shapes):
    if federation.algorithm.reduce == "stack":
        assert jax.tree.leaves(shapes["upload"])
        return
    for leaf in jax.tree.leaves(shapes["statistics"]):
        assert leaf.dtype == jnp.float32


def test_posteriors_are_over_the_models_parameters(shapes, task):
    params = jax.eval_shape(lambda key: trees(task.model.init(key)), jax.random.key(0))
    for kind, sample in shapes["samples"].items():
        assert signature(sample) == signature(params), kind


def test_every_option_has_a_default_and_says_what_it_means(name):
    for option in dataclasses.fields(options_of(name)):
        assert option.default is not dataclasses.MISSING, option.name
        assert option.metadata["help"].strip(), option.name
