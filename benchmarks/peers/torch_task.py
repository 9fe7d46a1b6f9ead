"""What the PyTorch peers share: the clients' data, the networks and their scores.

The networks are those of `fedvi.nn.models` and `pfl_network.py`, with their weights.
Pixels are standardised once and kept as float32.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "activations",
    "build",
    "prepare",
    "read_clients",
    "score",
    "set_weights",
    "standardise",
]

# As in `fedvi.Federation`: with batch statistics the size of a batch matters.
EVAL_BATCH = 128


def prepare(threads, seed, device="cpu"):
    """Threads and seed of this process; a CUDA device as fast as it can be set.

    Raises:
      ValueError: this PyTorch sees no such device.
    """
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"--torch_device={device}: this PyTorch finds no CUDA device"
            )
        # What JAX does by default there.
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    torch.set_num_threads(threads)
    torch.manual_seed(seed)


def activations(device, dtype):
    """The context of a forward pass whose activations are of `dtype`."""
    kind, low = torch.device(device).type, dtype != "float32"
    return torch.autocast(kind, getattr(torch, dtype) if low else None, enabled=low)


def read_clients(data_file, model, device="cpu"):
    """Train and test: of every client `(x, y)`, images as `model` takes them."""
    with np.load(data_file) as arrays:
        return tuple(
            [
                (
                    arrange(x[:n], arrays, model).to(device),
                    torch.from_numpy(y[:n]).long().to(device),
                )
                for x, y, n in zip(
                    *(arrays[f"{split}_{key}"] for key in ("x", "y", "size"))
                )
            ]
            for split in ("train", "test")
        )


def arrange(x, arrays, model):
    """Rows for mlp, else images `[n, channels, height, width]`."""
    x = standardise(x, arrays["mean"], arrays["std"])
    if model in MIRRORED:
        x = x.flip(1, 2)
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
    raise ValueError(
        f"model={model}: the PyTorch peers have mlp, {', '.join(IMAGE_NETWORKS)}"
    )


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


def mobilenet(example, classes):
    """fedvi's MobileNet, in a mirror; see `MIRRORED`."""
    channels = example.shape[0]
    layers = convolution(channels, 32, 3)
    blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)]
    blocks += [(512, 1)] * 5 + [(1024, 2), (1024, 1)]
    channels = 32
    for width, stride in blocks:
        layers += convolution(channels, channels, 3, stride=stride, groups=channels)
        layers += convolution(channels, width, 1)
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)


def convolution(channels, width, size, **options):
    """A convolution, its normalisation by the batch's statistics, and ReLU."""
    options |= {"padding": size // 2, "bias": False}
    return [
        nn.Conv2d(channels, width, size, **options),
        nn.BatchNorm2d(width, track_running_stats=False),
        nn.ReLU(),
    ]


def pfl_cnn(example, classes):
    """The network of `pfl_network.py`."""
    channels, height, width = example.shape
    features = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


IMAGE_NETWORKS = {
    "lenet": lenet,
    "mobilenet": mobilenet,
    "pfl_cnn": pfl_cnn,
    "vgg": vgg,
}

# With a stride of 2 XLA's "SAME" pads an even image below and right, PyTorch above and
# left: on mirrored images with mirrored filters both compute the same.
MIRRORED = ("mobilenet",)


@torch.no_grad()
def set_weights(network, params_file, model):
    """Sets the weights to fedvi's, as `FedviRounds.save_params` wrote them."""
    with np.load(params_file) as files:
        leaves = {name: torch.from_numpy(files[name]) for name in files}
    layers = [layer for layer in network if list(layer.parameters())]
    counts, channels = {}, None
    for layer in layers:
        kind = name_of(layer)
        where = f"body/{kind}_{counts.setdefault(kind, 0)}/"
        counts[kind] += 1
        if layer is layers[-1]:
            where = "head/classifier/"
        if layer.bias is not None:
            layer.bias.copy_(leaves[where + "bias"])
        if kind == "BatchNorm":
            layer.weight.copy_(leaves[where + "scale"])
            continue
        kernel = leaves[where + "kernel"]
        if isinstance(layer, nn.Conv2d):
            channels = layer.out_channels
            if model in MIRRORED:
                kernel = kernel.flip(0, 1)
            layer.weight.copy_(kernel.permute(3, 2, 0, 1))
        else:
            layer.weight.copy_(channels_first(kernel, channels).T)
            channels = None


def name_of(layer):
    """The name of the fedvi layer that a layer stands for."""
    if isinstance(layer, nn.Conv2d):
        return "DepthwiseConv" if layer.groups > 1 else "Conv"
    return "BatchNorm" if isinstance(layer, nn.BatchNorm2d) else "Dense"


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
