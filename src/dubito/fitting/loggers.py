"""Where the numbers of a run go: `Training(log=...)` takes any callable, and these are ready ones.

A logger is called in the first process with ``{"epoch": 0, "batch": 3, "loss": 0.7, "lr": 0.001}`` after every step,
and with ``{"epoch": 0, "validation": -0.4}``, the mean log score of the validation data, after every epoch of training
if there are such data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from dubito.core.errors import InputError, UnsupportedError

Logger = Callable[[Mapping[str, float]], Any]


class Log:
    """A logger inside of settings; it does not determine the result, so that all are equal."""

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

    def write(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        if "validation" in numbers:  # an epoch has ended: show it now
            writer.flush()

    return _with_steps(write)


def mlflow() -> Logger:
    """Write to the active run of MLflow."""
    library = _imported("mlflow")
    return _with_steps(lambda numbers, step: library.log_metrics(numbers, step=step))


def wandb(run: Any = None) -> Logger:
    """Write to a run of Weights & Biases; by default the active one.

    Steps are counted on from the last one of the run, because it drops what comes with an earlier step.
    """
    target = _imported("wandb").run if run is None else run
    if target is None:
        raise InputError("Weights & Biases has no active run: call wandb.init() first, or pass its run.")
    return _with_steps(lambda numbers, step: target.log(numbers, step=step), lambda: int(target.step))


def _with_steps(write: Callable[[dict[str, float], int], Any], first: Callable[[], int] = int) -> Logger:
    """Return a logger that counts steps, on from `first` at its first call, and writes the numbers of each."""
    steps: list[int] = []

    def log(numbers: Mapping[str, float]) -> None:
        steps[:] = steps or [first()]
        steps[0] += "batch" in numbers
        write({name: value for name, value in numbers.items() if name not in ("epoch", "batch")}, steps[0])

    return log


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"This logger needs the package {name}: pip install {name}.") from error
