"""The `TestTimeAugmentation` recipe: average predictions over random changes of the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import Prediction
from dubito.core.batches import Data
from dubito.core.constraints import CountOrZero, NonNegative
from dubito.core.errors import InputError
from dubito.core.params import Params
from dubito.core.randomness import derive_seed, draw_seed
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.loading import restored
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.recipe import Recipe
from dubito.fitting.traceable import HasTraceable, Traceable
from dubito.fitting.training import Training
from dubito.methods.ensembles.posterior import mixture
from dubito.methods.map.recipe import MAP
from dubito.select.rule import SelectionRule


@setting
class TestTimeAugmentation(Recipe):
    r"""Predict for changed copies of the inputs and average: $p(y \mid x) = \mathbb E_a\, p(y \mid f(a(x)))$.

    If an irrelevant change of the input changes the prediction, the prediction is uncertain. Train with the same
    changes in the data loader. Each random change, the same for all inputs of a call, is combined with one posterior
    sample of `recipe`. (Wang et al. 2019, https://arxiv.org/abs/1807.07356)

    Args:
        recipe: The recipe of the posterior.
        flip: Whether images ``[..., H, W]`` are flipped horizontally in half of the changes.
        shift: The largest shift of images in pixels, in each direction; zeros are padded.
        noise: The standard deviation of normal noise that is added to inputs of any shape.
    """

    __test__ = False  # pytest would take the name for a test class
    setting_name = "ensembles.TestTimeAugmentation"
    recipe: Recipe = MAP()
    flip: bool = False
    shift: CountOrZero = 0
    noise: NonNegative = 0.0

    def __post_init__(self) -> None:
        if type(self.recipe)._fit is not Recipe._fit:
            name = self.recipe.setting_name
            raise InputError(f"{name} cannot be augmented: use {name}(recipe=TestTimeAugmentation(...)) instead.")
        if not (self.flip or self.shift or self.noise):
            raise InputError("TestTimeAugmentation needs at least one change: set flip=True, shift=... or noise=....")

    @property
    def start(self) -> Any:
        """That of the recipe within."""
        return self.recipe.start

    @property
    def needs_trained_model(self) -> bool:
        """Whether the inner recipe does."""
        return self.recipe.needs_trained_model

    @property
    def weights(self) -> SelectionRule | None:
        """The selection rule of the inner recipe."""
        return self.recipe.weights

    @property
    def assumed_precision(self) -> float:
        """The assumed precision of the inner recipe."""
        return self.recipe.assumed_precision

    def on_subspace(self) -> TestTimeAugmentation:
        """Return the augmentation of the inner recipe on a subspace."""
        return self.replace(recipe=self.recipe.on_subspace())

    def default_training(self) -> Training:
        """Return the training settings of the inner recipe."""
        return self.recipe.default_training()

    def build(self, problem: Problem) -> Inference:
        """Return the steps of the inner recipe."""
        inner = self.recipe.build(problem)
        return inner._replace(posterior=lambda state: AugmentedPosterior(inner.posterior(state), self))


@dataclass(frozen=True)
class Change:
    """One random change of the inputs."""

    mirrored: bool
    down: int
    right: int
    noise: float
    seed: int
    _drawn: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def drawn(cls, recipe: TestTimeAugmentation, generator: torch.Generator) -> Change:
        """Draw a random change."""
        seed = draw_seed(generator)
        own = torch.Generator().manual_seed(seed)
        down, right = (torch.rand(2, generator=own) * (2 * recipe.shift + 1)).floor().int().tolist()
        mirrored = recipe.flip and bool(torch.rand((), generator=own) < 0.5)
        return cls(mirrored, down - recipe.shift, right - recipe.shift, recipe.noise, derive_seed(seed, "noise"))

    def __call__(self, x: Any) -> Tensor:
        """Return the changed inputs.

        >>> Change(True, 0, 1, 0.0, 0)(torch.tensor([[[1.0, 2.0, 3.0]]])).tolist()
        [[[0.0, 3.0, 2.0]]]
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise InputError("TestTimeAugmentation needs inputs that are one floating-point tensor.")
        if (self.mirrored or self.down or self.right) and x.ndim < 3:
            raise InputError(f"Inputs of shape {tuple(x.shape)} are not images: use only noise=... for them.")
        x = x.flip(-1) if self.mirrored else x
        if self.down or self.right:
            height, width = x.shape[-2:]
            moved = F.pad(x, (max(self.right, 0), max(-self.right, 0), max(self.down, 0), max(-self.down, 0)))
            top, left = max(-self.down, 0), max(-self.right, 0)
            x = moved[..., top : top + height, left : left + width]
        if self.noise:
            x = x + self.noise * self._noise(x).to(x.device)
        return x

    def _noise(self, x: Tensor) -> Tensor:
        """Return the noise of one input of this shape; the same at every call."""
        key = (x.shape[1:], x.dtype)
        if key not in self._drawn:
            own = torch.Generator().manual_seed(self.seed)
            self._drawn[key] = torch.randn(x.shape[1:], generator=own, dtype=x.dtype)
        return self._drawn[key]


class AugmentedPosterior(Posterior):
    """Predict for changed copies of every input with another posterior, and average."""

    family = "TestTimeAugmentation"
    passes_options = True

    def __init__(self, inner: Posterior, recipe: Any) -> None:
        super().__init__(inner.model, inner.likelihood, recipe, inner.num_data)
        self.inner = inner

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights from the inner posterior."""
        return self.inner.sample(num_samples, generator=generator)

    def marginals(self) -> tuple[Params, Params]:
        """Return the marginals of the inner posterior."""
        return self.inner.marginals()

    def prior(self) -> tuple[Params, Params]:
        """Return the prior of the inner posterior."""
        return self.inner.prior()

    def log_evidence(self) -> Tensor:
        """Return the evidence of the inner posterior."""
        return self.inner.log_evidence()

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the mixture over changes.

        Args:
            num_samples: The number of changes.
            generator: The source of randomness.
            options: Passed on to the inner posterior.
        """
        changes = [Change.drawn(self.recipe, generator) for _ in range(num_samples)]
        predictors = self.inner.predictors(num_samples, generator, **options)

        def predict(inputs: Any) -> Prediction:
            return mixture([predictor(change(inputs)) for change, predictor in zip(changes, predictors, strict=True)])

        return predict

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield the mixture over changes, by the cheapest exact form of the posterior within."""
        if type(self.inner).forms is HasTraceable.forms:
            yield from super().forms(example, num_samples, generator, **options)
            return
        changes = [Change.drawn(self.recipe, generator) for _ in range(num_samples)]
        drawn = [list(self.inner.forms(example, 1, generator, **options))[-1] for _ in changes]

        def predict(inputs: Any) -> Prediction:
            return mixture([each.predict(change(inputs)) for change, each in zip(changes, drawn, strict=True)])

        yield Traceable(predict, f"{num_samples} changes of the inputs, each: {drawn[0].form}")

    def _updated(self, data: Data, **options: Any) -> AugmentedPosterior:
        """Update the inner posterior with new data."""
        return AugmentedPosterior(self.inner.update(data, **options), self.recipe)

    def state(self) -> dict[str, Any]:
        """Return the state of the inner posterior, whose weights are those of `model`."""
        return {"inner": {**self.inner._tree(), "params": {}, "buffers": {}}}

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        return cls(restored(state["inner"], model), recipe)
