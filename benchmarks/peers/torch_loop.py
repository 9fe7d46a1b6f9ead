"""FedAvg as a plain PyTorch loop: the peer of `round_time.py`.

Pixels are standardised once and kept as float32; every client's examples are shuffled
with one gather an epoch and cut into views; one model is loaded anew for every client;
SGD is PyTorch's fused one, its momentum fresh for every client.
"""

import platform

import numpy as np
import torch
import torch.nn.functional as F
from worker import serve, timed


class TorchLoop:
    """A server model and one model that every client in turn trains."""

    def load(
        self,
        data_file,
        params_file,
        hidden,
        classes,
        batch_size,
        epochs,
        learning_rate,
        momentum,
        threads,
        seed,
    ):
        """Builds the data and the model from what fedvi starts with."""
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._batch_size, self._epochs = batch_size, epochs
        self._sgd = {"lr": learning_rate, "momentum": momentum, "fused": True}
        with np.load(data_file) as arrays:
            mean, std = arrays["mean"], arrays["std"]
            self._train, self._test = (
                [
                    (standardise(x[:n], mean, std), torch.from_numpy(y[:n]).long())
                    for x, y, n in zip(
                        *(arrays[f"{split}_{key}"] for key in ("x", "y", "size"))
                    )
                ]
                for split in ("train", "test")
            )
        features = self._train[0][0].shape[1]
        self._model = torch.nn.Sequential(
            torch.nn.Linear(features, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, classes),
        )
        self._params = list(self._model.parameters())
        with np.load(params_file) as leaves:
            bias_1, kernel_1, bias_2, kernel_2 = map(torch.from_numpy, leaves.values())
        self._set([kernel_1.T, bias_1, kernel_2.T, bias_2])
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
            loss += self._train_client(*self._train[client])
            weight = len(self._train[client][1])
            with torch.no_grad():
                torch._foreach_add_(total, self._params, alpha=weight)
        weight = sum(len(self._train[client][1]) for client in cohort)
        self._set([t / weight for t in total])
        return loss / len(cohort)

    def _train_client(self, x, y):
        optimizer = torch.optim.SGD(self._params, **self._sgd)
        total, steps = torch.zeros(()), 0
        for _ in range(self._epochs):
            order = torch.randperm(len(x))
            batches = zip(
                x[order].split(self._batch_size), y[order].split(self._batch_size)
            )
            for batch_x, batch_y in batches:
                optimizer.zero_grad(set_to_none=True)
                loss = F.cross_entropy(self._model(batch_x), batch_y)
                loss.backward()
                optimizer.step()
                total += loss.detach()
                steps += 1
        return (total / steps).item()

    @torch.no_grad()
    def _set(self, values):
        for param, value in zip(self._params, values):
            param.copy_(value)

    @torch.no_grad()
    def finish(self):
        """The global model's test scores."""
        x = torch.cat([x for x, _ in self._test])
        y = torch.cat([y for _, y in self._test])
        logits = self._model(x)
        return {
            "test_accuracy": (logits.argmax(1) == y).float().mean().item(),
            "test_nll": F.cross_entropy(logits, y).item(),
        }


def standardise(x, mean, std):
    """uint8 images `[n, ...]` as standardised float32 `[n, features]`."""
    return torch.from_numpy((x.astype(np.float32) / 255 - mean) / std).flatten(1)


if __name__ == "__main__":
    serve(TorchLoop())
