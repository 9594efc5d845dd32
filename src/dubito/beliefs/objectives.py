r"""Objectives of variational training: bounds on the evidence $\log p(D)$.

An objective is called on a converted module and one batch, and returns the negative bound per datum: a loss for any
optimizer. The KL divergence, which is summed over all weights, is divided by the number of examples, so that there is
no weighting to tune.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from torch import Tensor, nn

from dubito.beliefs import likelihoods
from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.likelihoods.base import Hyper
from dubito.core import batches, params
from dubito.core.constraints import Count, LargeCount, NonNegative, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.numeric import sum_scalars
from dubito.core.settings import Setting, setting

if TYPE_CHECKING:
    from dubito.methods.variational import VariationalModule

__all__ = ["ELBO", "Objective", "Renyi"]


def kl_weight(progress: float, rise: tuple[float, float], cycles: int = 1) -> float:
    """Return the weight of the KL divergence after a fraction `progress` of all steps.

    Args:
        progress: The fraction of all steps.
        rise: The fractions of a cycle between which the weight rises from 0 to 1; if the second is 0, it is always 1.
        cycles: The number of cycles, which divide the training into equal parts.

    >>> [kl_weight(progress, (0.0, 0.5), cycles=2) for progress in (0.0, 0.125, 0.25, 0.375, 0.5, 1.0)]
    [0.0, 0.5, 1.0, 1.0, 0.0, 1.0]
    """
    begin, end = rise
    if end == 0 or progress >= 1:
        return 1.0
    return min(max((progress * cycles % 1.0 - begin) / (end - begin), 0.0), 1.0)


@dataclass(frozen=True)
class Step:
    """The arguments of `Objective.__call__` for one batch."""

    inputs: Any
    targets: Tensor
    num_data: int
    likelihood: Likelihood
    temperature: float
    hyper: Hyper
    rows: int
    batch_size: int

    def log_likelihood(self, outputs: Tensor) -> Tensor:
        """Return the log-likelihood of the rows, summed."""
        try:
            return self.likelihood.log_prob(outputs, self.targets, self.hyper).sum()
        except (LookupError, ValueError, RuntimeError):
            self.likelihood.check(outputs, self.targets)  # explains the error, if outputs and targets do not fit
            raise


@setting
class Objective(Setting, ABC):
    """Base class of bounds on the evidence that are used as losses."""

    described = "one of dubito.objectives"

    @property
    def needs_weight_samples(self) -> bool:
        """Whether all outputs of a forward pass must come from one joint sample of the weights."""
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
            module: The result of `dubito.variational.convert` or, for the ELBO, any module that contains such results.
            inputs: The inputs of the batch.
            targets: The targets of the batch.
            num_data: The number of examples in the whole data.
            likelihood: The likelihood.
            temperature: The weight of the KL divergence; below 1 the posterior is colder, that is, narrower.
            hyper: The hyper-parameters of the likelihood.
            batch_size: The size of the whole batch, if the given rows are only this process's share of it.
        """
        self._check(module, num_data, temperature)
        rows, known = batches.num_rows(inputs), likelihoods.resolve(likelihood)
        if rows == 0:
            raise InputError("The batch is empty: give at least one row.")
        step = Step(inputs, targets, num_data, known, temperature, hyper, rows, batch_size or rows)
        return self.loss(module, step)

    def _check(self, module: nn.Module, num_data: int, temperature: float) -> None:
        check("num_data", Annotated[LargeCount, "the number of examples in the whole data"], num_data)
        check("temperature", NonNegative, temperature)
        if not _converted_parts(module) and not _bottlenecks(module):
            raise InputError("The module has no random weights: convert it with dubito.variational.convert first.")
        if self.needs_weight_samples and _bottlenecks(module):
            raise UnsupportedError(f"{self!r} has no term for the random codes of a Bottleneck: use objectives.ELBO().")
        if self.needs_weight_samples and getattr(module, "estimator", "") != "weight":
            raise InputError(
                f"{self!r} needs joint samples of all weights: give it the result of convert(..., estimator='weight') "
                "itself, not a module that contains it."
            )

    @abstractmethod
    def loss(self, module: VariationalModule, step: Step) -> Tensor:
        """Return the negative bound per datum."""


@setting
class ELBO(Objective):
    r"""The evidence lower bound, with the KL divergence in closed form if the prior has one.

    $$\mathcal L = \mathbb E_q[\log p(D \mid w)] - T\,\mathrm{KL}(q \,\|\, p) \le \log p(D) \quad (T = 1)$$

    The divergence of random codes (`dubito.variational.Bottleneck`) is added to that of the weights.

    Args:
        num_samples: The number of weight samples per step; one is enough in most cases.
    """

    setting_name = "objectives.ELBO"
    num_samples: Count = 1

    def loss(self, module: VariationalModule, step: Step) -> Tensor:
        r"""Return $-\frac1B \sum_n \log p(y_n \mid x_n, w) + T\,\mathrm{KL} / N$."""
        with ExitStack() as stack:
            terms = [stack.enter_context(part.shared_moments()) for part in _converted_parts(module)]
            codes = stack.enter_context(code_divergences(module, default_beta=1.0))
            draws = [step.log_likelihood(params.call(module, step.inputs)) for _ in range(self.num_samples)]
        loss = -torch.stack(draws).mean() / step.batch_size
        if terms:
            kl = sum_scalars(terms)
            loss = loss + kl * (step.temperature * step.rows / step.batch_size / step.num_data)
        scale = step.temperature * step.rows / step.batch_size / self.num_samples
        return loss + sum_scalars(codes) * scale if codes else loss


@setting
class Renyi(Objective):
    r"""The variational Rényi bound over K joint samples of all weights.

    $$\mathcal L_\alpha = \frac{1}{1 - \alpha} \log \frac1K \sum_k \exp\big((1 - \alpha)\,\ell_k\big), \qquad
      \ell_k = \log p(D \mid w_k) + T \log \frac{p(w_k)}{q(w_k)}$$

    (Li and Turner 2016, https://arxiv.org/abs/1602.02311). The exact bound ($K \to \infty$) decreases in α: α = 1 is
    the ELBO, α = 0 the evidence itself (for finite K the importance-weighted bound), α < 0 an upper bound; α = −∞ takes
    the largest $\ell_k$, α = ∞ the smallest. With a small α the posterior covers the mass, with a large one it seeks
    the mode. On a mini-batch the log-likelihood is scaled to all data, as in the paper.

    The gradient is doubly reparameterized (Tucker et al. 2018, https://arxiv.org/abs/1810.04152): it does not contain
    the score of $q$, so its variance decreases as q approaches the posterior.

    Args:
        alpha: The order α: any number, ``inf`` or ``-inf``.
        num_samples: The number of samples K.
    """

    setting_name = "objectives.Renyi"
    alpha: float = 0.5
    num_samples: Count = 8

    @property
    def needs_weight_samples(self) -> bool:
        """Whether joint samples are needed: always, except for α = 1, which is the ELBO."""
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
        # relative to the dominant sample and with log1p, so that nothing cancels if α is close to 1
        rest = (power * (log_ratios - most)).expm1().mean(0).log1p() / power
        return torch.where(most.isinf(), most, most + rest)

    def loss(self, module: VariationalModule, step: Step) -> Tensor:
        r"""Return $-\mathcal L_\alpha / N$."""
        if self.alpha == 1:
            return ELBO(self.num_samples).loss(module, step)
        if step.rows != step.batch_size:
            raise InputError("A Rényi bound needs all rows of a batch in one process: use objectives.ELBO instead.")
        factors: list[Tensor | float] = []
        terms = torch.stack([self._term(module, step, k, factors) for k in range(self.num_samples)])
        shares = self._shares(terms.detach())
        factors += self._path_factors(shares, step.temperature)
        surrogate = shares @ terms
        return -(self.bound(terms.detach()) + surrogate - surrogate.detach()) / step.num_data

    def _term(self, module: VariationalModule, step: Step, k: int, factors: list[Tensor | float]) -> Tensor:
        r"""Return $\ell_k$, whose gradient with respect to the weights is multiplied by `factors[k]`."""
        weights = module.sample_weights()
        for name, part in module.parts():
            if weights[name].requires_grad:
                weights[name].register_hook(lambda gradient, part=part: part.scale_gradient(gradient, factors[k]))
        log_likelihood = step.log_likelihood(params.functional_call(module.network, weights, step.inputs))
        return log_likelihood * (step.num_data / step.rows) + step.temperature * module.log_ratio(weights)

    def _shares(self, terms: Tensor) -> Tensor:
        r"""Return the gradient of the bound with respect to $\ell$: $\mathrm{softmax}((1 - \alpha)\,\ell)$."""
        if not math.isinf(self.alpha):
            return torch.softmax((1 - self.alpha) * terms, 0)
        best = terms.argmax() if self.alpha < 0 else terms.argmin()
        return torch.nn.functional.one_hot(best, len(terms)).to(terms.dtype)

    def _path_factors(self, shares: Tensor, temperature: float) -> list[Tensor | float]:
        r"""Return the factors that replace the score of q in the gradient, for the shares $s_k$ of the samples.

        Because $\mathbb E[s_k \nabla_\phi \log q(w_k)] = \mathbb E[\partial_w s_k \nabla_\phi w_k]$ with
        $\partial_w s_k = (1 - \alpha)(s_k - s_k^2)\,\partial_w \ell_k$, the gradient through $w_k$ becomes
        $s_k \big(1 - T (1 - \alpha)(1 - s_k)\big)\,\partial_w \ell_k$.
        """
        if math.isinf(self.alpha):
            return [1.0] * len(shares)
        return list(1 - temperature * (1 - self.alpha) * (1 - shares))


def _converted_parts(module: nn.Module) -> list[VariationalModule]:
    """Return the converted networks in a module, which may be one itself."""
    if hasattr(module, "shared_moments"):
        return [cast("VariationalModule", module)]
    return [cast("VariationalModule", part) for part in module.modules() if hasattr(part, "shared_moments")]


def _bottlenecks(module: nn.Module) -> list[Any]:
    """Return the layers with random codes."""
    return [part for part in module.modules() if getattr(part, "has_codes", False)]


@contextmanager
def code_divergences(module: nn.Module, default_beta: float) -> Iterator[list[Tensor]]:
    """Collect β times the mean KL divergence of random codes over the calls of a pass; the list is filled at the end.

    A layer that is called several times counts each call, and one that is not called counts nothing. `default_beta` is
    for layers without a β of their own.
    """
    found: list[Tensor] = []
    parts = _bottlenecks(module)
    for part in parts:
        part.is_counting, part.pass_divergence = True, None
    try:
        yield found
        terms = [(part.pass_divergence, part.beta) for part in parts]
        found += [term * (default_beta if beta is None else beta) for term, beta in terms if term is not None]
    finally:
        for part in parts:
            part.is_counting, part.pass_divergence = False, None
