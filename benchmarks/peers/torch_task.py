"""What the PyTorch peers share: the clients' data, the networks and their scores.

The networks are those of `fedvi.nn.models`, with their weights. Pixels are standardised
once and kept as float32.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["build", "read_clients", "score", "set_weights", "standardise"]

# As in `fedvi.Federation`: with batch statistics the size of a batch matters.
EVAL_BATCH = 128


def read_clients(data_file, model):
    """Train and test: of every client `(x, y)`, images as `model` takes them."""
    with np.load(data_file) as arrays:
        return tuple(
            [
                (arrange(x[:n], arrays, model), torch.from_numpy(y[:n]).long())
                for x, y, n in zip(
                    *(arrays[f"{split}_{key}"] for key in ("x", "y", "size"))
                )
            ]
            for split in ("train", "test")
        )


def arrange(x, arrays, model):
    """Rows for mlp, else images `[n, channels, height, width]`."""
    x = standardise(x, arrays["mean"], arrays["std"])
    # As stored: "channels last", which is PyTorch's faster layout here.
    return x.flatten(1) if model == "mlp" else x.permute(0, 3, 1, 2)


def standardise(x, mean, std):
    """uint8 images as standardised float32."""
    return torch.from_numpy((x.astype(np.float32) / 255 - mean) / std)


def build(model, example, hidden, classes):
    """The network for examples like `example`, as `arrange` gives them."""
    if model == "mlp":
        features = example.shape[-1]
        return nn.Sequential(
            nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )
    if model in IMAGE_NETWORKS:
        network = IMAGE_NETWORKS[model](example, classes)
        return network.to(memory_format=torch.channels_last)
    raise ValueError(f"model={model}: the PyTorch peers have mlp, lenet and vgg")


def lenet(example, classes):
    """fedvi's LeNet."""
    channels, height, _ = example.shape
    body = nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2 if height == 28 else 0),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    features = body(example[None]).shape[1]
    units = [nn.Linear(features, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    return nn.Sequential(*body, *units, nn.Linear(84, classes))


def vgg(example, classes):
    """fedvi's small VGG; batch normalisation always by the batch's statistics."""
    channels, layers = example.shape[0], []
    for width in (16, 32, 64, 128, 128):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.BatchNorm2d(width, track_running_stats=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        channels = width
    body = nn.Sequential(*layers, nn.Flatten())
    features = body(torch.stack([example, example])).shape[1]
    return nn.Sequential(*body, nn.Linear(features, classes))


IMAGE_NETWORKS = {"lenet": lenet, "vgg": vgg}


@torch.no_grad()
def set_weights(network, params_file):
    """Sets the weights to fedvi's, as `FedviRounds.save_params` wrote them."""
    with np.load(params_file) as files:
        leaves = {name: torch.from_numpy(files[name]) for name in files}
    names = {nn.Conv2d: "Conv", nn.BatchNorm2d: "BatchNorm", nn.Linear: "Dense"}
    layers = [layer for layer in network if type(layer) in names]
    counts, channels = dict.fromkeys(names, 0), None
    for layer in layers:
        kind = type(layer)
        where = f"body/{names[kind]}_{counts[kind]}/"
        counts[kind] += 1
        if layer is layers[-1]:
            where = "head/classifier/"
        layer.bias.copy_(leaves[where + "bias"])
        if kind is nn.BatchNorm2d:
            layer.weight.copy_(leaves[where + "scale"])
            continue
        kernel = leaves[where + "kernel"]
        if kind is nn.Conv2d:
            channels = layer.out_channels
            layer.weight.copy_(kernel.permute(3, 2, 0, 1))
        else:
            layer.weight.copy_(channels_first(kernel, channels).T)
            channels = None


def channels_first(kernel, channels):
    """A kernel `[inputs, outputs]` behind images: inputs from HWC to CHW order."""
    if channels is None:
        return kernel
    by_pixel = kernel.reshape(-1, channels, kernel.shape[1])
    return by_pixel.transpose(0, 1).reshape(kernel.shape)


@torch.no_grad()
def score(network, clients):
    """The test scores, pooled over the clients, each in even batches of its own."""
    correct, nll, count = 0, 0.0, 0
    for x, y in clients:
        if not len(y):
            continue
        width = math.ceil(len(y) / math.ceil(len(y) / EVAL_BATCH))
        for batch_x, batch_y in zip(x.split(width), y.split(width)):
            logits = network(batch_x)
            correct += (logits.argmax(1) == batch_y).sum().item()
            nll += F.cross_entropy(logits, batch_y, reduction="sum").item()
        count += len(y)
    return {"test_accuracy": correct / count, "test_nll": nll / count}
