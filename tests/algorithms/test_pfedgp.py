import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedvi.algorithms import pfedgp
from fedvi.flat import trees
from fedvi.nn import build

KEY = jax.random.key(0)


def test_the_embedding_is_what_the_head_is_given(task, train):
    params = task.model.init(KEY)
    x = train.x[0]
    head = trees(params)["head"]["classifier"]
    embedded = task.model.features({"body": params["body"]}, x)
    logits = embedded @ head["kernel"] + head["bias"][None]
    np.testing.assert_allclose(logits, task.model.apply(params, x), rtol=1e-5)


def test_padding_changes_nothing(task, train):
    algorithm = pfedgp(task, train_chains=2, gibbs_steps=1, predict_chains=2)
    server = algorithm.init(KEY)

    @jax.jit
    def run(data):
        out = algorithm.client_update(KEY, 0, server, (), data)
        personal = algorithm.personalise(KEY, server, (), data)
        x, mask = jnp.asarray(train.x[5, :4]), jnp.ones(4, bool)
        return out.upload, algorithm.personal_predictive(KEY, server, personal, x, mask)

    clean = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), train)
    real = jnp.arange(len(clean.y)) < clean.size
    noisy = clean._replace(
        x=jnp.where(real[:, None], clean.x, jnp.nan), y=jnp.where(real, clean.y, -7)
    )
    jax.tree.map(np.testing.assert_array_equal, run(clean), run(noisy))
    assert optax.tree.norm(run(clean)[0]) > 1e-3


def test_a_network_without_a_body_is_refused(task):
    model = build("logistic", classes=3, input_shape=(6,))
    with pytest.raises(ValueError, match="no body"):
        pfedgp(task._replace(model=model))


@pytest.mark.long
def test_two_devices_of_a_cpu_do_not_wait_for_each_other(tmp_path):
    """LAPACK's batches did, for ever; the suite's own eight devices do not show it."""
    flags = "--algorithm=pfedgp --dataset=digits --partition=class_shards --clients=20"
    flags += " --shards=3 --rounds=2 --model=mlp --hidden=64 --fraction=0.5 --devices=2"
    flags += " --eval_every=2 --plot_formats="
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    process = subprocess.run(
        [sys.executable, "-m", "fedvi", "run", *flags.split(), f"--run_dir={tmp_path}"],
        env=environment,
        timeout=150,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
