r"""A network with correlated random weights: one normal distribution over all of them, for small selections.

$$\Sigma = \mathrm{diag}(\sigma)\,R R^\top \mathrm{diag}(\sigma)$$

- ``"full"``: $R = I + L$ with $L$ strictly lower triangular: any covariance; $D^2$ numbers.
- ``"low-rank"``: $R R^\top = I + V V^\top$ with $V$ of `rank` columns (Ong et al. 2018,
  https://doi.org/10.1080/10618600.2017.1390472); $D \cdot$ rank numbers.

The factor, $L$ or $V$, has no unit: it holds the correlations, and σ the scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.core import limits, params
from dubito.core.errors import InputError
from dubito.core.limits import numbers
from dubito.core.params import Params
from dubito.methods.variational.mean_field import MeanField
from dubito.methods.variational.module import VariationalModule
from dubito.networks.selection import Selection

Family = Literal["mean-field", "low-rank", "full"]
# The initial scale of a low-rank factor: at zero its gradient would vanish.
START = 0.1


class JointModule(VariationalModule):
    r"""What `dubito.variational.convert` returns for ``family="low-rank"`` and ``"full"``.

    Every call draws all random weights jointly. `posterior` holds the scales σ by parameter, `factor` the
    correlations. The KL divergence from a prior of independent weights is

    $$\mathrm{KL}(q \,\|\, p) = \sum_i \mathrm{KL}(q_i \,\|\, p_i) + \sum_i \log s_i - \tfrac12 \log \det \Sigma$$

    with the marginals $q_i$ and their scales $s_i$. It is exact if that of one weight is.

    Args:
        network: A private copy of the network.
        posterior: Scales and priors, by parameter name.
        selection: The random weights.
        family: ``"low-rank"`` or ``"full"``.
        rank: The rank of a low-rank factor.
    """

    def __init__(
        self, network: nn.Module, posterior: Mapping[str, MeanField], selection: Selection, family: str, rank: int
    ) -> None:
        super().__init__(network, posterior, selection, "weight")
        self.family = family
        scales = self._log_scales().detach()
        self.factor = nn.Parameter(Correlations.start(family, len(scales), rank, scales))
        for name in ("prior_mean", "prior_scale", "prior_factor"):
            self.register_buffer(name, None)

    @property
    def correlations(self) -> Correlations:
        """Return the correlations of the weights."""
        return Correlations(self.family, self.factor)

    def continue_from(self, factor: Tensor) -> None:
        """Load the correlations of an earlier posterior, and use that posterior as the prior."""
        with torch.no_grad():
            self.factor.copy_(factor)
        self.prior_mean = self.selection.ravel(self._means()).detach().clone()
        self.prior_scale, self.prior_factor = self._log_scales().detach().exp(), factor.detach().clone()

    def kl(self, *, generator: torch.Generator | None = None) -> Tensor:
        """Return the KL divergence of the posterior from the prior, summed over all random weights."""
        own, log_scale = self.correlations, self._log_scales()
        if self.prior_factor is not None:
            return self._kl_from_joint_prior(own, log_scale)
        marginal = log_scale + own.spread().log()
        means, terms = self._means(), []
        for name, part in self.parts():
            spread = marginal[self.selection.slices[name]].view_as(part.log_scale)
            terms.append(part.prior.summed_kl(part.chosen(means[name]), spread, generator=generator))
        return torch.stack(terms).sum() + marginal.sum() - log_scale.sum() - 0.5 * own.log_det()

    def _kl_from_joint_prior(self, own: Correlations, log_scale: Tensor) -> Tensor:
        prior = Correlations(self.family, self.prior_factor)
        off = (self.selection.ravel(self._means()) - self.prior_mean) / self.prior_scale
        trace = prior.trace(own, log_scale.exp() / self.prior_scale)
        log_dets = 2 * (self.prior_scale.log().sum() - log_scale.sum()) + prior.log_det() - own.log_det()
        return 0.5 * (trace + prior.square(off[:, None]) - len(off) + log_dets)

    def sample_weights(self, *, generator: torch.Generator | None = None) -> Params:
        """Draw all random parameters, by name; differentiable in means, scales and correlations."""
        log_scale, means = self._log_scales(), self._means()
        device = log_scale.device if generator is None else generator.device
        noise = torch.empty(log_scale.shape, dtype=log_scale.dtype, device=device).normal_(generator=generator)
        flat = log_scale.exp() * self.correlations.apply(noise.to(log_scale.device), generator)
        drawn = {}
        for name, part in self.parts():
            mean, own = means[name], flat[self.selection.slices[name]].view_as(part.log_scale)
            drawn[name] = part.center(mean) + (own if part.index is None else part.placed(own, torch.zeros_like(mean)))
        return drawn

    def log_ratio(self, weights: Params) -> Tensor:
        r"""Return $\log p(w) - \log q(w)$ of one sample, differentiable in the weights only."""
        means = {name: value.detach() for name, value in self._means().items()}
        own, log_scale = Correlations(self.family, self.factor.detach()), self._log_scales().detach()
        off = (self.selection.ravel(weights) - self.selection.ravel(means)) / log_scale.exp()
        size = len(off) * math.log(2 * math.pi)
        log_q = -0.5 * (own.square(off[:, None]) + own.log_det() + size) - log_scale.sum()
        if self.prior_factor is not None:
            prior = Correlations(self.family, self.prior_factor)
            away = (self.selection.ravel(weights) - self.prior_mean) / self.prior_scale
            return -0.5 * (prior.square(away[:, None]) + prior.log_det() + size) - self.prior_scale.log().sum() - log_q
        marginal, terms = (log_scale + own.spread().log()).exp(), []
        for name, part in self.parts():
            spread = marginal[self.selection.slices[name]].view_as(part.log_scale)
            prior_of = part.prior.fitted(part.chosen(means[name]), spread)
            terms.append(prior_of.log_prob(part.chosen(weights[name])).sum() - prior_of.penalty())
        return torch.stack(terms).sum() - log_q

    def scales(self) -> Tensor:
        """Return the marginal standard deviations of all random weights, in the order of the selection."""
        return (self._log_scales().exp() * self.correlations.spread()).detach()

    @contextmanager
    def shared_moments(self) -> Iterator[Tensor]:
        """Yield the KL divergence for a training step."""
        yield self.kl()

    def _log_scales(self) -> Tensor:
        return torch.cat([part.log_scale.flatten() for _, part in self.parts()])

    def _sampled_weights(self) -> AbstractContextManager[Any]:
        return params.swapped(self.network, self.sample_weights(generator=self.weight_noise))


@dataclass(frozen=True, eq=False)
class Correlations:
    """The correlations of the weights, given the factor of a family.

    Args:
        family: ``"full"`` or ``"low-rank"``.
        factor: ``[D, D]``, of which only the part below the diagonal is used, or ``[D, rank]``.

    >>> alone = Correlations("low-rank", torch.tensor([[2.0], [0.0]]))
    >>> alone.spread().square().tolist()  # the diagonal of R Rᵀ
    [5.0, 1.0]
    """

    family: str
    factor: Tensor

    @classmethod
    def start(cls, family: str, size: int, rank: int, like: Tensor) -> Tensor:
        """Return the initial factor: no correlations, or very small ones."""
        most = numbers(limits.current().covariance_factor)
        if family == "full" and size**2 > most:
            raise InputError(
                f"family='full' stores a number for every pair of weights, and {size:,} weights are too many (at most "
                f"{math.isqrt(most):,}): select fewer with `weights`, or use family='low-rank'."
            )
        if family == "low-rank" and size * rank > most:
            raise InputError(
                f"family='low-rank' of rank {rank} over {size:,} weights is too large (at most {most:,} "
                "numbers): select fewer weights with `weights`, or use a smaller rank."
            )
        if family == "full":
            return like.new_zeros(size, size)
        return like.new_empty(size, rank).normal_().mul_(START / math.sqrt(rank))

    @property
    def rows(self) -> Tensor:
        """Return the factor, with zeros where its entries are not used."""
        return self.factor.tril(-1) if self.family == "full" else self.factor

    def apply(self, noise: Tensor, generator: torch.Generator | None = None) -> Tensor:
        r"""Transform independent normal numbers ``[..., D]`` to covariance $R R^\top$; may draw more noise."""
        if self.family == "full":
            return noise + noise @ self.rows.mT
        device = noise.device if generator is None else generator.device
        more = torch.empty(*noise.shape[:-1], self.factor.shape[1], dtype=noise.dtype, device=device)
        return noise + more.normal_(generator=generator).to(noise.device) @ self.factor.mT

    def spread(self) -> Tensor:
        r"""Return the square roots of the diagonal of $R R^\top$ ``[D]``: each weight's marginal scale over its σ."""
        return (1 + self.rows.square().sum(1)).sqrt()

    def log_det(self) -> Tensor:
        r"""Return $\log \det R R^\top$."""
        if self.family == "full":
            return self.factor.new_zeros(())
        return 2 * self._inner_root().diagonal().log().sum()

    def square(self, columns: Tensor) -> Tensor:
        r"""Return $\mathrm{tr}\,B^\top (R R^\top)^{-1} B$ for columns $B$ ``[D, k]``."""
        if self.family == "full":
            root = self.rows + torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
            return torch.linalg.solve_triangular(root, columns, upper=False).square().sum()
        inner = torch.linalg.solve_triangular(self._inner_root(), self.factor.mT @ columns, upper=False)
        return columns.square().sum() - inner.square().sum()

    def trace(self, other: Correlations, ratio: Tensor) -> Tensor:
        r"""Return $\mathrm{tr}\,(R R^\top)^{-1} \mathrm{diag}(r) R' R'^\top \mathrm{diag}(r)$, R' of this family."""
        own = other.rows * ratio[:, None]
        if self.family == "full":
            return self.square(own + torch.diag(ratio))
        inner = torch.linalg.solve_triangular(self._inner_root(), self.factor.mT, upper=False)  # [rank, D]
        alone = (ratio.square() * (1 - inner.square().sum(0))).sum()  # the part for R' R'ᵀ = I
        return alone + self.square(own)

    def _inner_root(self) -> Tensor:
        r"""Return the Cholesky factor of $I + V^\top V$."""
        identity = torch.eye(self.factor.shape[1], dtype=self.factor.dtype, device=self.factor.device)
        # without the check of `cholesky`, which reads from the device: the eigenvalues are at least 1
        return torch.linalg.cholesky_ex(identity + self.factor.mT @ self.factor).L
