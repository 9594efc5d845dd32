"""Regression networks with the noise of each target: known for each datum, or one learned number per output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core.constraints import Count, check
from dubito.core.errors import InputError
from dubito.core.tracing import is_tracing


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
        _check_positive(noise)
        return torch.cat([means, (2 * noise.log()).to(means.dtype) + torch.zeros_like(means)], dim=-1)


def _check_positive(noise: Tensor) -> None:
    """Raise an error for a noise of 0 or below, where looking at numbers is possible and does not wait for a device."""
    recorded = is_tracing() or torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack()
    if recorded or noise.device.type != "cpu":
        return
    wrong = noise.detach()[noise <= 0]
    if len(wrong):
        raise InputError(
            f"The noise of a datum is a standard deviation and must be above 0, got {wrong[0].item():g}: remove those "
            "rows, or give their noise."
        )


class NoiseColumn(nn.Module):
    """A `KnownNoise` network of table rows, one of whose features is the noise.

    Args:
        network: The network of the means, which gets all other features.
        place: The feature that is the noise.
        loc: What the noise was centred on.
        scale: What a unit of the feature is, in units of the target as the network predicts it; `loc` has its unit.

    >>> NoiseColumn(nn.Linear(2, 1), 1, 0.0, 2.0)(torch.ones(4, 3))[:, 1].exp().sqrt().tolist()
    [2.0, 2.0, 2.0, 2.0]
    """

    def __init__(self, network: nn.Module, place: int, loc: float, scale: float) -> None:
        super().__init__()
        self.known = KnownNoise(network)
        self.place, self.loc, self.scale = place, loc, scale

    def forward(self, x: Tensor) -> Tensor:
        """Return means and log-variances ``[B, 2·O]``."""
        others = torch.cat([x[:, : self.place], x[:, self.place + 1 :]], dim=1)
        found: Tensor = self.known(others, x[:, self.place] * self.scale + self.loc)
        return found


class LearnedNoise(nn.Module):
    r"""A regression network with one learned noise per output, $y_o \sim \mathcal N(f_o(x), e^{s_o})$.

    The outputs are means and then log-variances $s$, as `dubito.likelihoods.HeteroscedasticGaussian` takes them. The
    log-variances are weights: they are trained with the others, and have a posterior.

    Args:
        network: The network of the means, outputs ``[B]`` or ``[B, O]``.
        num_outputs: O.

    >>> LearnedNoise(nn.Linear(3, 2), 2)(torch.ones(5, 3)).shape
    torch.Size([5, 4])
    """

    def __init__(self, network: nn.Module, num_outputs: int) -> None:
        super().__init__()
        check("num_outputs", Count, num_outputs)
        self.network, self.log_variance = network, nn.Parameter(torch.zeros(num_outputs))

    def reset_parameters(self) -> None:
        """Start at a noise of 1."""
        nn.init.zeros_(self.log_variance)

    def forward(self, *inputs: Any) -> Tensor:
        """Return means and log-variances ``[B, 2·O]``."""
        means = self.network(*inputs)
        means = means.unsqueeze(-1) if means.ndim == 1 else means
        if means.ndim != 2 or means.shape[1] != len(self.log_variance):
            raise InputError(
                f"LearnedNoise has {len(self.log_variance)} noises, but the network gives outputs of shape "
                f"{tuple(means.shape)}: it must be [B, {len(self.log_variance)}]."
            )
        return torch.cat([means, self.log_variance.to(means.dtype) + torch.zeros_like(means)], dim=-1)
