"""The contract between a method and the fit loop: `Inference`, and the `Problem` that it solves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import io
from dubito.core.batches import Batch, Source
from dubito.core.params import Buffers, Params
from dubito.fitting.posterior import Posterior
from dubito.fitting.training import Training
from dubito.networks.selection import Selection

State = dict[str, Any]  # nested tensors, numbers and text, which can be saved in a checkpoint at any time
Info = dict[str, Tensor | float]  # numbers of one update that the progress bar shows


class Inference(NamedTuple):
    """The steps of a method, which the fit loop runs.

    `update` may change the tensors of the given state in place, and returns the next state. If the loss is not finite,
    it raises `NonFinite` *before* it changes anything (`check_loss`); on an accelerator the loop reads the losses in
    `Info` once per some batches.
    """

    init: Callable[[Params, Buffers, torch.Generator], State]
    update: Callable[[State, Batch, torch.Generator], tuple[State, Info]]
    posterior: Callable[[State], Posterior]
    epochs: int
    batches: Literal["mini", "full"] = "mini"
    score: Callable[[State, Batch], Tensor] | None = None  # validation log-probabilities ``[B]``, for early stopping
    additive: bool = False  # whether the state is a sum over this process's rows; otherwise all processes have the same
    source: Source | None = None  # the data that the loop iterates over instead of the problem's own
    anytime: bool = True  # whether every state gives a posterior; otherwise only the last one does
    checks_itself: bool = (
        False  # whether `update` notes states that are not finite; the loop reads none on accelerators
    )
    restore: Callable[[State, State], State] = io.copy_into  # copies the state of a checkpoint into the first state


class NonFinite(Exception):
    """The loss of an update is NaN or infinite."""


def check_loss(loss: Tensor) -> None:
    """Raise `NonFinite` if a loss on the CPU is not finite; one on an accelerator is read later, by a `LossWatch`."""
    if loss.device.type == "cpu" and not math.isfinite(value := loss.item()):
        raise NonFinite(f"The loss became {value}")


class LossWatch:
    """Remembers, on the accelerator, the first step whose loss is not finite: a read would wait for each step.

    >>> watch = LossWatch()
    >>> for step, loss in enumerate((0.1, float("nan"), 0.3)):
    ...     watch.add(torch.tensor(loss).isfinite(), (0, step))
    >>> watch.read(), watch.read()
    ((0, 1), None)
    """

    every: ClassVar[int] = 50  # steps between two reads
    few: ClassVar[int] = 20  # after fewer steps, the end of an epoch is no reason to read
    _none: ClassVar[int] = 2**62
    _epoch: ClassVar[int] = 2**31  # more batches than an epoch has

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self.waiting = 0  # the number of steps that have not been read

    @property
    def is_due(self) -> bool:
        """Whether it is time to read."""
        return self.waiting >= self.every

    def note(self, loss: Tensor | float | None, step: tuple[int, int]) -> None:
        """Note the loss of a step, given as epoch and batch; a step without one is only counted."""
        if isinstance(loss, Tensor):
            self.add(loss.isfinite(), step)
        else:
            self.waiting += 1

    def add(self, is_finite: Tensor, step: tuple[int, int]) -> None:
        """Note whether all is finite in a step, given as epoch and batch."""
        self.waiting += 1
        bad = torch.where(is_finite, self._none, step[0] * self._epoch + step[1])
        self._first = bad if self._first is None else torch.minimum(self._first, bad)

    def read(self) -> tuple[int, int] | None:
        """Return epoch and batch of the first step since the last reading that was not finite, or None."""
        first, self._first, self.waiting = self._first, None, 0
        found = self._none if first is None else int(first)
        return None if found == self._none else divmod(found, self._epoch)


@dataclass(frozen=True)
class Problem:
    """The inputs of a method: model, data, likelihood, training settings and random weights.

    Args:
        model: A private copy of the user's network, which the method may change.
        likelihood: The likelihood.
        source: The training data.
        validation: The validation data, or None.
        training: The training settings.
        generator: The generator of all random numbers that Dubito draws.
        progress: Whether to show a progress bar.
        selection: The random weights; by default all trainable weights.
    """

    model: nn.Module
    likelihood: Likelihood
    source: Source
    validation: Source | None
    training: Training
    generator: torch.Generator
    progress: bool
    selection: Selection = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.selection is None:
            object.__setattr__(self, "selection", Selection.all_of(self.model))

    @property
    def num_data(self) -> int:
        """The number of training examples."""
        return self.source.num_data

    def progress_at(self, step: int, epochs: int | None = None) -> float:
        """Return the fraction of all steps that come before `step`."""
        per_epoch = self.source.num_batches
        total = (per_epoch or 1) * max(self.training.epochs if epochs is None else epochs, 1)
        return min(step / total, 1.0)
