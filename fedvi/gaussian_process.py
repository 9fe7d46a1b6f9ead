"""Classification by Gaussian processes on a tree of the classes.

After GP-Tree (Achituve, Navon, Yemini, Chechik and Fetaya, ICML 2021). A binary tree
splits the classes; at node v a latent f_v ~ GP(0, k) says which way an example goes,

    p(right at v | x) = σ(f_v(x)),   p(y | x) = Π_{v above y} p(way to y at v | x).

Given Pólya-Gamma variables ω, one for each example, the likelihood is normal: with
κ = ±½ and Ω = diag(ω) the pseudo-targets Ω⁻¹κ have noise Ω⁻¹. ω is drawn by Gibbs
sampling in several chains, and over f the integral is taken.

The nodes of one level share no example. All their processes are one, whose kernel is
block-diagonal: a tree costs a Cholesky factor a level, not a node.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedvi.distributions import polya_gamma
from fedvi.placement import device_memory

__all__ = ["Fit", "Kernel", "Tree", "balanced_tree", "fit", "log_probabilities"]

# Variance of f that is no function of x. float32 loses about as much of a kernel of
# some hundred equal examples.
_JITTER = 1e-3


class Kernel(NamedTuple):
    """k(a, b) = outputscale · exp(-‖a - b‖² / (2 lengthscale²))."""

    outputscale: jax.Array | float
    lengthscale: jax.Array | float

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """`[n, features]`, `[m, features]` -> `[n, m]`."""
        centre = a.mean(axis=0, keepdims=True)  # far from 0 the squares cancel
        a, b = (a - centre) / self.lengthscale, (b - centre) / self.lengthscale
        products = jnp.matmul(a, b.T, precision="highest")
        squares = jnp.sum(a**2, 1)[:, None] + jnp.sum(b**2, 1)[None] - 2 * products
        return self.outputscale * jnp.exp(-0.5 * jnp.maximum(squares, 0.0))


class Tree(NamedTuple):
    """A binary tree over classes, level by level.

    Attributes:
      node: `[levels, classes]` int, the level's node that a class is below; -1: its
        path has ended.
      right: `[levels, classes]` bool, the way it goes there.
    """

    node: np.ndarray
    right: np.ndarray


def balanced_tree(classes: int) -> Tree:
    """Halves of the classes in their order, the larger one to the right."""
    levels = math.ceil(math.log2(classes))
    node = np.full((levels, classes), -1)
    right = np.zeros((levels, classes), bool)
    groups = [range(classes)]
    for level in range(levels):
        groups = [group for group in groups if len(group) > 1]
        halves = []
        for i, group in enumerate(groups):
            middle = len(group) // 2
            node[level, group] = i
            right[level, group[middle:]] = True
            halves += [group[:middle], group[middle:]]
        groups = halves
    return Tree(node, right)


class Fit(NamedTuple):
    """What a classifier predicts with.

    Attributes:
      x: `[n, features]` of the examples.
      y: `[n]` their classes.
      mask: `[n]` the real ones.
      omega: `[levels, chains, n]` Pólya-Gamma draws.
    """

    x: jax.Array
    y: jax.Array
    mask: jax.Array
    omega: jax.Array


def fit(key, tree: Tree, kernel: Kernel, x, y, mask, *, chains: int, steps: int) -> Fit:
    """Draws the ω of all levels, from draws of the prior on.

    A step draws ω ~ PG(1, f) and f ~ N(Σκ, Σ), Σ = (K⁻¹ + Ω)⁻¹; what is returned is
    drawn given the last f. No gradient flows through it.

    Args:
      key: typed PRNG key.
      tree: of the classes.
      kernel: k.
      x: `[n, features]`.
      y: `[n]` classes.
      mask: `[n]`, the real examples.
      chains: independent ones.
      steps: of each.

    Raises:
      ValueError: kernels of more examples than memory holds.
    """
    _check_memory(len(x), chains)
    x, kernel = jax.lax.stop_gradient((x, kernel))
    gram = kernel(x, x)

    def level(inputs):
        key, node, right = inputs
        member, kappa = _level(tree, node, right, y, mask)
        k = _blocks(gram, member)
        prior = _lapack(jnp.linalg.cholesky)(k)

        def chain(key):
            def step(key, f):
                """f given f, and the ω between."""
                omega_key, prior_key, noise_key = jax.random.split(key, 3)
                omega = polya_gamma.sample(omega_key, f)
                f0 = prior @ jax.random.normal(prior_key, f.shape)
                noise = jax.random.normal(noise_key, f.shape)
                root = jnp.sqrt(omega)
                # A draw of the prior, moved to agree with the data (Matheron).
                left = kappa / root - root * f0 - noise
                return f0 + k @ (root * _solve(_scaled(k, root), left[:, None])[:, 0])

            start_key, *step_keys = jax.random.split(key, steps + 2)
            step_keys = jnp.stack(step_keys)
            f = prior @ jax.random.normal(start_key, kappa.shape)
            f = jax.lax.fori_loop(0, steps, lambda i, f: step(step_keys[i], f), f)
            return polya_gamma.sample(step_keys[-1], f)

        return jax.vmap(chain)(jax.random.split(key, chains))

    keys = jax.random.split(key, len(tree.node))
    omega = jax.lax.map(level, (keys, jnp.asarray(tree.node), jnp.asarray(tree.right)))
    return Fit(x, y, mask, omega)


def log_probabilities(found: Fit, tree: Tree, kernel: Kernel, x) -> jax.Array:
    """`[m, classes]` log p(y | x), the mean over the chains at every node.

    Given ω, f(x) is normal: its mean is kᵀ(K + Ω⁻¹)⁻¹Ω⁻¹κ, its variance
    k(x, x) - kᵀ(K + Ω⁻¹)⁻¹k; the logistic's mean is taken by Gauss-Hermite quadrature.
    Where all examples go one way, so does what comes. Of C classes each that has none
    of the n examples gets 1 / (n + C) (Laplace's rule), the others share the rest.

    Args:
      found: of `fit`; a gradient flows to its x and to the kernel.
      tree: likewise.
      kernel: likewise.
      x: `[m, features]`.
    """
    gram, cross = kernel(found.x, found.x), kernel(found.x, x)

    @jax.checkpoint  # or all levels' factors are kept for the gradient
    def level(inputs):
        node, right, omega = inputs
        member, kappa = _level(tree, node, right, found.y, found.mask)
        k = _blocks(gram, member)

        def chain(omega):
            """`[m, nodes]` log p(right), log p(left), of one draw."""
            root = jnp.sqrt(omega)
            across = root[:, None] * cross
            both = jnp.concatenate([across, (kappa / root)[:, None]], axis=1)
            solved = _solve(_scaled(k, root), both)
            mean = (across * solved[:, -1:]).T @ member
            explained = (across * solved[:, :-1]).T @ member
            return _log_logistic(mean, kernel.outputscale - explained)

        right_way, left_way = (
            jax.nn.logsumexp(logs, axis=0) - math.log(len(omega))
            for logs in jax.vmap(chain)(omega)
        )
        to_right, to_left = (
            jnp.maximum(sign * kappa, 0.0) @ member for sign in (1, -1)
        )
        split = (node >= 0) & ((to_right > 0) & (to_left > 0))[node]
        way = jnp.where(right[None], right_way[:, node], left_way[:, node])
        return jnp.where(split[None], way, 0.0)

    levels = jnp.asarray(tree.node), jnp.asarray(tree.right), found.omega
    path = jax.lax.map(level, levels).sum(axis=0)
    classes = tree.node.shape[1]
    seen = jnp.zeros(classes, bool).at[found.y].max(found.mask)
    total = found.mask.sum() + classes
    known = jnp.log((total - (~seen).sum()) / total)
    return jnp.where(seen, path + known, -jnp.log(total))


def _log_logistic(mean, variance) -> tuple[jax.Array, jax.Array]:
    """log E[σ(f)], log E[σ(-f)] of f ~ N(mean, variance), by quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(20)
    points = jnp.asarray(points, jnp.float32)[:, None, None]
    log_weights = jnp.asarray(np.log(weights / weights.sum()), jnp.float32)
    log_weights = log_weights[:, None, None]
    f = mean[None] + jnp.sqrt(jnp.maximum(variance, 1e-6))[None] * points
    return tuple(
        jax.nn.logsumexp(jax.nn.log_sigmoid(way) + log_weights, axis=0)
        for way in (f, -f)
    )


def _level(tree: Tree, node, right, y, mask) -> tuple[jax.Array, jax.Array]:
    """(`[n, nodes]` 0 or 1, an example's node; `[n]` κ) at one level."""
    nodes = int(tree.node.max()) + 1
    place = jnp.where(mask, node[y], -1)
    kappa = jnp.where(place >= 0, right[y] - 0.5, 0.0)
    return jax.nn.one_hot(place, nodes), kappa


def _blocks(gram: jax.Array, member: jax.Array) -> jax.Array:
    """K of a level; who is in none of its nodes is alone."""
    return gram * (member @ member.T) + _JITTER * jnp.eye(len(gram))


def _scaled(k: jax.Array, root: jax.Array) -> jax.Array:
    """I + Ω^½ K Ω^½, whose eigenvalues are 1 and more."""
    return jnp.eye(len(k)) + root[:, None] * k * root[None]


def _solve(b: jax.Array, right: jax.Array) -> jax.Array:
    """b⁻¹ right of a symmetric b; no gradient of its factor is needed."""

    def solve(b, right):
        return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(b), True), right)

    return jax.lax.custom_linear_solve(
        lambda x: b @ x, right, lambda _, y: _lapack(solve)(b, y), symmetric=True
    )


def _lapack(function: Callable) -> Callable:
    """`function`, under `vmap` on CPU for one matrix after another.

    LAPACK's batches there are cut up among the threads that run the devices: with two
    devices on two cores those of jaxlib 0.10.2 wait for each other for ever.
    """
    on_cpu = jax.default_backend() == "cpu"
    return jax.custom_batching.sequential_vmap(function) if on_cpu else function


def _check_memory(examples: int, chains: int) -> None:
    # A chain's kernel, factor and their gradients; of several clients at once, more.
    needed = 4 * 4 * chains * examples**2
    if needed > device_memory():
        raise ValueError(
            f"{chains} chains of kernels of {examples} examples take {needed:.1e} "
            "bytes, more than the device has: fewer chains, or clients of fewer "
            "examples"
        )
