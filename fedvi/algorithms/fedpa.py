"""FedPA: the mode of the product of the clients' posteriors, from samples of each.

Al-Shedivat, Gillenwater, Xing and Rostamizadeh, "Federated learning via posterior
averaging: a new perspective and practical algorithms", ICLR 2021.
"""

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import plain_loss
from fedvi.algorithms.fedavg import FedAvg, fedavg_of
from fedvi.algorithms.registry import builder
from fedvi.flat import like_flats, trees
from fedvi.local import iterates, num_steps
from fedvi.options import option

__all__ = ["FedPA", "fedpa", "precision_times"]


class FedPA(FedAvg):
    """Options of `fedpa`, with those of FedAvg's server."""

    shrinkage: float = option(
        0.01,
        "ρ of the shrinkage: the less, the nearer is the covariance to the identity; 0 "
        "leaves of it the step to the samples' mean.",
        source="FedHB H.1",
        at_least=0,
        traced=True,
    )
    samples: int = option(
        5, "n, samples of a visit, each the mean of a window of iterates.", at_least=1
    )
    steps_per_sample: int | None = option(
        None,
        "Steps of a window; None: the visit's, after its burn-in, over the samples.",
        source="an epoch in the paper, which leaves one sample of one epoch",
        at_least=1,
    )
    burn_in_steps: int = option(
        0, "First steps of a visit, of which no sample is taken.", at_least=0
    )
    burn_in_rounds: int = option(
        0,
        "First rounds, which are FedAvg's.",
        source="the paper: some hundreds of 1,500",
        at_least=0,
    )


@builder(FedPA)
def fedpa(task: Task, options: FedPA) -> Algorithm:
    """Builds FedPA.

    With clients' posteriors N(μ_i, Σ_i) their product's mode is where the gradients
    Σ_i⁻¹ (θ - μ_i) sum to 0. A client samples its posterior by iterate-averaged SGD:
    x_k is the mean of the iterates of a window of steps of `task.training`. It sends
      Δ_i = Σ̂⁻¹ (x̄ - θ),  Σ̂ = ρ_n I + (1 - ρ_n) S,  ρ_n = 1 / (1 + (n - 1) ρ),
    S the samples' covariance, which `precision_times` does in O(n² d). Server: FedAvg's
    of Δ_i, weighted by the clients' sizes, with its optimiser.

    The windows are the last n of a visit. A client with fewer steps has fewer samples,
    and at least one: of all that it does after the burn-in, its last step in any case.
    One sample of one step is FedAvg.

    Metrics: `loss`, the mean over the steps; `samples`, how many there were.

    Raises:
      ValueError: an option outside its range.
    """

    def windows(data):
        """(steps of a visit, those of a window, number of windows)."""
        steps = num_steps(data.size, task.training)
        usable = jnp.maximum(steps - options.burn_in_steps, 1)
        window = options.steps_per_sample or jnp.maximum(usable // options.samples, 1)
        window = jnp.minimum(window, usable)
        return steps, window, jnp.clip(usable // window, 1, options.samples)

    def client_update(key, round_index, server, client, data):
        steps, window, count = windows(data)
        start = trees(server.params)

        def add(layers, seen):
            step, sums = seen
            back = (steps - 1 - step) // window  # 0 is the last window
            place = jnp.where(back < count, back, options.samples)

            # Differences: of the weights themselves little is left of a short visit.
            def into(s, p, p0):
                return s.at[place].add((p - p0) / window, mode="drop")

            return step + 1, jax.tree.map(into, sums, layers, start)

        zeros = jax.tree.map(lambda p: jnp.zeros((options.samples, *p.shape)), start)
        params, value, (_, samples) = iterates(
            key,
            round_index,
            server.params,
            data,
            task.training,
            plain_loss(task.model),
            see=add,
            seen=(0, zeros),
        )
        present = (jnp.arange(options.samples) < count).astype(jnp.float32)
        moved = precision_times(options.shrinkage, samples, present)
        plain = optax.tree.sub(params, server.params)
        burning = round_index < options.burn_in_rounds
        upload = optax.tree.where(burning, plain, like_flats(moved, plain))
        metrics = {"loss": value, "samples": present.sum()}
        return ClientOutput(upload, data.size, metrics=metrics)

    return fedavg_of(task, options)._replace(name="fedpa", client_update=client_update)


def precision_times(rho, samples, present):
    """Σ̂⁻¹ x̄ of n samples, given as differences to where they shall be seen from; the
    d × d matrix is never made.

    With U the centred samples `[n, d]`, S = Uᵀ U / (n - 1), it is Σ̂ = ρ_n (I + ρ Uᵀ U)
    and by Woodbury
      Σ̂⁻¹ v = (v - ρ Uᵀ (I + ρ U Uᵀ)⁻¹ U v) / ρ_n,
    all from sums of the samples' inner products. The paper's recursion over samples
    has the same cost and result, and n steps in turn.

    Args:
      rho: ρ.
      samples: pytree, leaves `[most, ...]`.
      present: [most] 1 for the n >= 1 that there are, 0 for the others.
    """
    n = present.sum()

    def inner(a, b):
        def part(x, y):
            x, y = x.reshape(x.shape[0], -1), y.reshape(y.shape[0], -1)
            return jnp.matmul(x, y.T, precision="highest")

        return jax.tree.reduce(jnp.add, jax.tree.map(part, a, b))

    mean = jax.tree.map(lambda s: jnp.tensordot(present, s, 1) / n, samples)
    centred = jax.tree.map(
        lambda s, m: (s - m[None]) * present.reshape(-1, *[1] * m.ndim), samples, mean
    )
    gram = jnp.eye(len(present)) + rho * inner(centred, centred)
    along = inner(centred, jax.tree.map(lambda v: v[None], mean))[:, 0]
    weights = rho * jnp.linalg.solve(gram, along)
    return jax.tree.map(
        lambda v, u: (1 + (n - 1) * rho) * (v - jnp.tensordot(weights, u, 1)),
        mean,
        centred,
    )
