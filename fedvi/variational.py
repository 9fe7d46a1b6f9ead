"""Networks with random weights: the loss and the prediction of a posterior.

What the mean-field algorithms share. A `Family` says what a posterior is, a
`BayesianNetwork` how its weights are drawn; both see one client and one batch.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedvi import checks
from fedvi.distributions import mean_field, spike_and_slab
from fedvi.distributions.draws import standard_normal_like
from fedvi.nn import Model, parameter_count

__all__ = ["BayesianNetwork", "Family", "bernoulli_gaussian", "normal"]


# Of a prediction: thousands of draws shall not need thousands of times the activations.
_DRAWS_AT_ONCE = 32


class Family(NamedTuple):
    """A variational family over a parameter pytree.

    Attributes:
      init: `(params) -> q`, centred at `params`.
      conditional: `(key, q) -> (mean, scale)`, pytrees like `params`: given what `q`
        draws first (gates, if it has any), the weights are N(mean, scale²).
      kl: `(q, p) ->` KL(q ‖ p) in nats.
      moments: `(q, near) -> statistics` whose mean over clients `from_moments` takes;
        `near` is a posterior that clients and server know, to which they refer.
      from_moments: `(mean statistics, near) -> w`, which minimises Σ_i KL(q_i ‖ w).
    """

    init: Callable[[Any], Any]
    conditional: Callable[..., tuple[Any, Any]]
    kl: Callable[..., jax.Array]
    moments: Callable[..., Any]
    from_moments: Callable[..., Any]


def normal(rho: float, link: str = "softplus") -> Family:
    """Mean-field normal, all scales starting at link(rho).

    Args:
      rho: initial unconstrained scale.
      link: "softplus" or "exp".

    Raises:
      ValueError: rho is NaN or infinite.
    """
    checks.finite("rho", rho)

    def moments(q, near):
        statistics = mean_field.moments(q, near.mu)
        del statistics["mass"]  # 1, and not sent
        return statistics

    def from_moments(statistics, near):
        mass = jax.tree.map(jnp.ones_like, near.mu)
        return mean_field.from_moments({**statistics, "mass": mass}, near.mu, link)

    return Family(
        init=lambda params: mean_field.from_rho(params, rho, link),
        conditional=lambda key, q: (q.mu, mean_field.scale(q)),
        kl=mean_field.kl,
        moments=moments,
        from_moments=from_moments,
    )


def bernoulli_gaussian(rho: float, inclusion: float, temperature: float) -> Family:
    """Spike and slab with a normal slab (sFedBayes Eq. 32).

    Args:
      rho: initial unconstrained scale of the slab, softplus.
      inclusion: initial λ in (0, 1).
      temperature: τ > 0 of the gates' straight-through gradient (Eq. 41).

    Raises:
      ValueError: rho is NaN or infinite.
    """
    checks.finite("rho", rho)

    def init(params):
        return spike_and_slab.init(mean_field.from_rho(params, rho), inclusion)

    def conditional(key, q):
        gates = spike_and_slab.gates(key, q, temperature)
        scale = mean_field.scale(q.slab)
        return (
            jax.tree.map(jnp.multiply, gates, q.slab.mu),
            jax.tree.map(jnp.multiply, gates, scale),
        )

    return Family(
        init=init,
        conditional=conditional,
        kl=spike_and_slab.kl,
        moments=lambda q, near: spike_and_slab.moments(q, near.slab.mu),
        from_moments=lambda statistics, near: spike_and_slab.from_moments(
            statistics, near.slab.mu
        ),
    )


class BayesianNetwork(NamedTuple):
    """A model whose weights follow a posterior.

    Attributes:
      model: the network and its likelihood.
      family: of the posteriors.
      sampling: "weight": one draw of the weights for a whole batch (the papers);
        "local": draws of the activations (local reparameterisation), with the same
        expected gradient for dense layers and less variance.
      mc_samples: a, draws a loss is averaged over.
      num_samples: draws of a prediction.
      eps_scale: factor on the noise of the draws; 1 as in the papers.
    """

    model: Model
    family: Family
    sampling: str
    mc_samples: int
    num_samples: int
    eps_scale: float

    def check(self) -> "BayesianNetwork":
        """Returns itself.

        Raises:
          ValueError: an option outside its range, or more draws than fit in memory.
        """
        checks.one_of("sampling", self.sampling, ("weight", "local"))
        checks.finite("eps_scale", self.eps_scale)
        checks.at_least("eps_scale", self.eps_scale, 0)
        most = _most_draws(self.model)
        for name in ("mc_samples", "num_samples"):
            draws = getattr(self, name)
            checks.at_least(name, draws, 1)
            if draws > most:
                raise ValueError(
                    f"{name}={draws} draws of {self.model.name} do not fit into this "
                    f"device's memory: {most:,} do"
                )
        return self

    def loss(self, key, q, batch):
        """E_q[-log p(y|x, θ)], Monte-Carlo estimate of the mean over the batch."""

        def one(key):
            outputs = self._outputs(key, q, batch.x, batch.mask)
            return self.model.loss(outputs, batch.y, batch.mask)

        if self.mc_samples == 1:
            return one(key)
        return jax.vmap(one)(jax.random.split(key, self.mc_samples)).mean()

    def predict(self, key, q, x, mask=None):
        """Log class probabilities `[num_samples, batch, classes]`."""

        def one(key):
            return jax.nn.log_softmax(self._outputs(key, q, x, mask))

        keys = jax.random.split(key, self.num_samples)
        if self.num_samples <= _DRAWS_AT_ONCE:
            return jax.vmap(one)(keys)
        return jax.lax.map(one, keys, batch_size=_DRAWS_AT_ONCE)

    def _outputs(self, key, q, x, mask):
        """Outputs `[batch, classes]` under one draw."""
        gate_key, noise_key = jax.random.split(key)
        mean, scale = self.family.conditional(gate_key, q)
        scale = jax.tree.map(lambda s: self.eps_scale * s, scale)
        if self.sampling == "local":
            return self.model.apply_local(noise_key, mean, scale, x, mask)
        noise = standard_normal_like(noise_key, mean)
        params = jax.tree.map(lambda m, s, z: m + s * z, mean, scale, noise)
        return self.model.apply(params, x, mask)


def _most_draws(model: Model) -> int:
    """Draws that memory could hold, roughly.

    A draw is counted as its weights, noise and gradient, and as much again for the
    activations of a batch; what the clients and seeds of one `vmap` multiply is not.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    stats = jax.local_devices()[0].memory_stats() or {}
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = stats.get("bytes_limit", physical)
    return max(1, memory // (6 * 4 * parameter_count(shapes)))
