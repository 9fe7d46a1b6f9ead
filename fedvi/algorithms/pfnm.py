"""PFNM, BNFed in pFedBayes' tables: the clients' hidden neurons matched, not averaged.

Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML
2019.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from fedvi.algorithm import Algorithm, ClientOutput, Task
from fedvi.algorithms.common import point_estimate, train_from
from fedvi.algorithms.registry import builder
from fedvi.flat import like_flats, trees
from fedvi.nn import Model
from fedvi.options import Options, option

__all__ = ["PFNM", "Server", "match", "pfnm"]


class Server(NamedTuple):
    """Server state; W is the greatest width, N the number of all clients.

    Attributes:
      neurons: `[W, inputs + 1 + classes]`, what leads to each hidden neuron, its bias,
        and what leads from it; zeros where there is none.
      bias: `[classes]`, of the outputs.
      counts: `[W]` float, clients matched to each neuron last; not sent.
      members: `[N, H]` int32, the neurons that a client's own are matched to.
    """

    neurons: Any
    bias: Any
    counts: Any
    members: Any


class PFNM(Options):
    """Options of `pfnm`."""

    neuron_std: float = option(
        1.0, "σ, of a client's neuron around the global one.", source="§5", above=0
    )
    prior_neuron_std: float = option(
        10.0,
        "σ0, of the global neurons around 0. §5's 1 shrinks them in every round.",
        source="ours: so that m / (m + σ²/σ0²) stays near 1",
        above=0,
    )
    new_neurons: float = option(
        1.0, "γ0, mass of the Beta process: how readily there are more.", above=0
    )
    widening: int = option(
        3, "The global network has at most so many times the model's width.", at_least=1
    )
    sweeps: int = option(3, "Passes over the cohort's clients.", at_least=1)


@builder(PFNM)
def pfnm(task: Task, options: PFNM) -> Algorithm:
    """Builds PFNM, for a network of one hidden layer of H neurons.

    A client trains H of the global network's neurons and sends them. Under
      v_jl ~ N(θ_c(jl), σ² I),  θ_i ~ N(0, σ0² I),  c ~ Beta-Bernoulli(γ0)
    the server finds which neurons c of the clients are the same, client by client given
    the others, by `match` on the host, and takes
      θ_i = Σ_matched v / σ² / (1/σ0² + m_i/σ²),
    which shrinks a neuron of m_i clients by m_i / (m_i + σ²/σ0²) in every round. The
    output biases are averaged. The global network is the union, as wide as it must be;
    a client of the last cohort gets the neurons that its own were matched to, all
    others those H that most clients share.

    Metrics: `loss`, the mean over the local steps.

    Raises:
      ValueError: a network that has not one hidden layer with biases.
    """
    model = task.model
    width, features = _one_hidden_layer(model)
    most = options.widening * width

    def init(key):
        neurons, bias = _neurons(model.init(key))
        empty = jnp.zeros((most - width, features))
        counts = (jnp.arange(most) < width).astype(jnp.float32)
        members = jnp.tile(jnp.arange(width, dtype=jnp.int32), (task.ids, 1))
        return Server(jnp.concatenate([neurons, empty]), bias, counts, members)

    def unicast(server, client_id):
        own = server.neurons[server.members[client_id]]
        # In a round a client is sent its own neurons alone.
        whole = server.neurons if jax.tree.leaves(server.counts) else ()
        return Server(whole, server.bias, (), own)

    def own_model(server):
        return _params(model, server.members, server.bias)

    def client_update(key, round_index, server, client, data):
        start = own_model(server)
        params, value = train_from(task, key, round_index, start, data)
        neurons, bias = _neurons(params)
        moved = {"neurons": neurons - server.members, "bias": bias - server.bias}
        return ClientOutput(moved, 1.0, metrics={"loss": value})

    def server_update(key, round_index, server, aggregate):
        weight, moved = aggregate.weight, aggregate.uploads
        sent = server.neurons[server.members[aggregate.client_ids]] + moved["neurons"]
        neurons, counts, members = _match_on_host(sent, weight > 0, options, most)
        bias = server.bias + (weight / weight.sum()) @ moved["bias"]
        # Whom nobody heard of in this round starts at the most popular neurons.
        popular = jnp.argsort(-counts)[:width].astype(jnp.int32)
        everyone = jnp.broadcast_to(popular, server.members.shape)
        return Server(neurons, bias, counts, aggregate.noted(everyone, members))

    def global_predictive(key, server, x, mask):
        """The outputs are linear in the hidden neurons: those of blocks of H add up."""
        blocks = server.neurons.reshape(options.widening, width, -1)
        bias = server.bias / options.widening

        def outputs(block):
            return model.apply(_params(model, block, bias), x, mask)

        return jax.nn.log_softmax(jax.lax.map(outputs, blocks).sum(0))[None]

    return point_estimate(
        "pfnm",
        task,
        params_of=own_model,
        init=init,
        client_update=client_update,
        server_update=server_update,
        global_predictive=global_predictive,
        broadcast=lambda server: server._replace(counts=()),
        unicast=unicast,
        reduce="stack",
        host=True,
    )


def match(neurons, counts, options: PFNM, most: int):
    """The neurons of several clients as those of one network, on the host.

    Given the other clients' matches, client j's neuron v gains by sharing neuron i with
    m_i of them, whose sum is s_i,
      ‖s_i/σ² + v/σ²‖² / (1/σ0² + (m_i + 1)/σ²) - ‖s_i/σ²‖² / (1/σ0² + m_i/σ²)
        + 2 log(m_i / (J - m_i)),
    and by being the k-th new one the same of an empty i, with 2 log(γ0/J) - 2 log k
    (Eq. 8); one assignment problem for all of its neurons.

    Args:
      neurons: `[clients, H, features]`.
      counts: `[clients]` bool, False: not looked at.
      options: σ, σ0, γ0, sweeps.
      most: neurons that there may be.

    Returns:
      (posterior means `[most, features]`, clients matched to each `[most]`, matches
      `[clients, H]` int32).
    """
    clients, width, features = neurons.shape
    vectors = neurons.astype(np.float64)
    precision, prior = options.neuron_std**-2, options.prior_neuron_std**-2
    members = np.tile(np.arange(width), (clients, 1))
    there = np.flatnonzero(counts)
    total = len(there)
    sums, sizes = np.zeros((most, features)), np.zeros(most)
    for turn in range(options.sweeps):
        for j in there:
            if turn:
                sums[members[j]] -= vectors[j]
                sizes[members[j]] -= 1
            # Those in use first, then as many new ones as may be needed.
            used, free = np.flatnonzero(sizes > 0), np.flatnonzero(sizes == 0)
            places = np.concatenate([used, free[:width]])
            m = sizes[places]
            s = np.where(m[:, None] > 0, sums[places], 0.0)
            square = (s**2).sum(1)
            both = square + 2 * vectors[j] @ s.T + (vectors[j] ** 2).sum(1)[:, None]
            gain = precision**2 * (
                both / (prior + (m + 1) * precision) - square / (prior + m * precision)
            )
            rank = 1 + np.arange(len(places)) - len(used)
            popular = np.log(np.maximum(m, 1) / np.maximum(total - m, 0.5))
            fresh = np.log(options.new_neurons / total) - np.log(np.maximum(rank, 1))
            gain = gain + 2 * np.where(m > 0, popular, fresh)
            members[j] = places[linear_sum_assignment(-gain)[1]]
            sums[members[j]] += vectors[j]
            sizes[members[j]] += 1
    sums = sums * (sizes > 0)[:, None]
    means = precision * sums / (prior + sizes * precision)[:, None]
    return means.astype(np.float32), sizes.astype(np.float32), members.astype(np.int32)


def _match_on_host(neurons, counts, options: PFNM, most: int):
    """`match`, from within a compiled round."""
    clients, width, features = neurons.shape
    return jax.pure_callback(
        lambda *given: match(*map(np.asarray, given), options, most),
        (
            jax.ShapeDtypeStruct((most, features), jnp.float32),
            jax.ShapeDtypeStruct((most,), jnp.float32),
            jax.ShapeDtypeStruct((clients, width), jnp.int32),
        ),
        neurons,
        counts,
        vmap_method="sequential",
    )


def _one_hidden_layer(model: Model) -> tuple[int, int]:
    """(H, inputs + 1 + classes) of a network that has one, with biases."""
    layers = jax.eval_shape(lambda key: trees(model.init(key)), jax.random.key(0))
    body, head = (jax.tree.leaves(layers[part]) for part in ("body", "head"))
    shapes = [[leaf.shape for leaf in part] for part in (body, head)]
    dims = [[len(shape) for shape in part] for part in shapes]
    if dims != [[1, 2], [1, 2]] or shapes[0][1][1] != shapes[1][1][0]:
        raise ValueError(
            f"model={model.name!r} is no network of one hidden layer with biases, "
            "whose neurons pfnm matches: use model='mlp' with one number in hidden"
        )
    (inputs, width), (_, classes) = body[1].shape, head[1].shape
    return width, inputs + 1 + classes


def _neurons(params):
    """(`[H, inputs + 1 + classes]`, output bias `[classes]`) of the parameters."""
    bias, kernel, out_bias, out = jax.tree.leaves(trees(params))
    return jnp.concatenate([kernel.T, bias[:, None], out], axis=1), out_bias


def _params(model: Model, neurons, out_bias):
    """The parameters of these neurons; the reverse of `_neurons`."""
    like = jax.eval_shape(model.init, jax.random.key(0))
    inputs = neurons.shape[1] - 1 - len(out_bias)
    bias, kernel, out = (
        neurons[:, inputs],
        neurons[:, :inputs].T,
        neurons[:, inputs + 1 :],
    )
    structure = jax.tree.structure(jax.eval_shape(trees, like))
    return like_flats(structure.unflatten([bias, kernel, out_bias, out]), like)
