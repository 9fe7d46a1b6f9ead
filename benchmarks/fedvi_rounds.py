"""fedvi's side of `round_time.py`: the rounds that it times."""

import platform
from importlib.metadata import version

import jax
import numpy as np
from worker import peak_memory, serve, timed

import fedvi
from fedvi import algorithms, nn, selection
from fedvi.cohort import clients_mesh
from fedvi.data import standardise


class FedviRounds:
    """A federation that does one round a request."""

    def load(
        self,
        data_file,
        algorithm,
        model,
        hidden,
        classes,
        participants,
        batch_size,
        epochs,
        learning_rate,
        momentum,
        optimizer,
        chunk_size,
        seed,
        devices,
        options,
    ):
        """Builds the federation from the arrays in `data_file`.

        `options` are the algorithm's own.
        """
        # The first call is to show what compilation costs.
        jax.config.update("jax_enable_compilation_cache", False)
        self._before = peak_memory()
        with np.load(data_file) as arrays:
            train, test = (
                fedvi.ClientData(*(arrays[f"{split}_{k}"] for k in ("x", "y", "size")))
                for split in ("train", "test")
            )
            mean, std = arrays["mean"], arrays["std"]
        clients = len(train.size)
        network = nn.build(
            model,
            classes=classes,
            input_shape=train.x.shape[2:],
            preprocess=standardise(mean, std),
            **({"hidden": (hidden,)} if model == "mlp" else {}),
        )
        training = fedvi.LocalTraining(
            epochs, batch_size, learning_rate, momentum, optimizer=optimizer
        )
        task = fedvi.Task(network, training, training, clients, int(train.size.sum()))
        self._federation = fedvi.Federation(
            algorithms.build(algorithm, task, **options),
            train,
            test,
            selection=selection.uniform(clients, participants),
            chunk_size=chunk_size or None,
            mesh=clients_mesh(devices),
        )
        self._algorithm = algorithm
        self._state = self._federation.init(jax.random.key(seed))
        names = ("jax", "jaxlib", "flax", "numpy")
        return {
            "python": platform.python_version(),
            "fedvi": fedvi.__version__,
            **{name: version(name) for name in names},
            "backend": jax.default_backend(),
        }

    def save_params(self, params_file):
        """Writes what the server starts with: of every dense layer `bias, kernel`.

        FedAvg's weights; pFedBayes' means and then its unconstrained scales.
        """
        server = self._state.server
        start = server.params if self._algorithm == "fedavg" else server.posterior
        np.savez(params_file, *jax.tree.leaves(start))
        return {}

    def round(self):
        """One round; which clients took part and their mean training loss."""

        def run():
            return jax.block_until_ready(self._federation.rounds(self._state, 1))

        (self._state, metrics), times = timed(run)
        if metrics.failed.any():
            raise RuntimeError("a client's training diverged: lower --learning_rate")
        return {
            **times,
            "loss": metrics.metrics["loss"].item(),
            "cohort": metrics.client_ids[0].tolist(),
        }

    def finish(self):
        """Memory, in bytes, and test scores, pooled over the clients.

        Of the global model and, where clients keep one, of their own.
        """
        peak = peak_memory()
        program = self._federation._jit_rounds.lower(
            self._state, self._federation.train, n=1
        )
        analysis = program.compile().memory_analysis()
        accuracy, nll = pooled(self._federation.evaluate(self._state))
        results = {
            "peak_bytes": peak,
            "before_data_bytes": self._before,
            "above_before_data_bytes": peak - self._before,
            "xla_temporary_bytes": analysis and analysis.temp_size_in_bytes,
            "test_accuracy": accuracy,
            "test_nll": nll,
        }
        if self._algorithm == "pfedbayes":
            own = pooled(self._federation.evaluate_personal(self._state))
            results["personal_accuracy"], results["personal_nll"] = own
        return results


def pooled(scores):
    """Accuracy and NLL over the test examples of all clients."""
    count = scores.count.sum()
    return (scores.correct.sum() / count).item(), (scores.nll.sum() / count).item()


if __name__ == "__main__":
    serve(FedviRounds())
