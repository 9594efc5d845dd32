"""The mixture-density likelihood, for targets with several modes."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from dubito.beliefs.likelihoods.base import Hyper, blank, check_rows, rows
from dubito.beliefs.likelihoods.categorical import softmax_root
from dubito.beliefs.likelihoods.kinds import DistributionLikelihood
from dubito.beliefs.prediction import DistributionPrediction
from dubito.beliefs.prediction.distributions import quasi_random
from dubito.core.constraints import Count
from dubito.core.errors import InputError
from dubito.core.settings import setting

# Draws of Gaussian outputs, of which there are too many for a grid.
_DRAWS = 128


@setting
class MixtureDensity(DistributionLikelihood):
    r"""Regression with several modes, $p(y) = \sum_k \pi_k\, \mathcal N(y; m_k, e^{2 s_k})$ (Bishop 1994).

    For O targets the network has 3·K·O outputs ``[B, 3·K·O]``: for each target the K logits of π, the means $m$, and
    the log-scales $s$. The Hessian need not be positive, so `hessian` is the Fisher information of target and component
    together: $\mathrm{diag}(\pi) - \pi\pi^\top$, $\pi_k e^{-2 s_k}$ and $2 \pi_k$. It is at least that of the target
    alone, because knowing the component can only add information: the posterior is never too wide by it.

    Args:
        components: K, the number of components.

    >>> MixtureDensity(components=2).predict(torch.tensor([[0.0, 0.0, -1.0, 1.0, -9.0, -9.0]])).stddev.item()
    1.0
    """

    setting_name = "likelihoods.MixtureDensity"
    layout = "logits, means and log-scales of all components"
    components: Count = 3

    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the outputs as they are, ``[B, 3·K·O]``."""
        width = 3 * self.components
        if outputs.ndim != 2 or outputs.shape[1] % width:
            raise InputError(
                f"{self!r} needs outputs [B, {width}·O], {self.layout} for each target, got {tuple(outputs.shape)}."
            )
        return outputs

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an error unless the targets are finite numbers, one for each 3·K outputs."""
        found = self.canonical(outputs)
        check_rows(targets, len(found), found.shape[1] // (3 * self.components), type(self).__name__)

    def outputs_for(self, num_targets: int) -> int:
        """Return 3·K for each target."""
        return 3 * self.components * num_targets

    def target_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-density of each target."""
        return self._joint(outputs, y).logsumexp(dim=-1)

    def target_cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the distribution function of each target."""
        log_shares, means, log_scales = self._parts(outputs)
        z = (y.unsqueeze(-1) - means) * (-log_scales).exp()
        return (log_shares.exp() * torch.special.ndtr(z)).sum(dim=-1)

    def target_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance of each target."""
        log_shares, means, log_scales = self._parts(outputs)
        shares = log_shares.exp()
        mean = (shares * means).sum(dim=-1)
        spread = (means - mean.unsqueeze(-1)).square() + (2 * log_scales).exp()
        return mean, (shares * spread).sum(dim=-1)

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $(\pi - \gamma,\ -\gamma z e^{-s},\ \gamma(1 - z^2))$ with the responsibilities γ of the target."""
        found = self.canonical(outputs)
        y = rows(targets, "targets").to(found.dtype)
        log_shares, means, log_scales = self._parts(found)
        z = (y.unsqueeze(-1) - means) * (-log_scales).exp()
        return self._score(log_shares, log_scales, self._joint(found, y).softmax(dim=-1), z)

    def fisher(self, parameters: Tensor) -> Tensor:
        """Return the diagonal of `hessian`."""
        return self.hessian(parameters).diagonal(dim1=-2, dim2=-1)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return the Fisher information of target and component, ``[B, 3·K·O, 3·K·O]``."""
        root = self.hessian_root(outputs)
        return torch.einsum("rbi,rbj->bij", root, root)

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return its root, one group of columns per target."""
        log_shares, _, log_scales = self._parts(self.canonical(outputs))
        count = self.components
        numbers = torch.arange(max(count - 1, 1), device=outputs.device).view(-1, 1, 1)
        of_logits = functional.pad(softmax_root(log_shares, numbers), (0, 2 * count))
        scales = torch.cat([0.5 * log_shares - log_scales, 0.5 * (log_shares + math.log(2))], dim=-1).exp()
        of_others = functional.pad(torch.diag_embed(scales).movedim(-2, 0), (count, 0))
        columns = torch.cat([of_logits, of_others])  # [R, B, O, 3K]
        apart = torch.diag_embed(columns.movedim(2, -1))  # [R, B, 3K, O, O]
        return apart.permute(0, 3, 1, 4, 2).flatten(3).flatten(0, 1)

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets ``[B, O]``."""
        log_shares, means, log_scales = self._parts(self.canonical(outputs))
        chosen, normal = self._drawn(log_shares, generator)
        return ((means + log_scales.exp() * normal) * chosen).sum(dim=-1)

    def _drawn_gradient(self, outputs: Tensor, hyper: Hyper, generator: torch.Generator | None) -> Tensor:
        # The gradient of target and component together, as in `hessian`.
        log_shares, _, log_scales = self._parts(self.canonical(outputs))
        return self._score(log_shares, log_scales, *self._drawn(log_shares, generator))

    def _over_gaussian(self, means: Tensor, variances: Tensor, hyper: Hyper) -> DistributionPrediction:
        """Return the equal mixture over 128 fixed quasi-random draws of the outputs, which are independent."""
        return DistributionPrediction.of(self, quasi_random(means, variances, _DRAWS), independent=True)

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log π, means and log-scales, each ``[..., O, K]``."""
        logits, means, log_scales = outputs.unflatten(-1, (-1, 3, self.components)).unbind(dim=-2)
        return logits.log_softmax(dim=-1), means, log_scales

    def _joint(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-density of target and component ``[..., O, K]``."""
        log_shares, means, log_scales = self._parts(outputs)
        z = (y.unsqueeze(-1) - means) * (-log_scales).exp()
        return log_shares - 0.5 * z.square() - log_scales - 0.5 * math.log(2 * math.pi)

    def _drawn(self, log_shares: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return one-hot components and standard normal numbers, each ``[B, O, K]``."""
        clocks = blank(log_shares, generator).exponential_(generator=generator).to(log_shares.device)
        numbers = torch.arange(self.components, device=log_shares.device)
        chosen = (log_shares - clocks.log()).argmax(dim=-1, keepdim=True) == numbers
        normal = blank(log_shares, generator).normal_(generator=generator).to(log_shares.device)
        return chosen.to(log_shares.dtype), normal

    def _score(self, log_shares: Tensor, log_scales: Tensor, share: Tensor, z: Tensor) -> Tensor:
        parts = log_shares.exp() - share, -share * z * (-log_scales).exp(), share * (1 - z.square())
        return torch.stack(parts, dim=-2).flatten(1)
