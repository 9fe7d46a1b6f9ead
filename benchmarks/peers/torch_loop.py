"""FedAvg as a plain PyTorch loop: the peer of `round_time.py`.

Every client's examples are shuffled with one gather an epoch and cut into views; one
model is loaded anew for every client; SGD is PyTorch's fused one, its momentum fresh
for every client.
"""

import platform

import torch
import torch.nn.functional as F
from torch_task import (
    activations,
    build,
    prepare,
    read_clients,
    score,
    set_weights,
)
from worker import serve, timed

__all__ = ["TorchLoop", "train_client"]


class TorchLoop:
    """A server model and one model that every client in turn trains."""

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
        self._training = {
            "batch_size": batch_size,
            "epochs": epochs,
            "learning_rate": learning_rate,
            "momentum": momentum,
            "dtype": dtype,
        }
        self._train, self._test = read_clients(data_file, model, device)
        self._model = build(model, self._train[0][0][0].cpu(), hidden, classes)
        set_weights(self._model, params_file, model)
        self._model.to(device)
        self._params = list(self._model.parameters())
        return {"python": platform.python_version(), "torch": torch.__version__}

    def round(self, cohort):
        """One round with the clients of `cohort`, and their mean training loss."""
        loss, times = timed(lambda: self._round(cohort))
        return {**times, "loss": loss}

    def _round(self, cohort):
        server = [p.detach().clone() for p in self._params]
        total = [torch.zeros_like(p) for p in server]
        loss = 0.0
        for client in cohort:
            self._set(server)
            loss += train_client(self._model, *self._train[client], **self._training)
            weight = len(self._train[client][1])
            with torch.no_grad():
                torch._foreach_add_(total, self._params, alpha=weight)
        weight = sum(len(self._train[client][1]) for client in cohort)
        self._set([t / weight for t in total])
        return loss.item() / len(cohort)

    @torch.no_grad()
    def _set(self, values):
        for param, value in zip(self._params, values):
            param.copy_(value)

    def finish(self):
        """The global model's test scores."""
        return score(self._model, self._test)


def train_client(
    model, x, y, batch_size, epochs, learning_rate, momentum, dtype="float32"
):
    """Trains the model in place; the mean loss over the steps, on the model's device.

    To read it would make the host wait for the device after every client.
    """
    optimizer = torch.optim.SGD(
        model.parameters(), lr=learning_rate, momentum=momentum, fused=True
    )
    total, steps = torch.zeros((), device=x.device), 0
    for _ in range(epochs):
        order = torch.randperm(len(x), device=x.device)
        batches = zip(x[order].split(batch_size), y[order].split(batch_size))
        for batch_x, batch_y in batches:
            optimizer.zero_grad(set_to_none=True)
            with activations(x.device, dtype):
                loss = F.cross_entropy(model(batch_x), batch_y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            steps += 1
    return total / steps


if __name__ == "__main__":
    serve(TorchLoop())
