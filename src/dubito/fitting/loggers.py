"""Where the numbers of a run go: `Training(log=...)` takes any callable, and these are ready ones.

A logger is called in the first process with ``{"epoch": 0, "batch": 3, "loss": 0.7, "lr": 0.001}`` after every step,
and with ``{"epoch": 0, "validation": -0.4}`` after an epoch with validation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from dubito.core.errors import InputError, UnsupportedError

Logger = Callable[[Mapping[str, float]], Any]


class Log:
    """A logger inside of settings; it does not determine the result, so that all are equal.

    Args:
        function: The callable.
    """

    def __init__(self, function: Logger) -> None:
        if not callable(function):
            raise InputError(f"`log` must be a callable that takes a dict of numbers, got {function!r}.")
        self.function: Logger = function.function if isinstance(function, Log) else function

    def __call__(self, numbers: Mapping[str, float]) -> None:
        """Pass the numbers on."""
        self.function(numbers)

    def digest(self) -> str:
        """Return a constant."""
        return "log"

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def tensorboard(directory: str | None = None) -> Logger:
    """Write to TensorBoard; `directory` is that of `torch.utils.tensorboard.SummaryWriter`."""
    _imported("tensorboard")
    writer = import_module("torch.utils.tensorboard").SummaryWriter(directory)
    return _with_steps(writer.add_scalar)


def mlflow() -> Logger:
    """Write to the active run of MLflow."""
    library = _imported("mlflow")
    return _with_steps(lambda name, value, step: library.log_metric(name, value, step=step))


def wandb(run: Any = None) -> Logger:
    """Write to a run of Weights & Biases; by default the active one."""
    target = _imported("wandb") if run is None else run
    return _with_steps(lambda name, value, step: target.log({name: value}, step=step))


def _with_steps(write: Callable[[str, float, int], Any]) -> Logger:
    """Return a logger that counts the steps and writes every number under its name."""
    steps = [0]

    def log(numbers: Mapping[str, float]) -> None:
        steps[0] += "batch" in numbers
        for name, value in numbers.items():
            if name not in ("epoch", "batch"):
                write(name, value, steps[0])

    return log


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"This logger needs the package {name}: pip install {name}.") from error
