"""What a client of DSVGD does: its two loops, shared by the serial and parallel form.

Equations are those of Yang, Liu and Kassab, "Client selection for federated Bayesian
learning". q and the particles of every density are matrices `[N, d]`.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, Task
from fedvi.local import LocalTraining, fold_minibatches, num_steps
from fedvi.options import option
from fedvi.particle_posterior import ParticleOptions, ParticlePosterior

__all__ = [
    "Client",
    "GaussianFactor",
    "Server",
    "SteinOptions",
    "stein_algorithm",
    "visit",
]


class SteinOptions(ParticleOptions):
    """Options that `dsvgd` and `parallel_dsvgd` share."""

    first_t: Literal["prior", "one"] = option(
        "one",
        'What t_k is at first. "one": t_k = 1 until the client\'s first visit, as '
        "Algorithm 1 says, and p_0 is only in the particles that q starts with; those "
        "of t_k are draws from p_0 too, moved by L' steps. \"prior\" (DSVGD's code): "
        "t_k starts as the global particles and stands for p_0·t_k, and every visit "
        "adds ∇ log p_0, so that the target of a run's first visit is exactly p_0·p_k. "
        "What follows is not: all of p_0 against one client's data, it shrank the "
        "weights of small clients to nothing.",
        source="docs/dsvgd.md",
    )
    local_loop_steps: int | None = option(
        None,
        "L', steps of the local loop; None: L, the minibatches of a visit.",
        at_least=1,
    )


class GaussianFactor(NamedTuple):
    """exp(Σ_j shift_j θ_j - ½ precision_j θ_j²), a t_k or the product of some.

    Attributes:
      shift: `[d]`.
      precision: `[d]`, not negative; with both 0 the factor is 1.
    """

    shift: jax.Array
    precision: jax.Array

    def score(self, points: jax.Array) -> jax.Array:
        """∇ log of it at `points`, `[N, d]`."""
        return self.shift[None] - self.precision[None] * points


class Server(NamedTuple):
    """Server state.

    Attributes:
      particles: of the global posterior q, `[N, d]`.
      first: those that q started with, where the server needs them; not sent.
      product: Π_k t_k with Gaussian factors, else ().
    """

    particles: jax.Array
    first: Any = ()
    product: Any = ()


class Client(NamedTuple):
    """What a client keeps.

    Attributes:
      factor: particles of t_k, or of p_0·t_k (option `first_t`), `[N, d]`; or t_k, a
        `GaussianFactor`.
      visited: `[]` int32, 1 once it has taken part.
    """

    factor: Any
    visited: jax.Array


def stein_algorithm(
    name: str, task: Task, posterior: ParticlePosterior, **functions
) -> Algorithm:
    """The `Algorithm` of a method, its predictions and initial states filled in.

    The personal posterior is the client's tilted density: the global loop with
    `task.finetuning`, which no paper defines; with no epochs it is q.
    """

    gaussian = posterior.options.factor == "gaussian"

    def init(key):
        particles = posterior.init(key)
        one = GaussianFactor(*jnp.zeros((2, particles.shape[1])))
        return Server(particles, product=one if gaussian else ())

    def init_client(key, server):
        """A client that has not taken part."""
        start = server.particles
        if gaussian:
            start = jax.tree.map(jnp.zeros_like, server.product)
        elif posterior.options.first_t == "one":
            start = posterior.init(key)
        return Client(start, jnp.zeros((), jnp.int32))

    def personalise(key, server, client, data):
        return global_loop(posterior, task.finetuning, key, 0, server, client, data)[0]

    return Algorithm(
        name=name,
        init_client=init_client,
        global_predictive=lambda key, server, x, mask: posterior.predict(
            server.particles, x, mask
        ),
        personalise=personalise,
        personal_predictive=lambda key, server, personal, x, mask: posterior.predict(
            personal, x, mask
        ),
        posterior=lambda server: posterior.distribution(server.particles),
        personal_posterior=lambda server, personal: posterior.distribution(personal),
        **{"init": init, **functions},
    )


def visit(
    posterior,
    training: LocalTraining,
    key,
    round_index,
    server: Server,
    client: Client,
    data,
):
    """Both loops of a client: (new q, new client, metrics)."""
    new, metrics = global_loop(
        posterior, training, key, round_index, server, client, data
    )
    if posterior.options.factor == "gaussian":
        factor = fitted_factor(new, posterior.full_likelihood_scores(new, data))
    else:
        steps = posterior.options.local_loop_steps or num_steps(data.size, training)
        factor = local_loop(
            posterior, training, round_index, new, server.particles, client, steps
        )
    return new, Client(factor, jnp.ones((), jnp.int32)), metrics


def global_loop(
    posterior,
    training: LocalTraining,
    key,
    round_index,
    server: Server,
    client: Client,
    data,
):
    """Eq. 13: (particles of the tilted density, metrics)."""
    optimizer = training.optimizer_at(round_index)

    def step(key, carry, batch):
        particles, moments, totals = carry
        likelihood, loss = posterior.likelihood_scores(particles, batch, data.size)
        terms = {
            "likelihood": likelihood,
            **other_terms(posterior, particles, server, client),
        }
        scores = sum(terms.values())
        particles, moments = posterior.step(optimizer, particles, scores, moments)
        sizes = {f"{name}_score": mean_norm(term) for name, term in terms.items()}
        return particles, moments, optax.tree.add(totals, {"loss": loss, **sizes})

    q = server.particles
    names = ("loss", "q_score", "t_score", "likelihood_score", "prior_score")
    start = (q, optimizer.init(q), {name: jnp.zeros(()) for name in names})
    particles, _, totals = fold_minibatches(key, data, training, step, start)
    steps = jnp.maximum(num_steps(data.size, training), 1)
    return particles, optax.tree.scale(1.0 / steps, totals)


def fitted_factor(particles: jax.Array, scores: jax.Array) -> GaussianFactor:
    r"""The Gaussian whose score is nearest to `scores`, coordinate by coordinate.

    $\min_{h_j, \lambda_j \ge 0} \sum_n (s_{nj} - h_j + \lambda_j \theta_{nj})^2$

    Exact where the scores are those of a Gaussian with independent coordinates.

    Args:
      particles: θ_n, `[N, d]`.
      scores: s_n, `[N, d]`.
    """
    mean, height = particles.mean(axis=0), scores.mean(axis=0)
    apart = particles - mean[None]
    spread = jnp.sum(jnp.square(apart), axis=0)
    falls = -jnp.sum(apart * (scores - height[None]), axis=0)
    # Particles that agree in a coordinate, up to rounding, say nothing about its
    # precision.
    rounding = len(particles) * jnp.square(jnp.finfo(mean.dtype).eps * mean)
    differ = spread > rounding
    precision = jnp.where(differ, falls / jnp.where(differ, spread, 1.0), 0.0)
    precision = jnp.maximum(precision, 0.0)
    return GaussianFactor(height + precision * mean, precision)


def local_loop(
    posterior, training: LocalTraining, round_index, new, old, client, steps
):
    """Eq. 14: particles of t_k · q_new / q_old (Eq. 7)."""
    if posterior.options.kde == "off":
        return client.factor
    optimizer = training.optimizer_at(round_index)
    density = posterior.density_scores

    def step(_, carry):
        x, moments = carry
        scores = density(x, new) - density(x, old) + t_score(posterior, x, client)
        return posterior.step(optimizer, x, scores, moments)

    start = (client.factor, optimizer.init(client.factor))
    return jax.lax.fori_loop(0, steps, step, start)[0]


def other_terms(
    posterior, points: jax.Array, server: Server, client: Client
) -> dict[str, jax.Array]:
    """The terms of ∇ log p̃_k at `points` that need no data, `[N, d]` each.

    "q" and "prior" together are ∇ log q: with Gaussian factors q is p_0 Π_k t_k as
    Eq. 4 has it, else the density of the server's particles.
    """
    options, prior = posterior.options, jnp.zeros_like(points)
    gaussian = options.factor == "gaussian"
    if gaussian or options.first_t == "prior":
        prior = posterior.prior_scores(points)
    return {
        "q": server.product.score(points)
        if gaussian
        else posterior.density_scores(points, server.particles),
        "t": -t_score(posterior, points, client),
        "prior": prior,
    }


def t_score(posterior, points: jax.Array, client: Client) -> jax.Array:
    """∇ log t_k at `points`; t_k = 1 before the first visit if `first_t` is."""
    if posterior.options.factor == "gaussian":
        return client.factor.score(points)
    score = posterior.density_scores(points, client.factor)
    return score if posterior.options.first_t == "prior" else client.visited * score


def mean_norm(scores: jax.Array) -> jax.Array:
    """Mean over the particles of the norm of their scores."""
    return jnp.sqrt(jnp.sum(jnp.square(scores), axis=1)).mean()
