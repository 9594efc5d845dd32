"""The two kinds of likelihoods, of classes and of numbers: the prediction from samples of the outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Self

from torch import Tensor

from dubito.beliefs.likelihoods.base import Hyper, Likelihood, check_rows
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.core.constraints import Positive, check
from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.core.tensor_checks import at_least_float32


def over_samples(function: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    """Apply a function of outputs ``[B, ...]`` to those of S samples, ``[S, B, ...]``."""
    return function(outputs.contiguous().flatten(0, 1)).unflatten(0, outputs.shape[:2])


@setting
class ClassLikelihood(Likelihood):
    """A likelihood of classes with a softmax over logits."""

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of all classes, ``[B, *positions, C]``."""

    def predict(self, outputs: Tensor, hyper: Hyper = None) -> ClassPrediction:
        """Return the softmax of one network's logits."""
        return ClassPrediction.from_logits(self.logits(outputs))

    def predict_samples(
        self,
        outputs: Tensor,
        hyper: Hyper = None,
        *,
        log_probs: Tensor | None = None,
        keep_samples: bool = True,
    ) -> ClassPrediction:
        """Return the mean probabilities of the samples, or those of `log_probs`."""
        logits = over_samples(self.logits, outputs)
        return ClassPrediction.from_logit_samples(logits, log_probs, keep_samples)

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Self]:
        """Divide the logits by the temperature."""
        check("temperature", Positive, temperature)
        return outputs / temperature, self


@setting
class RegressionLikelihood(Likelihood):
    """A likelihood of numbers, Gaussian given the outputs."""

    outputs_per_target: ClassVar[int] = 1
    layout: ClassVar[str] = "a mean"
    """The outputs for each target, in words."""

    @abstractmethod
    def moments(self, outputs: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, noise variances and function variances of canonical outputs ``[S, B, ...]``."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an error unless the targets are finite numbers, one for each `outputs_per_target` outputs."""
        canonical = self.canonical(outputs)
        check_rows(targets, len(canonical), canonical.shape[1] // self.outputs_per_target, type(self).__name__)

    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the outputs as they are, ``[B, n·O]`` with `outputs_per_target` n."""
        count = self.outputs_per_target
        if outputs.ndim != 2 or outputs.shape[1] % count:
            raise InputError(
                f"{type(self).__name__} needs outputs [B, {count}·O], {self.layout} for each target, got shape "
                f"{tuple(outputs.shape)}."
            )
        return outputs

    def predict(self, outputs: Tensor, hyper: Hyper = None) -> RegressionPrediction:
        """Return a Gaussian per datum from one network's outputs."""
        return self.predict_samples(outputs.unsqueeze(0), hyper)

    def predict_samples(
        self,
        outputs: Tensor,
        hyper: Hyper = None,
        *,
        log_probs: Tensor | None = None,
        keep_samples: bool = True,
    ) -> RegressionPrediction:
        """Return the equal mixture of the samples' Gaussians; `log_noise` may differ by sample."""
        if log_probs is not None:
            raise InputError("A regression likelihood has no class probabilities: leave `log_probs` out.")
        outputs = at_least_float32(outputs)
        return RegressionPrediction(*self.moments(over_samples(self.canonical, outputs), hyper))
