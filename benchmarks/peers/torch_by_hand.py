"""pFedBayes' steps with gradients written out.

Of the KL term, and of a draw by mu and rho, so that autograd sees the network alone.
Everything is written into buffers.
"""

import math

import torch
import torch.nn.functional as F
from torch_mean_field import Trainer, cut, mlp, mlp_of_activations

__all__ = ["HandTrainer"]


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


class HandTrainer(Trainer):
    """Leaves to autograd the network alone; has buffers of its own."""

    def __init__(self, shapes, options, seed):
        super().__init__(shapes, options, seed)
        weights = sum(map(math.prod, shapes))
        self._q, self._w = Scales(weights), Scales(weights)
        self._q_gradient, self._w_gradient = torch.empty(2, 2, weights)
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
        return super().train(personal, localised, x, y)

    def _start(self, personal, localised):
        personal.mu.grad, personal.rho.grad = self._q_gradient
        localised.mu.grad, localised.rho.grad = self._w_gradient
        self._q.follow(personal)
        self._follow_w(localised)

    def _train_personal(self, personal, localised, x, y):
        for _ in range(self._options["personal_steps"]):
            nll = self._step_personal(personal, localised, x, y)
        return nll

    def _train_localised(self, personal, localised):
        for _ in range(self._options["global_steps"]):
            self._step_localised(personal, localised)

    def _step_personal(self, personal, localised, x, y):
        sigma = self._q.sigma
        by_mu, by_rho = self._q_gradient
        torch.sub(personal.mu, localised.mu, out=self._shift)
        if self._options["sampling"] == "weight":
            self._draw(self._noise)
            torch.addcmul(personal.mu, sigma, self._noise, out=self._inputs[0])
            nll = self._backpropagate(y, mlp, x, *self._leaves)
            torch.mul(self._gradients[0], self._noise, out=by_rho)
            by_rho.addcmul_(sigma, self._pull)
        else:
            self._inputs[0].copy_(personal.mu)
            torch.mul(sigma, sigma, out=self._inputs[1])
            noise = self._draw_activations(len(x))
            nll = self._backpropagate(y, mlp_of_activations, x, *self._leaves, noise)
            torch.add(self._pull, self._gradients[1], alpha=2, out=by_rho).mul_(sigma)
        torch.addcmul(self._gradients[0], self._shift, self._pull, out=by_mu)
        torch.reciprocal(sigma, out=self._buffer)
        by_rho.sub_(self._buffer, alpha=self._kl_weight).mul_(self._q.slope)
        personal.optimizer.step()
        self._q.follow(personal)
        return nll

    def _step_localised(self, personal, localised):
        by_mu, by_rho = self._w_gradient
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

    def _backpropagate(self, y, network, *inputs):
        """The mean NLL; its gradient by what the network computes with."""
        self._gradients.zero_()
        with torch.enable_grad():
            loss = F.cross_entropy(network(*inputs), y)
        loss.backward()
        return loss.detach()
