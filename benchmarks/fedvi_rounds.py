"""fedvi's side of `round_time.py`: the rounds that it times."""

import platform
from importlib.metadata import version

import jax
import jax.numpy as jnp
import native_networks
import numpy as np
from counting import layers_of, least_round
from federations import build, compile_round
from floors import describe_peaks, floors_of, measure_peaks, step_flops
from worker import peak_memory, serve, timed

import fedvi
from fedvi import nn, selection
from fedvi.client_map import clients_mesh
from fedvi.data import standardise
from fedvi.flat import like_flats, trees


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
        dtype,
        compilation_cache,
        options,
        native_conv=False,
        params_file=None,
    ):
        """Builds the federation from the arrays in `data_file`.

        `options` are the algorithm's own. `native_conv` takes `flax.linen.Conv`
        instead of fedvi's; `params_file` has FedAvg's first weights.
        """
        jax.config.update("jax_enable_compilation_cache", bool(compilation_cache))
        jax.config.update("jax_compilation_cache_dir", compilation_cache or None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        self._before = peak_memory()
        with np.load(data_file) as arrays:
            train, test = (
                fedvi.ClientData(*(arrays[f"{split}_{k}"] for k in ("x", "y", "size")))
                for split in ("train", "test")
            )
            mean, std = arrays["mean"], arrays["std"]
        clients = len(train.size)
        network = (native_networks if native_conv else nn).build(
            "pfl_network:TwoConvolutions" if model == "pfl_cnn" else model,
            classes=classes,
            input_shape=train.x.shape[2:],
            preprocess=standardise(mean, std),
            dtype=dtype,
            **({"hidden": (hidden,)} if model == "mlp" else {}),
        )
        training = fedvi.LocalTraining(
            epochs, batch_size, learning_rate, momentum, optimizer=optimizer
        )
        self._federation = build(
            algorithm,
            network,
            training,
            train,
            test,
            options,
            selection=selection.uniform(clients, participants),
            chunk_size=chunk_size or None,
            mesh=clients_mesh(devices),
        )
        self._algorithm, self._dtype = algorithm, dtype
        self._model, self._training = network, training
        self._participants = participants
        self._program = None
        self._state = self._federation.init(jax.random.key(seed))
        if params_file:
            self._start_with(params_file)
        names = ("jax", "jaxlib", "flax", "numpy")
        return {
            "python": platform.python_version(),
            "fedvi": fedvi.__version__,
            **{name: version(name) for name in names},
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
        }

    def _start_with(self, params_file):
        server = self._state.server
        leaves, treedef = jax.tree.flatten_with_path(trees(server.params))
        with np.load(params_file) as files:
            values = [jnp.asarray(files[name_of(path)]) for path, _ in leaves]
        params = like_flats(treedef.unflatten(values), server.params)
        places = jax.tree.map(lambda leaf: leaf.sharding, server.params)
        params = jax.device_put(params, places)
        self._state = self._state._replace(server=server._replace(params=params))

    def save_params(self, params_file):
        """Writes what the server starts with, under names like `body/Conv_0/kernel`.

        FedAvg's weights; pFedBayes' means (`mu/body/...`) and then its unconstrained
        scales (`rho/body/...`).
        """
        server = self._state.server
        start = server.params if self._algorithm == "fedavg" else server.posterior
        leaves, _ = jax.tree.flatten_with_path(trees(start))
        np.savez(params_file, **{name_of(path): leaf for path, leaf in leaves})
        return {}

    def round(self, cohort=None):
        """One round; which clients took part and their mean training loss.

        They are drawn from the seed, so that another federation of fedvi has the same
        `cohort`.
        """

        def run():
            train = self._federation.train
            if self._program is None:
                self._program, _ = compile_round(self._federation, self._state)
            return jax.block_until_ready(self._program(self._state, train))

        (self._state, metrics), times = timed(run)
        if metrics.failed.any():
            raise RuntimeError("a client's training diverged: lower --learning_rate")
        drawn = metrics.client_ids[0].tolist()
        if cohort not in (None, drawn):
            raise RuntimeError(f"cohort={cohort} was drawn as {drawn}")
        return {**times, "loss": metrics.metrics["loss"].item(), "cohort": drawn}

    def roofline(self):
        """Floors of the round; nothing where the round's work is not counted.

        The hand count is of a plain gradient step with SGD: FedAvg's.
        """
        model, training = self._model, self._training
        if self._algorithm != "fedavg" or training.optimizer != "sgd":
            return {}
        train, participants = self._federation.train, self._participants
        sizes, shape = np.asarray(train.size), train.x.shape[2:]
        work = least_round(
            layers_of(model, shape),
            sizes,
            participants,
            batch_size=training.batch_size,
            epochs=training.epochs,
            moments=1 if training.momentum else 0,
            activation_bytes=jnp.dtype(self._dtype).itemsize,
            input_bytes=train.x.dtype.itemsize,
        )
        steps = np.ceil(sizes / training.batch_size).mean() * training.epochs
        peaks = measure_peaks((self._dtype,))
        return {
            **floors_of(work, peaks, self._dtype),
            "xla_flops": participants * steps * step_flops(model, training, train.x),
            "peaks": peaks,
            "description": describe_peaks(peaks),
        }

    def memory(self):
        """In bytes: of this process, and of XLA's temporaries of a round."""
        peak = peak_memory()
        analysis = self._program.memory_analysis()
        return {
            "peak_bytes": peak,
            "before_data_bytes": self._before,
            "above_before_data_bytes": peak - self._before,
            "xla_temporary_bytes": analysis and analysis.temp_size_in_bytes,
        }

    def finish(self):
        """`memory`, and test scores, pooled over the clients.

        Of the global model and, where clients keep one, of their own.
        """
        results = self.memory()
        accuracy, nll = pooled(self._federation.evaluate(self._state))
        results |= {"test_accuracy": accuracy, "test_nll": nll}
        if self._algorithm == "pfedbayes":
            own = pooled(self._federation.evaluate_personal(self._state))
            results["personal_accuracy"], results["personal_nll"] = own
        return results


def name_of(path):
    """A leaf's name in the file of weights."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def pooled(scores):
    """Accuracy and NLL over the test examples of all clients."""
    count = scores.count.sum()
    return (scores.correct.sum() / count).item(), (scores.nll.sum() / count).item()


if __name__ == "__main__":
    serve(FedviRounds())
