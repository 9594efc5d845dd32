"""Build networks by name for a data set, for the command line and the benchmarks."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dubito.core.constraints import Count, check
from dubito.core.errors import InputError
from dubito.core.grammar import read_call
from dubito.networks.models import convolutional, dense, sequence

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": dense.mlp,
    "lenet_300_100": dense.lenet_300_100,
    "lenet5": convolutional.lenet5,
    "resnet20": convolutional.resnet20,
    "resnet18": convolutional.resnet18,
    "transformer": sequence.transformer,
    "lstm": sequence.lstm,
}


def names() -> tuple[str, ...]:
    """Return the names that `build` accepts."""
    return tuple(_BUILDERS)


def build(
    name: str, input_shape: tuple[int, ...], num_outputs: int, *, vocabulary: int | None = None, **options: Any
) -> nn.Module:
    """Return a network by name, with newly drawn weights, for inputs of one shape.

    Args:
        name: One of `names()`, or text with options such as ``"mlp(hidden=[50, 50], activation=tanh)"``.
        input_shape: The shape of one input, without the batch axis; ``(length,)`` for token sequences.
        num_outputs: The number of classes, or of regression targets.
        vocabulary: The number of distinct tokens, if the inputs are tokens.
        options: Options of the network; those in `name` take precedence.

    >>> build("mlp(hidden=[20])", (1, 8, 8), 10)[1]
    Linear(in_features=64, out_features=20, bias=True)
    """
    check("name", str, name)
    check("input_shape", tuple[Count, ...], tuple(input_shape) if isinstance(input_shape, Sequence) else input_shape)
    check("num_outputs", Count, num_outputs)
    name, written = _read(name)
    parameters = inspect.signature(_BUILDERS[name]).parameters
    from_data = {
        "inputs": math.prod(input_shape),
        "input_shape": tuple(input_shape),
        "vocabulary": vocabulary,
        "length": input_shape[0] if input_shape else 1,
        "outputs": num_outputs,
    }
    fitted = {key: value for key, value in from_data.items() if key in parameters}
    if ("vocabulary" in fitted) != (vocabulary is not None):
        needed = "integer tokens" if "vocabulary" in fitted else "numbers, not tokens"
        raise InputError(f"The model '{name}' needs inputs of {needed}; choose another model for this data.")
    if "input_shape" in fitted and len(input_shape) != 3:
        raise InputError(f"The model '{name}' needs images [channels, height, width], not inputs {input_shape}.")
    known = [key for key in parameters if key not in fitted]
    wrong = [key for key in (*options, *written) if key not in known]
    if wrong:
        options_text = ", ".join(known) or "none"
        raise InputError(f"The model '{name}' has no option '{wrong[0]}'; its options are: {options_text}.")
    return _BUILDERS[name](**fitted, **{**options, **written})


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``name`` or ``name(key=value, ...)`` into the name and its options."""
    called, positional, options = read_call(text)
    name = called.lower().replace("-", "_")
    if name not in _BUILDERS:
        close = difflib.get_close_matches(name, _BUILDERS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(_BUILDERS)}."
        raise InputError(f"There is no model '{name}'; {hint}")
    if positional:
        raise InputError(f"Write the options of the model '{name}' with their names, as in {name}(option=value).")
    return name, options
