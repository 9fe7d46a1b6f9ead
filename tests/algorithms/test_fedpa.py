"""FedPA against its dense formula and FedAvg."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.algorithms import fedavg, fedpa
from fedvi.algorithms.fedpa import precision_times

KEY = jax.random.key(0)


@pytest.mark.parametrize("n", [1, 4])
def test_the_product_is_that_of_the_dense_inverse(n):
    rng = np.random.default_rng(n)
    x, rho = rng.normal(size=(6, 20)) + rng.normal(size=20), 0.3
    shrinkage = 1 / (1 + (n - 1) * rho)
    covariance = np.atleast_2d(np.cov(x[:n].T)) if n > 1 else np.zeros((20, 20))
    dense = shrinkage * np.eye(20) + (1 - shrinkage) * covariance
    expected = np.linalg.solve(dense, x[:n].mean(0))
    # In two leaves, and what is not there must not count.
    samples = {"a": jnp.float32(x[:, :8].reshape(6, 2, 4)), "b": jnp.float32(x[:, 8:])}
    present = jnp.float32(np.arange(6) < n)
    found = precision_times(rho, samples, present)
    found = np.concatenate([found["a"].ravel(), found["b"]])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def upload(task, train):
    """What client 0, of 6 steps, sends in a round; None is FedAvg."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), train)
    server = fedavg(task).init(jax.random.key(1))

    def run(options, at=0):
        algorithm = fedavg(task) if options is None else fedpa(task, **options)
        return jax.jit(algorithm.client_update)(KEY, at, server, (), data)

    return run


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)


def test_a_burn_in_longer_than_the_visit_leaves_its_last_step_which_is_fedavg(upload):
    plain = upload(None).upload
    assert_close(upload({"samples": 9, "burn_in_steps": 99}).upload, plain)


def test_the_first_rounds_are_fedavgs(upload):
    burning = {"burn_in_rounds": 2, "shrinkage": 5.0}
    assert_close(upload(burning, 1).upload, upload(None, 1).upload)
    with pytest.raises(AssertionError):
        assert_close(upload(burning, 2).upload, upload(None, 2).upload)


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"samples": 3}, 3),
        ({"samples": 4, "steps_per_sample": 2, "burn_in_steps": 1}, 2),
    ],
)
def test_a_visit_of_six_steps_has_as_many_samples(upload, options, samples):
    # Without shrinkage the upload is the mean over the windows' iterates.
    found = upload(options | {"shrinkage": 0.0})
    assert found.metrics["samples"] == samples
    window = min(options.get("steps_per_sample", 2), 6)
    used = {"samples": samples * window, "steps_per_sample": 1, "shrinkage": 0.0}
    assert_close(found.upload, upload(used).upload)
