"""pFedBayes as a PyTorch loop: the peer of `round_time.py`.

See `torch_mean_field.py` for what a client does; `gradients` tells how. The optimisers
are PyTorch's fused ones. `clients_at_once` trains so many, each in a Python thread:
PyTorch releases the interpreter lock inside its operations.
"""

import platform
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from torch_by_autograd import AutogradTrainer
from torch_by_hand import HandTrainer
from torch_mean_field import Learner, cut, mlp
from torch_task import read_clients
from worker import serve, timed

TRAINERS = {"hand": HandTrainer, "autograd": AutogradTrainer}


class TorchPFedBayes:
    """The global posterior, every client's two learners and who trains them."""

    def load(
        self,
        data_file,
        params_file,
        hidden,
        classes,
        learning_rate,
        momentum,
        optimizer,
        threads,
        gradients,
        clients_at_once,
        seed,
        **options,
    ):
        """Builds the data and the posterior from what fedvi starts with.

        `options` are `batch_size, epochs, zeta, personal_steps, global_steps, sampling`
        and `eps_scale`.
        """
        torch.set_num_threads(threads)
        self._threads = threads
        self._train, self._test = read_clients(data_file, "mlp")
        features = self._train[0][0].shape[1]
        self._shapes = [(hidden,), (features, hidden), (classes,), (hidden, classes)]
        with np.load(params_file) as files:
            flat = [torch.from_numpy(leaf).flatten() for leaf in files.values()]
        self._server = torch.cat(flat)
        self._trainers = [
            TRAINERS[gradients](self._shapes, options, seed + i)
            for i in range(clients_at_once)
        ]
        self._pool = ThreadPoolExecutor(clients_at_once)
        if optimizer == "adam":
            self._optimizer = lambda p: torch.optim.Adam(p, learning_rate, fused=True)
        else:
            self._optimizer = lambda p: torch.optim.SGD(
                p, learning_rate, momentum, fused=True
            )
        self._clients = {}
        self._options = options
        return {"python": platform.python_version(), "torch": torch.__version__}

    def round(self, cohort):
        """One round with the clients of `cohort`, and their mean training NLL.

        The value of the KL term is not computed: no gradient needs it.
        """
        loss, times = timed(lambda: self._round(cohort))
        return {**times, "loss": loss}

    def _round(self, cohort):
        number = len(self._trainers)
        shares = [cohort[i::number] for i in range(number)]
        results = list(self._pool.map(self._train_share, self._trainers, shares))
        self._server = sum(total for total, _ in results) / len(cohort)
        return sum(loss for _, loss in results) / len(cohort)

    def _train_share(self, trainer, cohort):
        """Sum of the localised globals, and of the losses, of some clients."""
        torch.set_num_threads(self._threads)
        total, loss = torch.zeros_like(self._server), 0.0
        for client in cohort:
            if client not in self._clients:
                self._clients[client] = tuple(
                    Learner(self._server, self._optimizer) for _ in range(2)
                )
            personal, localised = self._clients[client]
            localised.value.copy_(self._server)
            loss += trainer.train(personal, localised, *self._train[client])
            total += localised.value
        return total, loss

    def finish(self):
        """Test scores, pooled: of the global model and of each client's own."""
        everything = [torch.cat(parts) for parts in zip(*self._test)]
        accuracy, nll = self._score(self._server, *everything)
        own, count = torch.zeros(2), 0
        for client, (personal, _) in self._clients.items():
            x, y = self._test[client]
            own += len(y) * torch.tensor(self._score(personal.value, x, y))
            count += len(y)
        personal_accuracy, personal_nll = (own / count).tolist()
        return {
            "test_accuracy": accuracy,
            "test_nll": nll,
            "personal_accuracy": personal_accuracy,
            "personal_nll": personal_nll,
        }

    @torch.no_grad()
    def _score(self, posterior, x, y, draws=10):
        """Accuracy and NLL of the mean prediction of `draws` draws of the weights."""
        mu, rho = posterior.chunk(2)
        scale = self._options["eps_scale"] * F.softplus(rho)
        generator = torch.Generator().manual_seed(0)
        probabilities = 0
        for _ in range(draws):
            noise = torch.empty_like(mu).normal_(generator=generator)
            draw = cut(torch.addcmul(mu, scale, noise), self._shapes)
            probabilities += mlp(x, draw).softmax(1) / draws
        accuracy = (probabilities.argmax(1) == y).float().mean()
        return accuracy.item(), F.nll_loss(probabilities.log(), y).item()


if __name__ == "__main__":
    serve(TorchPFedBayes())
