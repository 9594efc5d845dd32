r"""What a variational posterior is trained to maximize: bounds on the evidence $\log p(D)$.

An objective is called on a converted module and one batch, and returns the negative bound per datum: a loss for any
optimizer. The number of data scales the divergence, which is summed over all weights, so that no constant is left to
the user.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from torch import Tensor, nn

from dubito.beliefs import likelihoods
from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.likelihoods.base import Hyper
from dubito.core import batches, params
from dubito.core.constraints import Count, LargeCount, NonNegative, check
from dubito.core.errors import InputError
from dubito.core.settings import Setting, setting

if TYPE_CHECKING:
    from dubito.methods.variational import VariationalModule

__all__ = ["ELBO", "Objective", "Renyi"]


def kl_weight(progress: float, rise: tuple[float, float], cycles: int = 1) -> float:
    """Return the weight of the KL divergence after a fraction `progress` of all steps.

    Args:
        progress: The fraction.
        rise: The fractions, of all steps or of a cycle, between which the weight rises from 0 to 1; up to 0: none.
        cycles: How often it rises, in equal parts of the training.

    >>> [kl_weight(progress, (0.0, 0.5), cycles=2) for progress in (0.0, 0.125, 0.25, 0.375, 0.5, 1.0)]
    [0.0, 0.5, 1.0, 1.0, 0.0, 1.0]
    """
    begin, end = rise
    if end == 0 or progress >= 1:
        return 1.0
    return min(max((progress * cycles % 1.0 - begin) / (end - begin), 0.0), 1.0)


@dataclass(frozen=True)
class Step:
    """One batch and how it counts; the arguments of `Objective.__call__`."""

    inputs: Any
    targets: Tensor
    num_data: int
    likelihood: Likelihood
    temperature: float
    hyper: Hyper
    rows: int
    batch_size: int

    def explained(self, outputs: Tensor) -> Tensor:
        """The log-likelihood of the rows, summed."""
        try:
            return self.likelihood.log_prob(outputs, self.targets, self.hyper).sum()
        except (LookupError, ValueError, RuntimeError):
            self.likelihood.check(outputs, self.targets)  # says what is wrong with them, if they are
            raise


@setting
class Objective(Setting, ABC):
    """A bound on the evidence, as a loss."""

    described = "one of dubito.objectives"

    @property
    def needs_weight_samples(self) -> bool:
        """Whether all outputs of a pass must come from one joint draw of the weights."""
        return False

    def __call__(
        self,
        module: VariationalModule,
        inputs: Any,
        targets: Tensor,
        *,
        num_data: int,
        likelihood: str | Likelihood = "categorical",
        temperature: float = 1.0,
        hyper: Hyper = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return the negative bound per datum, estimated from one batch.

        Args:
            module: What `dubito.variational.convert` returned, or, for the ELBO, any module with such parts.
            inputs: The inputs of the batch.
            targets: Its targets.
            num_data: The number of examples in the whole data.
            likelihood: How outputs explain targets.
            temperature: The weight of the divergence; below 1 the posterior is colder, that is narrower.
            hyper: The learned settings of the likelihood.
            batch_size: The size of the whole batch where these rows are only this process's share of it.
        """
        self._check(module, num_data, temperature)
        rows, known = batches.num_rows(inputs), likelihoods.resolve(likelihood)
        if rows == 0:
            raise InputError("The batch is empty.")
        step = Step(inputs, targets, num_data, known, temperature, hyper, rows, batch_size or rows)
        return self.loss(module, step)

    def _check(self, module: nn.Module, num_data: int, temperature: float) -> None:
        check("num_data", Annotated[LargeCount, "the number of examples in the whole data"], num_data)
        check("temperature", NonNegative, temperature)
        if not _converted_parts(module):
            raise InputError("No part of the module has random weights: take what dubito.variational.convert returns.")
        if self.needs_weight_samples and getattr(module, "estimator", "") != "weight":
            raise InputError(
                f"{self!r} needs joint draws of all weights: give it a converted network itself, not one inside of "
                "another module, from convert(..., estimator='weight')."
            )

    @abstractmethod
    def loss(self, module: VariationalModule, step: Step) -> Tensor:
        """Return the negative bound per datum."""


@setting
class ELBO(Objective):
    r"""The evidence lower bound, with the divergence in closed form where the prior has one.

    $$\mathcal L = \mathbb E_q[\log p(D \mid w)] - T\,\mathrm{KL}(q \,\|\, p) \le \log p(D) \quad (T = 1)$$

    Args:
        num_samples: Draws per step; one is enough in most cases.
    """

    setting_name = "objectives.ELBO"
    num_samples: Count = 1

    def loss(self, module: VariationalModule, step: Step) -> Tensor:
        r"""Return $-\frac1B \sum_n \log p(y_n \mid x_n, w) + T\,\mathrm{KL} / N$."""
        with ExitStack() as stack:
            terms = [stack.enter_context(part.shared_moments()) for part in _converted_parts(module)]
            kl = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            draws = [step.explained(params.call(module, step.inputs)) for _ in range(self.num_samples)]
        share = step.temperature * step.rows / step.batch_size / step.num_data
        return -torch.stack(draws).mean() / step.batch_size + kl * share


@setting
class Renyi(Objective):
    r"""The variational Rényi bound over K joint draws of all weights.

    $$\mathcal L_\alpha = \frac{1}{1 - \alpha} \log \frac1K \sum_k \exp\big((1 - \alpha)\,\ell_k\big), \qquad
      \ell_k = \log p(D \mid w_k) + T \log \frac{p(w_k)}{q(w_k)}$$

    (Li and Turner 2016, https://arxiv.org/abs/1602.02311). The exact bound ($K \to \infty$) falls as α grows: α = 1 is
    the ELBO, α = 0 the evidence itself (for finite K the importance-weighted bound), α < 0 lies above it; α = −∞ takes
    the largest $\ell_k$, α = ∞ the smallest. A small α makes the posterior cover the mass, a large one seek the mode.
    On a mini-batch the log-likelihood is scaled to all data, as in the paper.

    The gradient is the doubly reparameterized one (Tucker et al. 2018, https://arxiv.org/abs/1810.04152): no score of
    $q$ is left in it, so its noise falls as q comes close to the posterior.

    Args:
        alpha: The order: any number, ``inf`` or ``-inf``.
        num_samples: K.
    """

    setting_name = "objectives.Renyi"
    alpha: float = 0.5
    num_samples: Count = 8

    @property
    def needs_weight_samples(self) -> bool:
        """Always, but for α = 1, which is the ELBO."""
        return self.alpha != 1

    def bound(self, log_ratios: Tensor) -> Tensor:
        r"""Return $\mathcal L_\alpha$ of given $\ell_k$ along the first axis.

        >>> Renyi(alpha=0.0).bound(torch.tensor([0.0, 0.0])).item()
        0.0
        """
        if self.alpha == 1:
            return log_ratios.mean(0)
        if math.isinf(self.alpha):
            return log_ratios.amax(0) if self.alpha < 0 else log_ratios.amin(0)
        power = 1 - self.alpha
        most = log_ratios.amax(0) if power > 0 else log_ratios.amin(0)
        # by differences to the draw that counts most, and log1p, so that nothing cancels where α is close to 1
        rest = (power * (log_ratios - most)).expm1().mean(0).log1p() / power
        return torch.where(most.isinf(), most, most + rest)

    def loss(self, module: VariationalModule, step: Step) -> Tensor:
        r"""Return $-\mathcal L_\alpha / N$."""
        if self.alpha == 1:
            return ELBO(self.num_samples).loss(module, step)
        if step.rows != step.batch_size:
            raise InputError("A Rényi bound needs all rows of a batch at once: it cannot be shared by processes.")
        factors: list[Tensor | float] = []
        terms = torch.stack([self._term(module, step, k, factors) for k in range(self.num_samples)])
        shares = self._shares(terms.detach())
        factors += self._path_factors(shares, step.temperature)
        surrogate = shares @ terms
        return -(self.bound(terms.detach()) + surrogate - surrogate.detach()) / step.num_data

    def _term(self, module: VariationalModule, step: Step, k: int, factors: list[Tensor | float]) -> Tensor:
        r"""One $\ell_k$; on its way back through the weights its gradient will be multiplied by `factors[k]`."""
        weights = module.sample_weights()
        for name, part in module.parts():
            if weights[name].requires_grad:
                weights[name].register_hook(lambda slope, part=part: part.scale_gradient(slope, factors[k]))
        explained = step.explained(params.functional_call(module.network, weights, step.inputs))
        return explained * (step.num_data / step.rows) + step.temperature * module.log_ratio(weights)

    def _shares(self, terms: Tensor) -> Tensor:
        r"""The gradient of the bound: $\mathrm{softmax}((1 - \alpha)\,\ell)$."""
        if not math.isinf(self.alpha):
            return torch.softmax((1 - self.alpha) * terms, 0)
        best = terms.argmax() if self.alpha < 0 else terms.argmin()
        return torch.nn.functional.one_hot(best, len(terms)).to(terms.dtype)

    def _path_factors(self, shares: Tensor, temperature: float) -> list[Tensor | float]:
        r"""What replaces the score of q in the gradient, for the shares $s_k$ of the draws.

        Because $\mathbb E[s_k \nabla_\phi \log q(w_k)] = \mathbb E[\partial_w s_k \nabla_\phi w_k]$ with
        $\partial_w s_k = (1 - \alpha)(s_k - s_k^2)\,\partial_w \ell_k$, the gradient through $w_k$ becomes
        $s_k \big(1 - T (1 - \alpha)(1 - s_k)\big)\,\partial_w \ell_k$.
        """
        if math.isinf(self.alpha):
            return [1.0] * len(shares)
        return list(1 - temperature * (1 - self.alpha) * (1 - shares))


def _converted_parts(module: nn.Module) -> list[VariationalModule]:
    """The converted networks in a module, which may be one itself."""
    if hasattr(module, "shared_moments"):
        return [cast("VariationalModule", module)]
    return [cast("VariationalModule", part) for part in module.modules() if hasattr(part, "shared_moments")]
