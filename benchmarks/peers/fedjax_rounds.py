"""FedAvg with FedJAX: a peer of `round_time.py`.

FedJAX's own federated averaging (`fedjax.algorithms.fed_avg`), but each step also
returns its loss, and no norms of updates are computed. `for_each_client` runs with its
backend "jit", or with "pmap" over two CPU devices.
"""

import platform
from importlib.metadata import version

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fedjax.core import tree_util
from worker import serve, timed


class FedjaxRounds:
    """The server's weights and every client's data."""

    def load(
        self,
        data_file,
        params_file,
        model,
        hidden,
        classes,
        batch_size,
        epochs,
        learning_rate,
        momentum,
        backend,
        seed,
    ):
        """Builds the data and the model from what fedvi starts with.

        Raises:
          ValueError: a client's last batch would be a smaller one, which FedJAX fills
            with examples of a further epoch.
        """
        del model, hidden, classes  # the table of peers lets mlp alone through
        self._read(data_file)
        for size in {len(client) for client in self._train}:
            if size % batch_size:
                raise ValueError(
                    f"fedjax: --batch_size={batch_size} must divide a client's {size} "
                    "examples; FedJAX has no smaller last batch"
                )
        with np.load(params_file) as files:
            self._params = {name: jnp.asarray(files[name]) for name in files}
        self._random = np.random.default_rng(seed)
        self._batches = {"batch_size": batch_size, "num_epochs": epochs}
        fedjax.set_for_each_client_backend(backend)
        self._train_clients = train_for_each_client(
            fedjax.optimizers.sgd(learning_rate, momentum or None)
        )
        return {
            "python": platform.python_version(),
            **{name: version(name) for name in ("fedjax", "jax")},
        }

    def _read(self, data_file):
        with np.load(data_file) as arrays:
            mean, std = arrays["mean"], arrays["std"]
            self._train, self._test = (
                [
                    fedjax.ClientDataset(
                        {"x": standardise(x[:n], mean, std), "y": y[:n]}
                    )
                    for x, y, n in zip(
                        *(arrays[f"{split}_{key}"] for key in ("x", "y", "size"))
                    )
                ]
                for split in ("train", "test")
            )

    def round(self, cohort):
        """One round with the clients of `cohort`, and their mean training loss."""
        loss, times = timed(lambda: self._round(cohort))
        return {**times, "loss": loss}

    def _round(self, cohort):
        seeds = self._random.integers(2**31, size=len(cohort)).tolist()
        clients = [
            (
                client,
                self._train[client].shuffle_repeat_batch(**self._batches, seed=seed),
                None,
            )
            for client, seed in zip(cohort, seeds)
        ]
        total = tree_util.tree_zeros_like(self._params)
        weight, losses = 0, []
        for client, delta, results in self._train_clients(self._params, clients):
            size = len(self._train[client])
            total = tree_util.tree_add(total, tree_util.tree_weight(delta, size))
            weight += size
            losses += results
        mean = tree_util.tree_inverse_weight(total, weight)
        self._params = jax.block_until_ready(tree_util.tree_add(self._params, mean))
        return float(np.mean(jax.device_get(losses)))

    def finish(self):
        """The global model's test scores."""
        x, y = (
            np.concatenate([client.all_examples()[key] for client in self._test])
            for key in ("x", "y")
        )
        outputs = logits(self._params, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
        return {
            "test_accuracy": (outputs.argmax(1) == y).mean().item(),
            "test_nll": losses.mean().item(),
        }


def train_for_each_client(optimizer):
    """`for_each_client` with a client's SGD; every step returns its loss."""

    def init(params, _):
        return {"params": params, "optimizer": optimizer.init(params)}

    def step(state, batch):
        loss, gradient = jax.value_and_grad(mean_loss)(state["params"], batch)
        optimizer_state, params = optimizer.apply(
            gradient, state["optimizer"], state["params"]
        )
        return {"params": params, "optimizer": optimizer_state}, loss

    def final(params, state):
        return jax.tree_util.tree_map(jnp.subtract, state["params"], params)

    return fedjax.for_each_client(init, step, final, with_step_result=True)


def standardise(x, mean, std):
    """uint8 images as rows of standardised float32."""
    return ((x.astype(np.float32) / 255 - mean) / std).reshape(len(x), -1)


def mean_loss(params, batch):
    """Mean cross-entropy of a batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(params, batch["x"]), batch["y"]
    )
    return losses.mean()


def logits(params, x):
    """The network with one hidden layer."""
    x = x @ params["body/Dense_0/kernel"] + params["body/Dense_0/bias"]
    x = jax.nn.relu(x)
    return x @ params["head/classifier/kernel"] + params["head/classifier/bias"]


if __name__ == "__main__":
    serve(FedjaxRounds())
