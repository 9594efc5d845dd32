"""`KnownNoise`: a regression network whose data come with the noise of each target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core.errors import InputError


class KnownNoise(nn.Module):
    r"""A regression network for data whose noise is known, $y_n \sim \mathcal N(f(x_n), \sigma_n^2)$.

    Inputs are pairs ``(x, noise)``; the noise, a standard deviation, has shape ``[B]``, ``[B, 1]`` or that of the
    targets. The outputs are means and then log-variances, as `dubito.likelihoods.HeteroscedasticGaussian` takes them.
    No weight changes the log-variances, so the curvature in the weights, $J^\top \mathrm{diag}(\sigma^{-2}) J$, is
    exact. A new input needs its noise, too: it is that of the measurement that is predicted.

    Args:
        network: The network of the means, outputs ``[B]`` or ``[B, O]``.

    >>> KnownNoise(nn.Linear(3, 1))(torch.ones(2, 3), torch.ones(2)).shape
    torch.Size([2, 2])
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any, noise: Tensor) -> Tensor:
        """Return means and log-variances ``[B, 2·O]``."""
        means = self.network(x)
        means, noise = (part.unsqueeze(-1) if part.ndim == 1 else part for part in (means, noise))
        if noise.shape[-1] not in (1, means.shape[-1]) or noise.shape[0] != means.shape[0]:
            raise InputError(
                f"The noise must have one number per datum or per target, {tuple(means.shape)}, got a shape of "
                f"{tuple(noise.shape)}."
            )
        # a noise of 0 or below becomes NaN or infinite, which the checks of a fit and of a prediction refuse
        return torch.cat([means, (2 * noise.log()).to(means.dtype) + torch.zeros_like(means)], dim=-1)
