"""A user's own algorithm, written from the contract alone, runs through the driver."""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags as absl_flags

from fedvi import Algorithm, ClientOutput, algorithms
from fedvi.experiment import flags, runner
from fedvi.experiment.config import ExperimentConfig
from fedvi.experiment.run_options import RunOptions
from fedvi.local import cross_entropy, minimise


def fedavgm(task, *, server_momentum: float = 0.5) -> Algorithm:
    """FedAvg with momentum on the server: v <- βv + Σ n_i (θ - θ_i) / Σ n_i."""
    model = task.model

    def loss(key, params, batch):
        return cross_entropy(
            model.apply(params, batch.x, batch.mask), batch.y, batch.mask
        )

    def init(key):
        params = model.init(key)
        return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}

    def client_update(key, round, server, client, data):
        start = server["params"]
        params, value = minimise(key, round, start, data, task.training, loss)
        change = jax.tree.map(jnp.subtract, start, params)
        return ClientOutput(change, data.size, metrics={"loss": value})

    def server_update(key, round, server, aggregate):
        velocity = jax.tree.map(
            lambda v, g: server_momentum * v + g, server["velocity"], aggregate.mean()
        )
        params = jax.tree.map(jnp.subtract, server["params"], velocity)
        return {"params": params, "velocity": velocity}

    def predict(params, x, mask):
        return jax.nn.log_softmax(model.apply(params, x, mask))[None]

    return Algorithm(
        name="fedavgm",
        init=init,
        client_update=client_update,
        server_update=server_update,
        global_predictive=lambda key, server, x, mask: predict(
            server["params"], x, mask
        ),
        personalise=lambda key, server, client, data: minimise(
            key, 0, server["params"], data, task.finetuning, loss
        )[0],
        personal_predictive=lambda key, server, params, x, mask: predict(
            params, x, mask
        ),
    )


CONFIG = ExperimentConfig(
    algorithm="fedavgm",
    options={"server_momentum": 0.3},
    dataset="digits",
    partition="iid",
    clients=4,
    model="logistic",
    augment=False,
    fraction=0.5,
    rounds=4,
    eval_every=2,
)


def test_it_runs_through_the_driver(tmp_path):
    run_dir = str(tmp_path / "run")
    summary = runner.run(CONFIG, RunOptions(run_dir), fedavgm)
    assert summary["algorithm"] == "fedavgm"
    assert summary["global"]["accuracy"] > 80
    assert summary["personal"]["accuracy"] > 80
    model = 4 * (64 * 10 + 10)
    assert summary["bytes_up"] == 2 * (model + 4)
    assert summary["bytes_down"] == 2 * 2 * model  # this one sends its velocity too
    with np.load(tmp_path / "run" / "checkpoint.npz") as state:
        assert any("velocity" in name and state[name].any() for name in state.files)


def test_registered_it_has_flags_like_any_other(monkeypatch):
    monkeypatch.setattr(algorithms, "ALGORITHMS", dict(algorithms.ALGORITHMS))
    monkeypatch.setattr(flags, "ALGORITHMS", algorithms.ALGORITHMS)
    algorithms.register(fedavgm)
    values = absl_flags.FlagValues()
    flags.define(values)
    flags.parse(["x", "--algorithm=fedavgm", "--server_momentum=0.25"], values)
    [(config, _)] = flags.read(values)
    assert config.options == {"server_momentum": 0.25}
