"""The client's side of `torch_pfedbayes.py`: two posteriors, trained in turn.

Written for speed: a posterior is one flat tensor (mu, rho), so that every elementwise
operation and every optimiser step is one call; these write into buffers; the gradient
of the KL term, and that of a draw by mu and rho, are written out, so that autograd sees
the network alone; all noise of a step is one call.
"""

import itertools
import math

import torch
import torch.nn.functional as F

__all__ = ["Learner", "Trainer", "cut", "mlp"]


class Learner:
    """A posterior `[2 × weights]`, mu before rho, and its optimiser."""

    def __init__(self, start, make_optimizer):
        self.value = start.clone()
        self.mu, self.rho = self.value.chunk(2)
        self.optimizer = make_optimizer([self.value])


class Scales:
    """σ = softplus(rho) and its slope dσ/drho, both `[weights]`."""

    def __init__(self, weights):
        self.sigma, self.slope, self._buffer = torch.empty(3, weights)

    def follow(self, learner):
        """Takes over a learner's rho."""
        torch.exp(learner.rho, out=self.slope)
        torch.log1p(self.slope, out=self.sigma)
        torch.add(self.slope, 1, out=self._buffer)
        self.slope.div_(self._buffer)


class Trainer:
    """Trains one client after another, in buffers of its own."""

    def __init__(self, shapes, options, seed):
        self._options = options
        self._generator = torch.Generator().manual_seed(seed)
        weights = sum(map(math.prod, shapes))
        self._q, self._w = Scales(weights), Scales(weights)
        self._q_gradient, self._w_gradient = torch.empty(2, 2 * weights)
        self._shift, self._pull, self._noise, self._buffer = torch.empty(4, weights)
        # What the network computes with: a draw of the weights, or means and variances.
        inputs = 1 if options["sampling"] == "weight" else 2
        self._inputs = torch.empty(inputs, weights)
        self._gradients = torch.empty(inputs, weights)
        self._leaves = [cut(flat, shapes) for flat in self._inputs]
        for mine, flat in zip(self._leaves, self._gradients):
            for leaf, gradient in zip(mine, cut(flat, shapes)):
                leaf.requires_grad_().grad = gradient

    @torch.no_grad()
    def train(self, personal, localised, x, y):
        """One client's round; the mean NLL of its batches before q's last step."""
        options = self._options
        self._kl_weight = options["zeta"] / len(x)
        personal.value.grad, localised.value.grad = self._q_gradient, self._w_gradient
        self._q.follow(personal)
        self._follow_w(localised)
        batches = self._minibatches(x, y)
        total = torch.zeros(())
        for batch in batches:
            for _ in range(options["personal_steps"]):
                nll = self._step_personal(personal, localised, *batch)
            for _ in range(options["global_steps"]):
                self._step_localised(personal, localised)
            total += nll
        return (total / len(batches)).item()

    def _minibatches(self, x, y):
        size, batches = self._options["batch_size"], []
        for _ in range(self._options["epochs"]):
            order = torch.randperm(len(x), generator=self._generator)
            batches += zip(x[order].split(size), y[order].split(size))
        return batches

    def _step_personal(self, personal, localised, x, y):
        """A step of q on NLL + ζ/n KL(q ‖ w); the NLL before it."""
        sigma = self._q.sigma
        by_mu, by_rho = self._q_gradient.chunk(2)
        torch.sub(personal.mu, localised.mu, out=self._shift)
        if self._options["sampling"] == "weight":
            self._draw(self._noise)
            torch.addcmul(personal.mu, sigma, self._noise, out=self._inputs[0])
            nll = self._backpropagate(mlp, x, y)
            torch.mul(self._gradients[0], self._noise, out=by_rho)
            by_rho.addcmul_(sigma, self._pull)
        else:
            self._inputs[0].copy_(personal.mu)
            torch.mul(sigma, sigma, out=self._inputs[1])
            nll = self._backpropagate(self._mlp_of_activations, x, y)
            torch.add(self._pull, self._gradients[1], alpha=2, out=by_rho).mul_(sigma)
        torch.addcmul(self._gradients[0], self._shift, self._pull, out=by_mu)
        torch.reciprocal(sigma, out=self._buffer)
        by_rho.sub_(self._buffer, alpha=self._kl_weight).mul_(self._q.slope)
        personal.optimizer.step()
        self._q.follow(personal)
        return nll

    def _step_localised(self, personal, localised):
        """A step of w on ζ/n KL(q ‖ w)."""
        by_mu, by_rho = self._w_gradient.chunk(2)
        torch.sub(localised.mu, personal.mu, out=self._shift)
        torch.mul(self._shift, self._pull, out=by_mu)
        # ζ/n (1/σ_w - (σ_q² + shift²) / σ_w³)
        torch.mul(self._q.sigma, self._q.sigma, out=by_rho)
        by_rho.addcmul_(self._shift, self._shift).mul_(self._pull)
        by_rho.neg_().add_(self._kl_weight).div_(self._w.sigma).mul_(self._w.slope)
        localised.optimizer.step()
        self._follow_w(localised)

    def _follow_w(self, localised):
        """σ_w, and ζ/n / σ_w², how strongly q and w pull at each other."""
        self._w.follow(localised)
        torch.mul(self._w.sigma, self._w.sigma, out=self._pull)
        self._pull.reciprocal_().mul_(self._kl_weight)

    def _backpropagate(self, network, x, y):
        """The mean NLL; its gradient by what the network computes with."""
        self._gradients.zero_()
        with torch.enable_grad():
            loss = F.cross_entropy(network(x, *self._leaves), y)
        loss.backward()
        return loss.detach()

    def _mlp_of_activations(self, x, means, variances):
        """Logits of one draw of every activation."""
        bias_1, kernel_1, bias_2, kernel_2 = means
        var_bias_1, var_kernel_1, var_bias_2, var_kernel_2 = variances
        noise = self._draw(torch.empty(len(x), len(bias_1) + len(bias_2)))
        noise_1, noise_2 = noise.split([len(bias_1), len(bias_2)], 1)
        mean = torch.addmm(bias_1, x, kernel_1)
        variance = torch.addmm(var_bias_1, x * x, var_kernel_1)
        x = torch.addcmul(mean, variance.sqrt(), noise_1).relu()
        mean = torch.addmm(bias_2, x, kernel_2)
        variance = torch.addmm(var_bias_2, x * x, var_kernel_2)
        return torch.addcmul(mean, variance.sqrt(), noise_2)

    def _draw(self, out):
        return out.normal_(std=self._options["eps_scale"], generator=self._generator)


def mlp(x, weights):
    """Logits of a network with one hidden layer."""
    bias_1, kernel_1, bias_2, kernel_2 = weights
    x = torch.addmm(bias_1, x, kernel_1).relu()
    return torch.addmm(bias_2, x, kernel_2)


def cut(flat, shapes):
    """Views of a flat tensor."""
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    pieces = flat.tensor_split(ends[:-1])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]
