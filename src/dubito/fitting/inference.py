"""What every method is to the fit loop: `Inference`, and the `Problem` it is built for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core.batches import Batch, Source
from dubito.core.params import Buffers, Params
from dubito.fitting.posterior import Posterior
from dubito.fitting.training import Training
from dubito.networks.selection import Selection

State = dict[str, Any]  # tensors, numbers and text, nested; it can be written to a checkpoint at any time
Info = dict[str, Tensor | float]  # numbers of one update for the progress bar


class Inference(NamedTuple):
    """A way of finding a posterior, as pure steps that one loop drives.

    `update` may change the tensors of the state it is given in place, and returns the state to go on with. It raises
    `NonFinite` *before* it changes anything when the loss is not finite.
    """

    init: Callable[[Params, Buffers, torch.Generator], State]
    update: Callable[[State, Batch, torch.Generator], tuple[State, Info]]
    posterior: Callable[[State], Posterior]
    epochs: int
    batches: Literal["mini", "full"] = "mini"
    score: Callable[[State, Batch], Tensor] | None = None  # validation log-probabilities ``[B]``, for early stopping
    additive: bool = False  # the state is a sum over this process's rows; else it is the same in every process
    source: Source | None = None  # what the loop draws batches from in place of the problem's own data
    anytime: bool = True  # a state along the way is a posterior already; else only the last one is


class NonFinite(ArithmeticError):
    """Raised by an update whose loss is NaN or infinite."""


@dataclass(frozen=True)
class Problem:
    """What a recipe is asked to solve.

    Args:
        model: A private copy of the user's network, which the method may change.
        likelihood: How outputs explain targets.
        source: The training data.
        validation: Held-out data, or None.
        training: The settings of the loop.
        generator: Our randomness.
        progress: Whether to show progress.
        selection: The random weights; by default all that can be trained.
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
        """The fraction of all steps that lie before `step`."""
        per_epoch = self.source.num_batches
        total = (per_epoch or 1) * max(self.training.epochs if epochs is None else epochs, 1)
        return min(step / total, 1.0)
