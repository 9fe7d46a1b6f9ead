"""The client's side of `torch_pfedbayes.py`: two posteriors, trained in turn.

Written for speed: a posterior is one flat tensor, so that every elementwise operation
is one call; the optimisers are fused ones; all noise of a step is one call. How the
gradients are made is left to `torch_by_hand.py` and `torch_by_autograd.py`, which draw
the same numbers.
"""

import math

import torch

__all__ = ["Learner", "Trainer", "cut", "mlp", "mlp_of_activations"]


class Learner:
    """A posterior `[2 × weights]`, mu before rho, and its optimiser."""

    def __init__(self, start, make_optimizer):
        self.value = start.clone()
        self.mu, self.rho = (half.requires_grad_() for half in self.value.chunk(2))
        self.optimizer = make_optimizer([self.mu, self.rho])


class Trainer:
    """Trains one client after another.

    A subclass has `_start(personal, localised)`, called once a client,
    `_train_personal(personal, localised, x, y)`, a minibatch's steps of q on
    NLL + ζ/n KL(q ‖ w), which returns the NLL before the last one, and
    `_train_localised(personal, localised)`, its steps of w on ζ/n KL(q ‖ w).
    """

    def __init__(self, shapes, options, seed):
        self._shapes, self._options = shapes, options
        self._generator = torch.Generator().manual_seed(seed)

    def train(self, personal, localised, x, y):
        """One client's round; the mean NLL of its batches before q's last step."""
        self._kl_weight = self._options["zeta"] / len(x)
        self._start(personal, localised)
        batches = self._minibatches(x, y)
        total = torch.zeros(())
        for batch in batches:
            total += self._train_personal(personal, localised, *batch)
            self._train_localised(personal, localised)
        return (total / len(batches)).item()

    def _minibatches(self, x, y):
        size, batches = self._options["batch_size"], []
        for _ in range(self._options["epochs"]):
            order = torch.randperm(len(x), generator=self._generator)
            batches += zip(x[order].split(size), y[order].split(size))
        return batches

    def _draw(self, out):
        return out.normal_(std=self._options["eps_scale"], generator=self._generator)

    def _draw_activations(self, examples):
        """Noise `[examples, units]` of each layer."""
        units = [shape[0] for shape in self._shapes[::2]]
        return self._draw(torch.empty(examples, sum(units))).split(units, 1)


def mlp(x, weights):
    """Logits of a network with one hidden layer."""
    bias_1, kernel_1, bias_2, kernel_2 = weights
    x = torch.addmm(bias_1, x, kernel_1).relu()
    return torch.addmm(bias_2, x, kernel_2)


def mlp_of_activations(x, means, variances, noise):
    """Logits of one draw of every activation."""
    bias_1, kernel_1, bias_2, kernel_2 = means
    var_bias_1, var_kernel_1, var_bias_2, var_kernel_2 = variances
    mean = torch.addmm(bias_1, x, kernel_1)
    variance = torch.addmm(var_bias_1, x * x, var_kernel_1)
    x = torch.addcmul(mean, variance.sqrt(), noise[0]).relu()
    mean = torch.addmm(bias_2, x, kernel_2)
    variance = torch.addmm(var_bias_2, x * x, var_kernel_2)
    return torch.addcmul(mean, variance.sqrt(), noise[1])


def cut(flat, shapes):
    """Views of a flat tensor."""
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]
