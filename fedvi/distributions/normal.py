"""The normal distribution, with a KL that is made for descent."""

import distrax
import jax
import jax.numpy as jnp
from tensorflow_probability.substrates import jax as tfp

__all__ = ["Normal", "kl"]


class Normal(distrax.Normal):
    """`distrax.Normal`, whose KL to another one of its kind is `kl`."""


@jax.custom_jvp
def kl(mu_q, sigma_q, mu_p, sigma_p):
    """KL of normals, element by element.

    Not distrax's, whose expm1 takes a KL step from 0.34 to 0.54 ms on CPU (79,510
    weights), and which divides each mean by σ_p before it subtracts. And its
    derivatives are written out, because divisions are what its gradient costs:

        ∂/∂μ_q = d/σ_p   ∂/∂σ_q = (r - 1/r)/σ_p   ∂/∂σ_p = (1 - r² - d²)/σ_p

    with r = σ_q/σ_p and d = (μ_q - μ_p)/σ_p. For equal μ and σ they are 0 to the last
    digit: Adam would make a step of what rounding leaves.
    """
    ratio, distance = sigma_q / sigma_p, (mu_q - mu_p) / sigma_p
    return 0.5 * (ratio * ratio + distance * distance - 1) - jnp.log(ratio)


@kl.defjvp
def _kl_jvp(primals, tangents):
    mu_q, sigma_q, mu_p, sigma_p = primals
    inverse = 1 / sigma_p
    ratio, distance = sigma_q / sigma_p, (mu_q - mu_p) * inverse
    slopes = (
        distance * inverse,
        (ratio - 1 / ratio) * inverse,
        -distance * inverse,
        (1 - ratio * ratio - distance * distance) * inverse,
    )
    moved = sum(slope * tangent for slope, tangent in zip(slopes, tangents))
    return kl(*primals), moved


@tfp.distributions.RegisterKL(Normal, Normal)
def _registered(q: Normal, p: Normal, *_, **__):
    return kl(q.loc, q.scale, p.loc, p.scale)
