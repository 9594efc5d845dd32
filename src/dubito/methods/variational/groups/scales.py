r"""The posteriors of group scales $z$: one class for each group prior.

Each is a module that starts at $\mathbb E z \approx 1$, so that it does not change a trained network. Logarithms of
scales, which change a lot in training, are stored divided by `STRIDE`: an optimizer such as Adam moves every number by
about the learning rate, and the weights need a small one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import GroupPrior, Horseshoe, NormalJeffreys, TruncatedLogUniform
from dubito.beliefs.priors.group import log_normal_kl_gamma, log_normal_kl_inverse_gamma

STRIDE = 10.0


class Scales(nn.Module, ABC):
    """The posterior over the scales of all groups of one kind, ``[G]``.

    Args:
        size: The number of groups G.
        prior: Their prior.
    """

    statistic: ClassVar[str]
    """The quantity that `relevance` returns."""

    def __init__(self, size: int, prior: Any) -> None:
        super().__init__()
        self.size, self.prior = size, prior

    @abstractmethod
    def sample(self, lead: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw scales ``[*lead, G]``, differentiable in the parameters."""

    @abstractmethod
    def mean(self) -> Tensor:
        r"""Return $\mathbb E z_g$."""

    @abstractmethod
    def second_moment(self) -> Tensor:
        r"""Return $\mathbb E z_g^2$."""

    @abstractmethod
    def kl(self, active: Tensor | None = None) -> Tensor:
        """Return the KL divergence from the prior, summed over the groups in the mask `active` (by default all)."""

    @abstractmethod
    def relevance(self) -> Tensor:
        """Return the relevance of each group; groups with small values can be removed."""

    def log_alpha(self) -> Tensor:
        r"""Return $\log \alpha_g = \log \mathrm{Var}\, z_g - \log (\mathbb E z_g)^2$, noise over signal."""
        square = self.mean().square()
        tiny = torch.finfo(square.dtype).tiny
        return (self.second_moment() - square).clamp_min(tiny).log() - square.clamp_min(tiny).log()


class NormalScales(Scales):
    r"""$q(z_g) = \mathcal N(m_g, s_g^2)$ under the Jeffreys prior."""

    statistic = "-log_alpha"

    def __init__(self, size: int, prior: NormalJeffreys, initial_scale: float, like: Tensor) -> None:
        super().__init__(size, prior)
        self.loc = nn.Parameter(like.new_ones(size))
        self.log_scale = nn.Parameter(like.new_full((size,), math.log(initial_scale) / STRIDE))

    @property
    def scale(self) -> Tensor:
        """Return the standard deviations."""
        return (STRIDE * self.log_scale).exp()

    def sample(self, lead: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw scales."""
        return self.loc + self.scale * _normal((*lead, self.size), self.loc, generator)

    def mean(self) -> Tensor:
        """Return the means."""
        return self.loc

    def second_moment(self) -> Tensor:
        """Return m² + s²."""
        return self.loc.square() + self.scale.square()

    def kl(self, active: Tensor | None = None) -> Tensor:
        """Return the KL divergence, up to the constant of the improper prior."""
        return _total(self.prior.scale_kl(self.loc, self.scale), active)

    def relevance(self) -> Tensor:
        r"""Return $-\log \alpha_g$."""
        return -self.log_alpha()


class HorseshoeScales(Scales):
    r"""$z_g = \sqrt{a\, b\, a_g b_g}$ with log-normal posteriors: a, b of the whole layer, $a_g, b_g$ of each group.

    The four factors start where their KL divergence is smallest, except b, which compensates for the small τ: so
    $z = 1$ costs some nats once per layer, not per group.
    """

    statistic = "log_mode"

    def __init__(self, size: int, prior: Horseshoe, initial_scale: float, like: Tensor) -> None:
        super().__init__(size, prior)
        cheapest = math.log(prior.scale**2 / 2)
        layer, group = (1, cheapest), (size, -math.log(2))
        starts = {"a": layer, "b": (1, -cheapest), "a_group": group, "b_group": (size, math.log(2))}
        for name, (count, start) in starts.items():
            self.register_parameter(f"{name}_loc", nn.Parameter(like.new_full((count,), start / STRIDE)))
            log_scale = like.new_full((count,), math.log(initial_scale) / STRIDE)
            self.register_parameter(f"{name}_log_scale", nn.Parameter(log_scale))

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the logarithm of ``"a"``, ``"b"``, ``"a_group"``, ``"b_group"``."""
        loc, log_scale = getattr(self, f"{name}_loc"), getattr(self, f"{name}_log_scale")
        return STRIDE * loc, (2 * STRIDE * log_scale).exp()

    def log_moments(self) -> tuple[Tensor, Tensor]:
        r"""Return mean and variance of $\log z_g$."""
        means, variances = zip(*(self.moments(name) for name in ("a", "b", "a_group", "b_group")), strict=True)
        return sum(means) / 2, sum(variances) / 4

    def sample(self, lead: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw scales; the scales of one layer share its a and b."""
        mean, _ = self.log_moments()
        shared = self.moments("a")[1] + self.moments("b")[1]
        own = self.moments("a_group")[1] + self.moments("b_group")[1]
        noise = own.sqrt() * _normal((*lead, self.size), mean, generator)
        return (mean + (noise + shared.sqrt() * _normal((*lead, 1), mean, generator)) / 2).exp()

    def mean(self) -> Tensor:
        r"""Return $e^{m + v/2}$."""
        mean, variance = self.log_moments()
        return (mean + variance / 2).exp()

    def second_moment(self) -> Tensor:
        r"""Return $e^{2m + 2v}$."""
        mean, variance = self.log_moments()
        return (2 * mean + 2 * variance).exp()

    def kl(self, active: Tensor | None = None) -> Tensor:
        """Return the exact KL divergence of all four factors."""
        (a, b), (a_group, b_group) = (map(self.moments, names) for names in (("a", "b"), ("a_group", "b_group")))
        layer = log_normal_kl_gamma(*a, self.prior.scale) + log_normal_kl_inverse_gamma(*b)
        own = log_normal_kl_gamma(*a_group) + log_normal_kl_inverse_gamma(*b_group)
        return layer.sum() + _total(own, active)

    def relevance(self) -> Tensor:
        r"""Return the logarithm of the mode of $q(z_g)$, $m - v$."""
        mean, variance = self.log_moments()
        return mean - variance


class GateScales(Scales):
    r"""$\log z_g \sim \mathcal N(m_g, s_g^2)$ truncated to $[a, b]$, with $m_g = b - |r_g|$ so that it stays below b.

    The closed forms are evaluated in double precision, because their terms are large if a gate is almost certain.
    """

    statistic = "log_snr"

    def __init__(self, size: int, prior: TruncatedLogUniform, initial_scale: float, like: Tensor) -> None:
        super().__init__(size, prior)
        self.below = nn.Parameter(like.new_full((size,), initial_scale / STRIDE))
        self.log_scale = nn.Parameter(like.new_full((size,), math.log(initial_scale) / STRIDE))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean m, clamped to the range of the gate, and the scale s of the logarithm before truncation."""
        mean = self.prior.high - (STRIDE * self.below.double()).abs()
        return mean.clamp_min(self.prior.low), (STRIDE * self.log_scale.double()).clamp(-20.0, 5.0).exp()

    def sample(self, lead: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw gates by the inverse of their cumulative distribution function."""
        device = self.below.device if generator is None else generator.device
        level = torch.rand((*lead, self.size), dtype=torch.float64, device=device, generator=generator)
        return self.prior.quantile(*self.moments(), level.to(self.below.device)).to(self.below.dtype)

    def mean(self) -> Tensor:
        """Return the mean gate."""
        return self.prior.moment(*self.moments()).to(self.below.dtype)

    def second_moment(self) -> Tensor:
        """Return the mean square of the gate."""
        return self.prior.moment(*self.moments(), 2).to(self.below.dtype)

    def kl(self, active: Tensor | None = None) -> Tensor:
        """Return the exact KL divergence."""
        return _total(self.prior.scale_kl(*self.moments()), active).to(self.below.dtype)

    def log_alpha(self) -> Tensor:
        """Return noise over signal, from moments in double precision."""
        first, second = (self.prior.moment(*self.moments(), order) for order in (1, 2))
        return (second / first.square() - 1).clamp_min(1e-300).log().to(self.below.dtype)

    def relevance(self) -> Tensor:
        r"""Return $\log (\mathbb E z_g / \mathrm{std}\, z_g)$."""
        return -0.5 * self.log_alpha()

    def evidence_gain(self, bits: int = 8) -> Tensor:
        """Return the increase of the log evidence when a gate is closed, in nats; see `TruncatedLogUniform`."""
        return self.prior.evidence_gain(*self.moments(), bits).to(self.below.dtype)


def make_scales(size: int, prior: GroupPrior, initial_scale: float, like: Tensor) -> Scales:
    """Return the posterior of scales for a prior, with the dtype and device of `like`."""
    kinds: dict[type[GroupPrior], Any] = {
        NormalJeffreys: NormalScales, Horseshoe: HorseshoeScales, TruncatedLogUniform: GateScales,
    }  # fmt: skip
    scales: Scales = kinds[type(prior)](size, prior, initial_scale, like)
    return scales


def _total(divergences: Tensor, active: Tensor | None) -> Tensor:
    return (divergences if active is None else torch.where(active, divergences, 0.0)).sum()


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    return torch.empty(shape, dtype=like.dtype, device=device).normal_(generator=generator).to(like.device)
