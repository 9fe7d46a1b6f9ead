"""The least that training must compute and move, counted by hand from layers' shapes.

FLOPs: two for each multiply-add of a product or of a depthwise filter, once forward
and twice backward (for the weights and for the inputs; the first layer needs no
gradient for its inputs), and of the update. What is elementwise is left out.

Bytes: as if every product were a kernel of its own, forward, for the weights and for
the inputs, with all that is elementwise fused into it, and as if memory kept nothing
from one kernel to the next. A value behind a batch normalisation then moves 9 times:

    forward      written by its own layer; read, and normalised, by the next one
    backward     the next layer writes its gradient, and reads it for the sums of the
                 normalisation's gradient; this layer reads gradient and value for its
                 weights and again for its inputs; the next one reads it for its weights

and 7 times without one, as its gradient then needs no value. A cache that holds the
model, as of a small MLP on a CPU, moves less than that from and to memory.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from fedvi.nn import BatchNorm, Conv, Dense, DepthwiseConv, Model

__all__ = [
    "Layer",
    "Work",
    "layers_of",
    "least_forward",
    "least_round",
    "least_step",
    "moved_bytes",
]

FLOAT32 = 4  # bytes of a parameter, a moment and an upload


class Layer(NamedTuple):
    """A product layer, biases and a following normalisation included; of one example.

    Attributes:
      kind: name of its class.
      inputs: values read.
      outputs: values written.
      multiply_adds: of the forward pass.
      parameters: weights, biases, scale and bias of the normalisation.
      normalised: whether a batch normalisation follows.
    """

    kind: str
    inputs: int
    outputs: int
    multiply_adds: int
    parameters: int
    normalised: bool = False


class Work(NamedTuple):
    """What must be computed and moved; `bytes` in all."""

    flops: float
    activation_bytes: float
    parameter_bytes: float

    @property
    def bytes(self) -> float:
        """Activations and parameters together."""
        return self.activation_bytes + self.parameter_bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> "Work":
        """The same, `count` times over."""
        return Work(*(count * value for value in self))


def layers_of(model: Model, input_shape: Iterable[int]) -> list[Layer]:
    """The layers of a network of `fedvi.nn`, in the order in which they are called.

    Args:
      model: a network of Dense, Conv, DepthwiseConv and BatchNorm.
      input_shape: of one raw example.

    Raises:
      ValueError: weights that belong to none of these layers.
    """
    params = jax.eval_shape(model.init, jax.random.key(0))
    example = jax.ShapeDtypeStruct((1, *input_shape), jnp.float32)
    layers = []

    def record(call, args, kwargs, context):
        result = call(*args, **kwargs)
        if context.method_name == "__call__":
            _add(layers, context.module, args[0].shape, result.shape)
        return result

    with linen.intercept_methods(record):
        # A function of its own: a cached trace would call no layer.
        jax.eval_shape(lambda *arguments: model.apply(*arguments), params, example)
    counted = sum(layer.parameters for layer in layers)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    if counted != total:
        raise ValueError(
            f"model={model.name} has {total} parameters and its dense, convolution and "
            f"normalisation layers {counted}: count such a model in another way"
        )
    return layers


def _add(layers: list[Layer], module: Any, inputs: tuple, outputs: tuple) -> None:
    if not isinstance(module, (BatchNorm, Conv, Dense, DepthwiseConv)):
        return
    weights = module.variables["params"]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
    if isinstance(module, BatchNorm):
        last = layers.pop()
        parameters += last.parameters
        layers.append(last._replace(parameters=parameters, normalised=True))
        return
    size = math.prod(outputs[1:])
    # Multiply-adds of one output: kernel positions × the channels that it reads.
    each = math.prod(weights["kernel"].shape[:-1])
    kind = type(module).__name__
    layers.append(Layer(kind, math.prod(inputs[1:]), size, size * each, parameters))


def least_step(
    layers: list[Layer],
    batch_size: float,
    *,
    moments: int = 1,
    activation_bytes: int = FLOAT32,
    input_bytes: int = FLOAT32,
) -> Work:
    """One gradient step of one client on a minibatch, its update included.

    Args:
      layers: from `layers_of`.
      batch_size: examples.
      moments: arrays that the optimiser keeps for each parameter: 0 for SGD, 1 with
        momentum, 2 for Adam.
      activation_bytes: of an activation or its gradient.
      input_bytes: of a number of a raw example.
    """
    flops = parameter_values = moved = 0
    for index, layer in enumerate(layers):
        first = index == 0
        flops += 2 * layer.multiply_adds * (2 if first else 3)
        # A gradient through a normalisation needs the value too.
        gradient = layer.outputs * (2 if layer.normalised else 1)
        moved += layer.outputs + gradient
        if not first:
            # Forward and weights read the inputs; for the inputs the gradient comes
            # in, that of the inputs goes out, and they are read for what is fused.
            moved += 2 * layer.inputs + gradient + 2 * layer.inputs
        # Forward, inputs' gradient, and an update that reads and writes.
        reads = 1 if first else 2
        parameter_values += layer.parameters * (reads + 2 * (1 + moments))
    parameters = sum(layer.parameters for layer in layers)
    raw = 2 * layers[0].inputs * input_bytes
    return Work(
        flops=batch_size * flops + 2 * (1 + moments) * parameters,
        activation_bytes=batch_size * (activation_bytes * moved + raw),
        parameter_bytes=FLOAT32 * parameter_values,
    )


def least_forward(
    layers: list[Layer],
    batch_size: float,
    *,
    activation_bytes: int = FLOAT32,
    input_bytes: int = FLOAT32,
) -> Work:
    """One client's forward pass of a minibatch, as an evaluation does it.

    Args:
      layers: from `layers_of`.
      batch_size: examples.
      activation_bytes: as for `least_step`.
      input_bytes: see there.
    """
    written = sum(layer.outputs for layer in layers)
    read = sum(layer.inputs for layer in layers[1:])
    raw = layers[0].inputs * input_bytes
    return Work(
        flops=batch_size * sum(2 * layer.multiply_adds for layer in layers),
        activation_bytes=batch_size * (activation_bytes * (written + read) + raw),
        parameter_bytes=FLOAT32 * sum(layer.parameters for layer in layers),
    )


def least_round(
    layers: list[Layer],
    sizes: Iterable[int],
    participants: int,
    *,
    batch_size: int,
    epochs: int = 1,
    moments: int = 1,
    activation_bytes: int = FLOAT32,
    input_bytes: int = FLOAT32,
) -> Work:
    """A FedAvg round: the participants' steps, and the weighted sum of their models.

    Args:
      layers: from `layers_of`.
      sizes: training examples of every client; a participant's work is their mean.
      participants: clients in a round.
      batch_size: examples a step.
      epochs: passes over a client's data.
      moments: as for `least_step`, as are the rest.
      activation_bytes: see there.
      input_bytes: see there.
    """
    sizes = np.asarray(list(sizes))
    steps = np.ceil(sizes / batch_size)
    options = {
        "moments": moments,
        "activation_bytes": activation_bytes,
        "input_bytes": input_bytes,
    }
    # Steps cost by their number and by their examples: two terms of one formula.
    update = least_step(layers, 0, **options)
    both = least_step(layers, 1, **options)
    example = Work(*(b - u for b, u in zip(both, update, strict=True)))
    client = example.times(sizes.mean()) + update.times(steps.mean())
    parameters = sum(layer.parameters for layer in layers)
    # The upload is read, and the sum read and written.
    average = Work(2.0 * parameters, 0.0, 3.0 * FLOAT32 * parameters)
    return client.times(participants * epochs) + average.times(participants)


def moved_bytes(step: Callable, *arguments: Any) -> int:
    """Bytes of the arguments that the results depend on, and of the new results.

    State that a step hands on as it is need not move.
    """
    jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
    inputs = {id(v) for v in jaxpr.invars}
    written = [v for v in jaxpr.outvars if id(v) not in inputs]
    needed = {id(v) for v in written}
    for equation in reversed(jaxpr.eqns):
        if any(id(v) in needed for v in equation.outvars):
            needed |= {id(v) for v in equation.invars}
    moved = written + [v for v in jaxpr.invars if id(v) in needed]
    return sum(v.aval.size * v.aval.dtype.itemsize for v in moved)
