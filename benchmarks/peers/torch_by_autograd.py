"""pFedBayes' steps as one writes them: a loss, its backward pass, an optimiser."""

import torch
import torch.nn.functional as F
from torch_mean_field import Trainer, cut, mlp, mlp_of_activations

__all__ = ["AutogradTrainer"]


class AutogradTrainer(Trainer):
    """Leaves every gradient to autograd."""

    def _train_personal(self, personal, localised, x, y):
        mu_w, sigma_w = fixed(localised)
        for _ in range(self._options["personal_steps"]):
            sigma = F.softplus(personal.rho)
            nll = F.cross_entropy(self._logits(x, personal.mu, sigma), y)
            kl = divergence(personal.mu, sigma, mu_w, sigma_w)
            descend(personal.optimizer, nll + self._kl_weight * kl)
        return nll.detach()

    def _train_localised(self, personal, localised):
        mu_q, sigma_q = fixed(personal)
        for _ in range(self._options["global_steps"]):
            kl = divergence(mu_q, sigma_q, localised.mu, F.softplus(localised.rho))
            descend(localised.optimizer, self._kl_weight * kl)

    def _logits(self, x, mu, sigma):
        if self._options["sampling"] == "weight":
            noise = self._draw(torch.empty(len(mu)))
            return mlp(x, cut(torch.addcmul(mu, sigma, noise), self._shapes))
        means, variances = cut(mu, self._shapes), cut(sigma.square(), self._shapes)
        return mlp_of_activations(x, means, variances, self._draw_activations(len(x)))


def fixed(learner):
    """(mu, σ) of a posterior that is not trained now."""
    return learner.mu.detach(), F.softplus(learner.rho.detach())


def divergence(mu_q, sigma_q, mu_w, sigma_w):
    """KL(q ‖ w) of two normal distributions with independent weights."""
    ratio, shift = sigma_q / sigma_w, (mu_q - mu_w) / sigma_w
    squares = ratio.dot(ratio) + shift.dot(shift) - len(ratio)
    return squares / 2 - ratio.log().sum()


def descend(optimizer, loss):
    """One step down the gradient of `loss`."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
