r"""Convergence diagnostics: rank-normalized split R-hat and effective sample sizes (Vehtari et al. 2021).

All functions take draws ``[K, S, ...]`` of K chains and reduce the first two axes, as those of `arviz` do.
(https://arxiv.org/abs/1903.08008)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.core.errors import InputError


def rhat(draws: Tensor) -> Tensor:
    r"""Return the rank-normalized split R-hat: 1 if the chains agree, above 1.01 if they do not.

    $$\hat R = \sqrt{\frac{(n-1) W / n + B / n}{W}}$$

    with W the mean variance within half-chains and B / n the variance of their means: the larger of the values for the
    ranks of the draws and for the ranks of their distances from the median.

    >>> apart = torch.stack([torch.zeros(50), torch.full((50,), 5.0)]) + torch.linspace(0, 1, 50)
    >>> bool(rhat(apart) > 1.5)
    True
    """
    halves = _split(_checked(draws))
    folded = (halves - torch.quantile(halves.flatten(0, 1), 0.5, dim=0)).abs()
    return torch.maximum(_plain_rhat(_normal_scores(halves)), _plain_rhat(_normal_scores(folded)))


def ess_bulk(draws: Tensor) -> Tensor:
    """Return the effective number of draws for the centre of the distribution."""
    return _ess(_normal_scores(_split(_checked(draws))))


def ess_tail(draws: Tensor) -> Tensor:
    """Return the effective number of draws for the 5 % and 95 % quantiles, the smaller of the two."""
    draws = _checked(draws)
    quantiles = [torch.quantile(draws.flatten(0, 1), level, dim=0) for level in (0.05, 0.95)]
    return torch.minimum(*(_ess(_split((draws <= quantile).double())) for quantile in quantiles))


def ess_mean(draws: Tensor) -> Tensor:
    """Return the effective number of draws for the mean: the variance of a draw over that of the average."""
    return _ess(_split(_checked(draws)))


def autocorrelation(draws: Tensor) -> Tensor:
    """Return the autocorrelation of each chain at lags 0 to S − 1, ``[K, S, ...]``.

    >>> series = torch.tensor([[1.0, -1.0] * 8])
    >>> [round(v, 3) for v in autocorrelation(series)[0, :3].tolist()]
    [1.0, -0.938, 0.875]
    """
    covariance = _autocovariance(_checked(draws))
    return torch.where(covariance[:, :1] > 0, covariance / covariance[:, :1].clamp_min(1e-300), 0.0)


def energy_fraction(energy: Tensor) -> Tensor:
    """Return the E-BFMI of each chain ``[K]`` from its energies ``[K, S]``; below 0.3 the energy mixes too slowly.

    (Betancourt 2016, https://arxiv.org/abs/1604.00695)
    """
    energy = energy.double()
    return energy.diff(dim=1).square().sum(1) / (energy - energy.mean(1, keepdim=True)).square().sum(1).clamp_min(
        1e-300
    )


def _checked(draws: Tensor) -> Tensor:
    if draws.ndim < 2 or draws.shape[1] < 4:
        raise InputError(f"`draws` must have shape [chains, at least 4 draws, ...], got {tuple(draws.shape)}.")
    return draws.double()


def _split(draws: Tensor) -> Tensor:
    """Split each chain into two halves, without the middle draw of an odd number."""
    half = draws.shape[1] // 2
    return torch.cat([draws[:, :half], draws[:, draws.shape[1] - half :]])


def _normal_scores(draws: Tensor) -> Tensor:
    """Replace draws by normal quantiles of their ranks over all chains; equal draws share their mean rank."""
    flat = draws.flatten(0, 1)
    ranks = _mean_ranks(flat.reshape(len(flat), -1)).reshape(flat.shape)
    return torch.special.ndtri((ranks - 0.375) / (len(flat) + 0.25)).reshape(draws.shape)


def _mean_ranks(flat: Tensor) -> Tensor:
    """Return the ranks, from 1, within each column of ``[M, P]``."""
    ordered, order = flat.sort(dim=0)
    columns = ordered.mT.contiguous()
    low = torch.searchsorted(columns, columns, right=False)
    high = torch.searchsorted(columns, columns, right=True)
    ranks = ((low + high + 1).double() / 2).mT
    return torch.empty_like(flat).scatter_(0, order, ranks)


def _plain_rhat(draws: Tensor) -> Tensor:
    count = draws.shape[1]
    within = draws.var(1).mean(0)
    total = within * (count - 1) / count + draws.mean(1).var(0)
    # constant draws agree
    return torch.where(within > 0, (total / within.clamp_min(1e-300)).sqrt(), torch.where(total > 0, torch.inf, 1.0))


def _autocovariance(draws: Tensor) -> Tensor:
    """Return the autocovariance at lags 0 to S − 1, divided by S, by the fast Fourier transform."""
    count = draws.shape[1]
    away = draws - draws.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(away, n=2 * count, dim=1)
    return torch.fft.irfft(spectrum.abs().square(), n=2 * count, dim=1)[:, :count] / count


def _ess(draws: Tensor) -> Tensor:
    """Return the effective sample size over all chains by Geyer's initial monotone sequence."""
    num, count = draws.shape[:2]
    covariance = _autocovariance(draws)
    within = covariance[:, 0].mean(0) * count / (count - 1)
    total = within * (count - 1) / count + (draws.mean(1).var(0) if num > 1 else 0.0)
    correlation = 1 - (within - covariance.mean(0)) / total.clamp_min(1e-300)
    correlation[0] = 1.0
    last = max(math.ceil(count / 2) - 2, 0)
    pairs = correlation[: 2 * last + 2].unflatten(0, (-1, 2)).sum(1)  # lags 2t and 2t + 1; positive in theory
    alive = torch.cumprod((pairs > 0).long(), 0)
    ended = alive.sum(0).clamp_max(last)
    lags = torch.arange(last + 1, device=ended.device).reshape(-1, *[1] * ended.ndim)
    summed = (lags < ended).double()
    # of the pair that ends the sequence, half of the even lag counts
    even, lives = correlation[0::2].gather(0, ended[None])[0], alive.gather(0, ended[None])[0].bool()
    time = -1 + 2 * (torch.cummin(pairs, 0).values * summed).sum(0) + torch.where(lives, even, even.clamp_min(0.0))
    effective = num * count / time.clamp_min(1 / math.log10(num * count))
    return torch.where(total > 0, effective, float(num * count))
