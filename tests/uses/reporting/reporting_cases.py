"""Posteriors whose predictions are a known function of the inputs, so that every number can be computed beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dubito.likelihoods import Likelihood
from torch import Tensor, nn

import dubito
from dubito import likelihoods
from dubito.fitting.posterior import Posterior, Predictor


class KnownPosterior(Posterior):
    """Predicts from `outputs(inputs, generator)` [S, B, ...]: S weight samples of a float64 network."""

    def __init__(self, likelihood: Likelihood, outputs: Callable[[Any, torch.Generator], Tensor]) -> None:
        super().__init__(nn.PReLU().double(), likelihood, dubito.MAP(), 1)
        self.outputs = outputs
        self.sizes: list[int] = []

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        def predict(inputs: Any) -> Any:
            outputs = self.outputs(inputs, generator)
            self.sizes.append(outputs.shape[1])
            return self.likelihood.predict_samples(outputs)

        return predict

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("evaluating draws no weights itself")

    marginals = prior = state = sample
    from_state = classmethod(sample)


def classifier(
    likelihood: Likelihood | None = None, inputs: tuple[int, ...] = (6,), logits: tuple[int, ...] = (5,)
) -> KnownPosterior:
    """Three linear maps from inputs [B, *inputs] to logits [B, *logits]."""
    size_in, size_out = (int(torch.tensor(shape).prod()) for shape in (inputs, logits))
    maps = torch.randn(3, size_in, size_out, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def outputs(x: Tensor, _: torch.Generator) -> Tensor:
        return torch.einsum("bi,sio->sbo", x.reshape(len(x), size_in), maps).unflatten(-1, logits)

    return KnownPosterior(likelihood or likelihoods.Categorical(), outputs)


def regressor(num_inputs: int = 4, num_outputs: int = 1, num_samples: int = 3) -> KnownPosterior:
    """A few linear maps from inputs [B, I] to means [B, O], with a noise of 0.5."""
    generator = torch.Generator().manual_seed(2)
    maps = torch.randn(num_samples, num_inputs, num_outputs, generator=generator, dtype=torch.float64)
    return KnownPosterior(likelihoods.Gaussian(noise=0.5), lambda x, _: torch.einsum("bi,sio->sbo", x, maps))


def class_data(rows: int = 101) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (rows,), generator=generator)


def number_data(rows: int = 101, num_inputs: int = 4, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, num_inputs, generator=generator, dtype=torch.float64)
    y = x[:, :1] + torch.randn(rows, num_outputs, generator=generator, dtype=torch.float64)
    return x, y
