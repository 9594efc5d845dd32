"""`Likelihood`, the base class of distributions of the targets given the network's outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from dubito.beliefs.prediction import Prediction
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.core.settings import Setting, setting

Hyper = Mapping[str, Tensor] | None


@setting
class Likelihood(Setting, ABC):
    r"""A distribution $p(y \mid f)$ of the targets given the network's outputs.

    All methods are functions of tensors: nothing is stored, and learnable numbers are passed as `hyper`. `outputs` have
    the model's own layout; derivatives with respect to them have the *canonical* layout ``[B, *positions, C]``, whose
    last axis holds all the outputs that the target of one position depends on. `restore` converts it to the model's
    layout.

    `check` inspects values and is called once per batch; the other methods inspect only shapes, so they can be
    differentiated and vmapped.
    """

    scores_targets: ClassVar[bool] = True
    """Whether `predict` gives probabilities of the targets; a loss that is only trained on does not."""

    tempers: ClassVar[bool] = True
    """Whether a temperature can make predictions less or more confident; counts have no scale that it could change."""

    is_count: ClassVar[bool] = False
    """Whether targets are counts."""

    learned_setting: ClassVar[str] = ""
    """The setting that may be learned, if there is one; its learned value is ``hyper["log_" + learned_setting]``."""

    # Hyper-parameters

    def opened(self) -> Self:
        """Return the likelihood whose number is learned, if it has one that can be."""
        return self.replace(**{self.learned_setting: "learn"}) if self.learned_setting else self

    def hyper(self) -> Params:
        """Return the initial values of the learnable hyper-parameters, by name; most likelihoods have none."""
        return {}

    def resolved(self, hyper: Mapping[str, Tensor]) -> Likelihood:
        """Return the likelihood with the learned numbers of `hyper` as settings."""
        return self

    # Layout

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an `InputError` if the targets do not fit the outputs in shape, type or value."""

    @abstractmethod
    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the outputs as ``[B, *positions, C]``."""

    def restore(self, values: Tensor, outputs: Tensor) -> Tensor:
        """Undo `canonical`: arrange `values` ``[*lead, B, *positions, C]`` as ``[*lead, *outputs.shape]``."""
        lead = values.shape[: values.ndim - self.canonical(outputs).ndim]
        return values.reshape(*lead, *outputs.shape)

    def num_outputs(self, outputs: Tensor) -> int:
        """Return C, the number of outputs at one position."""
        return self.canonical(outputs).shape[-1]

    def outputs_for(self, num_targets: int) -> int:
        """Return how many outputs a network needs for so many classes, or for so many numbers per datum."""
        return num_targets

    def observed(self, targets: Tensor) -> Tensor | None:
        """Return which positions ``[B, *positions]`` have a target, or None if all of them always have one."""
        return None

    def aligned(self, targets: Tensor) -> Tensor:
        """Return the targets in the places of the outputs that predict them; most likelihoods change nothing."""
        return targets

    def log_scores(self, prediction: Prediction, targets: Tensor) -> Tensor:
        """Return the log-probability that a prediction gives to `aligned` targets; those not `observed` have none."""
        return prediction.log_prob(targets)

    # The density and its derivatives

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-probability of each datum's target ``[B]``, summed over its positions and outputs."""

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the gradient of ``-log_prob`` with respect to the outputs, canonical ``[B, *positions, C]``."""

    @abstractmethod
    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return the (expected) Hessian of ``-log_prob`` with respect to the outputs, ``[B, *positions, C, C]``.

        It does not depend on the targets, except that it is zero at a position without a target.
        """

    @abstractmethod
    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return columns ``[R, B, *positions, C]`` with $\sum_r g_r g_r^\top = $ `hessian`."""

    def fisher_columns(
        self,
        outputs: Tensor,
        num_samples: int,
        targets: Tensor | None = None,
        hyper: Hyper = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        r"""Return random columns ``[S, B, *positions, C]`` with $\mathbb E \sum_s g_s g_s^\top = $ `hessian`.

        $$g_s = -\tfrac{1}{\sqrt S} \nabla_f \log p(\hat y_s \mid f), \qquad \hat y_s \sim p(y \mid f)$$

        Args:
            outputs: The model's outputs.
            num_samples: The number of targets that are drawn at every position.
            targets: The data's targets, which are only used to find positions without a target.
            hyper: The hyper-parameters.
            generator: The source of randomness.
        """
        if num_samples < 1:
            raise InputError(f"The number of Fisher samples must be at least 1, got {num_samples}.")
        draws = [self._drawn_gradient(outputs, hyper, generator) for _ in range(num_samples)]
        columns = torch.stack(draws) / math.sqrt(num_samples)
        kept = None if targets is None else self.observed(targets)
        return columns if kept is None else torch.where(kept.unsqueeze(-1), columns, 0.0)

    def _drawn_gradient(self, outputs: Tensor, hyper: Hyper, generator: torch.Generator | None) -> Tensor:
        return self.gradient(outputs, self.sample(outputs, hyper, generator=generator), hyper)

    # Sampling and prediction

    @abstractmethod
    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw one target for each datum, in the layout and type that `check` accepts."""

    @abstractmethod
    def predict(self, outputs: Tensor, hyper: Hyper = None) -> Prediction:
        """Return the prediction of one network."""

    @abstractmethod
    def predict_samples(
        self, outputs: Tensor, hyper: Hyper = None, *, log_probs: Tensor | None = None, keep_samples: bool = True
    ) -> Prediction:
        """Return the mixture over S weight samples.

        Args:
            outputs: ``[S, *outputs]``, the outputs of each sample.
            hyper: The hyper-parameters; a stacked one ``[S]`` holds one value per sample.
            log_probs: Class log-probabilities from another link, canonical ``[B, *positions, C]``; classification only.
            keep_samples: Whether a class prediction holds the samples. A regression mixture always consists of them.
        """

    def predict_gaussian(
        self, mean: Tensor, variance: Tensor, hyper: Hyper = None, *, covariance: Tensor | None = None
    ) -> Prediction:
        """Return the prediction for outputs that are Gaussian, as those of a linearized network are.

        Args:
            mean: The mean of the outputs, in the model's layout.
            variance: Their variance, in the same layout.
            hyper: The hyper-parameters.
            covariance: Their covariance ``[B, C, C]``, if it is known.
        """
        raise UnsupportedError(f"{self!r} has no closed form under Gaussian outputs: use a link or samples of them.")

    @abstractmethod
    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Likelihood]:
        """Return outputs and a likelihood that are less confident (temperature above 1) or more, with the same mode.

        The outputs may have a leading sample axis.
        """


def rows(values: Tensor, what: str) -> Tensor:
    """Return ``[B]`` or ``[B, O]`` as ``[B, O]``."""
    if values.ndim not in (1, 2):
        raise InputError(
            f"The {what} must have shape [B] or [B, O] for this likelihood, got {tuple(values.shape)}: "
            "flatten everything after the batch axis."
        )
    return values.unsqueeze(-1) if values.ndim == 1 else values


def check_rows(targets: Tensor, batch: int, num_targets: int, like: str) -> None:
    """Raise an error unless the targets are finite real numbers of shape ``[B, O]`` (or ``[B]`` if O is 1)."""
    fits = targets.shape == (batch, num_targets) or (num_targets == 1 and targets.shape == (batch,))
    if not fits:
        wanted = f"({batch},) or ({batch}, 1)" if num_targets == 1 else f"({batch}, {num_targets})"
        raise InputError(f"{like} targets must have shape {wanted} for these outputs, got {tuple(targets.shape)}.")
    if targets.dtype == torch.bool:
        raise InputError(f"{like} targets must be numbers, not torch.bool: use targets.float(), or 'bernoulli'.")
    if targets.is_complex():
        raise InputError(f"{like} targets must be real numbers, not {targets.dtype}.")
    if targets.is_floating_point() and not bool(targets.isfinite().all()):
        raise InputError(f"{like} targets hold NaN or infinite values: remove those rows or fill them in first.")


def blank(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return an uninitialized tensor like another, on the generator's device, to be filled with noise."""
    device = like.device if generator is None else generator.device
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def diagonal_root(scales: Tensor) -> Tensor:
    """Return the root ``[C, B, C]`` of the diagonal matrices ``diag(scales[b])²``, one column per output."""
    return torch.diag_embed(scales).movedim(-2, 0)
