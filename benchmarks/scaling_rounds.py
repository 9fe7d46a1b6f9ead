"""A process of `scaling.py`: compiles a federation's round and runs it."""

import jax
import numpy as np
from federations import CLASSES, build, compile_round, random_clients
from worker import peak_memory, serve, timed

import fedvi
from fedvi import nn
from fedvi.client_map import clients_mesh


def hidden_width(parameters: int, features: int) -> int:
    """Width of two equal hidden layers that make about so many parameters.

    The network has h² + (features + classes + 2) h + classes of them.
    """
    linear = features + CLASSES + 2
    return max(1, round((np.sqrt(linear**2 + 4 * (parameters - CLASSES)) - linear) / 2))


class ScalingRounds:
    """One federation in which all clients take part."""

    def load(
        self,
        algorithm,
        clients,
        devices,
        parameters,
        chunk_size,
        examples,
        features,
        batch_size,
    ):
        """Builds it on random data; returns its number of parameters."""
        # Compilation is to be seen.
        jax.config.update("jax_enable_compilation_cache", False)
        self._before = peak_memory()
        data = random_clients(clients, examples, (features,))
        width = hidden_width(parameters, features)
        model = nn.build(
            "mlp", classes=CLASSES, input_shape=(features,), hidden=(width, width)
        )
        training = fedvi.LocalTraining(batch_size=batch_size, learning_rate=0.01)
        self._federation = build(
            algorithm,
            model,
            training,
            data,
            chunk_size=chunk_size or None,
            mesh=clients_mesh(devices),
        )
        self._state = self._federation.init(jax.random.key(0))
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        return {"parameters": nn.parameter_count(shapes), "jax": jax.__version__}

    def compile(self):
        """Traces and compiles the round afresh; seconds of either."""
        self._compiled, seconds = compile_round(self._federation, self._state)
        return seconds

    def round(self):
        """One round."""

        def run():
            results = self._compiled(self._state, self._federation.train)
            return jax.block_until_ready(results)

        (self._state, metrics), times = timed(run)
        if metrics.failed.any():
            raise RuntimeError("a client's training diverged")
        return times

    def finish(self):
        """Memory in bytes: XLA's analysis of the round, the device's, the process's."""
        analysis = self._compiled.memory_analysis()
        device = jax.devices()[0].memory_stats() or {}
        return {
            "backend": jax.default_backend(),
            "xla_temporary_bytes": analysis and analysis.temp_size_in_bytes,
            "xla_argument_bytes": analysis and analysis.argument_size_in_bytes,
            "device_peak_bytes": device.get("peak_bytes_in_use"),
            "above_before_data_bytes": peak_memory() - self._before,
        }


if __name__ == "__main__":
    serve(ScalingRounds())
