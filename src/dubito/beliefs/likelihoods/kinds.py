"""The two kinds of likelihoods, of classes and of numbers: the prediction from samples of the outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor

from dubito.beliefs.likelihoods.base import Hyper, Likelihood, check_rows, diagonal_root, rows
from dubito.beliefs.prediction import ClassPrediction, DistributionPrediction, RegressionPrediction
from dubito.beliefs.prediction.distributions import TargetDistribution, gaussian_grid
from dubito.core.constraints import Positive, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.settings import setting
from dubito.core.tensor_checks import at_least_float32


def over_samples(function: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    """Apply a function of outputs ``[B, ...]`` to those of S samples, ``[S, B, ...]``."""
    outputs = outputs.contiguous()
    flat = outputs.flatten(0, 1)
    found = function(flat)
    return outputs if found is flat else found.unflatten(0, outputs.shape[:2])


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
        self, outputs: Tensor, hyper: Hyper = None, *, log_probs: Tensor | None = None, keep_samples: bool = True
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
    """A likelihood of numbers; Gaussian given the outputs, unless it is a `DistributionLikelihood`."""

    outputs_per_target: ClassVar[int] = 1
    standardizes: ClassVar[bool] = True
    """Whether targets may be standardized; counts may not."""
    layout: ClassVar[str] = "a mean"
    """The outputs for each target, in words."""

    def moments(self, outputs: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, noise variances and function variances of canonical outputs ``[S, B, ...]``."""
        raise NotImplementedError

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

    def outputs_for(self, num_targets: int) -> int:
        """Return `outputs_per_target` for each target."""
        return self.outputs_per_target * num_targets

    def predict(self, outputs: Tensor, hyper: Hyper = None) -> RegressionPrediction:
        """Return a Gaussian per datum from one network's outputs."""
        return self.predict_samples(outputs.unsqueeze(0), hyper)

    def predict_samples(
        self, outputs: Tensor, hyper: Hyper = None, *, log_probs: Tensor | None = None, keep_samples: bool = True
    ) -> RegressionPrediction:
        """Return the equal mixture of the samples' distributions; `log_noise` may differ by sample."""
        if log_probs is not None:
            raise InputError("A regression likelihood has no class probabilities: leave `log_probs` out.")
        return self._mixture(over_samples(self.canonical, at_least_float32(outputs)), hyper)

    def _mixture(self, outputs: Tensor, hyper: Hyper) -> RegressionPrediction:
        """Return the equal mixture of the samples' distributions from canonical outputs ``[S, B, ...]``."""
        return RegressionPrediction(*self.moments(outputs, hyper))


@setting
class DistributionLikelihood(RegressionLikelihood, TargetDistribution):
    """A likelihood of numbers that are not Gaussian given the outputs, with a diagonal Hessian.

    A likelihood defines `target_log_prob`, `target_cdf`, `target_moments`, `gradient`, `sample` and `fisher`, and how
    many `nodes` each of a target's outputs gets when a Gaussian of them is integrated. One with a learned number adds
    it to its `parameters`, so that predictions with different numbers can be mixed.
    """

    nodes: ClassVar[tuple[int, ...]] = (192,)
    tempers: ClassVar[bool] = False

    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the outputs as ``[B, n·O]`` with `outputs_per_target` n."""
        return rows(outputs, "outputs") if self.outputs_per_target == 1 else super().canonical(outputs)

    def parameters(self, outputs: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the parameters of the targets' distributions: canonical outputs ``[..., n·O]`` and learned numbers."""
        return outputs

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-probability of the targets ``[B]``, jointly over outputs."""
        found = self.canonical(outputs)
        return self.joint_log_prob(self.parameters(found, hyper), rows(targets, "targets").to(found.dtype))

    @abstractmethod
    def fisher(self, parameters: Tensor) -> Tensor:
        """Return the diagonal ``[B, n·O]`` of the expected Hessian in the outputs."""

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return the expected Hessian, the Fisher information, ``[B, n·O, n·O]``."""
        return torch.diag_embed(self.fisher(self.parameters(self.canonical(outputs), hyper)))

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return one column per output, ``[n·O, B, n·O]``."""
        return diagonal_root(self.fisher(self.parameters(self.canonical(outputs), hyper)).sqrt())

    def _mixture(self, outputs: Tensor, hyper: Hyper) -> DistributionPrediction:
        return DistributionPrediction.of(self, self.parameters(outputs, hyper))

    def predict_gaussian(
        self, mean: Tensor, variance: Tensor, hyper: Hyper = None, *, covariance: Tensor | None = None
    ) -> DistributionPrediction:
        """Return the mixture over Gaussian outputs, which are independent."""
        means, variances = (self.canonical(at_least_float32(part)) for part in (mean, variance))
        return self._over_gaussian(means, variances, hyper)

    def _over_gaussian(self, means: Tensor, variances: Tensor, hyper: Hyper) -> DistributionPrediction:
        """Return the mixture over canonical outputs by quadrature.

        Nodes are those of each output of a target, combined in a grid.
        """
        outputs, weights = gaussian_grid(means, variances, self.nodes)
        return DistributionPrediction.of(self, self.parameters(outputs, hyper), weights, independent=True)

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Self]:
        """Raise an error for any temperature but 1: the distribution has no scale of its own."""
        check("temperature", Positive, temperature)
        if temperature != 1:
            raise UnsupportedError(f"{self!r} has no scale that a temperature could change: leave it at 1.")
        return outputs, self


def with_number(likelihood: Likelihood, outputs: Tensor, hyper: Hyper, transform: Callable[[float], float]) -> Tensor:
    """Return outputs ``[..., n·O]`` followed by one number for each of the O targets.

    Args:
        likelihood: The likelihood, whose `learned_setting` is a number or ``"learn"``.
        outputs: Canonical outputs, ``[B, n·O]``, or those of samples ``[S, B, n·O]``.
        hyper: The hyper-parameters; a learned number is one for all, or one per sample.
        transform: What turns the setting into the number.
    """
    name = likelihood.learned_setting
    setting, learned = getattr(likelihood, name), (hyper or {}).get(f"log_{name}")
    if setting != "learn":
        number = outputs.new_tensor(transform(float(setting)))
    elif learned is None:
        raise InputError(f"The {name} of {likelihood!r} is not known yet: fit it first, or give it as a number.")
    else:
        number = learned.to(outputs)
    number = number.reshape(-1, *[1] * (outputs.ndim - 1))
    width = outputs.shape[-1] // likelihood.outputs_for(1)
    return torch.cat([outputs, number.expand(*outputs.shape[:-1], width)], dim=-1)
