"""A slip in a user's algorithm is named before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi import contract_checks
from fedvi.algorithm import Algorithm, ClientOutput, Importance
from fedvi.algorithms import fedavg, local_only
from fedvi.data import ClientData
from fedvi.federation import Federation
from fedvi.keys import root_key
from fedvi.selection import Selection, full, proportional, round_robin, uniform
from fedvi.visit import Call, Visit, personal_model


def broken(algorithm, **functions):
    return algorithm._replace(**functions)


def test_a_good_algorithm_passes(task, train, test):
    for builder in (fedavg, local_only):
        contract_checks.check(builder(task), train, test, 6)
    # A client's own global model may be another pytree than the server's state.
    plain = fedavg(task)
    clustered = plain._replace(
        assign=lambda key, server, client, data: (jnp.int32(0), {"own": server}),
        global_predictive=lambda key, server, x, mask: plain.global_predictive(
            key, server["own"], x, mask
        ),
    )
    contract_checks.check(clustered, train, test, 6)
    measured = broken(plain, importance=importance())
    contract_checks.check(measured, train, test, 6)


def importance(score=lambda server, reports, counts: reports["size"] * 1.0):
    def report(key, server, client, data):
        return {"size": data.size, "params": server.params}

    return {"mine": Importance(report, score)}


def test_slips_are_named(task, train, test):
    good, personal = fedavg(task), local_only(task)

    def no_output(key, round_index, server, client, data):
        return server.params

    def forgets_client(key, round_index, server, client, data):
        return ClientOutput((), 1.0)

    def half(key, round_index, server, aggregate):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), server)

    def other_state(key, round_index, server, aggregate):
        return server.params

    def no_samples(key, server, x, mask):
        return task.model.apply(server.params, x, mask)

    def cluster_only(key, server, client, data):
        return jnp.int32(0)

    def cluster_of_floats(key, server, client, data):
        return jnp.zeros(2), server

    def counts(key, round_index, server, client, data):
        return ClientOutput({"n": data.size}, 1.0)

    for algorithm, message in (
        (object(), "algorithm=object must be a fedvi.Algorithm"),
        (broken(good, reduce="mean"), "reduce='mean' must be one of sum, stack"),
        (broken(good, client_update=no_output), "must return a fedvi.ClientOutput"),
        (
            broken(personal, client_update=forgets_client),
            "client_update changes ClientOutput.client: it lacks",
        ),
        (
            broken(good, server_update=half),
            r"server_update changes the server's state: at .*float32.*bfloat16",
        ),
        (
            broken(good, server_update=other_state),
            "server_update changes the server's state: it ",
        ),
        (
            broken(good, global_predictive=no_samples),
            r"global_predictive returns shape \(10, 3\) for 10 examples",
        ),
        (
            broken(good, client_update=counts),
            r"ClientOutput.upload, without statistics, is int32\[\] at \['n'\]",
        ),
        (
            broken(good, statistics=lambda server, upload: {"n": jnp.int32(1)}),
            r"statistics returns what is int32\[\] at \['n'\]: what is weighted and",
        ),
        (
            broken(good, statistics=lambda server, upload: ()),
            "statistics returns nothing to sum of an upload",
        ),
        (broken(good, assign=cluster_only), r"assign must return \(cluster \[\] int32"),
        (
            broken(good, assign=cluster_of_floats),
            r"assign returns float32\[2\] for the cluster: it must be int32\[\]",
        ),
        (
            broken(
                good,
                importance=importance(lambda server, reports, counts: counts.sum()),
            ),
            r"importance\['mine'\].score returns int32\[\] for 3 clients: return",
        ),
        (
            broken(
                good,
                importance=importance(lambda server, reports, counts: reports["size"]),
            ),
            r"importance\['mine'\].score returns int32\[3\] for 3 clients",
        ),
        (
            broken(
                good,
                importance=importance(
                    lambda server, reports, counts: jnp.ones((3, 1)) * 1.0
                ),
            ),
            r"score returns float32\[3, 1\] for 3 clients: return float32 \[clients\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            contract_checks.check(algorithm, train, test, 6)


def test_what_a_function_raises_names_the_function(task, train, test):
    """Statistics of another structure than the server's are a user's own slip."""

    def other(server, upload):
        return {"body": upload["body"]}

    with pytest.raises(ValueError) as found:
        contract_checks.check(broken(fedavg(task), statistics=other), train, test, 6)
    assert found.value.__notes__[-1] == (
        "raised while the contract of server_update was checked"
    )


def test_it_tells_what_is_sent(task, train, test):
    algorithm = broken(
        fedavg(task),
        statistics=lambda server, upload: (upload, upload),
        server_update=lambda key, round_index, server, aggregate: server,
    )
    found = contract_checks.check(algorithm, train, test, 6)
    assert jax.tree.structure(found.summands) == jax.tree.structure((found.upload,) * 2)
    assert found.down.moments == () and found.client == () and found.reports == {}


def test_a_selection_must_suit_the_algorithm(task):
    plain = fedavg(task)
    serial, everyone = broken(plain, cohort=1), broken(plain, cohort="all")
    measured = broken(plain, importance=importance())
    for algorithm, selection in (
        (plain, uniform(7, 3)),
        (serial, round_robin(7, 1)),
        (everyone, full(7)),
        (everyone, full(7, [1, 2])),
        (everyone, round_robin(7, 3, [4, 5, 6])),
        (measured, proportional(7, 3, "mine")),
    ):
        contract_checks.check_selection(algorithm, selection)
    for algorithm, selection, message in (
        (serial, uniform(7, 3), "selection of 3 clients a round .* participants=1"),
        (everyone, uniform(7, 3), "fedavg, which takes 7: select participants=7"),
        (everyone, uniform(7, 2, [1, 2, 5]), "takes 3: select participants=3"),
        (plain, proportional(7, 3, "ksd"), "measure='ksd': fedavg has none; use"),
        (measured, proportional(7, 3, "ksd"), "measure='ksd': fedavg has mine; use"),
    ):
        with pytest.raises(ValueError, match=message):
            contract_checks.check_selection(algorithm, selection)


def test_what_is_called_must_be_a_function_of_what_it_is_called_with(task, train, test):
    good = fedavg(task)
    bare = {"mine": lambda key, server, client, data: data.size}
    for fields, message in (
        ({"personalise": None}, r"personalise=None must be a function of \(key, serv"),
        ({"client_update": 3}, "client_update=3 must be a function of"),
        (
            {"client_update": lambda key, server, data: None},
            r"client_update takes \(key, server, data\), but it is called with "
            r"\(key, round_index, server, client, data\): too many",
        ),
        ({"broadcast": lambda: None}, r"broadcast takes \(\), but it is called with"),
        ({"posterior": "normal"}, "posterior='normal' must be a function of"),
        ({"assign": lambda key: 0}, r"assign takes \(key\), but it is called with"),
        ({"importance": None}, "importance=None must be a dict of fedvi.Importance"),
        ({"importance": bare}, r"importance\['mine'\]=.* must be a fedvi.Importance"),
        (
            {"importance": importance(lambda server, reports: reports)},
            r"importance\['mine'\].score takes \(server, reports\), but",
        ),
        ({"cohort": 0}, "cohort=0 must be a whole number, at least 1"),
        ({"cohort": 2.5}, "cohort=2.5 must be a whole number"),
        ({"cohort": "any"}, "cohort='any' must be a whole number, 'all' or None"),
        ({"name": None}, "name=None must be text"),
        ({"init": lambda key: None}, "init returns None: it must return the server's"),
    ):
        with pytest.raises(ValueError, match=message):
            contract_checks.check(broken(good, **fields), train, test, 6)


def test_what_a_client_returns_beside_its_upload_is_one_number_each(task, train, test):
    good = fedavg(task)

    def returning(**fields):
        def client_update(*arguments):
            return good.client_update(*arguments)._replace(**fields)

        return broken(good, client_update=client_update)

    for fields, message in (
        ({"weight": None}, "ClientOutput.weight is None: it must be one number"),
        ({"weight": jnp.ones(3)}, r"ClientOutput.weight is float32\[3\]: it must be"),
        ({"metrics": {"loss": jnp.ones(2)}}, r"metrics\['loss'\] is float32\[2\]"),
        ({"metrics": {"a": {"b": 1.0}}}, r"metrics\['a'\] is .*: it must be one"),
        ({"metrics": [1.0]}, "ClientOutput.metrics=list must be a dict of scalars"),
        ({"metrics": {"seed": 1.0}}, "metrics has 'seed', the name of a column"),
    ):
        with pytest.raises(ValueError, match=message):
            contract_checks.check(returning(**fields), train, test, 6)
    for weight in (1, 1.0, np.float64(2), jnp.int32(1), True):
        metrics = {"count": 3, "share": 0.5, "flag": jnp.bool_(True)}
        found = contract_checks.check(
            returning(weight=weight, metrics=metrics), train, test, 6
        )
        assert sorted(found.metrics) == ["count", "flag", "share"]


def test_predictions_have_samples_examples_and_classes(task, train, test):
    good = fedavg(task)

    def predicting(change):
        def predictive(*arguments):
            return change(good.personal_predictive(*arguments))

        return broken(good, personal_predictive=predictive)

    for change, message in (
        (lambda p: p[0], r"personal_predictive returns shape \(10, 3\) for 10"),
        (lambda p: p[:0], r"personal_predictive returns shape \(0, 10, 3\)"),
        (lambda p: p.argmax(-1, keepdims=True), "personal_predictive returns int32"),
        (lambda p: p[..., :2], "global_predictive 3 and personal_predictive 2 classes"),
    ):
        with pytest.raises(ValueError, match=message):
            contract_checks.check(predicting(change), train, test, 6)
    assert contract_checks.check(good, train, test, 6).classes == 3


def test_numbers_of_python_are_numbers(task, train, test):
    """Statistics, reports and states of Python's own floats go through a round."""
    algorithm = fedavg(task)._replace(
        client_update=lambda key, round_index, server, client, data: ClientOutput(
            {"a": 1.0}, 2, {"visits": client["visits"] + 1}, {"loss": 0.5}
        ),
        init_client=lambda key, server: {"visits": 0},
        statistics=lambda server, upload: (1.0, upload["a"]),
        server_update=lambda key, round_index, server, aggregate: server,
        importance={
            "mine": Importance(
                lambda key, server, client, data: 1.0,
                lambda server, reports, counts: reports,
            )
        },
    )
    federation = Federation(
        algorithm, train, test, selection=proportional(7, 2, "mine")
    )
    shapes = federation.shapes()
    state, _ = jax.eval_shape(
        lambda state: federation.pure_rounds(state, federation.train, 1), shapes
    )
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, shapes)


def test_a_selection_of_ones_own_picks_as_many_as_it_says(task):
    def picking(found):
        return Selection(7, 2, lambda key, round_index, scores, counts: found)

    plain = fedavg(task)
    contract_checks.check_selection(plain, picking((jnp.array([1, 2]), ())))
    for found, message in (
        ((jnp.array([1, 2, 3]), ()), r"ids int32\[2\], .* ids are int32\[3\]"),
        ((jnp.array([1.0, 2.0]), ()), r"its ids are float32\[2\]"),
        (jnp.array([1, 2]), "selection.select must return"),
    ):
        with pytest.raises(ValueError, match=message):
            contract_checks.check_selection(plain, picking(found))


@pytest.mark.parametrize(
    "kept, error",
    [
        (lambda server, client: client, r"must return \(known \[\] bool, personal\)"),
        (lambda server, client: (1, server.params), "for known: it must be bool"),
        (
            lambda server, client: (jnp.bool_(1), server),
            "what personalise returns: i",
        ),
    ],
)
def test_what_a_client_kept_is_what_it_predicts_with(task, train, test, kept, error):
    with pytest.raises(ValueError, match=error):
        contract_checks.check(broken(fedavg(task), kept=kept), train, test, 6)


def test_who_kept_something_is_not_personalised():
    """And those who did not are, with all of their data."""
    algorithm = Algorithm(
        *("toy", None, None, None, None),
        personalise=lambda key, server, client, data: data.size + 100,
        personal_predictive=None,
        kept=lambda server, client: (client > 0, client),
    )
    call, data = Call(root_key(0), jnp.int32(0), ()), ClientData((), (), jnp.int32(7))

    def model(client):
        visited = Visit(jnp.int32(1), jnp.int32(client), data)
        return int(personal_model(algorithm, None, call, visited))

    assert [model(client) for client in (0, 3)] == [107, 3]
