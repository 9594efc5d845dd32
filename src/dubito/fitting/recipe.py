"""`Recipe`: a way of finding a posterior, as a frozen setting with one method, `fit`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dubito.core.randomness import restoring_generators
from dubito.core.settings import Setting, setting
from dubito.core.widest import at_home
from dubito.fitting.training import Training

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dubito.beliefs.likelihoods import Likelihood
    from dubito.core.batches import Data
    from dubito.fitting.inference import Inference, Problem
    from dubito.fitting.posterior import Posterior
    from dubito.fitting.training import Training
    from dubito.select.rule import SelectionRule


@dataclass(frozen=True)
class FitCall:
    """The arguments of one call of `Recipe.fit`."""

    model: nn.Module
    data: Data
    likelihood: str | Likelihood = "categorical"
    validation: Data | None = None
    training: Training | None = None
    num_data: int | None = None
    generator: torch.Generator | None = None
    progress: bool = True


@setting
class Recipe(Setting, ABC):
    """Base class of all recipes; a subclass defines its fields and `build`."""

    described = "a recipe such as MAP()"

    @abstractmethod
    def build(self, problem: Problem) -> Inference:
        """Return the inference that the fit loop runs; `problem.selection` holds the weights that `weights` chose."""

    @property
    def weights(self) -> SelectionRule | None:
        """The rule that chooses the random weights, or None. A recipe may define it as a field."""
        return None

    @property
    def start(self) -> Any:
        """Where training starts: ``"model"``, ``"fresh"`` or ``"head"``. A recipe may define it as a field.

        ``"model"`` are the model's weights and ``"fresh"`` newly drawn ones; ``"head"`` draws only the weights of the
        output layer, on top of the model's other layers.
        """
        return "model"

    @property
    def starts_fresh(self) -> bool:
        """Whether all weights are newly drawn before training."""
        return isinstance(self.start, str) and self.start == "fresh"

    @property
    def redraws(self) -> bool:
        """Whether some weights, those of the output layer or all, are newly drawn before training."""
        return isinstance(self.start, str) and self.start in ("fresh", "head")

    @property
    def needs_trained_model(self) -> bool:
        """Whether the model must be trained already."""
        return False

    @property
    def trains(self) -> bool:
        """Whether the fit trains the network for a number of epochs."""
        return not self.needs_trained_model

    @property
    def has_score(self) -> bool:
        """Whether its inference can score validation data while it trains."""
        return False

    def epochs_after_search(self, found: int, batches: int) -> int:
        """Return how many epochs to train, given what is best for the plain network at a constant learning rate.

        Args:
            found: That number of epochs. By default a third more are taken, as the learning rate falls in the second
                half and is three quarters of its peak on average.
            batches: The number of batches of an epoch.
        """
        return math.ceil(4 / 3 * found)

    @property
    def assumed_precision(self) -> float:
        """The prior precision that a selection rule uses when it compares variances."""
        return 1.0

    def starting(self, start: str) -> Recipe:
        """Return this recipe with another `start`."""
        return self.replace(start=start) if "start" in self.fields() else self

    def on_subspace(self) -> Recipe:
        """Return the recipe for a network whose only parameter is one row of coordinates."""
        return self

    def default_training(self) -> Training:
        """Return the training settings used when the user gives none."""
        return Training()

    @at_home
    def fit(
        self,
        model: nn.Module,
        data: Data,
        *,
        likelihood: str | Likelihood = "categorical",
        validation: Data | None = None,
        training: Training | None = None,
        num_data: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> Posterior:
        """Fit a posterior over the weights of `model` to `data`. The model itself is not changed.

        Args:
            model: Any network that maps inputs to outputs (logits, or means).
            data: A DataLoader, a Dataset, an ``(inputs, targets)`` pair or a list of batches.
            likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"``, ``"heteroscedastic"``, or one of
                `dubito.likelihoods`.
            validation: Validation data, for early stopping and for settings that are tuned on it.
            training: Epochs, learning rate, checkpoints and so on.
            num_data: The number of examples, for data that cannot be counted.
            generator: The source of randomness; by default the seed is fixed, so the same call gives the same result.
            progress: Whether to show a progress bar on a terminal.
        """
        with restoring_generators():
            return self._fit(FitCall(model, data, likelihood, validation, training, num_data, generator, progress))

    def _fit(self, call: FitCall) -> Posterior:
        """Fit once; a recipe that consists of several fits overrides it."""
        from dubito.fitting.loop import fit

        return fit(self, call)
