"""FedAvg with Apple's pfl-research: a peer of `round_time.py`.

pfl's own `FederatedAveraging` on its simulated backend, in one process, one central
iteration a round. pfl does not shuffle: a client's examples are, with one gather, when
its turn comes. More than one local epoch would pass over the same batches.
"""

import platform
from importlib.metadata import version

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch_task import (
    activations,
    build,
    prepare,
    read_clients,
    score,
    set_weights,
)
from worker import serve, timed


class Network(torch.nn.Module):
    """What pfl wants of a model; it keeps the losses of the steps."""

    def __init__(self, layers, device, dtype):
        super().__init__()
        self.layers = layers
        self.losses = []
        self._forward = device, dtype

    def loss(self, x, y):
        """Mean cross-entropy of a batch."""
        with activations(*self._forward):
            loss = F.cross_entropy(self.layers(x), y)
        self.losses.append(loss.detach())
        return loss

    @torch.no_grad()
    def metrics(self, x, y):
        """pfl evaluates before its first round."""
        loss = F.cross_entropy(self.layers(x), y, reduction="sum").item()
        return {"loss": Weighted(loss, len(y))}


class PflRounds:
    """pfl's algorithm, backend and model."""

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
        threads,
        seed,
        device="cpu",
        dtype="float32",
    ):
        """Builds the data and the model from what fedvi starts with."""
        prepare(threads, seed, device)
        np.random.seed(seed)  # noqa: NPY002  pfl draws from it
        self._train, self._test = read_clients(data_file, model, device)
        layers = build(model, self._train[0][0][0].cpu(), hidden, classes)
        set_weights(layers, params_file, model)
        self._network = Network(layers, device, dtype).to(device)
        self._model = PyTorchModel(
            self._network,
            lambda params, lr: torch.optim.SGD(params, lr, momentum, fused=True),
            torch.optim.SGD(self._network.parameters(), lr=1.0),
        )
        self._training = NNTrainHyperParams(
            local_batch_size=batch_size,
            local_num_epochs=epochs,
            local_learning_rate=learning_rate,
        )
        data = FederatedDataset(self._shuffled, lambda: next(self._cohort))
        self._backend = SimulatedBackend(data, data, [WeightByDatapoints()])
        self._algorithm = FederatedAveraging()
        self._rounds = 0
        return {
            "python": platform.python_version(),
            "pfl": version("pfl"),
            "torch": torch.__version__,
        }

    def _shuffled(self, client):
        x, y = self._train[client]
        order = torch.randperm(len(y), device=y.device)
        return Dataset((x[order], y[order]), user_id=str(client))

    def round(self, cohort):
        """One round with the clients of `cohort`, and their mean training loss."""
        loss, times = timed(lambda: self._round(cohort))
        return {**times, "loss": loss}

    def _round(self, cohort):
        self._cohort = iter(cohort)
        self._network.losses.clear()
        self._rounds += 1
        # A run goes on where the last one stopped.
        parameters = NNAlgorithmParams(
            central_num_iterations=self._rounds,
            evaluation_frequency=2**31,
            train_cohort_size=len(cohort),
            val_cohort_size=None,
        )
        self._algorithm.run(
            parameters,
            self._backend,
            self._model,
            self._training,
            send_metrics_to_platform=False,
        )
        return torch.stack(self._network.losses).mean().item()

    def finish(self):
        """The global model's test scores."""
        return score(self._network.layers, self._test)


if __name__ == "__main__":
    serve(PflRounds())
