"""Temperature scaling (Guo et al. 2017) from what clients can upload as sums.

A prediction p becomes p_T(c|x) ∝ p(c|x)^(1/T): flatter for T > 1, sharper below. p is
the averaged predictive distribution, so that it serves posteriors and point estimates.

With θ = log T, β = 1/T and ℓ_c = log p(c|x), the negative log-likelihood of n examples
is Σ_i [log Σ_c exp(β ℓ_ic) - β ℓ_iy], which is convex in β, and

    slope        d NLL / dθ = β Σ_i (ℓ_iy - E_i ℓ),   E_i under p_T(·|x_i)
    information             = β² Σ_i Var_i ℓ,         Fisher's, of θ, if p_T is true.

A client uploads both once, on a fixed grid of θ: two vectors that a server adds up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = [
    "LOG_TEMPERATURES",
    "TemperatureSums",
    "client_temperatures",
    "global_temperature",
    "rescaled",
    "temperature_sums",
    "temperature_variance",
]

LOG_TEMPERATURES = np.linspace(-3.0, 3.0, 61)
"""The grid of θ: temperatures from 0.05 to 20. Between its points the slope is taken
for a straight line, which finds T to about 0.1 %."""

_FLOOR = -1e4  # of log-probabilities: 0 · inf would be NaN


class TemperatureSums(NamedTuple):
    """What a client uploads; of several clients, stacked with a leading [clients]."""

    slope: Array  # [grid] d NLL / d log T, summed over the examples
    information: Array  # [grid] Fisher's, of log T


def rescaled(log_probs: Array, temperature: Array) -> Array:
    """`log p_T`, `[..., classes]`.

    Args:
      log_probs: `[..., classes]` log-probabilities.
      temperature: T > 0 of every example, of a shape that broadcasts with `[...]`.
    """
    temperature = jnp.broadcast_to(temperature, log_probs.shape[:-1])
    return jax.nn.log_softmax(log_probs / temperature[..., None])


def temperature_sums(log_probs: Array, labels: Array, mask: Array) -> TemperatureSums:
    """One client's sums at the temperatures of `LOG_TEMPERATURES`.

    Args:
      log_probs: `[capacity, classes]`, of the averaged predictions.
      labels: `[capacity]` int32 in [0, classes).
      mask: `[capacity]` bool, True for real examples; others count exactly 0.
    """
    log_p = jnp.where(mask[:, None], jnp.maximum(log_probs, _FLOOR), 0.0)
    labels = jnp.where(mask, labels, 0)
    own = jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]

    def at(theta):
        beta = jnp.exp(-theta)
        p = jax.nn.softmax(beta * log_p)
        mean = jnp.sum(p * log_p, axis=-1)
        variance = jnp.sum(p * (log_p - mean[:, None]) ** 2, axis=-1)
        slope = jnp.where(mask, beta * (own - mean), 0.0)
        return jnp.sum(slope), jnp.sum(jnp.where(mask, beta**2 * variance, 0.0))

    grid = jnp.asarray(LOG_TEMPERATURES, jnp.float32)
    return TemperatureSums(*jax.lax.map(at, grid))


def global_temperature(sums: TemperatureSums) -> float:
    """The temperature of the least NLL over all clients' examples.

    Args:
      sums: stacked, leaves `[clients, grid]`; only their sum over clients is used.

    Returns:
      T in [0.05, 20], an end of that where the NLL falls beyond it (a model without a
      mistake asks for T → 0); NaN if a prediction is NaN; 1 without any example.
    """
    slope = np.asarray(sums.slope, np.float64).sum(axis=0)
    return float(np.exp(_least(slope[None])[0]))


def temperature_variance(sums: TemperatureSums, temperature: float) -> float:
    """How much the clients' own log-temperatures vary: τ² of θ_i ~ N(θ, τ²).

    At θ client i has slope g_i and information h_i: its own estimate is one Newton step
    away, θ_i ≈ θ - g_i / h_i, with variance 1 / h_i around the truth. DerSimonian and
    Laird's (1986) moment estimator for such estimates needs sums only,

        τ² = max(0, (Σ_i g_i² / h_i - (K - 1)) / (Σ_i h_i - Σ_i h_i² / Σ_i h_i)),

    over the K clients with h_i > 0: 0 where they differ no more than by chance. At an
    end of the grid, where Σ g_i is not 0, (Σ g_i)² / Σ h_i is taken off Σ g_i² / h_i.

    Args:
      sums: stacked, leaves `[clients, grid]`.
      temperature: exp(θ), the global one.
    """
    slope, information = (_at(leaf, np.log(temperature)) for leaf in sums)
    held = information > 0
    slope, information = slope[held], information[held]
    total = information.sum()
    if held.sum() < 2:
        return 0.0
    # Around the estimates' own mean: at an end of the grid the slopes do not cancel.
    around = np.sum(slope**2 / information) - slope.sum() ** 2 / total
    excess = around - (held.sum() - 1)
    return float(max(0.0, excess / (total - np.sum(information**2) / total)))


def client_temperatures(
    sums: TemperatureSums, temperature: float, variance: float
) -> np.ndarray:
    """Every client's own temperature, drawn to the global one as far as it is unsure.

    Empirical Bayes: with the prior log T_i ~ N(θ, τ²), T_i is where
    NLL_i(T_i) + (log T_i - θ)² / (2 τ²) is least. The server sends θ and τ², the client
    does the rest.

    Args:
      sums: stacked, leaves `[clients, grid]`.
      temperature: exp(θ), the global one.
      variance: τ², of `temperature_variance`.

    Returns:
      `[clients]`; the global temperature for a client without examples, and for all of
      them where τ² = 0.
    """
    if not variance > 0:  # NaN too
        return np.full(len(sums.slope), temperature)
    prior = (LOG_TEMPERATURES - np.log(temperature)) / variance
    return np.exp(_least(np.asarray(sums.slope, np.float64) + prior))


def _least(slope: np.ndarray) -> np.ndarray:
    """`[...]` where a function of θ is least, from its slopes `[..., grid]`."""
    grid, step = LOG_TEMPERATURES, np.diff(LOG_TEMPERATURES[:2])[0]
    rises = (slope[..., 1:] + slope[..., :-1]) * step / 2
    height = np.concatenate([np.zeros_like(slope[..., :1]), rises.cumsum(-1)], axis=-1)
    # On a plateau the place nearest to T = 1, where there is nothing to go by.
    lowest = np.where(height == height.min(-1, keepdims=True), np.abs(grid), np.inf)
    at = lowest.argmin(-1)
    here = np.take_along_axis(slope, at[..., None], -1)[..., 0]
    other = np.clip(at + np.where(here > 0, -1, 1), 0, len(grid) - 1)
    there = np.take_along_axis(slope, other[..., None], -1)[..., 0]
    crosses = here * there < 0
    share = np.where(crosses, here / np.where(crosses, here - there, 1.0), 0.0)
    return np.where(
        np.isnan(slope).any(-1), np.nan, grid[at] + share * (grid[other] - grid[at])
    )


def _at(values: Array, theta: float) -> np.ndarray:
    """`[clients]` linear interpolation in `[clients, grid]`."""
    right = np.clip(np.searchsorted(LOG_TEMPERATURES, theta), 1, values.shape[1] - 1)
    ends = LOG_TEMPERATURES[right - 1], LOG_TEMPERATURES[right]
    share = (theta - ends[0]) / (ends[1] - ends[0])
    values = np.asarray(values, np.float64)
    return (1 - share) * values[:, right - 1] + share * values[:, right]
