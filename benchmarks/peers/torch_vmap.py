"""FedAvg with `torch.func`: a peer of `round_time.py`.

All clients of a round train at once: a step is one `vmap` over the clients of gradient
and loss, and SGD with momentum on the stacked weights.
"""

import platform

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value, vmap
from torch_task import (
    activations,
    build,
    prepare,
    read_clients,
    score,
    set_weights,
)
from worker import serve, timed


class TorchVmap:
    """The server's weights; data of all clients in two tensors."""

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
        """Builds the data and the model from what fedvi starts with.

        Raises:
          ValueError: clients of different sizes.
        """
        prepare(threads, seed, device)
        self._device, self._dtype = device, dtype
        self._batch_size, self._epochs = batch_size, epochs
        self._learning_rate, self._momentum = learning_rate, momentum
        train, self._test = read_clients(data_file, model, device)
        sizes = sorted({len(y) for _, y in train})
        if len(sizes) > 1:
            raise ValueError(
                f"torch_vmap: clients have {sizes[0]} to {sizes[-1]} examples; vmap "
                "needs equal numbers: change --clients or --client_examples"
            )
        self._x, self._y = (torch.stack(arrays) for arrays in zip(*train))
        self._model = build(model, self._x[0, 0].cpu(), hidden, classes)
        set_weights(self._model, params_file, model)
        self._model.to(device)
        self._names = [name for name, _ in self._model.named_parameters()]
        self._step = vmap(grad_and_value(self._loss))
        return {"python": platform.python_version(), "torch": torch.__version__}

    def _loss(self, params, x, y):
        params = dict(zip(self._names, params))
        with activations(self._device, self._dtype):
            return F.cross_entropy(functional_call(self._model, params, (x,)), y)

    def round(self, cohort):
        """One round with the clients of `cohort`, and their mean training loss."""
        loss, times = timed(lambda: self._round(cohort))
        return {**times, "loss": loss}

    @torch.no_grad()
    def _round(self, cohort):
        clients = torch.tensor(cohort, device=self._device)[:, None]
        server = list(self._model.parameters())
        params = [p.expand(len(cohort), *p.shape).clone() for p in server]
        velocity = [torch.zeros_like(p) for p in params]
        total, steps = torch.zeros((), device=self._device), 0
        for _ in range(self._epochs):
            shape = len(cohort), self._y.shape[1]
            order = torch.rand(shape, device=self._device).argsort(1)
            x, y = self._x[clients, order], self._y[clients, order]
            size = self._batch_size
            for batch_x, batch_y in zip(x.split(size, 1), y.split(size, 1)):
                gradients, losses = self._step(params, batch_x, batch_y)
                torch._foreach_mul_(velocity, self._momentum)
                torch._foreach_add_(velocity, gradients)
                torch._foreach_add_(params, velocity, alpha=-self._learning_rate)
                total += losses.mean()
                steps += 1
        for mean, values in zip(server, params):
            mean.copy_(values.mean(0))
        return (total / steps).item()

    def finish(self):
        """The global model's test scores."""
        return score(self._model, self._test)


if __name__ == "__main__":
    serve(TorchVmap())
