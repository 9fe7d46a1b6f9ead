"""pFedBayes' steps as one writes them: a loss, its backward pass, an optimiser."""

import torch
import torch.nn.functional as F
from torch_mean_field import Trainer, cut, mlp, mlp_of_activations

__all__ = ["AutogradTrainer"]


class AutogradTrainer(Trainer):
    """Leaves every gradient to autograd; computes a σ anew only after a step of it."""

    def _start(self, personal, localised):
        self._sigma_q = F.softplus(personal.rho)
        self._sigma_w = F.softplus(localised.rho)

    def _train_personal(self, personal, localised, x, y):
        mu_w, sigma_w = localised.mu.detach(), self._sigma_w.detach()
        for _ in range(self._options["personal_steps"]):
            nll = F.cross_entropy(self._logits(x, personal.mu, self._sigma_q), y)
            kl = divergence(personal.mu, self._sigma_q, mu_w, sigma_w)
            self._sigma_q = descend(personal, nll + self._kl_weight * kl)
        return nll.detach()

    def _train_localised(self, personal, localised):
        mu_q, sigma_q = personal.mu.detach(), self._sigma_q.detach()
        for _ in range(self._options["global_steps"]):
            kl = divergence(mu_q, sigma_q, localised.mu, self._sigma_w)
            self._sigma_w = descend(localised, self._kl_weight * kl)

    def _logits(self, x, mu, sigma):
        if self._options["sampling"] == "weight":
            noise = self._draw(torch.empty(len(mu)))
            return mlp(x, cut(torch.addcmul(mu, sigma, noise), self._shapes))
        means, variances = cut(mu, self._shapes), cut(sigma.square(), self._shapes)
        return mlp_of_activations(x, means, variances, self._draw_activations(len(x)))


def divergence(mu_q, sigma_q, mu_w, sigma_w):
    """KL(q ‖ w) of two normal distributions with independent weights."""
    ratio, shift = sigma_q / sigma_w, (mu_q - mu_w) / sigma_w
    squares = ratio.dot(ratio) + shift.dot(shift) - len(ratio)
    return squares / 2 - ratio.log().sum()


def descend(learner, loss):
    """One step down the gradient of `loss`, and the new σ."""
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    learner.optimizer.step()
    return F.softplus(learner.rho)
