"""What a client of DSVGD does: its two loops, and what it reports to be chosen.

Shared by the serial and the parallel form. Equations are those of Yang, Liu and Kassab,
"Client selection for federated Bayesian learning".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedvi import checks, priors
from fedvi.algorithm import Algorithm, Task
from fedvi.evaluation import fold_batches
from fedvi.local import Batch, LocalTraining, fold_minibatches, num_steps
from fedvi.particle_posterior import ParticlePosterior
from fedvi.stein import KERNELS, hip, squared_norm

__all__ = ["Client", "Server", "SteinClient", "posterior_of"]

_EXAMPLES_AT_ONCE = 500  # of a report: bounds the activations of all particles


class Server(NamedTuple):
    """Server state.

    Attributes:
      particles: of the global posterior q, leaves `[particles, ...]`.
      first: those that q started with, where the server needs them; not sent.
    """

    particles: Any
    first: Any = ()


class Client(NamedTuple):
    """What a client keeps.

    Attributes:
      particles: of t_k, or of p_0·t_k (see `dsvgd`), leaves `[particles, ...]`.
      visited: `[]` int32, 1 once it has taken part.
    """

    particles: Any
    visited: jax.Array


def posterior_of(
    task: Task,
    *,
    prior: str,
    precision: float,
    gamma_shape: float,
    gamma_rate: float,
    copies: int,
    **options,
) -> ParticlePosterior:
    """The particle posterior that the options of `dsvgd` describe.

    `copies` particle sets of each client lie in memory at once.
    """
    checks.one_of("prior", prior, ("gaussian", "hierarchical"))
    checks.positive("precision", precision)
    if prior == "gaussian":
        density = priors.gaussian(task.model, precision)
    else:
        density = priors.hierarchical(task.model, gamma_shape, gamma_rate)
    posterior = ParticlePosterior(task.model, density, **options)
    return posterior.check(kept=copies * task.clients)


class SteinClient(NamedTuple):
    """What a client does, of DSVGD and of its parallel form.

    Attributes:
      posterior: model, prior, kernel and density estimates.
      first_t: as in `dsvgd`.
      local_loop_steps: L', or None.
      report_batch_size: examples of a report, or None.
    """

    posterior: ParticlePosterior
    first_t: str
    local_loop_steps: int | None
    report_batch_size: int | None = None

    def check(self) -> "SteinClient":
        """Returns itself; raises `ValueError` for an option outside its range."""
        checks.one_of("first_t", self.first_t, ("prior", "one"))
        for name in ("local_loop_steps", "report_batch_size"):
            if getattr(self, name) is not None:
                checks.at_least(name, getattr(self, name), 1)
        return self

    def algorithm(self, name: str, task: Task, **rest) -> Algorithm:
        """The `Algorithm` of a method, its predictions and initial states filled in.

        The personal posterior is the client's tilted density: the global loop with
        `task.finetuning`, which no paper defines; with no epochs it is q.
        """
        predict = self.posterior.predict

        def personalise(key, server, client, data):
            q = server.particles
            return self.global_loop(key, 0, q, client, data, task.finetuning)[0]

        rest.setdefault("init", lambda key: Server(self.posterior.init(key)))
        return Algorithm(
            name=name,
            init_client=self.init,
            global_predictive=lambda key, server, x, mask: predict(
                server.particles, x, mask
            ),
            personalise=personalise,
            personal_predictive=lambda key, server, q, x, mask: predict(q, x, mask),
            **rest,
        )

    def init(self, key, server: Server) -> Client:
        """A client that has not taken part."""
        start = server.particles
        if self.first_t == "one":
            start = self.posterior.init(key)
        return Client(start, jnp.zeros((), jnp.int32))

    def visit(self, key, round, q, client: Client, data, training: LocalTraining):
        """(new q, new client, metrics): both loops."""
        new, metrics = self.global_loop(key, round, q, client, data, training)
        steps = num_steps(data.size, training)
        if self.local_loop_steps is not None:
            steps = self.local_loop_steps
        t = self.local_loop(round, new, q, client, steps, training)
        return new, Client(t, jnp.ones((), jnp.int32)), metrics

    def global_loop(self, key, round, q, client: Client, data, training: LocalTraining):
        """Eq. 13: (particles of the tilted density, metrics)."""
        optimizer = training.optimizer_at(round)

        def step(key, carry, batch):
            particles, moments, totals = carry
            terms, loss = self._tilted(particles, q, client, batch, data.size)
            scores = _sum(*terms.values())
            particles, moments = self.posterior.step(
                optimizer, particles, scores, moments
            )
            sizes = {f"{k}_score": _mean_norm(v) for k, v in terms.items()}
            totals = jax.tree.map(jnp.add, totals, {"loss": loss, **sizes})
            return particles, moments, totals

        names = ("loss", "q_score", "t_score", "likelihood_score", "prior_score")
        start = (q, optimizer.init(q), {name: jnp.zeros(()) for name in names})
        particles, _, totals = fold_minibatches(key, data, training, step, start)
        steps = jnp.maximum(num_steps(data.size, training), 1)
        return particles, jax.tree.map(lambda total: total / steps, totals)

    def local_loop(self, round, new, old, client: Client, steps, training):
        """Eq. 14: particles of t_k · q_new / q_old (Eq. 7)."""
        if self.posterior.kde == "off":
            return client.particles
        optimizer = training.optimizer_at(round)
        density = self.posterior.density_scores

        def step(_, carry):
            particles, moments = carry
            scores = jax.tree.map(
                lambda a, b, c: a - b + c,
                density(particles, new),
                density(particles, old),
                self._log_t(particles, client),
            )
            return self.posterior.step(optimizer, particles, scores, moments)

        start = (client.particles, optimizer.init(client.particles))
        return jax.lax.fori_loop(0, steps, step, start)[0]

    def report_ksd(self, key, server, client, data):
        """S(q, tilted density of this client) at the global particles (Eq. 17)."""
        q = server.particles
        likelihood = self.report_scores(key, server, client, data)
        rest = self._rest(q, q, client).values()
        scores = [_sum(one, *rest) for one in likelihood]
        return hip(q, scores[0], scores[-1], kernel=KERNELS[self.posterior.kernel])

    def report_scores(self, key, server, client, data):
        """∇ log p_k at the global particles (step 4 of Algorithm 2), once or twice.

        Once from all examples, or twice from independent draws of `report_batch_size`:
        noise that all particles share does not average out of a square, but out of a
        product of two.
        """
        drawn = self.report_batch_size
        if drawn is None:
            return (self._full_scores(server.particles, data),)

        def one(key):
            slots = jax.random.randint(key, (drawn,), 0, jnp.maximum(data.size, 1))
            mask = jnp.broadcast_to(data.size > 0, (drawn,))
            batch = Batch(data.x[slots], data.y[slots], mask)
            return self.posterior.likelihood_scores(server.particles, batch, data.size)[
                0
            ]

        first, second = jax.random.split(key)
        return one(first), one(second)

    def _full_scores(self, q, data):
        """∇ log p_k at q from all of a client's examples."""
        scores_of, capacity = self.posterior.likelihood_scores, data.y.shape[0]
        if capacity <= _EXAMPLES_AT_ONCE:
            mask = jnp.arange(capacity) < data.size
            batch = Batch(_only_real(data.x, mask), data.y, mask)
            return scores_of(q, batch, data.size)[0]

        def add(total, start, x, y, mask):
            batch = Batch(_only_real(x, mask), y, mask)
            return _sum(total, scores_of(q, batch, mask.sum())[0])

        zero = jax.tree.map(jnp.zeros_like, q)
        return fold_batches(add, data, _EXAMPLES_AT_ONCE, zero)

    def hip_with_mean(self, server, reports, counts):
        """⟨φ_k, φ'⟩ of every client (Eq. 24); φ' is that of the mean score."""
        weights = counts / jnp.maximum(counts.sum(), 1)
        mean = jax.tree.map(lambda s: jnp.tensordot(weights, s, axes=1), reports[-1])
        kernel = KERNELS[self.posterior.kernel]
        return jax.vmap(
            lambda scores: hip(server.particles, scores, mean, kernel=kernel)
        )(reports[0])

    def _tilted(self, particles, q, client: Client, batch, size):
        """The terms of ∇ log p̃_k at `particles`, by name, and the mean loss."""
        likelihood, loss = self.posterior.likelihood_scores(particles, batch, size)
        return {"likelihood": likelihood, **self._rest(particles, q, client)}, loss

    def _rest(self, particles, q, client: Client):
        """The terms of ∇ log p̃_k that need no data."""
        prior = jax.tree.map(jnp.zeros_like, particles)
        if self.first_t == "prior":
            prior = self.posterior.prior_scores(particles)
        t = self._log_t(particles, client)
        return {
            "q": self.posterior.density_scores(particles, q),
            "t": jax.tree.map(jnp.negative, t),
            "prior": prior,
        }

    def _log_t(self, particles, client: Client):
        """∇ log t_k at `particles`; t_k = 1 before the first visit if `first_t` is."""
        scores = self.posterior.density_scores(particles, client.particles)
        if self.first_t == "prior":
            return scores
        return jax.tree.map(lambda s: client.visited * s, scores)


def _only_real(x, mask):
    """Examples with the first in place of padding, of which a NaN would reach the
    gradient through the mask."""
    return jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, x[:1])


def _sum(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


def _mean_norm(scores):
    return jnp.sqrt(squared_norm(scores)).mean()
