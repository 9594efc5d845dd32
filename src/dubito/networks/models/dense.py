"""Fully connected networks: `mlp`, and LeNet-300-100 as one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count
from dubito.core.errors import InputError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}

MOST_WEIGHTS = 10**10


def check_num_weights(number: int) -> None:
    """Raise an error, before any allocation, if a network would have more than `MOST_WEIGHTS` weights."""
    if number > MOST_WEIGHTS:
        raise InputError(f"A network of {number:,} weights is too large: the limit is {MOST_WEIGHTS:,}.")


@checked_arguments
def mlp(
    inputs: Count, outputs: Count, hidden: Sequence[Count] | Count = (50,), activation: str = "relu"
) -> nn.Sequential:
    """Return a multi-layer perceptron; inputs of any shape are flattened to `inputs` features.

    Args:
        inputs: The number of input features.
        outputs: The number of outputs.
        hidden: The width of each hidden layer; an empty sequence gives a linear model.
        activation: One of `ACTIVATIONS`.

    >>> sum(p.numel() for p in mlp(3, 2, hidden=(5,)).parameters()) == (3 + 1) * 5 + (5 + 1) * 2
    True
    """
    if activation not in ACTIVATIONS:
        raise InputError(f"There is no activation '{activation}': use one of {', '.join(ACTIVATIONS)}.")
    widths = [inputs, *(hidden if isinstance(hidden, Sequence) else [hidden]), outputs]
    check_num_weights(sum(fan_in * fan_out for fan_in, fan_out in pairwise(widths)))
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


@checked_arguments
def lenet_300_100(inputs: Count = 784, outputs: Count = 10) -> nn.Sequential:
    """Return LeNet-300-100 (LeCun et al. 1998, "Gradient-based learning applied to document recognition") with ReLU.

    It has 266,610 weights for 28 x 28 images and 10 classes: the usual first network of papers on pruning.
    """
    return mlp(inputs, outputs, hidden=(300, 100))
