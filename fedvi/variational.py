"""Networks with random weights: the loss and the prediction of a posterior.

What the mean-field algorithms share. A `Family` says what a posterior is, a
`BayesianNetwork` how its weights are drawn; both see one client and one batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import distrax
import jax
import jax.numpy as jnp

from fedvi.algorithm import Algorithm
from fedvi.distributions import mean_field, spike_and_slab
from fedvi.distributions.tree import with_head
from fedvi.flat import trees
from fedvi.nn import Model, parameter_count
from fedvi.options import Options, option
from fedvi.placement import device_memory

__all__ = [
    "Average",
    "BayesianNetwork",
    "Family",
    "Sampling",
    "bernoulli_gaussian",
    "frozen_head",
    "mean_field_normal",
    "posterior_estimate",
]


# Of a prediction: thousands of draws shall not need thousands of times the activations.
_DRAWS_AT_ONCE = 32


class Average(NamedTuple):
    """What the server takes for the average of posteriors.

    Attributes:
      statistics: `(q, near) -> pytree` of floats whose mean over clients is asked for;
        `near` is a posterior that clients and server know, to which they refer.
      posterior: `(mean statistics, near) -> w`; `near` itself where all are.
    """

    statistics: Callable[..., Any]
    posterior: Callable[..., Any]


class Family(NamedTuple):
    """A variational family over a parameter pytree.

    Attributes:
      init: `(params) -> q`, centred at `params`.
      sample: `(key, q, eps_scale) -> params`, one draw, its noise times `eps_scale`.
      conditional: `(key, q) -> (mean, scale)`, pytrees like `params`: given what `q`
        draws first (gates, if it has any), the weights are N(mean, scale²).
      kl: `(q, p) ->` KL(q ‖ p) in nats.
      averages: by name, those that are no mean of the parameters; that of "moments"
        minimises Σ_i KL(q_i ‖ w).
      distribution: `(q) -> distrax.Distribution` over the tree of layers.
    """

    init: Callable[[Any], Any]
    sample: Callable[..., Any]
    conditional: Callable[..., tuple[Any, Any]]
    kl: Callable[..., jax.Array]
    averages: Mapping[str, Average]
    distribution: Callable[[Any], distrax.Distribution]


def mean_field_normal(rho: float, link: mean_field.Link = "softplus") -> Family:
    """Mean-field normal, all scales starting at link(rho).

    Args:
      rho: initial unconstrained scale.
      link: "softplus" or "exp".
    """
    return Family(
        init=lambda params: mean_field.from_rho(params, rho, link),
        sample=mean_field.sample,
        conditional=lambda key, q: (q.mu, mean_field.scale(q)),
        kl=mean_field.kl,
        averages={"moments": Average(mean_field.moments, mean_field.from_moments)},
        distribution=mean_field.distribution,
    )


def bernoulli_gaussian(rho: float, inclusion: float, temperature: float) -> Family:
    """Spike and slab with a normal slab (sFedBayes Eq. 32).

    Args:
      rho: initial unconstrained scale of the slab, softplus.
      inclusion: initial λ in (0, 1).
      temperature: τ > 0 of the gates' straight-through gradient (Eq. 41).
    """

    def init(params):
        return spike_and_slab.init(mean_field.from_rho(params, rho), inclusion)

    def conditional(key, q):
        gates = spike_and_slab.gates(key, q, temperature)
        slab = (q.slab.mu, mean_field.scale(q.slab))
        return tuple(jax.tree.map(jnp.multiply, gates, part) for part in slab)

    return Family(
        init=init,
        sample=lambda key, q, eps_scale: spike_and_slab.sample(
            key, q, temperature, eps_scale
        ),
        conditional=conditional,
        kl=spike_and_slab.kl,
        averages={
            "moments": Average(spike_and_slab.moments, spike_and_slab.from_moments),
            "probabilities": Average(
                spike_and_slab.probabilities, spike_and_slab.from_probabilities
            ),
        },
        distribution=spike_and_slab.distribution,
    )


def frozen_head(family: Family) -> Family:
    """`family` over the body of a network whose random head stays as it is.

    A posterior is `{"body": q, "head": weights}`: no noise, no KL and no gradient
    reach the head. The averages are those of q.
    """

    def sample(key, q, eps_scale=1.0):
        body = family.sample(key, q["body"], eps_scale)
        return {"body": body, "head": jax.lax.stop_gradient(q["head"])}

    def conditional(key, q):
        mean, scale = family.conditional(key, q["body"])
        head = jax.lax.stop_gradient(q["head"])
        still = jax.tree.map(jnp.zeros_like, head)
        return {"body": mean, "head": head}, {"body": scale, "head": still}

    def distribution(q):
        body = jax.eval_shape(lambda: family.sample(jax.random.key(0), q["body"], 1.0))
        base = family.distribution(q["body"]).base
        return with_head(base, {"body": body}, {"head": q["head"]})

    return family._replace(
        init=lambda params: {**params, "body": family.init(params["body"])},
        sample=sample,
        conditional=conditional,
        kl=lambda q, p: family.kl(q["body"], p["body"]),
        distribution=distribution,
    )


class Sampling(Options):
    """Options of the draws from a posterior."""

    sampling: Literal["weight", "local"] = option(
        "local",
        "What is drawn in training and prediction. weight: the weights, once for a "
        "batch (the papers); local: the activations (local reparameterisation), for "
        "dense layers with the same expected gradient and less variance; convolutions "
        "are better served by weight. Gates are drawn as weights are in both.",
    )
    mc_samples: int = option(
        1, "a, draws that a step's loss is averaged of.", at_least=1
    )
    num_samples: int = option(
        10, "Draws of a prediction.", evaluation="rows", at_least=1
    )
    eps_scale: float = option(
        1.0,
        "Factor on the noise of every draw, of normals and slabs.",
        source="the papers: 1; pFedBayes' public code: 0.001",
        at_least=0,
        traced=True,
    )


@dataclasses.dataclass(frozen=True)
class BayesianNetwork:
    """A model whose weights follow a posterior.

    Attributes:
      model: the network and its likelihood.
      family: of the posteriors.
      options: how to draw.

    Raises:
      ValueError: more draws than fit in memory.
    """

    model: Model
    family: Family
    options: Sampling

    def __post_init__(self):
        most = _most_draws(self.model)
        for name in ("mc_samples", "num_samples"):
            draws = getattr(self.options, name)
            if draws > most:
                raise ValueError(
                    f"{name}={draws} draws of {self.model.name} do not fit into this "
                    f"device's memory: {most:,} do"
                )

    def loss(self, key, q, batch):
        """E_q[-log p(y|x, θ)], Monte-Carlo estimate of the mean over the batch."""

        def one(key):
            outputs = self._outputs(key, q, batch.x, batch.mask)
            return self.model.loss(outputs, batch.y, batch.mask)

        if self.options.mc_samples == 1:
            return one(key)
        return jax.vmap(one)(jax.random.split(key, self.options.mc_samples)).mean()

    def predict(self, key, q, x, mask=None):
        """Log class probabilities `[num_samples, batch, classes]`."""

        def one(key):
            return jax.nn.log_softmax(self._outputs(key, q, x, mask))

        keys = jax.random.split(key, self.options.num_samples)
        if len(keys) <= _DRAWS_AT_ONCE:
            return jax.vmap(one)(keys)
        return jax.lax.map(one, keys, batch_size=_DRAWS_AT_ONCE)

    def _outputs(self, key, q, x, mask):
        """Outputs `[batch, classes]` under one draw."""
        eps_scale = self.options.eps_scale
        if self.options.sampling == "weight":
            params = self.family.sample(key, q, eps_scale)
            return self.model.apply(trees(params), x, mask)
        gate_key, noise_key = jax.random.split(key)
        mean, scale = trees(self.family.conditional(gate_key, q))
        scale = jax.tree.map(lambda s: eps_scale * s, scale)
        return self.model.apply_local(noise_key, mean, scale, x, mask)


def posterior_estimate(
    name: str,
    network: BayesianNetwork,
    global_of: Callable,
    init: Callable,
    client_update: Callable,
    server_update: Callable,
    personalise: Callable,
    **functions,
) -> Algorithm:
    """The `Algorithm` of a method whose models are posteriors of `network.family`.

    Args:
      name: of the method.
      network: what predicts.
      global_of: `(server) -> q`, the global posterior.
      init: of `Algorithm`, like the next two.
      client_update: likewise.
      server_update: likewise.
      personalise: likewise; it returns a posterior.
      **functions: other fields of `Algorithm`.
    """
    distribution = network.family.distribution
    return Algorithm(
        name,
        init,
        client_update,
        server_update,
        personalise=personalise,
        global_predictive=lambda key, server, x, mask: network.predict(
            key, global_of(server), x, mask
        ),
        personal_predictive=lambda key, server, personal, x, mask: network.predict(
            key, personal, x, mask
        ),
        posterior=lambda server: distribution(global_of(server)),
        personal_posterior=lambda server, personal: distribution(personal),
        **functions,
    )


def _most_draws(model: Model) -> int:
    """Draws that memory could hold, roughly.

    A draw is counted as its weights, noise and gradient, and as much again for the
    activations of a batch; what the clients and seeds of one `vmap` multiply is not.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return max(1, device_memory() // (6 * 4 * parameter_count(shapes)))
