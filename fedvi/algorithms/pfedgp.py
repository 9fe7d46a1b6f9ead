"""pFedGP: a shared embedding, and on it a Gaussian process of every client's own.

Achituve, Shamsian, Navon, Chechik and Fetaya, "Personalized federated learning with
Gaussian processes", NeurIPS 2021 (pFedGP-full, without inducing points).
"""

import jax
import jax.numpy as jnp
import optax

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import halves_of, train_from
from fedvi.algorithms.registry import builder
from fedvi.data import ClientData
from fedvi.flat import trees
from fedvi.gaussian_process import Kernel, balanced_tree, fit, log_probabilities
from fedvi.local import Batch, LocalTraining, Quadratic
from fedvi.nn import parameter_count
from fedvi.options import Options, option

__all__ = ["PFedGP", "pfedgp"]


class PFedGP(Options):
    """Options of `pfedgp`."""

    outputscale: float = option(
        8.0, "Variance of the latent functions.", source="paper", above=0, traced=True
    )
    lengthscale: float = option(
        1.0,
        "Of the kernel, in distances of the embedding.",
        source="paper",
        above=0,
        traced=True,
    )
    gibbs_steps: int = option(5, "Of a chain.", source="public code", at_least=1)
    train_chains: int = option(
        20, "Gibbs chains in training.", source="public code", at_least=1
    )
    predict_chains: int = option(
        30,
        "Gibbs chains of a prediction.",
        source="public code",
        at_least=1,
        evaluation="rows",
    )
    whole_data: bool = option(
        True,
        "A step sees all of a client's data, so that an epoch is one step: give "
        "several epochs; otherwise a minibatch.",
        source="public code",
    )
    gp_weight_decay: float = option(
        1e-3,
        "Weight decay of the embedding.",
        source="public code",
        at_least=0,
        traced=True,
    )
    gp_clip: float = option(
        50.0,
        "Norm of the gradient at most.",
        source="public code",
        above=0,
        traced=True,
    )


@builder(PFedGP)
def pfedgp(task: Task, options: PFedGP) -> Algorithm:
    """Builds pFedGP.

    The network without its head embeds an example as a unit vector, as in the public
    code: of long ones the kernel sees none of the others. `fedvi.gaussian_process`
    classifies the embedded examples of one client: k(a, b) = outputscale ·
    exp(-‖a - b‖² / 2ℓ²) on a balanced tree of the classes. (The public code clusters
    each client's own classes, splits S and Q class by class, sums the means of the
    nodes' losses, predicts with exp E log σ(f) where this is E σ(f), and decays the
    weights beside the clipped gradient, where here the decay is clipped with it.)

    Client: the data of a step fall into random halves S and Q, and the network descends
    -1/|Q| Σ_{j in Q} log p(y_j | x_j, S). The Pólya-Gamma variables drawn given S are
    constants in the gradient, which leaves out how their distribution depends on the
    network (the paper's estimator; the score's term is noisy).
    Server: the uniform mean of the networks, as differences.
    Prediction: a client's process on all of its training data, embedded by the shared
    network; nothing is fine-tuned. A class that it has no examples of gets what
    Laplace's rule leaves, once for all nodes (the paper's tree has no such class).
    There is no global model: `global_predictive` is uniform.

    Server state: `{"body": ...}`. Metrics: `loss`, the mean of the loss over the steps.
    `task.finetuning` is not used.

    Raises:
      ValueError: an option outside its range, a model without a body or without
        `features`, or a client of more examples than memory holds kernels of.
    """
    model, tree = task.model, balanced_tree(task.model.classes)
    kernel = Kernel(options.outputscale, options.lengthscale)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    if not parameter_count(shapes["body"]):
        raise ValueError(
            f"model={model.name!r} has no body, which is all that pfedgp trains: use a "
            "model with hidden layers"
        )

    def embed(server, x, mask):
        z = model.features(server, x, mask).reshape(len(x), -1)
        squares = jnp.sum(z**2, axis=1, keepdims=True)
        return z * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))

    def classify(key, x, y, mask, chains):
        steps = options.gibbs_steps
        return fit(key, tree, kernel, x, y, mask, chains=chains, steps=steps)

    def loss(key, server, batch):
        # A minibatch is in random order.
        embedded = batch._replace(x=embed(server, batch.x, batch.mask))
        support, (x, y, mask) = halves_of(embedded)
        found = classify(key, *support, options.train_chains)
        found = found._replace(x=support.x)  # with its gradient
        own = log_probabilities(found, tree, kernel, x)
        own = jnp.take_along_axis(own, y[:, None], axis=1)[:, 0]
        return -jnp.where(mask, own, 0.0).sum() / jnp.maximum(mask.sum(), 1)

    def init(key):
        return {"body": model.init(key)["body"]}

    def client_update(key, round_index, server, client, data):
        training = _clipped(task.training, options.gp_clip)
        if options.whole_data:
            training = training._replace(batch_size=len(data.y))
        decay = Quadratic(optax.tree.zeros_like(trees(server)), options.gp_weight_decay)
        own = task._replace(training=training)
        body, value = train_from(own, key, round_index, server, data, loss, decay)
        return ClientOutput(optax.tree.sub(body, server), 1.0, (), {"loss": value})

    def server_update(key, round_index, server, aggregate):
        return optax.tree.add(server, aggregate.mean())

    def global_predictive(key, server, x, mask):
        return jnp.full((1, len(x), model.classes), -jnp.log(float(model.classes)))

    def personalise(key, server, client, data):
        x, y, mask = _without_padding(data)
        x = embed(server, x, mask)
        return classify(key, x, y, mask, options.predict_chains)

    def personal_predictive(key, server, found, x, mask):
        return log_probabilities(found, tree, kernel, embed(server, x, mask))[None]

    return Algorithm(
        "pfedgp",
        init,
        client_update,
        server_update,
        global_predictive,
        personalise,
        personal_predictive,
        global_model=False,
    )


def _without_padding(data: ClientData) -> Batch:
    """The examples, padding zeroed: a NaN in it would reach them through the mask."""
    mask = jnp.arange(len(data.y)) < data.size

    def real(leaf):
        spread = mask.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(spread, leaf, jnp.zeros((), leaf.dtype))

    return Batch(real(data.x), real(data.y), mask)


def _clipped(training: LocalTraining, most) -> LocalTraining:
    """The same training, its gradients' norm bounded."""

    def optimizer(rate):
        inner = training._replace(learning_rate=rate).optimizer_at(0)
        return optax.chain(optax.clip_by_global_norm(most), inner)

    return training._replace(optimizer=optimizer)
