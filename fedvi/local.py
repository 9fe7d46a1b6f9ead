"""What happens inside one client: minibatches of its data, and descent on them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedvi import checks, names
from fedvi.flat import has_flats, like_flats, trees

__all__ = [
    "OPTIMIZERS",
    "Batch",
    "LocalTraining",
    "Quadratic",
    "check_stable",
    "cross_entropy",
    "descent",
    "fold_minibatches",
    "iterates",
    "layerwise",
    "minimise",
    "num_steps",
    "squared_gradients",
    "unless_zero",
]


class Batch(NamedTuple):
    """A minibatch: x `[batch, ...]`, y `[batch]`, mask `[batch]` (real examples)."""

    x: jax.Array
    y: jax.Array
    mask: jax.Array


class LocalTraining(NamedTuple):
    """How a client trains. Defaults are FedBABU's protocol, which FedHB §6 follows.

    Attributes:
      epochs: τ, passes over the client's data; Python int.
      batch_size: examples a step; the last batch of an epoch may be smaller.
      learning_rate: a number, or a function of the round (an optax schedule).
      momentum: heavy-ball momentum of SGD in [0, 1).
      augment: optional `(key, x [batch, ...]) -> x` on raw inputs.
      optimizer: a name of `OPTIMIZERS`: "sgd", the only one that takes `momentum`;
        "adam" with optax's defaults (pFedBayes, BPFed); "adagrad", whose first step is
        ± the rate (DSVGD); "rmsprop" with decay 0.9 and a second moment that starts at
        the first squared gradient (as DSVGD's public code, which calls it AdaGrad; eps
        1e-8, where that has 1e-9 or 1e-6). Or your own, `(learning_rate) ->
        optax.GradientTransformation`, such as `optax.adamw`. It may see layers or few
        long vectors; one that treats layers apart (LAMB, Adafactor, Muon) needs
        `layerwise`.
      steps: R, minibatches a round; None: as many as `epochs` take. The last epoch
        that they need is left unfinished. An empty client takes none.
    """

    epochs: int = 1
    batch_size: int = 50
    learning_rate: float | Callable = 0.1
    momentum: float = 0.9
    augment: Callable | None = None
    optimizer: str | Callable[..., optax.GradientTransformation] = "sgd"
    steps: int | None = None

    def check(self) -> None:
        """Raises `ValueError` for a value outside its range."""
        checks.whole("epochs", self.epochs, 0)
        checks.whole("batch_size", self.batch_size)
        checks.fraction("momentum", self.momentum)
        if not callable(self.optimizer) and self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer={self.optimizer!r} must be one of {', '.join(OPTIMIZERS)}, "
                "or a function of the learning rate, such as optax.adamw"
                f"{names.near(self.optimizer, OPTIMIZERS)}"
            )
        if self.steps is not None:
            checks.whole("steps", self.steps)
        if not callable(self.learning_rate):
            checks.positive("learning_rate", self.learning_rate)

    def one_pass(self) -> "LocalTraining":
        """All of a client's data once as they are, for what is no training."""
        return LocalTraining(epochs=1, batch_size=self.batch_size)

    def at_rate(self, rate: float | None) -> "LocalTraining":
        """The same at another learning rate, in all rounds; None: at its own."""
        if rate is None:
            return self
        return self._replace(learning_rate=lambda round_index: rate)

    def learning_rate_at(self, round_index):
        """The learning rate in a round."""
        rate = self.learning_rate
        return rate(round_index) if callable(rate) else rate

    def optimizer_at(self, round_index) -> optax.GradientTransformation:
        """The optimiser, with this round's learning rate.

        Its moments may be kept over rounds: the rate is no part of them.

        Raises:
          ValueError: as `check`.
        """
        self.check()
        rate = self.learning_rate_at(round_index)
        if self.optimizer == "sgd":
            return optax.sgd(rate, unless_zero(self.momentum))
        if callable(self.optimizer):
            return self.optimizer(rate)
        return OPTIMIZERS[self.optimizer](rate)


def unless_zero(momentum):
    """optax's argument: None, which keeps no velocity, for Python's own number 0.

    One of NumPy or JAX stands for what is traced, whose state it must share.
    """
    return None if type(momentum) in (int, float) and not momentum else momentum


def check_stable(
    training: LocalTraining,
    curvature,
    term: str,
    chased: bool = False,
    otherwise: str = "use optimizer='adam'",
) -> None:
    """Refuses a term of a loss that SGD at this learning rate does not follow.

    On a loss of curvature c the step θ <- θ - v, v <- β v + lr c θ, shrinks θ only if
    lr c < 2 (1 + β): beyond, it grows without end. Other optimisers bound their steps
    and pass, as does what JAX traces. A schedule is looked at in round 0.

    Two variables that descend c/2 (q - w)² in turn, each with a velocity of its own,
    also chase each other. After a step of each at the rates a and b, they travel on
    side by side for ever where c a b / (a + b) = 1 - β, and faster and faster beyond:
    at equal rates from lr c = 2 (1 - β). With both rates below that, no number of steps
    in turn was unstable that we looked at; several steps allow more.

    Args:
      training: learning rate, momentum and optimiser.
      curvature: c, the term's largest second derivative at the start.
      term: what the user set, for the message: "zeta=10.0".
      chased: whether c is between two variables that move in turn.
      otherwise: what else a user can do, for the message.

    Raises:
      ValueError: lr c >= 2 (1 + β), or 2 (1 - β) where two variables move.
    """
    if training.optimizer != "sgd":
        return
    rate = training.learning_rate_at(0)
    numbers = curvature, rate, training.momentum
    if any(isinstance(number, jax.core.Tracer) for number in numbers):
        return
    sign, momentum = ("-", -training.momentum) if chased else ("+", training.momentum)
    most = 2 * (1 + momentum) / max(float(curvature), 1e-30)
    if not rate < most:
        raise ValueError(
            f"{term} has a curvature of {float(curvature):.3g}, on which SGD with "
            f"momentum={training.momentum} diverges from learning_rate={most:.3g} on, "
            f"2 (1 {sign} momentum) / curvature: learning_rate={float(rate):.3g} must "
            f"be smaller, or {otherwise}"
        )


def layerwise(
    optimizer: Callable[..., optax.GradientTransformation],
) -> Callable[..., optax.GradientTransformation]:
    """For `LocalTraining`: an optimiser that is to see a model's layers.

    Args:
      optimizer: `(learning_rate) -> optax.GradientTransformation` whose steps depend on
        where one layer ends, such as `optax.lamb`.

    Raises:
      ValueError: no such function.
    """
    if not callable(optimizer):
        raise ValueError(
            f"optimizer={optimizer!r} must be a function of the learning rate, such as "
            "optax.lamb"
        )

    def make(learning_rate):
        inner = optimizer(learning_rate)

        def update(gradients, state, params=None):
            layers = None if params is None else trees(params)
            updates, state = inner.update(trees(gradients), state, layers)
            return like_flats(updates, gradients), state

        return optax.GradientTransformation(lambda p: inner.init(trees(p)), update)

    return make


class _Rms(NamedTuple):
    """State of `_scale_by_rms`: the mean square of the gradients, steps so far."""

    mean_square: Any
    count: jax.Array


def _scale_by_rms(decay: float = 0.9, eps: float = 1e-8):
    """G <- g² at first, then decay·G + (1 - decay)·g²; g / (√G + eps).

    optax's `scale_by_rms` starts from a constant, or corrects the bias in another way:
    over the ten steps of a visit the three differ.
    """

    def init(params):
        return _Rms(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(gradients, state, params=None):
        kept = jnp.where(state.count == 0, 0.0, decay)
        mean_square = jax.tree.map(
            lambda m, g: kept * m + (1.0 - kept) * jnp.square(g),
            state.mean_square,
            gradients,
        )
        scaled = jax.tree.map(
            lambda m, g: g / (jnp.sqrt(m) + eps), mean_square, gradients
        )
        return scaled, _Rms(mean_square, state.count + 1)

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "sgd": optax.sgd,
    "adam": optax.adam,
    "adagrad": partial(optax.adagrad, initial_accumulator_value=0.0, eps=1e-16),
    "rmsprop": lambda rate: optax.chain(_scale_by_rms(), optax.scale(-rate)),
}


def cross_entropy(logits, labels, mask):
    """Mean cross-entropy over the real examples of a batch, 0 if there are none.

    Args:
      logits: [batch, classes].
      labels: [batch] int.
      mask: [batch] bool.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    # `where` and not a product: a padded example's loss may be infinite.
    return jnp.where(mask, losses, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def num_steps(size, training: LocalTraining):
    """Minibatches of one client in a round: `steps`, or epochs × ceil(size / batch)."""
    an_epoch = -(-size // training.batch_size)
    if training.steps is None:
        return training.epochs * an_epoch
    return jnp.where(an_epoch > 0, training.steps, 0)


def fold_minibatches(
    key,
    data,
    training: LocalTraining,
    step: Callable,
    carry: Any,
    draw: Callable = lambda key: key,
) -> Any:
    """Folds `step` over the shuffled minibatches of one client.

    Clients of different sizes share one compiled program: the number of steps is
    that of the client's true size, so a small client costs what it should, an empty
    one does nothing, and padded slots never enter a batch unmasked.

    Args:
      key: typed PRNG key; shuffles, augments and is split for `step`.
      data: one client's `ClientData`.
      training: epochs, batch size and augmentation.
      step: `(drawn, carry, Batch) -> carry`.
      carry: pytree.
      draw: `(key) -> drawn`, what a step draws at random. It is drawn for all steps of
        an epoch at once, as a small draw costs a launch and not its numbers; what is
        as large as the weights is better drawn by `step`. Default: the step's key.

    Returns:
      The carry after the last step.

    Raises:
      ValueError: a hyper-parameter outside its range.
    """
    training.check()
    data = jax.tree.map(jnp.asarray, data)  # what `federate` makes is NumPy's
    capacity = data.x.shape[0]
    batch_size = min(training.batch_size, capacity)
    an_epoch = -(-data.size // batch_size)
    total = num_steps(data.size, training._replace(batch_size=batch_size))

    def epoch(index, carry):
        epoch_key = jax.random.fold_in(key, index)
        shuffle_key, step_key = jax.random.split(epoch_key)
        # Real examples get a random rank, padded slots go behind all of them.
        rank = jnp.where(
            jnp.arange(capacity) < data.size,
            jax.random.uniform(shuffle_key, (capacity,)),
            2.0,
        )
        order = jnp.pad(jnp.argsort(rank), (0, -capacity % batch_size))

        def randomness(b):
            augment_key, loss_key = jax.random.split(jax.random.fold_in(step_key, b))
            return augment_key, draw(loss_key)

        steps = jax.vmap(randomness)(jnp.arange(order.size // batch_size))

        def minibatch(b, carry):
            start = b * batch_size
            slots = jax.lax.dynamic_slice(order, (start,), (batch_size,))
            mask = start + jnp.arange(batch_size) < data.size
            # A batch begins with a real example. Copies of it fill the batch up: what
            # padding holds, a NaN say, would reach the gradient through the mask.
            slots = jnp.where(mask, slots, slots[0])
            augment_key, drawn = jax.tree.map(lambda leaf: leaf[b], steps)
            x = data.x[slots]
            if training.augment is not None:
                x = training.augment(augment_key, x)
            return step(drawn, carry, Batch(x, data.y[slots], mask))

        left = total - index * an_epoch
        return jax.lax.fori_loop(0, jnp.minimum(an_epoch, left), minibatch, carry)

    return jax.lax.fori_loop(0, -(-total // jnp.maximum(an_epoch, 1)), epoch, carry)


class Quadratic(NamedTuple):
    """A penalty ½ Σ_j w_j (θ_j - c_j)² of parameters θ.

    Attributes:
      centre: c, of θ's structure, or its layers.
      weight: w, of the same structure, or one number for all or for a part of it.
    """

    centre: Any
    weight: Any

    def value(self, params) -> jax.Array:
        """[] the penalty at θ. On a CPU faster of `Flat`s than of layers."""
        terms = self._map(lambda w, p, c: jnp.sum(w * (p - c) ** 2), params)
        return 0.5 * sum(jax.tree.leaves(terms), jnp.zeros(()))

    def gradient(self, params):
        """w (θ - c)."""
        return self._map(lambda w, p, c: w * (p - c), params)

    def proximal(self, params, step_size):
        """argmin_θ ½ Σ_j w_j (θ_j - c_j)² + ‖θ - params‖² / (2 step_size)."""

        def step(w, p, c):
            share = step_size * w / (1 + step_size * w)
            return p + share * (c - p)

        return self._map(step, params)

    def _map(self, function, params):
        def part(weight, params, centre):
            return jax.tree.map(lambda p, c: function(weight, p, c), params, centre)

        params = params if has_flats(self.centre) else trees(params)
        return jax.tree.map(part, self.weight, params, self.centre)


def minimise(
    key,
    round_index,
    params,
    data,
    training: LocalTraining,
    loss: Callable,
    penalty: Callable | None = None,
    draw: Callable = lambda key: key,
):
    """Minibatch descent of one client from `params`, its moments afresh.

    Args:
      key: typed PRNG key.
      round_index: scalar, for the learning-rate schedule.
      params: pytree to train.
      data: one client's `ClientData`.
      training: hyper-parameters.
      loss: `(drawn, params, Batch) -> scalar`, mean over the batch. It gets the layers,
        `trees(params)`.
      penalty: optional `(params) -> Quadratic` of the layers, added to the loss. If it
        depends on where the parameters are, before a step, it is the quadratic that
        touches the true penalty there from above (majorise-minimise, as in EM). With
        SGD each step ends at its exact minimum beside the step's own result (a proximal
        step), stable at any weight. Its step size is lr / (1 - momentum): heavy-ball
        momentum multiplies every gradient by 1 / (1 - momentum) in the long run, and
        only with the same factor is the fixed point that of loss + penalty. The
        penalty pulls with that factor from the first step on, the loss only after some
        1 / (1 - momentum) steps: in a short visit the penalty counts for more than its
        gradient would. Other optimisers are given the gradient of the sum.
      draw: as `fold_minibatches`; default: `loss` gets the step's key.

    Returns:
      (trained params, mean of the loss without the penalty over the steps).
    """
    trained, value, _ = iterates(
        key, round_index, params, data, training, loss, penalty, draw=draw
    )
    return trained, value


def iterates(
    key,
    round_index,
    params,
    data,
    training: LocalTraining,
    loss: Callable,
    penalty: Callable | None = None,
    see: Callable = lambda layers, seen: seen,
    seen: Any = (),
    draw: Callable = lambda key: key,
):
    """`minimise` that shows where it goes.

    Args:
      key: as `minimise`, with the next six.
      round_index: likewise.
      params: likewise.
      data: likewise.
      training: likewise.
      loss: likewise.
      penalty: likewise.
      see: `(layers, seen) -> seen`, called with the layers after each step.
      seen: pytree, at first.
      draw: as `minimise`.

    Returns:
      (trained params, mean loss, seen).
    """
    init, descend = descent(training, round_index)

    def step(drawn, carry, batch):
        layers, moments, total, seen = carry
        value, gradients = jax.value_and_grad(loss, argnums=1)(drawn, layers, batch)
        # Where the step starts: only there the quadratic and the penalty have the same
        # gradient at rest.
        near = None if penalty is None else penalty(layers)
        layers, moments = descend(layers, moments, gradients, near)
        return layers, moments, total + value, see(layers, seen)

    # An SGD step on the vector would copy it twice more: into slices for the network,
    # and out of them for the gradient.
    layers = trees(params)
    start = (layers, init(layers), jnp.zeros(()), seen)
    layers, _, total, seen = fold_minibatches(key, data, training, step, start, draw)
    steps = jnp.maximum(num_steps(data.size, training), 1)
    return like_flats(layers, params), total / steps, seen


def descent(training: LocalTraining, round_index) -> tuple[Callable, Callable]:
    """An optimiser that takes a quadratic penalty as `minimise` does.

    Args:
      training: optimiser, learning rate and momentum.
      round_index: scalar, for the learning-rate schedule.

    Returns:
      (init, step): `init(layers) -> moments` and `step(layers, moments, gradients,
      near) -> (layers, moments)`, `near` a `Quadratic` or None.
    """
    exact = training.optimizer == "sgd"
    optimizer = training.optimizer_at(round_index)
    step_size = training.learning_rate_at(round_index) / (1 - training.momentum)

    def step(layers, moments, gradients, near=None):
        if near is not None and not exact:
            gradients = jax.tree.map(jnp.add, gradients, near.gradient(layers))
        updates, moments = optimizer.update(gradients, moments, layers)
        layers = optax.apply_updates(layers, updates)
        if near is not None and exact:
            layers = near.proximal(layers, step_size)
        return layers, moments

    return optimizer.init, step


def squared_gradients(key, params, data, training: LocalTraining, loss: Callable):
    """Σ_j (∂ℓ_j/∂θ)², one client's examples one after another.

    With ℓ_j = -log p(y_j|x_j, θ) it is the diagonal of the empirical Fisher
    information, which a Laplace approximation takes for the curvature of Σ_j ℓ_j.

    So a gradient is squared and added while it is in the cache: an MLP's of 200,000
    weights take a 50th of the time of a batch of 50 at once (one core of a CPU; not
    measured on an accelerator).

    Args:
      key: typed PRNG key, split for `loss`.
      params: θ, pytree.
      data: one client's `ClientData`.
      training: its batch size, of what is read at once; nothing is augmented.
      loss: as of `minimise`; it gets batches of one example.

    Returns:
      A pytree like `params`; zeros of an empty client.
    """
    layers = trees(params)

    def step(key, total, batch):
        def square(total, example):
            one = jax.tree.map(lambda a: a[None], example)
            gradient = jax.grad(loss, argnums=1)(key, layers, one)
            squares = jax.tree.map(
                lambda t, g: t + jnp.where(example.mask, g**2, 0.0), total, gradient
            )
            return squares, None

        return jax.lax.scan(square, total, batch)[0]

    zeros = jax.tree.map(jnp.zeros_like, layers)
    total = fold_minibatches(key, data, training.one_pass(), step, zeros)
    return like_flats(total, params)
